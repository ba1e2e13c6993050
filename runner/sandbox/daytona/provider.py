"""The Daytona provider: one sandbox for each session, awake while a seat holds it, asleep or away otherwise."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import Key
from runner.rules.daytona import fits, judge, late_creation, start_code
from runner.sandbox.daytona.boot import Booter, keep_active
from runner.sandbox.daytona.copying import copy_workspace
from runner.sandbox.daytona.disks import Disks
from runner.sandbox.daytona.files import DaytonaFiles
from runner.sandbox.daytona.leaving import Leaving
from runner.sandbox.daytona.lifecycle import Lifecycle, Way, nowhere
from runner.sandbox.daytona.names import places, sandbox_name
from runner.sandbox.daytona.reaping import Asks, Reaped, look
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Found, quiet
from runner.sandbox.daytona.terms import PROJECT_LABEL, SESSION_LABEL, Terms, plan_of
from runner.sandbox.daytona.vault import Vault
from runner.sandbox.daytona.visits import Ground, Visits
from runner.sandbox.port import Condition, Copied, Disk, Gone, Paths, SandboxSpec
from runner.sandbox.remote import RemoteSandbox
from runner.sandbox.workspace import check_files
from runner.tasks import Tasks, shielded

DOWN_SECONDS: Final = 25.0
UNDO_SECONDS: Final = 10.0
LATE_SECONDS: Final = 60.0
REMOVE_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 20.0
BOOTS: Final = 2
log = logging.getLogger("runner.sandbox.daytona")

Open = Callable[[], Awaitable[DaytonaService]]


class DaytonaProvider:
    """Makes and wakes sandboxes by name; see ``port.Provider``.

    Args:
        open_service: opens the vendor's client, once, at the first use.
        store_id, replica_id: in the labels: the reaper looks for the store's, people for the replica's.
        clock: on the scale of ``SandboxSpec.deadline``.
        install_command: what installs the vendor's package, where it is missing.

    Attributes:
        counts: what became of sandboxes how often.
        failures: calls that failed, and what was done, how often.
        stuck: deletions that hang at the service, as the reaper saw last.
        elsewhere: tells whether another runner that lives has a session (project, session).
    """

    def __init__(
        self,
        open_service: Open,
        terms: Terms,
        store_id: str,
        replica_id: str,
        *,
        clock: Clock,
        install_command: str | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.stuck = 0
        self.elsewhere: Asks = nowhere
        self._install_command = install_command
        self._open, self._terms, self._clock = open_service, terms, clock
        self._store_id, self._replica_id = store_id, replica_id
        self._opening: asyncio.Task[DaytonaService] | None = None
        self._held: dict[str, str] = {}
        self._live: dict[str, RemoteSandbox] = {}
        self._active: dict[str, asyncio.Task[None]] = {}
        self._disks = Disks(clock, self._expire)
        self._seen: set[str] = set()
        self._tasks = Tasks("daytona")
        self._leaving = Leaving(self._tasks, self.service, self._down, self._forget, self._held.__contains__)
        held, live, drop = self._held, self._live, self._disks.drop
        ground = Ground(self.service, held, live, terms.capacity, self._up, self._down, drop, self._sleeps)
        self._visits = Visits(ground, self._tasks, clock)
        self._closed = False

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``daytona``."""
        return "daytona"

    @property
    def capacity(self) -> int | None:
        """How many run at once."""
        return self._terms.capacity or None

    @property
    def isolation(self) -> str:
        """What every sandbox of this provider has."""
        return "remote"

    @property
    def live(self) -> tuple[str, ...]:
        """Seats that hold a sandbox whose end is not proven, or whose start is under way."""
        return tuple(seat for name, seat in self._held.items() if name not in self._visits)

    def disks(self) -> tuple[Disk, ...]:
        """See ``port.Provider.disks``."""
        return self._disks.all

    def condition(self) -> Condition:
        """Whether there is a package, a key that is taken, and an account that answers, by what was seen last."""
        opening = self._opening
        reason = f"its package is missing: {self._install_command}" if self._install_command else None
        if reason is None and opening is not None and opening.done():
            error = opening.exception()
            reason = str(error) if error is not None else opening.result().trouble
        numbers = {"running": len(self._held), "asleep": len(self._disks.all)}
        return Condition(reason is None, reason, self._install_command, **numbers)

    def paths(self, project: str, session_id: str, workspace_path: Path | None) -> Paths:
        """See ``names.places``."""
        return places(project, session_id, workspace_path)

    def sandbox_name(self, project: str, session_id: str) -> str:
        """See ``names.sandbox_name``."""
        return sandbox_name(self._store_id, project, session_id)

    async def service(self) -> DaytonaService:
        """The client; whoever comes first opens it for all.

        Raises:
            RunnerError: ``invalid_request``: the package is missing; ``sandbox_start_failed``: there is no client.
        """
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = self._tasks.spawn("open", self._opened())
        await asyncio.wait({self._opening})
        return self._opening.result()

    async def _opened(self) -> DaytonaService:
        return await self._open()

    def _lifecycle(self, service: DaytonaService) -> Lifecycle:
        return Lifecycle(service, self._clock, self.counts, self.failures, self._is_elsewhere)

    async def _is_elsewhere(self, found: Found) -> bool:
        return await self.elsewhere(found.labels.get(PROJECT_LABEL, ""), found.labels.get(SESSION_LABEL, ""))

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self, spec: SandboxSpec) -> RemoteSandbox:
        """See ``port.Provider.start``. Also ``provider_at_capacity``, and ``credentials_missing`` for secrets."""
        self.paths(spec.project, spec.session_id, spec.workspace_path)
        check_files(spec.workspace_files)
        name = self.sandbox_name(spec.project, spec.session_id)
        if self._closed:
            raise RunnerError("sandbox_start_failed", "The runner is shutting down.")
        if self._seconds(spec) == 0.0:
            raise RunnerError("sandbox_start_failed", "The sandbox did not start in time.")
        way = Way(woken=await self._visits.make_way(name, self._seconds(spec)))
        if name in self._held:
            raise RunnerError("sandbox_start_failed", "The session's last sandbox is still being put to sleep.")
        if not fits(len(self._held), self._terms.capacity):
            raise RunnerError("provider_at_capacity", f"{self._terms.capacity} Daytona sandboxes run already.")
        self._held[name] = spec.seat_id
        self._seen.add(name)
        self._disks.drop(name)
        # A creation under way is never cancelled: nobody would know whether it was done.
        work = self._tasks.spawn(f"start {name}", self._tried(spec, name, way))
        try:
            await asyncio.wait({work}, timeout=self._seconds(spec))
            if not work.done():
                raise RunnerError("sandbox_start_failed", "The sandbox did not start in time.")
            result = work.result()
            if isinstance(result, RunnerError):
                raise result
            return result
        except BaseException:
            undo = self._tasks.spawn(f"undo {name}", self._undone(spec, name, way, work))
            await shielded(_waited(undo), UNDO_SECONDS + 1)
            raise

    def _seconds(self, spec: SandboxSpec) -> float | None:
        return max(0.0, spec.deadline - self._clock.monotonic()) if spec.deadline else None

    def _vault(self, service: DaytonaService) -> Vault:
        return Vault(service, self._terms.secret_hosts, self._terms.plain_secrets)

    async def _forget(self, name: str) -> None:
        await self._vault(await self.service()).forget(name)

    async def _tried(self, spec: SandboxSpec, name: str, way: Way) -> RemoteSandbox | RunnerError:
        """A failure is a value: whoever waits tells it, and it may be nobody."""
        try:
            return await self._started(spec, name, way)
        except CallFailed as failed:
            code = judge(failed.call, failed.failure).code
            return RunnerError(start_code(code), f"The sandbox could not be started: {failed}")
        except RunnerError as error:
            return error

    async def _started(self, spec: SandboxSpec, name: str, way: Way) -> RemoteSandbox:
        service = await self.service()
        deadline = spec.deadline or self._clock.monotonic() + LATE_SECONDS
        lifecycle, terms = self._lifecycle(service), self._terms
        await self._leaving.wait(name, max(0.0, deadline - self._clock.monotonic()))
        spec, stored = await self._vault(service).hide(spec, name)
        await self._vault(service).attach(lifecycle, name, stored, deadline)
        plan = plan_of(terms, spec, name, stored, self._store_id, self._replica_id)
        given = {"python": terms.python, "baked": terms.root, "content": terms.content}
        booter = Booter(service, self._clock, terms.moved, **given, orphan_seconds=terms.orphan_seconds)
        for attempt in range(1, BOOTS + 1):
            found = await lifecycle.bring_up(plan, deadline, way)
            try:
                sandbox = await booter.boot(found, spec, lambda said: self._ended(spec, name))
                break
            except CallFailed as failed:
                verdict = judge(failed.call, failed.failure)
                self.failures["boot", verdict.action] += 1
                if attempt == BOOTS or verdict.action == "fail":
                    raise RunnerError("sandbox_start_failed", f"The agent could not be started: {failed}") from failed
        else:
            raise AssertionError("unreachable")
        self.counts["created" if way.created else "woken" if way.woken else "recovered"] += 1
        if way.woken and not way.created:
            sandbox.was_asleep()
        self._live[spec.seat_id] = sandbox
        pulse = terms.auto_stop_seconds / 3

        def missed() -> None:
            self.failures["activity", "later"] += 1

        self._active[name] = self._tasks.spawn(f"activity {name}", keep_active(service, found.id, pulse, missed))
        return sandbox

    async def _undone(
        self, spec: SandboxSpec, name: str, way: Way, work: asyncio.Task[RemoteSandbox | RunnerError]
    ) -> None:
        """A start that nobody waits for any more: what it made goes, what it found sleeps (``late_creation``)."""
        await asyncio.wait({work}, timeout=LATE_SECONDS)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
        self.counts["undone"] += 1
        known, sandbox = None, work.result() if not work.cancelled() and work.exception() is None else None
        try:
            away = way.created and not await self.elsewhere(spec.project, spec.session_id)
            if isinstance(sandbox, RemoteSandbox):
                if away:
                    await self._down(name, away=True)
                await sandbox.destroy(0.0)
                return
            found = await quiet((await self.service()).get(name))
            away = away and found is not None and late_creation(False, found.state) == "delete"
            for _ in range(BOOTS):
                known = known or await self._down(name, away=away)
        finally:
            self._let_go(spec.seat_id, name)
            self._sleeps(spec, name, known)

    def files(
        self, project: str, session_id: str, workspace_path: Path | None, recipe: str = "default"
    ) -> DaytonaFiles:
        """See ``port.Provider.files``."""
        self.paths(project, session_id, workspace_path)
        spec = SandboxSpec(project, session_id, "", (), {}, recipe=recipe)
        name = self.sandbox_name(project, session_id)
        return DaytonaFiles(self._visits, spec, name, self._terms.python)

    async def _up(self, spec: SandboxSpec, name: str, deadline: float, make: bool) -> Found:
        lifecycle = self._lifecycle(await self.service())
        await self._leaving.wait(name, max(0.0, deadline - self._clock.monotonic()))
        self._seen.add(name)
        plan = plan_of(self._terms, spec, name, {}, self._store_id, self._replica_id)
        return await lifecycle.bring_up(plan, deadline, Way(any_recipe=True, make=make))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _ended(self, spec: SandboxSpec, name: str) -> Gone:
        """The cell was torn down: put the sandbox to sleep, delete a broken one (DESIGN 3.4)."""
        known = await self._down(name, away=False)
        if known is None:
            self.counts["sleep_failed"] += 1
            return Gone(False, "")
        self._let_go(spec.seat_id, name)
        self._sleeps(spec, name, known)
        return Gone(True, known)

    def _sleeps(self, spec: SandboxSpec, name: str, known: str | None) -> None:
        if known == "stopped" and not self._closed and name not in self._leaving:
            self._disks.keep(name, spec.project, spec.session_id, self._terms.disk_seconds)

    async def _down(self, name: str, *, away: bool) -> str | None:
        lifecycle = self._lifecycle(await self.service())
        known = await lifecycle.bring_down(name, "gone" if away else "sleep", self._clock.monotonic() + DOWN_SECONDS)
        if known is not None:
            self.counts[known] += 1
        return known

    def _let_go(self, seat_id: str, name: str) -> None:
        self._live.pop(seat_id, None)
        if self._held.get(name) == seat_id:
            del self._held[name]
        active = self._active.pop(name, None)
        if active is not None:
            active.cancel()

    def _expire(self, name: str) -> None:
        """A sleeping disk has an end; the service's auto-delete is the net below (case C3)."""
        if name not in self._held and not self._closed:
            self._leaving.away(name, disk_seconds=self._terms.disk_seconds)

    async def remove(self, project: str, session_id: str, used: bool = True) -> None:
        """See ``port.Provider.remove``: asked for now, and until it is done; it does not fail."""
        self.paths(project, session_id, None)
        name = self.sandbox_name(project, session_id)
        if self._install_command or not (used or name in self._seen or name in self._disks):
            return
        self._disks.drop(name)
        self._leaving.away(name)
        if name in self._seen:
            self._seen.discard(name)
            await self._leaving.wait(name, REMOVE_SECONDS)

    async def home_identity(self, project: str, session_id: str) -> str | None:
        """See ``port.Provider.home_identity``: the sandbox's id, for its disk is not another's."""
        service = await self.service()
        found = await quiet(service.get(self.sandbox_name(project, session_id)))
        return found.id if found is not None and found.state not in ("destroyed", "destroying") else None

    async def copy_workspace(self, source: Key, to: Key) -> Copied:
        """See ``port.Provider.copy_workspace``."""
        return await copy_workspace(self.files(*source, None), self.files(*to, None))

    async def reap(self, known: Asks, owned: Asks) -> Reaped:
        """See ``reaping.look``; what a dead runner left running is put to sleep behind it."""
        if self._install_command:
            return Reaped([], [])
        service = await self.service()

        def in_use(name: str) -> bool:
            return name in self._held or name in self._leaving

        found = await look(
            service,
            self._terms,
            self._store_id,
            self.counts,
            self._disks,
            in_use=in_use,
            known=known,
            owned=owned,
            forget=self._forget,
        )
        self.stuck = found.stuck
        for name in found.left:
            if not in_use(name):
                self.counts["left"] += 1
                self._leaving.to_sleep(name)
        return found

    async def close(self) -> None:
        """Put to sleep what is awake and start nothing more; what the service does not do in time its nets do."""
        self._closed = True
        self._disks.clear()
        closing = [sandbox.destroy(0.0) for sandbox in list(self._live.values())]
        await shielded(_gathered([*closing, self._visits.close()]), CLOSE_SECONDS)
        if self._opening is not None and self._opening.done() and self._opening.exception() is None:
            undoing = [task for task in self._tasks.names if ":undo " in task or ":remove " in task]
            if undoing:
                await self._tasks.join(CLOSE_SECONDS)
            await self._tasks.close()
            await self._opening.result().close()
        else:
            await self._tasks.close()


async def _waited(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task}, timeout=UNDO_SECONDS)


async def _gathered(work: Iterable[Awaitable[object]]) -> None:
    await asyncio.gather(*work, return_exceptions=True)
