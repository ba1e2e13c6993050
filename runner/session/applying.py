"""Applies commands to the sessions of this replica, at once, and sees each of them to its outcome (DESIGN 3.3)."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from runner.errors import RunnerError
from runner.rules import command as rules
from runner.rules.turn import End
from runner.session.executions import target, there
from runner.session.issued import Ask, Issued, ending_of, outcome_of, settled_by
from runner.session.run import Start, TurnRun
from runner.session.services import Services
from runner.session.session import Session
from runner.store.port import CommandRow
from runner.terms import CommandKind, CommandOutcome, CommandState, Outcome, StopReason

log = logging.getLogger("runner.session")
KILL_SECONDS: Final = 10.0
PAUSING_SECONDS: Final = 5.0
SAVE_SECONDS: Final = 0.5
KEYS_KEPT: Final = 256
KEEP_QUEUE: Final = "keep_queue"


class Applying:
    """Commands of this process. They never wait behind a turn.

    A command without an idempotency key marks its turn before it is stored; one with a key is stored first, for it may
    be the repeat of one that is over. A store that is away or slow stops no Stop.

    Args:
        services: of the replica.
        start: gives the turn that ends a paused chain its supervisor.
        again: the session behind an await; ``Registry.again``.
        settled: called once for each command with its outcome.
    """

    def __init__(
        self,
        services: Services,
        start: Start,
        again: Callable[[Session], Session],
        settled: Callable[[Issued], None],
    ) -> None:
        self._services = services
        self._start = start
        self._again = again
        self._settled = settled
        self._story = services.stories.teller("command")
        self._issued: dict[str, Issued] = {}
        self._keys: OrderedDict[tuple[str, str, str], Issued] = OrderedDict()

    def known(self, command_id: str) -> Issued | None:
        """A command that is on its way here."""
        return self._issued.get(command_id)

    def by_key(self, session: Session, key: str | None) -> Issued | None:
        """The command that this idempotency key stood for lately."""
        return self._keys.get((*session.key, key)) if key is not None else None

    # -- what comes in -----------------------------------------------------------------------------------------------

    async def issue(self, session: Session, ask: Ask) -> Issued:
        """Decide whom a request means, mark them, and have the command stored behind that.

        Raises:
            RunnerError: ``execution_mismatch``: nothing was stopped, nothing was written.
        """
        await _pause_over(session)
        session, verdict = await self._verdict(self._again(session), ask)
        known = self.by_key(session, ask.idempotency_key)
        if known is not None:
            return known
        issued = Issued(self._row(session, ask, verdict))
        issued.cancelled_prompts = self._drop(session, verdict, ask.arrived_at, ask.keep_queue)
        if isinstance(verdict, rules.NotRunning):
            self._nothing_runs(issued)
        elif ask.idempotency_key is None:
            twin = self._twin(session, issued, verdict)
            if twin is not None:
                twin.cancelled_prompts += issued.cancelled_prompts
                return twin
            self._mark(session, issued, verdict)
        self._remember(session, issued)
        self._services.tasks.spawn(f"command {issued.row.command_id}", self._carry(session, issued, ask.arrived_at))
        return issued

    async def take(
        self, session: Session, row: CommandRow, arrived_at: float, reply_to: str | None, stored: bool
    ) -> None:
        """Apply a command that was delivered to this replica, which has claimed it."""
        await _pause_over(session)
        issued = Issued(row, stored=stored, keeps_seat=await self._newer_seat(session, row, arrived_at))
        if reply_to is not None:
            issued.reply_to.add(reply_to)
        self._remember(session, issued)
        verdict = target(session, issued.kind, row.turn_id, arrived_at, ended=True)
        issued.cancelled_prompts = self._drop(session, verdict, arrived_at, bool(row.arguments.get(KEEP_QUEUE)))
        self._decide(session, issued, arrived_at)
        self._services.tasks.spawn(f"command {row.command_id}", self._carry(session, issued, arrived_at))

    async def end(self, session: Session, reason: StopReason) -> None:
        """Stop everything of a session and destroy its seat, without a command; bounded."""
        await _pause_over(session)
        runs = self._runs(session, [run.turn_id for run in there(session)])
        session.queue.cancel_waiting(keep_queue=False)
        for run in runs:
            run.stop(reason)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                for run in runs:
                    await ending_of([run])
        except TimeoutError:
            log.error("the turn of %s has not ended yet", session.session_id)
        await self._empty_seat(session, reason)

    def _drop(self, session: Session, verdict: rules.Target, arrived_at: float, keep: bool) -> list[str]:
        """Cancel what waited when the command arrived; their ids."""
        at = self._services.clock.now_ms() - (self._services.clock.monotonic() - arrived_at) * 1000
        return session.queue.cancel_waiting(keep_queue=keep, running=isinstance(verdict, rules.Apply), arrived_ms=at)

    def stop_chain(self, session: Session, reason: StopReason) -> None:
        """End a paused chain for this reason: a turn resumes it and ends cancelled."""
        self._resumed(session).stop(reason)

    # -- whom it means -----------------------------------------------------------------------------------------------

    async def _verdict(self, session: Session, ask: Ask) -> tuple[Session, rules.Apply | rules.NotRunning]:
        """The store is asked only about a turn that is not here."""
        verdict = target(session, ask.kind, ask.expected, ask.arrived_at)
        if isinstance(verdict, rules.Mismatch) and verdict.current is None and ask.expected is not None:
            known = await self._services.store.turn(session.project, session.session_id, ask.expected)
            session = self._again(session)
            verdict = target(session, ask.kind, ask.expected, ask.arrived_at, ended=known is not None)
        if isinstance(verdict, rules.Mismatch):
            raise mismatch(verdict.current)
        return session, verdict

    def _row(self, session: Session, ask: Ask, verdict: rules.Target) -> CommandRow:
        """Claimed by this replica from the first moment on: nobody else has to deliver it."""
        now = self._services.clock.now_ms()
        turn_id = ask.expected
        if isinstance(verdict, rules.Apply) and (len(verdict.turn_ids) == 1 or session.current_turn_id is not None):
            turn_id = verdict.turn_ids[0]
        age = max(0.0, self._services.clock.monotonic() - ask.arrived_at)
        return CommandRow(
            session.project,
            session.session_id,
            self._services.ids.mint("cmd"),
            ask.kind.value,
            CommandState.CLAIMED.value,
            turn_id,
            now - round(age * 1000),
            ask.idempotency_key,
            claimed_by=self._services.replica_id,
            claimed_until=now + rules.CLAIM_MS,
            deliveries=1,
        )

    def _twin(self, session: Session, issued: Issued, verdict: rules.Apply) -> Issued | None:
        """The command of the same kind that already stops the same turn: simultaneous Stops are one."""
        return next(
            (
                command
                for run in self._runs(session, verdict.turn_ids)
                for command in run.commands
                if command.kind is issued.kind and command.outcome is None
            ),
            None,
        )

    def _decide(self, session: Session, issued: Issued, arrived_at: float) -> None:
        """Whom a stored command means now; the turn that it names may be over."""
        verdict = target(session, issued.kind, issued.row.turn_id, arrived_at, ended=True)
        if isinstance(verdict, rules.Apply):
            issued.keeps_seat = False
            self._mark(session, issued, verdict)
            return
        issued.marked = True
        issued.keeps_seat = issued.keeps_seat or isinstance(verdict, rules.Mismatch)

    async def _newer_seat(self, session: Session, row: CommandRow, arrived_at: float) -> bool:
        """Whether a kill comes too late for the seat that is there: its turn is another one, or started later."""
        live = self._services.pool.live(session.key)
        if live is None or live.seat.turn_id is None or row.kind != CommandKind.KILL:
            return False
        if row.turn_id is not None:
            return row.turn_id != live.seat.turn_id
        clock = self._services.clock
        turn = await self._services.store.turn(session.project, session.session_id, live.seat.turn_id)
        arrived_ms = clock.now_ms() - (clock.monotonic() - arrived_at) * 1000
        return turn is not None and turn.started_at > arrived_ms

    def _mark(self, session: Session, issued: Issued, verdict: rules.Apply) -> None:
        """Tell the turns, each with the command's own label. No await since the verdict."""
        runs = self._runs(session, verdict.turn_ids)
        stopped = [run for run in runs if run.stop(rules.REASONS[issued.kind], command=issued)]
        issued.marked = True
        # A kill has to see an ending through that is on its way already: the seat behind it goes too.
        issued.runs = runs if issued.kind is CommandKind.KILL else stopped
        effects = [("stop", {"turn_id": run.turn_id}) for run in stopped]
        self._story(session.key, issued.row.command_id, issued.row.kind, None, issued.row.state, effects)
        if not issued.runs:
            self._nothing_runs(issued)

    def _nothing_runs(self, issued: Issued) -> None:
        issued.marked, issued.outcome = True, CommandOutcome.NOT_RUNNING
        if not issued.stored:
            state, outcome = CommandState.OBSOLETE.value, CommandOutcome.NOT_RUNNING.value
            issued.row = replace(issued.row, state=state, outcome=outcome, finished_at=self._services.clock.now_ms())

    def _runs(self, session: Session, turn_ids: tuple[str, ...] | list[str]) -> list[TurnRun]:
        """The turns with these ids; for a paused one the turn that ends its chain."""
        starting = {run.turn_id: run for run in session.starting.values()}
        found = []
        for turn_id in turn_ids:
            if session.current is not None and session.current.turn_id == turn_id:
                found.append(session.current)
            elif session.paused is not None and session.paused.turn_id == turn_id:
                found.append(self._resumed(session))
            else:
                found.append(starting[turn_id])
        return list(dict.fromkeys(found))

    def _resumed(self, session: Session) -> TurnRun:
        """The turn that resumes a paused chain in order to end it (DESIGN 3.2), or one that resumes it already."""
        run = session.resuming
        if run is None:
            assert session.paused is not None
            run = TurnRun.resuming(self._services, session, session.paused)
            self._start(session, run)
        return run

    # -- until its outcome -------------------------------------------------------------------------------------------

    async def _carry(self, session: Session, issued: Issued, arrived_at: float) -> None:
        try:
            saving = None
            if not issued.stored and not issued.saved.is_set():
                saving = self._services.tasks.spawn(f"save {issued.row.command_id}", self._save(issued.row))
                await asyncio.wait({saving}, timeout=SAVE_SECONDS)
                self._adopt(issued, saving)
            if not issued.marked:
                self._decide(session, issued, arrived_at)
            issued.saved.set()
            await self._see_through(session, issued, saving)
        finally:
            self._forget(issued)

    async def _save(self, row: CommandRow) -> CommandRow | None:
        try:
            return await self._services.store.submit_command(row)
        except RunnerError as error:
            log.error("command %s (%s) is not durable: %s", row.command_id, row.kind, error.message)
            return None

    def _adopt(self, issued: Issued, saving: asyncio.Task[CommandRow | None]) -> None:
        """Go on as the command that the store has: this one, or the one that it repeats."""
        row = saving.result() if saving.done() and not saving.cancelled() else None
        if row is None:
            return
        again = row.command_id != issued.row.command_id
        issued.row, issued.stored, issued.written = row, True, row.outcome is not None
        if again and issued.written and not issued.runs:
            issued.outcome, issued.marked = outcome_of(row), True

    async def _see_through(
        self, session: Session, issued: Issued, saving: asyncio.Task[CommandRow | None] | None
    ) -> None:
        end = await self._end(issued)
        if issued.kind is CommandKind.KILL and not issued.keeps_seat:
            for run in issued.runs:
                await ending_of([run])
            await self._empty_seat(session, StopReason.KILL)
            await self._start_over(session)
        if saving is not None and not issued.stored:
            await asyncio.wait({saving})
            self._adopt(issued, saving)
        if not issued.written:
            state, outcome = await self._came_to(session, issued, end)
            issued.outcome = issued.outcome or outcome
            await self._settle(issued, state, issued.outcome)
        elif issued.outcome is None and end is not None:
            issued.outcome = settled_by(end[1])[1]

    async def _end(self, issued: Issued) -> tuple[TurnRun, End] | None:
        """The ending of its turn; before its claim lapses it is shown as applied, and nobody delivers it again."""
        ending = asyncio.ensure_future(ending_of(issued.runs))
        try:
            await asyncio.wait({ending}, timeout=rules.CLAIM_MS / 2000)
            if not ending.done() and issued.stored:
                await self._write(issued, CommandState.APPLIED, None)
            return await ending
        finally:
            ending.cancel()

    async def _came_to(
        self, session: Session, issued: Issued, end: tuple[TurnRun, End] | None
    ) -> tuple[CommandState, CommandOutcome]:
        """By the ending that the store has: it may be another than the one that was seen here (a lost turn)."""
        turn_id = end[0].turn_id if end is not None else issued.row.turn_id
        if turn_id is not None and issued.outcome is None:
            try:
                row = await self._services.store.turn(session.project, session.session_id, turn_id)
            except RunnerError:
                row = None
            if row is not None and row.outcome is not None and row.outcome != Outcome.PAUSED:
                return rules.settled(Outcome(row.outcome), error_code(row.result))
        if end is not None:
            return settled_by(end[1])
        if session.paused is not None and session.current is None and not session.starting:
            # The turn that was to end the chain was not admitted: it waits on.
            return CommandState.OBSOLETE, CommandOutcome.FAILED
        late = turn_id is not None and issued.keeps_seat and session.current_turn_id is not None
        return CommandState.OBSOLETE, CommandOutcome.SUPERSEDED if late else CommandOutcome.NOT_RUNNING

    async def _settle(self, issued: Issued, state: CommandState, outcome: CommandOutcome) -> None:
        if issued.stored:
            await self._write(issued, state, outcome)
        elif issued.row.outcome is None:
            now = self._services.clock.now_ms()
            await self._save(replace(issued.row, state=state.value, outcome=outcome.value, finished_at=now))

    async def _write(self, issued: Issued, state: CommandState, outcome: CommandOutcome | None) -> None:
        """Settle the row; one that was shown as applied stays so. What fails is left to the sweep."""
        store, row, at = self._services.store, issued.row, self._services.clock.now_ms()
        word = outcome.value if outcome is not None else None
        try:
            written = await store.settle_command(row.project, row.command_id, state.value, word, at)
            if not written and outcome is not None and state is not CommandState.APPLIED:
                await store.settle_command(row.project, row.command_id, CommandState.APPLIED.value, word, at)
        except RunnerError as error:
            log.warning("the outcome of command %s is not durable: %s", row.command_id, error.message)

    async def _empty_seat(self, session: Session, reason: StopReason) -> None:
        pool = self._services.pool
        live = pool.live(session.key)
        if live is not None and not session.taken:
            pool.dismiss(live, reason.value)
        await pool.teardowns_of(session.key, KILL_SECONDS)

    async def _start_over(self, session: Session) -> None:
        """The next prompt of a killed session is cold: nobody goes on with what its agent had become (DESIGN 3.7)."""
        if not session.taken and session.agent_state.get("agent") is not None:
            session.agent_state["agent"] = None
            await session.save_agent()

    def _remember(self, session: Session, issued: Issued) -> None:
        self._issued.setdefault(issued.row.command_id, issued)
        if issued.row.idempotency_key is not None:
            self._keys[(*session.key, issued.row.idempotency_key)] = issued
            while len(self._keys) > KEYS_KEPT:
                self._keys.popitem(last=False)

    def _forget(self, issued: Issued) -> None:
        for name in [name for name, known in self._issued.items() if known is issued]:
            del self._issued[name]
        if issued.runs:
            issued.row, issued.runs = replace(issued.row, turn_id=issued.turn_id), []
        row, outcome = issued.row, issued.outcome.value if issued.outcome is not None else None
        self._story((row.project, row.session_id), row.command_id, "settled", row.state, outcome)
        issued.saved.set()
        issued.done.set()
        self._settled(issued)


def mismatch(current: str | None) -> RunnerError:
    """Another execution is current than the one that was meant (DESIGN 3.7)."""
    return RunnerError(
        "execution_mismatch", "Another execution is current; nothing was stopped.", current_execution_id=current
    )


def error_code(result: dict[str, object] | None) -> str | None:
    """The code of a stored result's error."""
    error = (result or {}).get("error")
    return str(error.get("code")) if isinstance(error, dict) else None


async def _pause_over(session: Session) -> None:
    """A turn that is ending as paused can only be stopped once its chain can be resumed."""
    if session.current is not None and session.current.pausing:
        await asyncio.wait({session.current.ended}, timeout=PAUSING_SECONDS)
