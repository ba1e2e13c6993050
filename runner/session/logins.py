"""Lends the logins of this machine to sandboxes, and takes back what their agents refreshed (``rules.login``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from runner.clock import Clock
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.logins import Lent, Shelf
from runner.harness.spec import HarnessSpec
from runner.rules import login as rules
from runner.rules.pool import Key, Seat
from runner.sandbox.workspace import read_private, remove_private, write_private
from runner.tasks import Tasks, shielded

LOOK_SECONDS: Final = 2.0
"""How often a home with a refresh token is looked at: what a crash can cost is a login that was refreshed since."""
DISK_SECONDS: Final = 10.0
PROVIDER: Final = "local"
NO_KEY: Final = "has no key and no login here"
T = TypeVar("T")
log = logging.getLogger("runner.session")


@dataclass(frozen=True, slots=True)
class Borrowed:
    """What one start gets: its login file, and the values to mask."""

    files: dict[str, bytes]
    secrets: tuple[str, ...]


@dataclass(slots=True)
class _Out:
    """A login in one home. ``expires_ms``: None for whoever may refresh it."""

    key: Key
    shelf: Shelf
    home: Path
    holder: bool
    expires_ms: int | None


class Logins:
    """The logins of one replica; all disk work is done in a worker thread, one piece at a time.

    Attributes:
        on_secrets: told the values to mask in a session.
        release: frees the seat of a session if nobody uses it, and waits until that is done.
    """

    def __init__(
        self, catalogue: Catalogue, state_dir: Path, clock: Clock, tasks: Tasks, projects: Iterable[str]
    ) -> None:
        self._clock = clock
        self._tasks = tasks
        self._projects = frozenset(projects)
        self._shelves: dict[str, Shelf] = {}
        for name in catalogue.names():
            login = catalogue.get(name).login
            if login is not None and login.form is not None:
                self._shelves[name] = Shelf(state_dir, name, login.form)
        self._out: dict[str, _Out] = {}
        self._lock = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self.on_secrets: Callable[[Key, Iterable[str]], None] = lambda key, values: None
        self.release: Callable[[Key, str], Awaitable[None]] = _nobody

    def applies(self, project: str, spec: HarnessSpec, provider: str, given: Collection[str]) -> bool:
        """Whether such a start takes the login of this machine, if there is one."""
        may = project in self._projects and provider == PROVIDER and spec.name in self._shelves
        return may and rules.wanted(spec.key_vars, {*given, *spec.inherited})

    def logged_in(self, name: str) -> bool | None:
        """Whether this machine has a login of a harness; None for one that keeps none."""
        shelf = self._shelves.get(name)
        return shelf.login() is not None if shelf is not None else None

    def identity(self, project: str, spec: HarnessSpec, provider: str, given: Collection[str]) -> str | None:
        """Of the login that such a start takes: part of the fingerprint's ``secrets``; a refresh does not change it."""
        return self._shelves[spec.name].identity() if self.applies(project, spec, provider, given) else None

    def expires_ms(self, key: Key) -> int | None:
        """When what the session's sandbox was lent is of no use any more; it is not reused then."""
        known = [out.expires_ms for out in self._out.values() if out.key == key and out.expires_ms is not None]
        return min(known, default=None)

    async def borrow(
        self, seat: Seat, spec: HarnessSpec, provider: str, given: Collection[str], home: Path
    ) -> Borrowed | None:
        """What this start gets; None when it needs no login. ``give_back`` ends it, whatever became of the start.

        Raises:
            RunnerError: ``harness_auth_required`` with the command that helps; ``credentials_missing``: the login has
                expired, and who may refresh it is busy.
        """
        found = None
        if self.applies(seat.key[0], spec, provider, given):
            shelf = self._shelves[spec.name]
            login = shelf.login()
            holder = self._holder(shelf)
            if login is not None and login.rotates and holder and login.expired(self._clock.now_ms(), rules.MARGIN_MS):
                await self.release(self._out[holder].key, holder)
            now_ms = self._clock.now_ms()
            try:
                found = await self._work(lambda: self._lend(shelf, seat, home, now_ms))
            except OSError as error:
                raise RunnerError(
                    "sandbox_start_failed", f"The login of {spec.name} is out of reach: {error}."
                ) from error
        if found is None:
            self._require(seat.key[0], spec, provider, given)
            return None
        self.on_secrets(seat.key, found.secrets)
        if self._watch is None or self._watch.done():
            self._watch = self._tasks.spawn("watch logins", self._watched())
        return found

    def _require(self, project: str, spec: HarnessSpec, provider: str, given: Collection[str]) -> None:
        login = spec.login
        if login is None or not (spec.key_vars or login.form) or any(name in given for name in login.keyless):
            return
        if not rules.wanted(spec.key_vars, {*given, *spec.inherited}):
            return
        ways = [f"send the secret {' or '.join(spec.key_vars)}"] if spec.key_vars else []
        if project in self._projects and provider == PROVIDER and login.form is not None:
            ways.append(f"log in on the runner's machine: acp-runner harness login {spec.name}")
        text = f"{spec.title} {NO_KEY}; {', or '.join(ways) or 'no login serves this session'}."
        raise RunnerError("harness_auth_required", text)

    def _holder(self, shelf: Shelf) -> str | None:
        return next((seat_id for seat_id, out in self._out.items() if out.holder and out.shelf is shelf), None)

    def _lend(self, shelf: Shelf, seat: Seat, home: Path, now_ms: int) -> Borrowed | None:
        with shelf.locked():
            lent = shelf.lent()
            if lent is not None and lent.seat_id not in self._out:
                _take_back(shelf, lent)
                lent = None
            content = shelf.content()
            login = rules.read(shelf.form, content)
            if login is None or content is None:
                return None
            whole = not login.rotates or lent is None
            if not whole and login.expired(now_ms):
                who = lent.session_id if lent is not None else ""
                text = f"The login of {shelf.name} has expired, and the session {who}, which refreshes it, is busy."
                raise RunnerError("credentials_missing", text)
            if login.rotates and whole:
                shelf.lend(Lent(seat.seat_id, seat.key[1], str(home), login.digest))
            holder = login.rotates and whole
            self._out[seat.seat_id] = _Out(seat.key, shelf, home, holder, None if holder else login.expires_ms)
            given = content if whole else rules.without_refresh(shelf.form, content)
        return Borrowed({shelf.form.file: given}, login.secrets)

    async def give_back(self, seat_id: str) -> None:
        """The sandbox is gone: what its agent refreshed counts from now on, and its home keeps no login."""
        if seat_id not in self._out:
            return
        try:
            await self._work(lambda: self._returned(seat_id))
        except (OSError, TimeoutError) as error:
            log.error("a login was not taken back from seat %s: %s", seat_id, error)

    def _returned(self, seat_id: str) -> None:
        out = self._out.pop(seat_id, None)
        if out is None:
            return
        with out.shelf.locked():
            lent = out.shelf.lent()
            if lent is not None and lent.seat_id == seat_id:
                _take_back(out.shelf, lent)
            else:
                remove_private(out.home, out.shelf.form.file)

    async def recover(self) -> None:
        """What sandboxes of a killed runner refreshed counts; call it when they are gone, before any start."""
        lent = [shelf for shelf in self._shelves.values() if shelf.lent() is not None]
        if lent:
            await self._work(lambda: _recovered(lent))

    async def _watched(self) -> None:
        while any(out.holder for out in self._out.values()):
            await asyncio.sleep(LOOK_SECONDS)
            try:
                for shelf, content in await self._work(self._look):
                    await self._bring(shelf, content)
            except (OSError, TimeoutError) as error:
                log.error("the homes with logins were not looked at: %s", error)

    def _look(self) -> list[tuple[Shelf, bytes]]:
        """Adopt what agents refreshed."""
        looked = [(out.shelf, self._looked(seat_id, out)) for seat_id, out in list(self._out.items()) if out.holder]
        return [(shelf, content) for shelf, content in looked if content is not None]

    def _looked(self, seat_id: str, out: _Out) -> bytes | None:
        """The new content, when this agent refreshed its login."""
        shelf = out.shelf
        found = read_private(out.home, shelf.form.file, rules.MAX_BYTES)
        fresh = rules.read(shelf.form, found)
        with shelf.locked():
            lent = shelf.lent()
            if lent is None or lent.seat_id != seat_id:
                out.holder = False
                return None
            verdict = rules.judge(shelf.form, lent.digest, shelf.content(), found)
            if verdict != "adopt" or found is None or fresh is None:
                return None
            shelf.keep(found)
            shelf.lend(Lent(seat_id, lent.session_id, lent.home, fresh.digest))
        log.info("the login of %s was refreshed in session %s", shelf.name, lent.session_id)
        return found

    async def _bring(self, shelf: Shelf, content: bytes) -> None:
        """A refreshed login for all who have an older one; its values are masked before an agent can say them."""
        login = rules.read(shelf.form, content)
        having = [out for out in self._out.values() if out.shelf is shelf]
        for out in having if login is not None else ():
            self.on_secrets(out.key, login.secrets if login is not None else ())
        await self._work(lambda: _brought([out for out in having if not out.holder], content))

    async def _work(self, work: Callable[[], T]) -> T:
        async with self._lock:
            return await shielded(asyncio.to_thread(work), DISK_SECONDS)


async def _nobody(key: Key, seat_id: str) -> None:
    """Nobody can be asked."""


def _brought(others: Iterable[_Out], content: bytes) -> None:
    for out in others:
        with suppress(OSError):
            write_private(out.home, {out.shelf.form.file: rules.without_refresh(out.shelf.form, content)})


def _recovered(shelves: Iterable[Shelf]) -> None:
    for shelf in shelves:
        with shelf.locked():
            lent = shelf.lent()
            if lent is not None:
                _take_back(shelf, lent)


def _take_back(shelf: Shelf, lent: Lent) -> None:
    """Nobody has the refresh token from now on but the state directory."""
    found = read_private(Path(lent.home), shelf.form.file, rules.MAX_BYTES)
    verdict = rules.judge(shelf.form, lent.digest, shelf.content(), found)
    if verdict == "adopt" and found is not None:
        shelf.keep(found)
    elif verdict == "conflict":
        log.warning("what session %s refreshed of %s is dropped: somebody logged in anew", lent.session_id, shelf.name)
    shelf.lend(None)
    remove_private(Path(lent.home), shelf.form.file)
