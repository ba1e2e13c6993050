"""One store and one lease plane for several replicas, and how each replica reaches them.

``WatchedStore`` and ``WatchedPlane`` are the memory twins of production that also judge what is done to them, by rules
of their own. ``Far`` is one replica's way to either: slow, sometimes away, and cut when the replica is killed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from typing import Any

from runner.errors import RunnerError
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import BeatAnswer, Heartbeat
from runner.rules import lease
from runner.rules.story import Stories
from runner.store import rows
from runner.store.memory import MemoryStore
from runner.store.port import CommandRow, Ending, InteractionRow
from tests.simulation.chance import Chance
from tests.virtual_time import LoopClock

LEASE_SECONDS = 20.0


class WatchedStore(MemoryStore):
    """A store that notices an ending that changes, and counts what becomes of questions and commands."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.questions: Counter[tuple[str, str]] = Counter()
        self.commands: Counter[tuple[str, str]] = Counter()

    async def end(self, ending: Ending) -> bool:
        key = (ending.turn.project, ending.turn.session_id, ending.turn.turn_id)
        before = await super().turn(*key)
        known = [await self.command(row.project, row.command_id) for row in ending.commands]
        written = await super().end(ending)
        after = await super().turn(*key)
        if before is not None and before.outcome is not None and (written or after != before):
            self.faults.append(f"turn {key[2]} ended as {before.outcome} and again as {ending.turn.outcome}")
        for row in known:
            if row is not None:
                await self._command_moved(row)
        return written

    async def submit_command(self, row: CommandRow) -> CommandRow:
        submitted = await super().submit_command(row)
        self.commands["" if submitted.command_id == row.command_id else "repeat", submitted.state] += 1
        return submitted

    async def claim_command(
        self, project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
    ) -> CommandRow | None:
        before = await self.command(project, command_id)
        claimed = await super().claim_command(project, command_id, replica_id, now, until, max_deliveries)
        if before is not None and claimed is not None:
            self.commands[before.state, claimed.state] += 1
        return claimed

    async def settle_command(self, project: str, command_id: str, state: str, outcome: str | None, at: int) -> bool:
        before = await self.command(project, command_id)
        settled = await super().settle_command(project, command_id, state, outcome, at)
        if before is not None:
            await self._command_moved(before)
        return settled

    async def _command_moved(self, before: CommandRow) -> None:
        after = await self.command(before.project, before.command_id)
        if after is not None and after.state != before.state:
            self.commands[before.state, after.state] += 1

    def _save_interaction(self, row: InteractionRow) -> None:
        before = self._question(row)
        super()._save_interaction(row)
        self._question_moved(row, before)

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        before = self._question(row)
        answered = await super().answer_interaction(row, expected_status)
        self._question_moved(row, before)
        return answered

    def _question(self, row: InteractionRow) -> str:
        found = self._interactions.get((row.project, row.interaction_id))
        return "" if found is None else rows.interaction_row(found).status

    def _question_moved(self, row: InteractionRow, before: str) -> None:
        after = self._question(row)
        if after != before:
            self.questions[before, after] += 1


