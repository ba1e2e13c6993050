"""One session of a real server as a test drives it, and what must hold behind every case (CASES.md, head)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import Any

from runner.client import ApiError, Client
from tests.e2e.server import SECONDS, Server, alive, until

Line = dict[str, Any]
CLOSED_TOOL = frozenset({"completed", "failed", "cancelled", "deferred"})


class Dispatched:
    """A dispatch under way: a task collects its lines."""

    def __init__(self, client: Client, session: str, prompt: Any, fields: dict[str, Any]) -> None:
        self.events: list[Line] = []
        self._stream = client.dispatch(session, prompt, **fields)
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> dict[str, Any]:
        try:
            async for line in self._stream:
                if line["kind"] == "result":
                    return dict(line["result"])
                self.events.append(line)
                async with self._changed:
                    self._changed.notify_all()
        finally:
            await self._stream.aclose()
            async with self._changed:
                self._changed.notify_all()
        raise AssertionError("a stream without a result")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Data of the events of one type so far."""
        return [event["data"] for event in self.events if event["type"] == kind]

    async def event(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for the n-th event of a type; its data. Fails when the stream ends without it."""
        async with asyncio.timeout(SECONDS), self._changed:
            await self._changed.wait_for(lambda: len(self.of(kind)) >= count or self._task.done())
        assert len(self.of(kind)) >= count, f"no {kind} among {self.events}"
        return self.of(kind)[count - 1]

    async def text(self, wanted: str) -> None:
        """Wait until the deltas hold this text."""
        async with asyncio.timeout(SECONDS), self._changed:
            await self._changed.wait_for(lambda: wanted in self.streamed or self._task.done())
        assert wanted in self.streamed, self.events

    @property
    def streamed(self) -> str:
        """Exact concatenation of the message deltas so far."""
        return "".join(data["text"] for data in self.of("message_delta"))

    async def result(self) -> dict[str, Any]:
        """Wait for the result line."""
        async with asyncio.timeout(SECONDS):
            return await asyncio.shield(self._task)

    @property
    def over(self) -> bool:
        return self._task.done()

    async def drop(self) -> None:
        """Close the connection without waiting for the end."""
        self._task.cancel()
        await asyncio.wait({self._task})


class Talk:
    """A session.

    Args:
        server: whose process it runs in.
        client: of that server.
        session: its id.
        fields: what every dispatch carries.
    """

    def __init__(self, server: Server, client: Client, session: str, **fields: Any) -> None:
        self.server = server
        self.client = client
        self.session = session
        self.fields = fields

    def dispatch(self, prompt: Any, **fields: Any) -> Dispatched:
        """Dispatch and collect in the background."""
        return Dispatched(self.client, self.session, prompt, {**self.fields, **fields})

    async def prompt(self, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
        """Dispatch and wait for the result."""
        return await self.dispatch(prompt, **fields).result()

    async def refused(self, prompt: Any = "hi", **fields: Any) -> ApiError:
        """Dispatch what is refused before its first line; the refusal."""
        try:
            result = await self.prompt(prompt, **fields)
        except ApiError as error:
            return error
        raise AssertionError(f"not refused: {result}")

    async def stop(self, seconds: float = SECONDS) -> dict[str, Any]:
        """Stop and wait for the outcome."""
        return await self.client.cancel(self.session, wait_seconds=seconds)

    async def view(self) -> dict[str, Any]:
        return await self.client.session(self.session)

    async def agent_pid(self) -> int:
        """Pid of the session's agent, as the view tells it."""
        return int((await self.view())["pool"]["agent_pid"])

    def outside(self, inner: int) -> int:
        """The number on this machine of a live process that told its own."""
        return self.server.outside(self.session, inner)

    async def kill_agent(self) -> int:
        """SIGKILL the session's agent; its pid."""
        pid = await self.agent_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    async def questions(self) -> list[dict[str, Any]]:
        """Open questions, oldest first."""
        return list((await self.client.interactions(self.session, status="pending"))["items"])

    async def no_questions(self) -> None:
        """Wait until no question is open."""
        async with asyncio.timeout(SECONDS):
            while await self.questions():
                await asyncio.sleep(0.01)

    async def records(self) -> list[Line]:
        """Everything durable."""
        found: list[Line] = []
        after = None
        while True:
            page = await self.client.records(self.session, after=after)
            found += page["items"]
            after = page["next_cursor"]
            if after is None:
                return found

    async def idle(self) -> dict[str, Any]:
        """Wait until the session is idle; its view."""
        async with asyncio.timeout(SECONDS):
            while (view := await self.view())["state"] != "idle":
                await asyncio.sleep(0.01)
        return view

    async def check(self) -> None:
        """What holds behind every case: one ending each, nothing running, nobody but the warm set."""
        view = await self.idle()
        assert view["running_turn"] is None
        assert view["open_interactions"] == []
        records = await self.records()
        admitted = [record["data"]["turn_id"] for record in records if record["type"] == "turn_admitted"]
        done = Counter(record["data"]["turn_id"] for record in records if record["type"] == "done")
        assert done == Counter(admitted)
        _all_closed(records)
        *_, end = [line async for line in self.client.export(self.session)]
        assert (end["records"], end["complete"]) == (len(records), True), end
        await _warm_set(self.server, self.client)


def _all_closed(records: list[Line]) -> None:
    tools: dict[str, str] = {}
    questions: dict[str, str] = {}
    for record in records:
        data = record["data"]
        if record["type"] in ("tool_call", "tool_call_update"):
            tools[data["tool_call_id"]] = data.get("status") or tools.get(data["tool_call_id"], "")
        elif record["type"] == "interaction_requested":
            questions[data["interaction_id"]] = "pending"
        elif record["type"] == "interaction_closed":
            questions[data["interaction_id"]] = data["status"]
    assert set(tools.values()) <= CLOSED_TOOL, tools
    assert "pending" not in questions.values(), questions


async def _warm_set(server: Server, client: Client) -> None:
    """The processes are exactly those of the pool's seats and spares, once teardowns under way are over."""
    wanted: set[str] = set()

    async def pool() -> bool:
        seen = await client.pool()
        wanted.clear()
        wanted.update(item["seat_id"] for item in (*seen["items"], *seen["spares"]))
        return not seen["tearing_down"]

    async with asyncio.timeout(SECONDS):
        while not await pool() or server.seats() != wanted:
            await asyncio.sleep(0.02)


async def gone(pid: int, what: str, seconds: float = SECONDS) -> None:
    """Wait until a process is gone."""
    await until(lambda: not alive(pid), f"{what} ({pid}) is gone", seconds)
