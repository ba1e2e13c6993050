"""One ordered inbox per agent session: order, ends, strays, backpressure (cases A4, A7, A16, E8, E10)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.acp.connection import (
    AgentConnection,
    Closed,
    Inbox,
    Item,
    PermissionAsked,
    PermissionWithdrawn,
    PromptAnswered,
    Updates,
)
from runner.acp.memory import MemoryTransport
from runner.acp.transport import ExitInfo
from tests.acp.bed import SESSION, Bed, line, permission, text_update, texts
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

BLOCKS = [{"type": "text", "text": "hello"}]


def ended(request_id: Any, stop_reason: str = "end_turn") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "result": {"stopReason": stop_reason}}


def answered(items: list[Item]) -> list[PromptAnswered]:
    return [item for item in items if isinstance(item, PromptAnswered)]


async def test_a_prompt_is_sent_at_once_and_answered_through_the_inbox(bed: Bed) -> None:
    bed.inbox()
    request_id = bed.connection.prompt(SESSION, BLOCKS)
    frame = await bed.reads("session/prompt")
    assert (frame["id"], frame["params"]) == (request_id, {"sessionId": SESSION, "prompt": BLOCKS})
    bed.says(ended(request_id))
    assert await bed.items() == [PromptAnswered(request_id, {"stopReason": "end_turn"}, None)]


@pytest.mark.parametrize("chunk", [None, 1, 7, 100])
async def test_the_answer_right_behind_the_last_chunk_loses_nothing(bed: Bed, chunk: int | None) -> None:
    """One burst, cut anywhere: everything in order, runs of updates as one item, then the answer, then the end."""
    bed.inbox()
    request_id = bed.connection.prompt(SESSION, BLOCKS)
    await bed.reads()
    bed.agent.chunk_bytes = chunk
    bed.says(*(text_update(str(n)) for n in range(50)), permission("p"), text_update("50"), ended(request_id))
    bed.agent.exit(ExitInfo(code=0))
    await asyncio.sleep(0.1)
    items = bed.inbox().drain()
    assert [type(item) for item in items] == [Updates, PermissionAsked, Updates, PromptAnswered, Closed]
    assert texts(items) == [str(n) for n in range(51)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["update", "ask"])), min_size=1, max_size=25),
    st.integers(1, 300),
)
def test_every_session_has_its_own_order(script: list[tuple[str, str]], chunk: int) -> None:
    """Two agent sessions on one connection do not mix, whatever the interleaving and the chunks."""

    class Deaf(MemoryTransport):
        def connect(self, receiver: Any) -> None:
            pass

    connection = AgentConnection(Deaf(), clock=StillClock())
    boxes = {name: connection.inbox(name) for name in "ab"}
    data = b""
    for number, (session, what) in enumerate(script):
        frame = text_update(str(number), session) if what == "update" else permission(number, str(number), session)
        data += line(frame)
    got: dict[str, list[tuple[str, str]]] = {"a": [], "b": []}
    for start in range(0, len(data), chunk):
        connection.data_received(data[start : start + chunk])
        for name, box in boxes.items():
            for item in box.drain():
                if isinstance(item, Updates):
                    got[name].extend(("update", update["content"]["text"]) for update in item.updates)
                elif isinstance(item, PermissionAsked):
                    got[name].append(("ask", item.params["toolCall"]["toolCallId"]))
    for name in "ab":
        assert got[name] == [(what, str(n)) for n, (session, what) in enumerate(script) if session == name]


class StillClock:
    def monotonic(self) -> float:
        return 0.0

    def now_ms(self) -> int:
        return 0


async def test_a_second_terminal_is_dropped_and_does_not_end_the_next_turn(bed: Bed) -> None:
    """Case A4: terminals are matched by request id."""
    bed.inbox()
    first = bed.connection.prompt(SESSION, BLOCKS)
    bed.connection.cancel(SESSION)
    bed.says(ended(first, "cancelled"))
    await bed.items(answered)
    second = bed.connection.prompt(SESSION, BLOCKS)
    bed.says(ended(first), text_update("on"), ended(str(first)), ended(second))
    items = await bed.items(answered)
    assert [item.request_id for item in answered(items)] == [second]
    assert texts(items) == ["on"]
    assert bed.connection.counts["duplicate_terminals"] == 2


@pytest.mark.parametrize("body", [{"result": None}, {}, {"result": "done"}, {"result": [1]}], ids=repr)
async def test_an_empty_answer_is_an_answer(bed: Bed, body: dict[str, Any]) -> None:
    """Case A7: null, absent or senseless results end the turn too."""
    bed.inbox()
    request_id = bed.connection.prompt(SESSION, BLOCKS)
    bed.says({"jsonrpc": "2.0", "id": request_id, **body})
    assert await bed.items() == [PromptAnswered(request_id, None, None)]


async def test_an_error_answer_carries_its_code(bed: Bed) -> None:
    """Case A16."""
    bed.inbox()
    request_id = bed.connection.prompt(SESSION, BLOCKS)
    bed.says({"jsonrpc": "2.0", "id": request_id, "error": {"code": -32800, "message": "Request cancelled"}})
    [item] = await bed.items()
    assert isinstance(item, PromptAnswered) and item.error is not None
    assert (item.request_id, item.result, item.error.code) == (request_id, None, -32800)


async def test_an_answer_too_large_for_us_ends_the_turn(beds: Callable[..., Bed]) -> None:
    """Case E1: the turn ends clearly, and the connection goes on."""
    bed = beds(max_line_bytes=1000)
    bed.inbox()
    request_id = bed.connection.prompt(SESSION, BLOCKS)
    bed.says({**ended(request_id), "result": {"stopReason": "end_turn", "text": "x" * 2000}})
    [item] = await bed.items()
    assert isinstance(item, PromptAnswered) and item.error is not None
    assert "too large" in item.error.message
    bed.says(text_update("on"))
    assert texts(await bed.items()) == ["on"]


async def test_an_update_too_large_for_us_is_seen(beds: Callable[..., Bed]) -> None:
    """Case E1."""
    bed = beds(max_line_bytes=1000)
    bed.inbox()
    bed.says(text_update("a"), text_update("x" * 2000), text_update("b"))
    [item] = await bed.items()
    assert isinstance(item, Updates)
    assert [update["sessionUpdate"] for update in item.updates] == [
        "agent_message_chunk",
        "oversized_line",
        "agent_message_chunk",
    ]


async def test_updates_of_nobody_are_counted(bed: Bed) -> None:
    """Case E8."""
    bed.inbox()
    bed.says(text_update("x", "other"), text_update("mine"), text_update("y", "other"))
    assert texts(await bed.items()) == ["mine"]
    assert bed.connection.counts["stray_updates"] == 2


async def test_the_inbox_is_there_before_what_follows_its_session(bed: Bed) -> None:
    """Case E8: an update in the same burst as the answer to session/new waits for its session, not for a turn."""
    call = asyncio.get_running_loop().create_task(bed.connection.new_session("/w", []))
    frame = await bed.reads("session/new")
    bed.says({"jsonrpc": "2.0", "id": frame["id"], "result": {"sessionId": SESSION}}, text_update("banner"))
    await call
    assert texts(bed.inbox().drain()) == ["banner"]


@pytest.mark.parametrize(
    "frame",
    [
        {"jsonrpc": "2.0", "method": "session/update"},
        {"jsonrpc": "2.0", "method": "session/update", "params": []},
        {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": SESSION}},
        {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": SESSION, "update": "x"}},
        {"jsonrpc": "2.0", "method": 5, "id": 1, "result": {}},
        {"jsonrpc": "2.0", "id": True, "result": {}},
        {"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "parse error"}},
        {"jsonrpc": "2.0", "id": None, "method": "fs/read_text_file"},
        {"jsonrpc": "2.0", "id": [1], "method": "session/request_permission", "params": {}},
        {},
    ],
    ids=repr,
)
async def test_malformed_frames_are_counted_and_hurt_nobody(bed: Bed, frame: dict[str, Any]) -> None:
    bed.inbox()
    request_id = bed.connection.prompt(SESSION, BLOCKS)
    assert request_id == 1
    bed.says(frame, text_update("on"))
    assert texts(await bed.items()) == ["on"]
    assert bed.connection.counts["malformed"] == 1


@pytest.mark.parametrize("session", [5, None, [], {}], ids=repr)
async def test_an_update_with_a_senseless_session_is_a_stray(bed: Bed, session: Any) -> None:
    bed.inbox()
    bed.says(text_update("x", session), text_update("on"))
    assert texts(await bed.items()) == ["on"]
    assert bed.connection.counts["stray_updates"] == 1


@pytest.mark.parametrize(
    "frame",
    [
        {"jsonrpc": "2.0", "method": "_vendor/background_task", "params": {"x": 1}},
        {"jsonrpc": "2.0", "method": "elicitation/complete", "params": {"elicitationId": "e"}},
        {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "s9", "update": {"sessionUpdate": "?"}}},
        {"jsonrpc": "2.0", "id": 1, "method": "fs/read_text_file", "params": {}},
    ],
    ids=lambda frame: str(frame["method"]),
)
async def test_any_message_is_life(bed: Bed, clock: LoopClock, frame: dict[str, Any]) -> None:
    """Case E10: ten minutes of messages that we do not know are no silence."""
    for _ in range(10):
        await asyncio.sleep(60)
        bed.says(frame)
        await asyncio.sleep(0)
        assert bed.connection.last_activity == clock.monotonic()


async def test_noise_is_no_life(bed: Bed, clock: LoopClock) -> None:
    """Case E10, the other half: a spinner on stdout must not keep a dead turn alive."""
    before = bed.connection.last_activity
    await asyncio.sleep(60)
    bed.agent.send_bytes(b"still here\n\n[]\n42\n" + line(text_update("half"))[:-20])
    await asyncio.sleep(0)
    assert bed.connection.last_activity == before


async def test_closed_is_last_and_comes_once(bed: Bed) -> None:
    inbox = bed.inbox()
    bed.connection.prompt(SESSION, BLOCKS)
    bed.says(text_update("last"))
    bed.agent.exit(ExitInfo(code=1))
    items = await bed.items(lambda got: any(isinstance(item, Closed) for item in got))
    assert [type(item) for item in items] == [Updates, Closed]
    bed.connection.exited(ExitInfo(code=2))
    bed.connection.data_received(line(text_update("late")))
    bed.connection.eof_received()
    assert inbox.drain() == []
    await asyncio.wait_for(inbox.wait(), 1)
    assert bed.connection.exit_error().extra["exit_code"] == 1


async def test_half_a_frame_and_then_the_exit(bed: Bed) -> None:
    """Case E5."""
    bed.inbox()
    bed.agent.send_bytes(line(text_update("whole")) + line(text_update("half"))[:-9])
    bed.agent.exit(ExitInfo(code=1))
    items = await bed.items(lambda got: any(isinstance(item, Closed) for item in got))
    assert texts(items) == ["whole"]
    assert bed.connection.diagnostics()["noise"] == 1


async def test_a_last_frame_without_its_newline_counts(bed: Bed) -> None:
    """Case E5."""
    bed.inbox()
    request_id = bed.connection.prompt(SESSION, BLOCKS)
    bed.agent.send_bytes(line(ended(request_id))[:-1])
    bed.agent.exit(ExitInfo(code=0))
    items = await bed.items(lambda got: any(isinstance(item, Closed) for item in got))
    assert [item.request_id for item in answered(items)] == [request_id]


async def test_push_is_called_once_a_burst(bed: Bed) -> None:
    inbox = bed.inbox()
    got: list[list[Item]] = []
    inbox.on_items = lambda: got.append(inbox.drain())
    bed.says(*(text_update(str(n)) for n in range(100)), permission(1))
    await asyncio.sleep(0.1)
    assert [len(items) for items in got] == [2]
    assert len(inbox) == 0


async def test_wait_can_be_cancelled_and_used_again() -> None:
    inbox = Inbox(lambda: None)
    waiting = asyncio.get_running_loop().create_task(inbox.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    inbox.put(PermissionWithdrawn(1))
    inbox.notify()
    await inbox.wait()
    assert inbox.drain() == [PermissionWithdrawn(1)]


async def test_a_full_inbox_stops_the_reading_and_half_of_it_starts_it_again(beds: Callable[..., Bed]) -> None:
    frame = text_update("x" * 100)
    size = len(line(frame)) - 1
    bed = beds(inbox_bytes=10 * size)
    inbox, other = bed.inbox(), bed.inbox("s2")
    bed.agent.chunk_bytes = size + 1
    bed.says(*[frame] * 100)
    await asyncio.sleep(0.1)
    assert inbox.queued_bytes == 11 * size
    assert other.drain() == []
    taken = 0
    rounds = 0
    while taken < 100:
        taken += sum(len(item.updates) for item in inbox.drain() if isinstance(item, Updates))
        rounds += 1
        await asyncio.sleep(0.1)
        assert inbox.queued_bytes <= 11 * size
    assert (taken, rounds) == (100, 10)


async def test_a_little_unread_in_another_inbox_does_not_stop_the_reading(beds: Callable[..., Bed]) -> None:
    """Reading goes on once every inbox is below half, not only when all are empty."""
    frame, other = text_update("x" * 100), text_update("y" * 100, "s2")
    size = len(line(frame)) - 1
    bed = beds(inbox_bytes=10 * size)
    inbox, full = bed.inbox(), bed.inbox("s2")
    bed.agent.chunk_bytes = size + 1
    bed.says(*[other] * 6, *[frame] * 20)
    await asyncio.sleep(0.1)
    assert (inbox.queued_bytes, full.queued_bytes) == (11 * size, 6 * size)
    assert len(texts(inbox.drain())) == 11
    await asyncio.sleep(0.1)
    assert inbox.drain() == []
    full.drain()
    bed.agent.send(other, other)
    await asyncio.sleep(0.1)
    assert len(texts(inbox.drain())) == 9
    assert full.queued_bytes == 2 * size
    bed.says(*[frame] * 30)
    await asyncio.sleep(0.1)
    assert len(texts(inbox.drain())) == 11
    await asyncio.sleep(0.1)
    assert len(texts(inbox.drain())) == 11


async def test_a_session_that_is_closed_does_not_stop_the_reading_for_ever(beds: Callable[..., Bed]) -> None:
    bed = beds(inbox_bytes=1000)
    bed.inbox()
    close = asyncio.get_running_loop().create_task(bed.connection.close_session(SESSION))
    frame = await bed.reads("session/close")
    bed.says({"jsonrpc": "2.0", "id": frame["id"], "result": None}, text_update("x" * 3000))
    await close
    bed.inbox("s2")
    bed.says(text_update("on", "s2"))
    assert texts(await bed.items(session="s2")) == ["on"]


async def test_an_exit_is_told_while_the_reading_is_stopped(beds: Callable[..., Bed]) -> None:
    """Case E5: nobody reads the inbox, and still its calls fail at once and the end stands behind the data."""
    bed = beds(inbox_bytes=100)
    bed.inbox()
    call = asyncio.get_running_loop().create_task(bed.connection.set_mode(SESSION, "plan", seconds=100))
    await asyncio.sleep(0)
    bed.agent.chunk_bytes = 200
    bed.says(*(text_update("x" * 100) for _ in range(20)))
    bed.agent.exit(ExitInfo(code=1))
    with pytest.raises(Exception, match="exit code 1"):
        await asyncio.wait_for(call, 1)
    items = bed.inbox().drain()
    assert len(texts(items)) == 20
    assert isinstance(items[-1], Closed)