class WatchedPlane(MemoryLeasePlane):
    """A plane that counts its moves and notices a beat that harms another turn or brings an ended one back."""

    def __init__(self, store: WatchedStore, *, shared: bool) -> None:
        super().__init__(LoopClock(), LEASE_SECONDS, shared=shared, has_ended=self.has_ended)
        self.faults: list[str] = []
        self.moves: Counter[lease.Move] = Counter()
        self.story = Stories(LoopClock().now_ms)
        self._store = store
        self._over: set[tuple[str, str]] = set()

    def running(self) -> list[str]:
        """Sessions with a turn that runs, as the plane knows; a lease that nobody renews runs out."""
        return [session_id for project, session_id in self._leases if self.lease(project, session_id).running]

    async def has_ended(self, project: str, session_id: str, turn_id: str) -> bool:
        turn = await self._store.turn(project, session_id, turn_id)
        return turn is not None and turn.outcome is not None

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        key = (beat.project, beat.session_id)
        before = self.lease(*key)
        predecessor_ended = beat.predecessor is not None and await self.has_ended(*key, beat.predecessor)
        turn_ended = await self.has_ended(*key, beat.turn_id)
        move = lease.move(before, beat, predecessor_ended=predecessor_ended, turn_ended=turn_ended)
        self.moves[move] += 1
        answer = await super().beat(beat)
        after = self.lease(*key)
        self.story.tell(key, "lease", beat.turn_id, (move, {"beat": beat.phase}), _shown(before), _shown(after))
        self._judge(beat, before, after, answer)
        return answer

    def _judge(
        self, beat: Heartbeat, before: lease.SessionLease, after: lease.SessionLease, answer: BeatAnswer
    ) -> None:
        turn, key = beat.turn_id, (beat.session_id, beat.turn_id)
        if key in self._over and after.running == turn:
            self.faults.append(f"a beat brought turn {turn} back that had ended")
        if answer.admitted and beat.phase in ("ended", "parked"):
            self._over.add(key)
        own = (None, turn, beat.predecessor)  # a turn that was not admitted after all gives back what it replaced
        if beat.phase != "running" and before.running not in own and after.running != before.running:
            self.faults.append(f"the {beat.phase} beat of {turn} released {before.running}")
        if before.owner not in (None, beat.replica_id) and after != before:
            self.faults.append(f"a beat of {beat.replica_id} changed a session of {before.owner}")


def _shown(found: lease.SessionLease) -> dict[str, Any]:
    return {"owner": found.owner, "alive": found.alive, "running": found.running, "epoch": found.epoch}


class Road:
    """How one replica reaches the outside.

    ``down``: every call fails at once; ``hanging``: none is answered; ``lossy``: this share of calls is done but its
    answer gets lost; ``forgetful``: this share of notes.
    """

    def __init__(self, chance: Chance, context: Context) -> None:
        self.chance = chance
        self.context = context
        self.down = False
        self.hanging = False
        self.hung: list[asyncio.Future[None]] = []
        self.lossy = self.forgetful = 0.0
        self.long = 0.02

    async def there(self, code: str) -> None:
        await self.chance.wait(self.long)
        await self._open(code)

    async def back(self, code: str) -> None:
        await self.chance.wait(self.long)
        if self.chance.often(self.lossy):
            raise RunnerError(code, "The answer was lost.")
        await self._open(code)

    def heal(self) -> None:
        """The road is free again; what hung meanwhile fails, as a connection does that was cut."""
        self.down = self.hanging = False
        hung, self.hung = self.hung, []
        for wait in hung:
            if not wait.done():
                wait.set_exception(RunnerError("plane_unavailable", "The connection was cut."))

    async def _open(self, code: str) -> None:
        if self.hanging:
            self.hung.append(asyncio.get_running_loop().create_future())
            await self.hung[-1]
        if self.down:
            raise RunnerError(code, "It cannot be reached.")


class Far:
    """Passes every call of a port on to the one that all share, along a road."""

    def __init__(self, core: Any, road: Road, code: str, *, returns: bool) -> None:
        self._core = core
        self._road = road
        self._code = code
        self._returns = returns

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._core, name)
        if not asyncio.iscoroutinefunction(work):
            return work
        road, code, returns = self._road, self._code, self._returns

        async def call(*args: Any, **named: Any) -> Any:
            await road.there(code)
            answer = await work(*args, **named)
            if returns:
                await road.back(code)
            else:
                await road.chance.wait(road.long)
            return answer

        self.__dict__[name] = call
        return call

    async def close(self) -> None:
        """The others still use it."""


class FarPlane(Far):
    """Notes reach their replica as callbacks of its own, if they do: they only save time."""

    async def push(self, replica_id: str, note: Any) -> bool:
        await self._road.there(self._code)
        if self._road.chance.often(self._road.forgetful):
            return False
        return bool(await self._core.push(replica_id, note))

    async def listen(self, replica_id: str, on_note: Callable[[Any], None]) -> None:
        loop, context = asyncio.get_running_loop(), self._road.context.copy()

        def deliver(note: Any) -> None:
            loop.call_soon(on_note, note, context=context)

        await self._core.listen(replica_id, deliver)
