"""Replicas, clients and agents of one seed: random steps, then calm, then the next message of every session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from typing import Any, Final

from runner.assembly import Replica
from runner.errors import RunnerError
from runner.session.port import Caller, ReaderCut, ReaderEnded
from runner.wire.models import AnswerRequest, CancelRequest, DispatchRequest
from tests.simulation import trouble
from tests.simulation.chance import Chance
from tests.simulation.doubles import LEASE_SECONDS, WatchedPlane, WatchedStore
from tests.simulation.ledger import Dispatched, Ledger, Stopped
from tests.simulation.replicas import PROJECT, Fallen, Node

CALLER: Final = Caller(PROJECT, frozenset({"dispatch", "read", "operate"}))
PATIENCE: Final = 400.0
STEPS: Final = (
    *("dispatch",) * 6,
    *("retry",) * 2,
    *("stop",) * 4,
    *("answer",) * 4,
    *("rest",) * 3,
    "kill",
    "race",
    "delete",
    "leave",
    "look",
)
RETRYABLE: Final = ("refused", "error:plane_unavailable", "error:owned_elsewhere")
"""For example the lease of a replica that is gone, but not provably."""
TROUBLE: Final = (*trouble.KINDS, "struck")
PAUSES: Final = (0.0, 0.0, 0.005, 0.05, 0.15, 0.3, 1.0, 2.5)
RESTS: Final = (4.0, 4.0, 11.0, 25.0, 65.0)


class World:
    """One run. ``hazard`` 0 to 1 is how often agents, providers and the outside misbehave."""

    node = Node

    def __init__(self, seed: int) -> None:
        self.chance = chance = Chance(seed)
        self.hazard = chance.pick((0.0, 0.5, 1.0))
        self.troubled = chance.often(0.6)
        self.calmed = False
        self.shared = chance.often(0.7)
        self.same_host = chance.often(0.6)
        self.loads = chance.often(0.5)
        self.seats = chance.pick((1, 2, 4))
        self.session_ids = ("a", "b", "c")[: chance.pick((1, 2, 2, 3))]
        self.context = copy_context()
        self.store = WatchedStore()
        self.planes: list[WatchedPlane] = []
        self.ledger = Ledger()
        self.replicas: list[Replica] = []
        self.nodes_by_id: dict[str, Node] = {}
        self.dead: set[str] = set()
        self.frozen: list[list[float]] = []
        self.nodes = [self.node(self, name) for name in ("r", "s", "t")[: chance.pick((2, 2, 3)) if self.shared else 1]]
        self.clients: list[asyncio.Task[None]] = []
        self._pid = 1000
        self._prompts = 0
        self.trouble = trouble.Trouble(chance)

    # -- what the replicas are given ---------------------------------------------------------------------------------

    def plane_for_boot(self) -> WatchedPlane:
        """The shared plane, or the own one of a replica that is alone."""
        if not self.planes or not self.shared:
            self.planes.append(WatchedPlane(self.store, shared=self.shared))
        return self.planes[-1]

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def proven_dead(self, replica_id: str) -> bool:
        """What a look at the lock file says."""
        return self.same_host and replica_id in self.dead

    # -- steps -------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Every replica boots."""
        for node in self.nodes:
            await node.start()

    async def step(self) -> None:
        """One random thing."""
        kinds = (*STEPS, *TROUBLE) if self.troubled else STEPS
        kind = self.chance.pick(kinds)
        session_id = self.chance.pick(self.session_ids)
        match kind:
            case "dispatch":
                self._dispatch(session_id)
                if self.chance.often(0.3):
                    self._dispatch(session_id)
            case "retry":
                self._retry()
            case "stop":
                for _ in range(self.chance.pick((1, 1, 1, 2))):
                    self._client(self.stop(session_id, "cancel", self._expected(session_id)))
                if self.chance.often(0.2):
                    await asyncio.sleep(self.chance.pick((0.0, 0.02, 0.4, 2.03, 2.1)))
                    self._client(self.stop(session_id, "kill", None))
            case "kill":
                self._client(self.stop(session_id, "kill", None))
            case "race":
                await self._race(session_id)
            case "answer":
                self._client(self.answer(session_id))
            case "delete":
                if self.chance.often(0.3):
                    self.ledger.deleted.add(session_id)
                    self._client(self.stop(session_id, "delete", None))
            case "leave":
                if self.clients:
                    self.chance.pick(self.clients).cancel()
            case "look":
                self._client(self.look(session_id))
            case "rest":
                await asyncio.sleep(self.chance.pick(RESTS))
            case "struck":
                await self._struck(session_id)
            case _:
                self.trouble.strike(kind, self.chance.pick(self.nodes))
        await asyncio.sleep(self.chance.pick(PAUSES))

    def _client(self, work: Coroutine[Any, Any, None]) -> None:
        self.clients.append(asyncio.create_task(work, name="client"))

    def _dispatch(self, session_id: str) -> None:
        self._prompts += 1
        token = f"T{self._prompts}"
        self._send(Dispatched(session_id, f"p{self._prompts}", token, asyncio.get_running_loop().time()))

    def _retry(self) -> None:
        """The same prompt again, as a client does that lost its answer."""
        if self.ledger.dispatched:
            old = self.chance.pick(self.ledger.dispatched[-4:])
            self._send(Dispatched(old.session_id, old.prompt_id, old.token, asyncio.get_running_loop().time()))

    def _send(self, dispatched: Dispatched) -> None:
        self.ledger.dispatched.append(dispatched)
        self._client(self.dispatch(dispatched, leaves=self.chance.often(0.2)))

    def _expected(self, session_id: str) -> str | None:
        """Half of the Stops name the turn that their client saw last; it may be over."""
        seen = [row.turn_id for row in self.ledger.dispatched if row.session_id == session_id and row.turn_id]
        return self.chance.pick(seen[-2:]) if seen and self.chance.often(0.5) else None

    # -- clients -----------------------------------------------------------------------------------------------------

    async def asked(self, session_id: str, work: Callable[[Any], Awaitable[Any]], *, stays: bool = False) -> Any:
        """A request at any replica; what another one holds is passed to it once, commands are not (DESIGN 3.1.10).

        Returns:
            What ``work`` made of the coordinator it was given, and the node that served it.

        Raises:
            RunnerError: a refusal.
            Fallen: no replica answered.
        """
        up = [node for node in self.nodes if node.up]
        if not up:
            raise Fallen
        entry = self.chance.pick(up)

        async def serve() -> Any:
            if stays or not self.shared:
                return await work(entry.sessions), entry
            owner = await entry.replica.services.owners.elsewhere(PROJECT, session_id)
            if owner is None:
                return await work(entry.sessions), entry
            target = self.nodes_by_id[owner.replica_id]
            if target.replica_id != owner.replica_id or not target.up:
                if not await entry.replica.services.owners.gone(owner.replica_id):
                    raise RunnerError("owned_elsewhere", "It cannot be reached.", owner=owner.replica_id)
                return await work(entry.sessions), entry
            return await target.serve(lambda: self._forwarded(target, session_id, work)), target

        return await entry.serve(serve)

    async def _forwarded(self, node: Node, session_id: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
        owner = await node.replica.services.owners.elsewhere(PROJECT, session_id)
        if owner is not None:
            raise RunnerError("owned_elsewhere", "Another replica holds it by now.", owner=owner.replica_id)
        return await work(node.sessions)

    async def dispatch(self, row: Dispatched, *, leaves: bool = False) -> None:
        """A client that sends a prompt and reads its stream, or leaves early."""
        text = f"[{row.token}] do it"
        fields = {"prompt": text, "prompt_id": row.prompt_id, "keep_on_disconnect": self.chance.often(0.3)}
        if self.chance.often(0.2):
            fields["limits"] = {"total_seconds": self.chance.pick((1, 1, 3, 30))}
        if self.chance.often(0.06):
            fields["env"] = {"A": row.token}
        request = DispatchRequest.model_validate(fields)
        try:
            handle, node = await self.asked(row.session_id, lambda at: at.dispatch(CALLER, row.session_id, request))
        except RunnerError as error:
            row.answer = "refused" if error.code == "session_turn_in_use" else f"error:{error.code}"
            return
        except Fallen:
            return
        row.answer, row.turn_id = ("refused", None) if handle.refused is not None else ("accepted", handle.turn_id)
        try:
            await node.serve(lambda: self._read(handle, leaves))
            row.result = await node.serve(handle.result)
        except Fallen:
            return

    async def _read(self, handle: Any, leaves: bool) -> None:
        reader = handle.reader()
        try:
            if leaves:
                await asyncio.sleep(self.chance.pick(PAUSES))
                return
            while True:
                await reader.next(3600)
        except (ReaderEnded, ReaderCut):
            return
        finally:
            reader.close()

    async def stop(self, session_id: str, kind: str, expected: str | None) -> None:
        """A Stop, a kill or a DELETE."""
        loop = asyncio.get_running_loop()
        row = Stopped(session_id, kind, loop.time(), expected)
        self.ledger.stopped.append(row)
        wait = self.chance.pick((0.0, 0.0, 30.0))
        request = CancelRequest.model_validate({"expected_execution_id": expected, "wait_seconds": wait})
        try:
            if kind == "cancel":
                work = self.asked(session_id, lambda at: at.cancel(CALLER, session_id, request), stays=True)
            else:
                work = self.asked(session_id, lambda at: getattr(at, kind)(CALLER, session_id), stays=kind == "kill")
            reply, _ = await work
            row.status, row.body = reply.status, reply.body
        except RunnerError as error:
            row.error = error.code
        except Fallen:
            row.error = "fallen"
        row.replied_at = loop.time()

    async def answer(self, session_id: str) -> None:
        """A human answers one of the open questions, or two of them at the same time."""
        try:
            view, _ = await self.asked(session_id, lambda at: at.view(CALLER, session_id))
        except (RunnerError, Fallen):
            return
        for question in view["open_interactions"][: self.chance.pick((1, 2))]:
            decision = AnswerRequest.model_validate({"decision": self.chance.pick(("allow", "allow", "deny"))})
            self._client(self._answered(session_id, question, decision))
            if self.chance.often(0.2):
                await asyncio.sleep(self.chance.pick((0.0, 0.002, 0.01, 0.1)))
                self._client(self.stop(session_id, self.chance.pick(("cancel", "kill")), None))
            elif self.troubled and self.chance.often(0.15):
                await asyncio.sleep(self.chance.pick((0.0, 0.002, 0.01, 0.1)))
                self.trouble.strike("crash", self.chance.pick(self.nodes))

    async def _answered(self, session_id: str, question: str, decision: AnswerRequest) -> None:
        try:
            await self.asked(session_id, lambda at: at.answer(CALLER, session_id, question, decision))
        except (RunnerError, Fallen):
            return

    async def look(self, session_id: str) -> None:
        """Reads that change nothing."""
        try:
            await self.asked(session_id, lambda at: at.records(CALLER, session_id, None, 50), stays=True)
            await self.asked(session_id, lambda at: at.story(CALLER, session_id))
        except (RunnerError, Fallen):
            return

    async def _race(self, session_id: str) -> None:
        """A turn that two people stop at the same time, each in their own way."""
        self._dispatch(session_id)
        await asyncio.sleep(self.chance.pick((0.05, 0.3, 0.6)))
        for kind in self.chance.pick((("cancel", "kill"), ("kill", "cancel"))):
            self._client(self.stop(session_id, kind, None))
            await asyncio.sleep(self.chance.pick((0.0, 0.0, 0.02)))

    async def _struck(self, session_id: str) -> None:
        """A Stop, and whoever may have taken it stands still or dies."""
        self._dispatch(session_id)
        await asyncio.sleep(self.chance.pick((0.05, 0.3, 0.6)))
        self._client(self.stop(session_id, "cancel", None))
        await asyncio.sleep(self.chance.pick((0.002, 0.01, 0.05)))
        self.trouble.strike(self.chance.pick(("crash", "freeze", "freeze")), self.chance.pick(self.nodes))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def calm(self) -> None:
        """Trouble ends, agents behave; everything that is under way comes to its end."""
        self.hazard, self.troubled, self.calmed = 0.0, False, True
        await self.trouble.mended()
        for node in self.nodes:
            if not node.up:
                await node.start()
            node.plane_road.long = node.store_road.long = 0.0
        await self._settle([task for task in self.clients if not task.done()])
        for _ in range(int(PATIENCE / 5)):
            await asyncio.sleep(5)
            unfinished = await self.store.open_turns() or await self.store.open_commands()
            if not unfinished and not self.planes[-1].running():
                break
        await asyncio.sleep(6)

    async def _settle(self, waits: list[asyncio.Task[Any]]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while True:
            for node in self.nodes:
                for sandbox in list(node.provider.alive.values()):
                    sandbox.agent.behave()
            waits = [task for task in waits if not task.done()]
            if not waits and not any(node.sessions._runs for node in self.nodes):
                return
            assert loop.time() < deadline, f"still under way: {[task.get_name() for task in waits]}"
            await asyncio.sleep(1.0)

    async def next_messages(self) -> None:
        """The next message of every session succeeds wherever it arrives, at the latest when it is sent again."""
        waiting = [session_id for session_id in self.session_ids if session_id not in self.ledger.deleted]
        again: set[str] = set()
        for _ in range(4 * len(waiting)):
            if not waiting:
                return
            session_id = waiting.pop(0)
            self._prompts += 1
            row = Dispatched(session_id, f"p{self._prompts}", f"T{self._prompts}", asyncio.get_running_loop().time())
            self.ledger.dispatched.append(row)
            client = asyncio.create_task(self.dispatch(row))
            await self._settle([client])
            await client
            if row.answer in RETRYABLE and session_id not in again:
                again.add(session_id)
                waiting.append(session_id)
                await asyncio.sleep(LEASE_SECONDS)
                continue
            assert row.answer == "accepted", f"the next message of {session_id} was {row.answer}"
            assert row.result is not None
            if not row.result["ok"]:
                # A client may give a cold start less time than it takes.
                assert row.result["error"]["code"] in ("provider_at_capacity", "limit_total"), row.result
                waiting.append(session_id)
            await asyncio.sleep(20)
        assert not waiting, f"no seat for {waiting}"

    async def end(self) -> None:
        """Every replica drains; nothing of it is left."""
        for node in self.nodes:
            await node.drain()
            assert node.provider.alive == {}, f"{node.replica_id} left {list(node.provider.alive)}"
