"""Cancel and kill, wherever the session is: applied here, or handed to its owner as a durable row (DESIGN 3.7)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from runner.errors import RunnerError
from runner.leases.port import Holder, Note
from runner.rules import command as rules
from runner.rules.pool import Key
from runner.session import views
from runner.session.applying import KEEP_QUEUE, KILL_SECONDS, SAVE_SECONDS, Applying, error_code, mismatch
from runner.session.issued import CLOSED, Ask, Issued, outcome_of, reply_of
from runner.session.outage import Outage
from runner.session.port import Reply
from runner.session.registry import Registry
from runner.session.run import Start
from runner.session.services import Services
from runner.session.session import Session
from runner.store.port import CommandRow
from runner.terms import CommandKind, CommandOutcome, CommandState, Outcome, StopReason
from runner.wire.models import CancelRequest

log = logging.getLogger("runner.session")
DELIVER: Final = "command"
SETTLED: Final = "command_settled"
VERDICT_SECONDS: Final = 1.0
ACKNOWLEDGE_SECONDS: Final = 0.5
POLL_SECONDS: Final = (0.05, 0.25)
ON_PLANE: Final = "arrived_on_plane"


class Commands:
    """Every command of a replica: those that clients give it, and those that others hand to it."""

    def __init__(self, services: Services, registry: Registry, start: Start) -> None:
        self._services = services
        self._registry = registry
        self._applying = Applying(services, start, registry.again, self._tell)
        self._delivering: set[str] = set()
        self._waiting: dict[str, asyncio.Future[Note]] = {}

    # -- what clients ask --------------------------------------------------------------------------------------------

    async def cancel(self, key: Key, request: CancelRequest, arrived_at: float) -> Reply:
        """Stop what is current; see ``session.port.Sessions.cancel``."""
        ask = Ask(
            CommandKind.CANCEL,
            arrived_at,
            request.expected_execution_id,
            request.idempotency_key,
            request.wait_seconds,
            keep_queue=request.queue == "keep",
        )
        return await self._ask(key, ask)

    async def kill(self, key: Key) -> Reply:
        """Cancel everything and destroy the seat; waits, bounded, until that is done."""
        arrived_at = self._services.clock.monotonic()
        return await self._ask(key, Ask(CommandKind.KILL, arrived_at, wait_seconds=2 * KILL_SECONDS))

    async def end(self, session: Session) -> None:
        """Stop everything of a session that is being deleted, and destroy its seat."""
        await self._applying.end(session, StopReason.DELETE)

    def stop_chain(self, session: Session, reason: StopReason) -> None:
        """End a paused chain for this reason."""
        self._applying.stop_chain(session, reason)

    async def view(self, project: str, command_id: str) -> dict[str, Any]:
        """One command of the project; see ``session.port.Sessions.command``."""
        row = await self._services.store.command(project, command_id)
        if row is None:
            issued = self._applying.known(command_id)
            row = issued.row if issued is not None and issued.row.project == project else None
        if row is None:
            raise RunnerError("not_found", f"There is no command {command_id}.")
        return views.command_view(row)

    async def _ask(self, key: Key, ask: Ask) -> Reply:
        try:
            session = await self._registry.existing(key)
        except RunnerError as error:
            # Whoever holds a lease of it knows the session, and a Stop does not wait for a store.
            holder = await self._other(key) if error.code == "store_unavailable" else None
            if holder is None or holder.alive is None:
                raise
            return await self._hand_over(key, ask, holder)
        issued = self._applying.by_key(session, ask.idempotency_key)
        if issued is None:
            holder = await self._other(key)
            if holder is not None and (holder.alive is not None or ask.expected is None):
                return await self._hand_over(key, ask, holder)
            issued = await self._applying.issue(session, ask)
        await issued.saved.wait()
        if issued.cancelled_prompts:
            await session.outbox.written(ACKNOWLEDGE_SECONDS)
        # An outcome that is known already is about to be written down: the client may look it up.
        seconds = ask.wait_seconds if issued.came_to is None else max(ask.wait_seconds, SAVE_SECONDS)
        if seconds > 0 and not issued.done.is_set():
            waiting = asyncio.ensure_future(issued.done.wait())
            await asyncio.wait({waiting}, timeout=seconds)
            waiting.cancel()
        return reply_of(issued.row, issued.turn_id, issued.came_to, issued.cancelled_prompts)

    # -- a session that another replica holds ------------------------------------------------------------------------

    async def _other(self, key: Key) -> Holder | None:
        """The other replica that holds the session. While the plane is away the store's open turn tells."""
        if not self._services.owners.shared or self._registry.holds(key):
            return None
        try:
            holder = await self._services.beats.look(*key)
        except RunnerError as error:
            log.warning("nobody knows who holds session %s: %s", key[1], error.message)
            turn = await self._services.owners.open_elsewhere(key)
            if turn is None:
                return None
            now = self._services.beats.plane_now()
            return Holder(turn.replica_id, None, turn.turn_id, turn.turn_id, turn.epoch, 0.0, now)
        return None if holder is None or holder.replica_id == self._services.replica_id else holder

    async def _hand_over(self, key: Key, ask: Ask, holder: Holder) -> Reply:
        """Write the command down for its owner, push it, and wait for the outcome as long as the client may.

        Raises:
            RunnerError: ``execution_mismatch``: nothing was written.
        """
        arrived = self._services.beats.plane_now() - max(0.0, self._services.clock.monotonic() - ask.arrived_at)
        current = rules.Execution(holder.alive, holder.started_at) if holder.alive is not None else None
        at = arrived if ask.kind is not CommandKind.KILL else math.inf
        verdict = rules.target(ask.kind, ask.expected, current, (), at)
        if isinstance(verdict, rules.Mismatch):
            raise mismatch(verdict.current)
        row = await self._submit(self._pending(key, ask, holder.alive, arrived))
        seconds = ask.wait_seconds if holder.alive is not None else max(ask.wait_seconds, VERDICT_SECONDS)
        waiter = self._waiting.setdefault(row.command_id, asyncio.get_running_loop().create_future())
        try:
            if row.state not in CLOSED:
                await self._push(holder, row)
                row = await self._wait(row, waiter, seconds, until_claimed=ask.wait_seconds == 0)
        finally:
            if self._waiting.get(row.command_id) is waiter:
                del self._waiting[row.command_id]
        told = waiter.result() if waiter.done() else {}
        return reply_of(row, row.turn_id, outcome_of(row), told.get("cancelled_prompts", ()))

    def _pending(self, key: Key, ask: Ask, turn_id: str | None, on_plane: float) -> CommandRow:
        age = max(0.0, self._services.clock.monotonic() - ask.arrived_at)
        return CommandRow(
            *key,
            self._services.ids.mint("cmd"),
            ask.kind.value,
            CommandState.PENDING.value,
            turn_id,
            self._services.clock.now_ms() - round(age * 1000),
            ask.idempotency_key,
            {ON_PLANE: on_plane, KEEP_QUEUE: ask.keep_queue},
        )

    async def _submit(self, row: CommandRow) -> CommandRow:
        try:
            return await self._services.store.submit_command(row)
        except RunnerError as error:
            log.error("command %s (%s) is not durable: %s", row.command_id, row.kind, error.message)
            return row

    async def _push(self, holder: Holder, row: CommandRow) -> None:
        """A push that nobody hears costs a beat; an owner that is provably gone has lost its turn by now."""
        note = _note(row, self._services.replica_id)
        if await self._services.owners.push(holder.replica_id, note):
            return
        if await self._services.owners.gone(holder.replica_id):
            with _logged(f"command {row.command_id}"):
                await self._see_to(row)

    async def _wait(
        self, row: CommandRow, waiter: asyncio.Future[Note], seconds: float, *, until_claimed: bool
    ) -> CommandRow:
        """The row with its outcome, as its owner tells it or the store; as it is when the time is up."""
        deadline = self._services.clock.monotonic() + seconds
        pause, longest = POLL_SECONDS
        while (left := deadline - self._services.clock.monotonic()) > 0:
            await asyncio.wait({waiter}, timeout=min(pause, left))
            if waiter.done():
                note = waiter.result()
                return replace(row, turn_id=note.get("turn_id") or row.turn_id, outcome=note.get("outcome"))
            pause = min(longest, pause * 1.5)
            with _logged(f"command {row.command_id}"):
                row = await self._services.store.command(row.project, row.command_id) or row
            if row.state in CLOSED or (until_claimed and row.state == CommandState.CLAIMED):
                break
        return row

    # -- what others hand over ---------------------------------------------------------------------------------------

    def note(self, note: Note) -> None:
        """A note of another replica: a command for a session of this one, or the outcome of one that it handed over."""
        command_id = str(note.get("command_id"))
        if note.get("kind") == DELIVER:
            self._services.tasks.spawn(f"deliver {command_id}", self._deliver_note(note))
        elif note.get("kind") == SETTLED:
            waiter = self._waiting.get(command_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(note)

    def due(self, project: str, session_id: str, commands: Iterable[Mapping[str, Any]]) -> None:
        """Commands that came with the answer to a beat: a lost push costs at most one beat."""
        for command in commands:
            if self._applying.known(str(command.get("command_id"))) is not None:
                continue
            self.note({**command, "kind": DELIVER, "project": project, "session_id": session_id})

    async def watch(self) -> None:
        """Look for commands of sessions that are held here, once a beat, for ever; a failing round does not end it."""
        outage = Outage("the look for commands")
        while True:
            await asyncio.sleep(self._services.settings.leases.beat_seconds)
            with outage.around():
                await self._poll()

    async def _poll(self) -> None:
        now = self._services.clock.now_ms()
        for row in await self._services.store.open_commands():
            due = row.state == CommandState.PENDING or (
                row.state == CommandState.CLAIMED and (row.claimed_until or 0) <= now
            )
            if due and self._registry.holds((row.project, row.session_id)):
                await self._deliver(row, None)

    async def _deliver_note(self, note: Note) -> None:
        """With the store away the note alone counts: a Stop stops all the same."""
        row: CommandRow | None
        asker = note.get("reply_to")
        reply_to = str(asker) if asker is not None else None
        try:
            row = await self._services.store.command(str(note["project"]), str(note["command_id"]))
        except RunnerError as error:
            log.warning("command %s is applied without its row: %s", note.get("command_id"), error.message)
            row = _row_of(note, self._services.clock.now_ms())
        if row is not None:
            with _logged(f"command {row.command_id}"):
                await self._deliver(row, reply_to)

    async def _deliver(self, row: CommandRow, reply_to: str | None) -> None:
        known = self._applying.known(row.command_id)
        if known is not None:
            if reply_to is not None:
                known.reply_to.add(reply_to)
        elif row.state not in CLOSED and row.command_id not in self._delivering:
            self._delivering.add(row.command_id)
            try:
                await self._claim(row, reply_to)
            finally:
                self._delivering.discard(row.command_id)

    async def _claim(self, row: CommandRow, reply_to: str | None) -> None:
        """Claim a command and apply it, unless another replica holds its session: that one will be told."""
        key = (row.project, row.session_id)
        session = await self._registry.find(key)
        if session is None or session.ended_at is not None:
            await self._obsolete(row, CommandOutcome.NOT_RUNNING)
            return
        if await self._other(key) is not None:
            return
        stored = True
        try:
            now = self._services.clock.now_ms()
            until = now + rules.CLAIM_MS
            claimed = await self._services.store.claim_command(
                row.project, row.command_id, self._services.replica_id, now, until, rules.DELIVERIES
            )
        except RunnerError:
            claimed, stored = row, False
        if claimed is not None:
            session = self._registry.again(session)
            await self._applying.take(session, claimed, self._arrival(claimed), reply_to, stored)

    def _arrival(self, row: CommandRow) -> float:
        """When its request arrived, loop time: by the plane's clock, which all replicas share, where it was read."""
        on_plane = row.arguments.get(ON_PLANE)
        if isinstance(on_plane, int | float):
            age = self._services.beats.plane_now() - on_plane
        else:
            age = (self._services.clock.now_ms() - row.arrived_at) / 1000
        return self._services.clock.monotonic() - max(0.0, age)

    def _tell(self, issued: Issued) -> None:
        """Tell the outcome to whoever handed the command over."""
        outcome = issued.outcome.value if issued.outcome is not None else None
        row = issued.row
        note: Note = {"kind": SETTLED, "project": row.project, "command_id": row.command_id, "outcome": outcome}
        note = {**note, "turn_id": issued.turn_id, "cancelled_prompts": issued.cancelled_prompts}
        for replica_id in issued.reply_to:
            self._services.tasks.spawn(f"tell {replica_id}", self._services.owners.push(replica_id, note))

    # -- the sweep ---------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Open commands that nobody sees to: delivered again, or settled (DESIGN 3.7)."""
        for row in await self._services.store.open_commands():
            if self._applying.known(row.command_id) is None:
                with _logged(f"command {row.command_id}"):
                    await self._see_to(row)

    async def _see_to(self, row: CommandRow) -> None:
        key = (row.project, row.session_id)
        step = rules.care(await self._found(row))
        if isinstance(step, rules.Settle):
            store, at = self._services.store, self._services.clock.now_ms()
            state = step.state if row.state != CommandState.APPLIED else CommandState.APPLIED
            await store.settle_command(row.project, row.command_id, state.value, step.outcome.value, at)
        elif isinstance(step, rules.Deliver):
            other = await self._other(key)
            if other is None:
                await self._deliver(row, None)
            else:
                await self._services.owners.push(other.replica_id, _note(row, None))

    async def _found(self, row: CommandRow) -> rules.Found:
        store, now = self._services.store, self._services.clock.now_ms()
        turn = await store.turn(row.project, row.session_id, row.turn_id) if row.turn_id is not None else None
        holder = await self._services.beats.look(row.project, row.session_id)
        return rules.Found(
            CommandState(row.state),
            row.deliveries,
            now - row.arrived_at,
            (row.claimed_until or 0) - now,
            row.claimed_by,
            holder.replica_id if holder is not None else None,
            turn is not None and turn.outcome is None,
            Outcome(turn.outcome) if turn is not None and turn.outcome is not None else None,
            error_code(turn.result) if turn is not None else None,
        )

    async def _obsolete(self, row: CommandRow, outcome: CommandOutcome) -> None:
        store, at = self._services.store, self._services.clock.now_ms()
        await store.settle_command(row.project, row.command_id, CommandState.OBSOLETE.value, outcome.value, at)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Keeps one command's failure from the others; the sweep comes back to it."""
    try:
        yield
    except RunnerError as error:
        log.warning("%s failed: %s", what, error.message)
    except Exception:
        log.exception("%s failed", what)


def _note(row: CommandRow, reply_to: str | None) -> dict[str, Any]:
    """What the owner is told; enough to apply the command while the store is away."""
    return {
        "kind": DELIVER,
        "project": row.project,
        "session_id": row.session_id,
        "command_id": row.command_id,
        "command": row.kind,
        "turn_id": row.turn_id,
        ON_PLANE: row.arguments.get(ON_PLANE),
        KEEP_QUEUE: row.arguments.get(KEEP_QUEUE, False),
        "reply_to": reply_to,
    }


def _row_of(note: Note, now_ms: int) -> CommandRow | None:
    if note.get("command") not in set(CommandKind):
        return None
    return CommandRow(
        str(note["project"]),
        str(note["session_id"]),
        str(note["command_id"]),
        str(note["command"]),
        CommandState.PENDING.value,
        note.get("turn_id"),
        now_ms,
        arguments={ON_PLANE: note.get(ON_PLANE), KEEP_QUEUE: bool(note.get(KEEP_QUEUE))},
    )
