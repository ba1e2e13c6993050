"""A replica that anything may happen to, and what must hold once it has calmed down."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any

from runner.errors import RunnerError
from runner.session.port import Reader, ReaderEnded
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FakeAgent
from tests.session.reading import Event, assert_contiguous, assert_ordered, conversation, cursor, take

SESSIONS = ("a", "b", "c")
SETTINGS = {"pool": {"max_seats": 2}, "acp": {"start_seconds": 5}, "turn": {"settle_seconds": 3}}
SLEEPS = (0.0, 0.0, 0.05, 0.2, 1.0, 4.0, 11.0, 61.0, 601.0, 20.0)
PAUSES = (0.0, 0.0, 0.001, 0.01, 0.15, 0.15)
LATENCIES = (0.0, 0.0, 0.01, 0.05, 0.2, 1.0)
PATIENCE = 300.0


class AgentLife:
    """What the world knows of one agent: its open prompts and questions."""

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        self.answered: set[int] = set()
        self.asked: dict[int, str] = {}
        self.tools: dict[str, str] = {}
        self.count = 0
        self.gone = False

    @property
    def prompt(self) -> dict[str, Any] | None:
        """The newest prompt without an answer."""
        frames = [frame for frame in self.agent.all("session/prompt") if frame["id"] not in self.answered]
        return frames[-1] if frames and not self.gone else None

    @property
    def waiting(self) -> list[int]:
        """Questions without an answer."""
        replied = {frame.get("id") for frame in self.agent.frames if "method" not in frame}
        return [number for number in self.asked if number not in replied]

    @property
    def cancelled(self) -> bool:
        """Whether the newest prompt was cancelled."""
        order = [frame.get("method") for frame in self.agent.frames]
        return "session/cancel" in order[len(order) - order[::-1].index("session/prompt") :]

    def fresh(self) -> int:
        self.count += 1
        return self.count

    def end(self, stop_reason: str = "end_turn") -> None:
        """Answer the newest prompt."""
        prompt = self.prompt
        if prompt is not None:
            self.answered.add(prompt["id"])
            self.agent.answer(prompt, stop_reason)

    def fail(self) -> None:
        prompt = self.prompt
        if prompt is not None:
            self.answered.add(prompt["id"])
            self.agent.error(prompt["id"], -32603, "model is down")

    def tool(self, which: int, status: str) -> None:
        name = f"{self.agent.pid}-{which % 2}"
        kind = "tool_call" if name not in self.tools else "tool_call_update"
        self.tools[name] = status
        self.agent.update(sessionUpdate=kind, toolCallId=name, title=f"tool {name}", status=status)

    def ask(self, which: int) -> None:
        number = 1000 + self.fresh()
        self.asked[number] = f"{self.agent.pid}-{which % 2}"
        self.agent.ask(number, self.asked[number])

    def withdraw(self) -> None:
        if self.waiting:
            self.agent.send({"method": "$/cancel_request", "params": {"requestId": self.waiting[0]}})

    def exit(self) -> None:
        self.gone = True
        self.agent.exit(7)


class World:
    """One bed, its clients and its agents; every step of a story is one method call."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.store: Any = bed.store
        self.plane: Any = bed.replica.plane
        self.lives: dict[int, AgentLife] = {}
        self.calls: list[asyncio.Task[Any]] = []
        self.clients: list[asyncio.Task[Any]] = []
        self.watchers: dict[str, asyncio.Task[None]] = {}
        self.seen: dict[str, list[Event]] = {}
        self.gapless: dict[str, bool] = {}
        self.readers = 0
        self.deleted: set[str] = set()
        self.prompts = 0

    # Steps.

    def step(self, kind: str, one: int, two: int) -> float:
        """Do one thing; how long to sleep behind it."""
        session_id = SESSIONS[one % len(SESSIONS)]
        match kind:
            case "dispatch":
                self.dispatch(session_id, two)
            case "agent":
                self.agent_does(one, two)
            case "command":
                self.command(session_id, two)
            case "answer":
                self.call(self.answer(session_id, two))
            case "leave":
                if self.clients:
                    self.clients[one % len(self.clients)].cancel()
            case "fault":
                self.fault(one, two)
            case "slow":
                self.store.latency, self.plane.latency = LATENCIES[one], LATENCIES[two % 6]
        return SLEEPS[two] if kind == "sleep" else PAUSES[one]

    def dispatch(self, session_id: str, two: int) -> None:
        fields: dict[str, Any] = {"prompt": f"text {two % 3}", "keep_on_disconnect": two % 2 == 0}
        if two < 4:
            fields["prompt_id"] = f"p{two % 3}"
        if two == 9:
            fields["env"] = {"A": str(self.prompts % 2)}
        self.prompts += 1
        self.clients.append(asyncio.create_task(self.client(session_id, fields), name="client"))

    async def client(self, session_id: str, fields: dict[str, Any]) -> None:
        with contextlib.suppress(RunnerError):
            handle = await self.bed.dispatch(session_id, **fields)
            if session_id not in self.watchers and handle.refused is None:
                self.watchers[session_id] = asyncio.create_task(self.watch(session_id), name="watcher")
            reader = handle.reader()
            self.readers += 1
            try:
                events = await self.read(reader)
            finally:
                reader.close()
                self.readers -= 1
            assert {event["prompt_id"] for event in events} <= {handle.prompt_id}
            result = await handle.result()
            assert result["prompt_ids"] == [handle.prompt_id]

    @staticmethod
    async def read(reader: Reader) -> list[Event]:
        events: list[Event] = []
        with contextlib.suppress(ReaderEnded):
            while True:
                events += await take(reader, 1)
        return events

    async def watch(self, session_id: str) -> None:
        """A follower from the beginning, until the session is deleted; it comes back where it was broken off."""
        seen = self.seen.setdefault(session_id, [])
        with contextlib.suppress(ReaderEnded):
            while True:
                with contextlib.suppress(RunnerError):
                    await self.follow(session_id, seen)
                await asyncio.sleep(1)

    async def follow(self, session_id: str, seen: list[Event]) -> None:
        after = seen[-1]["cursor"] if seen else None
        reader: Any = await self.bed.sessions.follow(CALLER, session_id, after, True)
        self.gapless[session_id] = self.gapless.get(session_id, True) and reader._covered
        self.readers += 1
        try:
            while True:
                seen.extend(await take_any(reader))
        finally:
            reader.close()
            self.readers -= 1

    def agent_does(self, one: int, two: int) -> None:
        sandboxes = self.bed.provider.sandboxes
        if not sandboxes:
            return
        life = self.life(sandboxes[-1 - one % min(3, len(sandboxes))].agent)
        if life.gone or (life.prompt is None and two not in (0, 7)):
            return
        match two:
            case 0:
                life.agent.say(f"w{life.fresh()} ")
            case 1:
                life.tool(one, "in_progress")
            case 2:
                life.tool(one, "completed")
            case 3 | 4:
                life.ask(one)
            case 5:
                life.agent.say("so ")
                life.end()
            case 6:
                life.end("cancelled")
            case 7:
                life.exit()
            case 8:
                life.withdraw()
            case 9:
                life.fail()

    def life(self, agent: FakeAgent) -> AgentLife:
        return self.lives.setdefault(agent.pid, AgentLife(agent))

    def command(self, session_id: str, two: int) -> None:
        sessions = self.bed.sessions
        if two < 5:
            self.call(self.bed.cancel(session_id, wait_seconds=two))
        elif two < 8:
            self.call(sessions.kill(CALLER, session_id))
        elif two == 8:
            self.call(self.delete(session_id))

    async def delete(self, session_id: str) -> None:
        """Until it is done; what a failed one left is removed by the next."""
        for _ in range(3):
            try:
                await self.bed.sessions.delete(CALLER, session_id)
                self.deleted.add(session_id)
                return
            except RunnerError as error:
                if error.code != "store_unavailable":
                    return
                await asyncio.sleep(100)

    async def answer(self, session_id: str, two: int) -> None:
        view = await self.bed.sessions.view(CALLER, session_id)
        if view["open_interactions"]:
            question = view["open_interactions"][two % len(view["open_interactions"])]
            await self.bed.answer(question, session_id, decision="deny" if two % 2 else "allow")

    def call(self, work: Coroutine[Any, Any, Any]) -> None:
        async def quiet() -> None:
            with contextlib.suppress(RunnerError):
                await work

        self.calls.append(asyncio.create_task(quiet(), name="call"))

    def fault(self, one: int, two: int) -> None:
        provider = self.bed.provider
        match two:
            case 0:
                self.store.unavailable = not self.store.unavailable
            case 1:
                self.plane.down = not self.plane.down
            case 2:
                self.store.failing["end"] += one
            case 3:
                self.store.failing["append"] += one
            case 4:
                self.store.failing["admit"] += 2
            case 5:
                provider.start_error = (
                    RunnerError("sandbox_start_failed", "no") if provider.start_error is None else None
                )
            case 6:
                provider.survivors = not provider.survivors
            case 7:
                provider.unproven += 1
            case 8:
                self.hold_starts()
            case 9:
                provider.manners["session/new"] = not provider.manners.get("session/new", True)

    def hold_starts(self) -> None:
        """Sandboxes do not start, or go on again."""
        provider = self.bed.provider
        if provider.start_gate is None:
            provider.start_gate = asyncio.Event()
        else:
            provider.start_gate.set()
            provider.start_gate = None

    # The end.

    async def calm(self) -> None:
        """Faults end, agents behave; everything that is under way comes to its end."""
        provider = self.bed.provider
        self.store.unavailable = self.plane.down = False
        self.store.latency = self.plane.latency = 0.0
        self.store.failing.clear()
        provider.start_error, provider.survivors, provider.unproven = None, False, 0
        if provider.start_gate is not None:
            self.hold_starts()
        provider.manners.pop("session/new", None)
        for _ in range(40):
            self.behave()
            await asyncio.sleep(0.5)
        waits = [*self.calls, *self.clients]
        behaving = asyncio.create_task(self.keep_behaving())
        if waits:
            _, pending = await asyncio.wait(waits, timeout=PATIENCE)
            assert not pending, [task.get_name() for task in pending]
        for session in self.bed.sessions._registry.all():
            if session.remains:  # every DELETE of it failed half-way: the next one finishes it
                await self.bed.sessions.delete(CALLER, session.session_id)
                self.deleted.add(session.session_id)
        await asyncio.sleep(20)
        behaving.cancel()
        for task in waits:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception() or AssertionError

    async def keep_behaving(self) -> None:
        while True:
            self.behave()
            await asyncio.sleep(0.2)

    def behave(self) -> None:
        """Each agent answers its prompt, unless it waits for a human."""
        for sandbox in self.bed.provider.sandboxes:
            life = self.life(sandbox.agent)
            if life.prompt is None or sandbox.gone.is_set():
                continue
            for name, status in list(life.tools.items()):
                if status == "in_progress":
                    life.tool(int(name[-1]), "completed")
            if life.cancelled:
                life.end("cancelled")
            elif not life.waiting:
                life.agent.say("fine ")
                life.end()

    async def check(self) -> None:
        """What must hold now."""
        bed = self.bed
        sessions = [session for session in SESSIONS if await bed.store.session("p", session) is not None]
        for session_id in sessions:
            if session_id not in self.deleted:
                await self.check_session(session_id)
            lease = self.plane.lease("p", session_id)
            seat = bed.pool.book.seats.get(("p", session_id))
            assert lease.running is None, session_id
            assert (lease.owner is not None) <= (seat is not None), (session_id, lease)
        assert await bed.store.open_turns() == []
        assert {seat.seat_id for seat in bed.pool.book.seats.values()} == bed.provider.alive
        assert bed.pool.book.tearing == {}
        assert bed.sessions.has_capacity()
        assert bed.sessions._runs == {}
        for_life = {"sessions:sweep", "sessions:expire questions"}
        left = {task.get_name() for task in asyncio.all_tasks() if not task.done()} - for_life
        assert [name for name in left if name.startswith(("sessions:", "heartbeats:", "pool:", "call", "client"))] == []
        present = sum(session.presence.count for session in bed.sessions._registry.all())
        assert present == self.readers

    async def check_session(self, session_id: str) -> None:
        bed = self.bed
        view = await bed.sessions.view(CALLER, session_id)
        paused = view["state"] == "awaiting_approval"
        assert view["state"] in ("idle", "awaiting_approval"), view
        stored = await bed.history(session_id)
        if session_id in self.seen:
            live = self.seen[session_id]
            (assert_contiguous if self.gapless[session_id] else assert_ordered)(live)
            assert cursor(live[-1]) == cursor(stored[-1])
            assert conversation(live) == conversation(stored)
        turns = [row for row in bed.store._all_turns() if row.session_id == session_id]
        done = [event["turn_id"] for event in stored if event["type"] == "done"]
        assert sorted(done) == sorted(row.turn_id for row in turns)
        assert all(row.outcome is not None and row.result is not None for row in turns)
        beats = [kind for kind in types(stored) if kind in ("session_busy", "session_idle")]
        assert beats == (["session_busy", "session_idle"] * len(beats))[: len(beats)]
        assert (beats[-1] == "session_busy") == paused
        await self.check_ends(session_id, stored, paused, view["open_interactions"])

    async def check_ends(self, session_id: str, stored: list[Event], paused: bool, open_now: list[str]) -> None:
        bed = self.bed
        rows = await bed.store.interactions("p", session_id)
        pending = {row.interaction_id for row in rows if row.status in ("pending", "answered")}
        assert pending == set(open_now), (pending, open_now)
        assert bool(pending) <= paused
        tools = conversation(stored)["tools"]
        unended = {name for name, tool in tools.items() if tool["status"] not in ("completed", "failed", "cancelled")}
        assert not unended or paused, unended
        begun = {name for event in stored if event["type"] == "turn_admitted" for name in event["data"]["prompt_ids"]}
        ended = [event["data"]["prompt_id"] for event in stored if event["type"] == "prompt_ended"]
        assert len(ended) == len(set(ended))
        assert len(begun - set(ended)) == paused
        for prompt_id in begun:
            row = await bed.store.prompt("p", session_id, prompt_id)
            assert (row.state == "active") == (prompt_id not in ended), (row.state, prompt_id)
            assert row.result is not None

    async def next_messages(self) -> None:
        """The next message of every session succeeds; where paused sessions hold every seat, once they got theirs."""
        behaving = asyncio.create_task(self.keep_behaving())
        waiting = [session_id for session_id in SESSIONS if session_id not in self.deleted]
        for _ in SESSIONS:
            for session_id in list(waiting):
                handle = await self.bed.dispatch(session_id, prompt="and now", keep_on_disconnect=True)
                assert handle.refused is None, session_id
                result = await asyncio.wait_for(handle.result(), PATIENCE)
                full = not result["ok"] and result["error"]["code"] == "provider_at_capacity"
                assert result["ok"] or full, result
                if result["ok"]:
                    waiting.remove(session_id)
        assert waiting == []
        behaving.cancel()

    async def restart(self) -> None:
        """A second runner over the same store shows the same conversations, and nothing is open in them."""
        known = [session_id for session_id in SESSIONS if session_id not in self.deleted]
        before = {session_id: await self.bed.history(session_id) for session_id in known}
        await self.close()
        self.store.unavailable = False
        self.bed = again = await Bed.make(settings=SETTINGS, store=self.store, replica_id="rep_2")
        for session_id, events in before.items():
            assert conversation(await again.history(session_id)) == conversation(events)
            assert await again.history(session_id, events[-1]["cursor"]) == []
            assert await again.state(session_id) == "idle"

    async def close(self) -> None:
        for watcher in self.watchers.values():
            if watcher.done() and not watcher.cancelled() and watcher.exception() is not None:
                raise watcher.exception() or AssertionError
        for task in [*self.watchers.values(), *self.clients, *self.calls]:
            task.cancel()
        await self.bed.close()
        assert self.bed.provider.alive == set()


async def take_any(reader: Reader) -> list[Event]:
    """The next events; a session may be silent for long."""
    while True:
        lines = await reader.next(10_000)
        if lines is not None:
            return [json.loads(line) for line in lines.splitlines()]
