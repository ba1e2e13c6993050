"""The sessions as the server sees them, in memory and by hand: every delivery and ending is the test's doing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from runner.errors import RunnerError, turn_in_use
from runner.rules.files import MAX_FILE_BYTES, Content, Precondition, Written, decode_cursor
from runner.sandbox.memory_files import MemoryFiles
from runner.server.auth import ALL_BUT_RUNNER, AccessToken
from runner.session.port import Caller, ReaderCut, ReaderEnded, Reply
from runner.wire.codec import event_line, to_json
from runner.wire.models import AnswerRequest, CancelRequest, DispatchRequest, ForkRequest, ShellRequest

TOKENS = [
    AccessToken("all", "default", ALL_BUT_RUNNER),
    AccessToken("other", "elsewhere", ALL_BUT_RUNNER),
    AccessToken("reader", "default", frozenset({"read"})),
    AccessToken("sender", "default", frozenset({"dispatch"})),
    AccessToken("operator", "default", frozenset({"operate"})),
]
AT = "2026-11-29T16:09:53.123Z"


def auth(token: str = "all") -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def line(n: int, event_type: str, data: dict[str, Any], prompt_id: str | None = "p1") -> bytes:
    return event_line(f"1.{n}", "t1", prompt_id, AT, event_type, to_json(data))


def result(outcome: str = "completed", **fields: Any) -> dict[str, Any]:
    return {
        "ok": outcome in ("completed", "paused"),
        "session_id": "s1",
        "turn_id": "t1",
        "prompt_ids": ["p1"],
        "outcome": outcome,
        "stop_reason": "end_turn" if outcome == "completed" else None,
        "text": "hello",
        "usage": {},
        "start": "cold",
        "reason": "miss",
        "timings": {"admitted_ms": 1.0, "ready_ms": 2.0, "first_update_ms": 3.0, "total_ms": 4.0},
        **fields,
    }


class FakeReader:
    """Delivers what the test feeds."""

    def __init__(self) -> None:
        self._feed: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.given_up = False
        self.asked = asyncio.Event()

    ended = False

    def feed(self, *items: bytes | Exception) -> FakeReader:
        for item in items:
            self._feed.put_nowait(item)
        return self

    def end(self) -> FakeReader:
        return self.feed(ReaderEnded())

    def cut(self, reason: str) -> FakeReader:
        return self.feed(ReaderCut(reason))

    async def next(self, seconds: float) -> bytes | None:
        self.asked.set()
        try:
            item = await asyncio.wait_for(self._feed.get(), seconds)
        except TimeoutError:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self, *, cut: bool = False) -> None:
        self.given_up = self.given_up or cut
        self.closed.set()


class FakeHandle:
    """A prompt whose reader and result are the test's."""

    def __init__(self, *, refused: RunnerError | None = None) -> None:
        self.prompt_id = "p1"
        self.turn_id: str | None = None if refused else "t1"
        self.refused = refused
        self.state = "failed" if refused else "active"
        self.readers: list[FakeReader] = []
        self.plan: Callable[[FakeReader], Any] = lambda _reader: None
        self._result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if refused:
            self.resolve(result("failed", turn_id=None, error=refused.as_event(), text=""))

    def resolve(self, value: dict[str, Any]) -> None:
        self._result.set_result(value)

    def reader(self) -> FakeReader:
        reader = FakeReader()
        self.readers.append(reader)
        self.plan(reader)
        return reader

    def result(self) -> Awaitable[dict[str, Any]]:
        return asyncio.shield(self._result)


def finished_handle(*lines: bytes, **fields: Any) -> FakeHandle:
    """A handle of a turn that is over: its lines, then its result."""
    handle = FakeHandle()
    shown = lines or (
        line(1, "turn_admitted", {"turn_id": "t1", "epoch": 1, "replica_id": "r", "prompt_ids": ["p1"]}),
        line(2, "message_delta", {"message_id": "m", "text": "hello"}),
        line(3, "done", {"turn_id": "t1", "outcome": fields.get("outcome", "completed")}),
    )
    handle.plan = lambda reader: reader.feed(b"".join(shown)).end()
    handle.resolve(result(**fields))
    return handle


EXPORTED = (
    b'{"kind":"session","session":{"session_id":"s1"}}\n{"kind":"record","cursor":"1.1"}\n',
    b'{"kind":"end","records":1,"complete":true}\n',
)


class FakeFiles:
    """The files of session ``s1``, and what was asked of them."""

    def __init__(self, called: Callable[..., Awaitable[None]]) -> None:
        self._called = called
        self.disk: dict[tuple[str, ...], bytes] = {("a.txt",): b"hello"}
        self._files = MemoryFiles(self.disk)

    async def read(self, caller: Caller, session_id: str, path: str) -> Content:
        await self._called("read", caller, session_id, path)
        return await self._files.read(path, MAX_FILE_BYTES)

    async def write(
        self, caller: Caller, session_id: str, path: str, data: bytes, condition: Precondition
    ) -> Written | None:
        await self._called("write", caller, session_id, (path, data, condition))
        return await self._files.write(path, data, condition)

    async def list(self, caller: Caller, session_id: str, path: str, limit: int, cursor: str | None) -> dict[str, Any]:
        await self._called("list", caller, session_id, (path, limit, cursor))
        found = await self._files.list(path, decode_cursor(cursor), limit)
        items = [
            {"name": e.name, "path": e.name, "type": e.kind, "size": e.size, "modified_at": AT} for e in found.entries
        ]
        return {"path": path, "items": items, "next_cursor": None}


class FakeSessions:
    """Knows session ``s1`` of project ``default``; records every call as ``(name, project, session, argument)``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.files = FakeFiles(self._called)
        self.capacity = True
        self.is_ready = True
        self.handles: list[FakeHandle] = []
        self.next_handle: Callable[[], FakeHandle] = finished_handle
        self.export_reader: Callable[[], FakeReader] = lambda: FakeReader().feed(*EXPORTED).end()
        self.follow_reader: Callable[[], FakeReader] = lambda: FakeReader().end()
        self.error: RunnerError | Exception | None = None
        self.gate: asyncio.Event | None = None
        self.passed = asyncio.Event()
        self.replies: dict[str, Reply] = {}
        self.questions: list[dict[str, Any]] = []
        self.arrived_at: float | None = None
        self.abortable: set[str] = set()
        self.waiting: list[dict[str, Any]] = []
        self.active: str | None = None

    async def _called(self, name: str, caller: Caller, session_id: str | None, argument: Any = None) -> None:
        self.calls.append((name, caller.project, session_id, argument))
        if self.gate is not None:
            await self.gate.wait()
        self.passed.set()
        if self.error is not None:
            raise self.error
        if (
            session_id is not None
            and name not in ("dispatch", "shell")
            and (caller.project, session_id) != ("default", "s1")
        ):
            raise RunnerError("not_found", f"There is no session {session_id}.")

    def has_capacity(self) -> bool:
        return self.capacity

    async def dispatch(
        self, caller: Caller, session_id: str, request: DispatchRequest, *, keep_on_disconnect: bool = False
    ) -> FakeHandle:
        await self._called("dispatch", caller, session_id, (request, keep_on_disconnect))
        handle = self.next_handle()
        self.handles.append(handle)
        return handle

    def refuse(self) -> None:
        self.next_handle = lambda: FakeHandle(refused=turn_in_use())

    async def cancel(
        self, caller: Caller, session_id: str, request: CancelRequest, *, arrived_at: float | None = None
    ) -> Reply:
        self.arrived_at = arrived_at
        await self._called("cancel", caller, session_id, request)
        idle: dict[str, Any] = {"command_id": None, "state": "idle", "turn_id": None, "cancelled_prompts": []}
        return self.replies.get("cancel", Reply(200, {**idle, "outcome": "not_running"}))

    async def abort_prompt(self, caller: Caller, session_id: str, prompt_id: str) -> bool:
        await self._called("abort_prompt", caller, session_id, prompt_id)
        aborted = prompt_id in self.abortable
        self.abortable.discard(prompt_id)
        return aborted

    async def prompts(self, caller: Caller, session_id: str) -> dict[str, Any]:
        await self._called("prompts", caller, session_id)
        return {"items": self.waiting, "next_cursor": None, "active": self.active}

    async def resume(self, caller: Caller, session_id: str) -> str | None:
        await self._called("resume", caller, session_id)
        return "t2"

    async def shell(self, caller: Caller, session_id: str, request: ShellRequest) -> dict[str, Any]:
        await self._called("shell", caller, session_id, request)
        return {"turn_id": "t2", "exit_code": 0, "output": "out\n", "truncated": False}

    async def kill(self, caller: Caller, session_id: str) -> Reply:
        await self._called("kill", caller, session_id)
        return Reply(200, {"command_id": "c1", "state": "idle", "turn_id": None, "outcome": "not_running"})

    async def command(self, caller: Caller, command_id: str) -> dict[str, Any]:
        await self._called("command", caller, None, command_id)
        if (caller.project, command_id) != ("default", "c1"):
            raise RunnerError("not_found", f"There is no command {command_id}.")
        return command()

    async def delete(self, caller: Caller, session_id: str) -> Reply:
        await self._called("delete", caller, session_id)
        return Reply(200, {"command_id": "c2", "state": "ended", "turn_id": None, "outcome": "not_running"})

    async def view(self, caller: Caller, session_id: str) -> dict[str, Any]:
        await self._called("view", caller, session_id)
        return view(session_id)

    async def sessions(self, caller: Caller, limit: int, cursor: str | None) -> dict[str, Any]:
        await self._called("sessions", caller, None, (limit, cursor))
        return {"items": [view("s1")], "next_cursor": None}

    async def records(self, caller: Caller, session_id: str, after: str | None, limit: int) -> dict[str, Any]:
        await self._called("records", caller, session_id, (after, limit))
        item = {"record_id": "rec_1", "session_id": session_id, "turn_id": "t1", "cursor": "1.1", "type": "message"}
        return {"items": [{**item, "data": {"text": "hello"}, "at": AT}], "next_cursor": None}

    async def export(self, caller: Caller, session_id: str) -> FakeReader:
        await self._called("export", caller, session_id)
        self.reader = self.export_reader()
        return self.reader

    async def fork(self, caller: Caller, session_id: str, request: ForkRequest) -> Reply:
        await self._called("fork", caller, session_id, request)
        made: dict[str, Any] = {"session_id": request.session_id or "s2", "forked_from": session_id, "records": 2}
        made |= {"after": request.after, "head": "1.4", "complete": True, "workspace": "empty", "reason": "none"}
        return self.replies.get("fork", Reply(201, made))

    async def follow(self, caller: Caller, session_id: str, after: str | None, follow: bool) -> FakeReader:
        await self._called("follow", caller, session_id, (after, follow))
        self.reader = self.follow_reader()
        return self.reader

    async def feed(self, caller: Caller, after: str | None, follow: bool) -> FakeReader:
        await self._called("feed", caller, None, (after, follow))
        self.reader = self.follow_reader()
        return self.reader

    async def interactions(self, caller: Caller, session_id: str | None, status: str | None) -> dict[str, Any]:
        await self._called("interactions", caller, session_id, status)
        return {"items": self.questions, "next_cursor": None}

    async def answer(self, caller: Caller, session_id: str, interaction_id: str, request: AnswerRequest) -> Reply:
        await self._called("answer", caller, session_id, (interaction_id, request))
        if interaction_id != "i1":
            raise RunnerError("not_found", f"There is no interaction {interaction_id}.")
        return self.replies.get("answer", Reply(200, question(status="consumed")))

    async def story(self, caller: Caller, session_id: str) -> dict[str, Any]:
        await self._called("story", caller, session_id)
        begin = {"at": AT, "machine": "turn", "id": "t1", "event": {"name": "Begin"}, "before": {"phase": "admitted"}}
        return {"items": [{**begin, "after": {"phase": "preparing"}, "effects": [{"name": "Prepare"}]}]}

    async def quarantine(self, caller: Caller, limit: int, cursor: str | None) -> dict[str, Any]:
        await self._called("quarantine", caller, None, (limit, cursor))
        item = {"record_id": "rec_1", "session_id": "s1", "turn_id": "t1", "cursor": "1.1", "type": "message"}
        item |= {"reason": "turn_ended", "set_aside_at": AT, "at": AT}
        return {"items": [{**item, "data": {}}], "next_cursor": "7"}

    def pool(self, caller: Caller) -> dict[str, Any]:
        self.calls.append(("pool", caller.project, None, None))
        return {"seats": [], "spares": [], "max_seats": 64}

    def health(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {
            "status": "ok",
            "version": "9.9",
            "protocol": 1,
            "replica_id": "rep_1",
            "harnesses": [{"name": "demo", "available": True, "key_vars": ["DEMO_KEY"]}],
            "providers": [{"name": "local", "available": True}],
            "isolation": "none",
            "draining": False,
        }

    async def ready(self) -> dict[str, Any]:
        return {"ready": self.is_ready, "store": "ok", "leases": "ok", "capacity": 64, "draining": False}


def view(session_id: str) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "state": "idle",
        "running_turn": None,
        "stopping": False,
        "queue": [],
        "pool": {"state": "idle", "start": "cold", "reason": "miss", "warm_until": AT},
        "harness": "demo",
        "sandbox": {"provider": "local", "recipe": "default"},
        "isolation": "none",
        "last_turn": {"turn_id": "t1", "outcome": "completed", "stop_reason": "end_turn", "ended_at": AT},
        "open_interactions": [],
        "usage": {},
        "created_at": AT,
        "updated_at": AT,
    }


def command(**fields: Any) -> dict[str, Any]:
    return {
        "command_id": "c1",
        "session_id": "s1",
        "kind": "cancel",
        "state": "applied",
        "outcome": "stopped",
        "turn_id": "t1",
        "arrived_at": AT,
        "finished_at": AT,
        **fields,
    }


def question(**fields: Any) -> dict[str, Any]:
    return {
        "interaction_id": "i1",
        "session_id": "s1",
        "turn_id": "t1",
        "status": "pending",
        "kind": "permission",
        "tool_call": {"tool_call_id": "c", "title": "rm -rf build", "kind": "execute"},
        "options": [
            {"option_id": "yes", "name": "Allow", "kind": "allow_once"},
            {"option_id": "no", "name": "Reject", "kind": "reject_once"},
        ],
        "created_at": AT,
        "expires_at": AT,
        **fields,
    }
