"""The agent's calls to us: every one answered exactly once (cases A10, A16, F15)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from runner.acp.connection import Closed, Item, PermissionAsked, PermissionWithdrawn, Updates
from runner.acp.transport import ExitInfo
from tests.acp.bed import SESSION, Bed, permission, text_update, texts

pytestmark = pytest.mark.virtual_time

ALLOWED = {"outcome": {"outcome": "selected", "optionId": "yes"}}
CANCELLED = {"outcome": {"outcome": "cancelled"}}
IDS: list[Any] = [0, 7, -1, 2**53, "0", "7", "", "0198c0de-0000-7000-8000-000000000000", "\u00e9\U0001f600", 1.5, None]


def keys(items: list[Item]) -> list[int]:
    return [item.key for item in items if isinstance(item, PermissionAsked)]


@pytest.mark.parametrize("request_id", IDS, ids=repr)
async def test_a_permission_is_answered_once_and_its_id_echoed(bed: Bed, request_id: Any) -> None:
    bed.inbox()
    bed.says(permission(request_id))
    [item] = await bed.items()
    assert isinstance(item, PermissionAsked)
    assert item.params["toolCall"]["toolCallId"] == "t1"
    assert bed.connection.respond(item.key, ALLOWED) is True
    assert bed.connection.respond(item.key, CANCELLED) is False
    assert bed.connection.respond_error(item.key, -32603, "late") is False
    frame = await bed.reads()
    assert frame == {"jsonrpc": "2.0", "id": request_id, "result": ALLOWED}
    assert type(frame["id"]) is type(request_id)
    assert len(bed.agent.received) == 1


async def test_ids_that_look_alike_are_two_requests(bed: Bed) -> None:
    bed.inbox()
    bed.says(permission(1, "a"), permission("1", "b"))
    one, two = keys(await bed.items())
    bed.connection.respond(two, CANCELLED)
    bed.connection.respond(one, ALLOWED)
    assert (await bed.reads())["id"] == "1"
    assert (await bed.reads())["id"] == 1


async def test_several_permissions_are_answered_in_any_order(bed: Bed) -> None:
    bed.inbox()
    bed.says(*(permission(n, f"t{n}") for n in range(5)))
    asked = keys(await bed.items())
    for key in reversed(asked):
        assert bed.connection.respond_error(key, -32603, "denied by policy")
    assert [(await bed.reads())["id"] for _ in range(5)] == [4, 3, 2, 1, 0]


async def test_a_repeated_request_is_not_answered_twice(bed: Bed) -> None:
    bed.inbox()
    bed.says(permission(9), permission(9))
    [key] = keys(await bed.items())
    bed.connection.respond(key, ALLOWED)
    await bed.reads()
    await asyncio.sleep(0.1)
    assert len(bed.agent.received) == 1
    assert bed.connection.counts["repeated_requests"] == 1
    bed.says(permission(9))
    assert keys(await bed.items()) == [key + 1]


def withdrawal(request_id: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": request_id}}


@pytest.mark.parametrize("request_id", [0, "7"], ids=repr)
async def test_a_withdrawn_permission_is_answered_with_its_error_once(bed: Bed, request_id: Any) -> None:
    bed.inbox()
    bed.says(permission(request_id), text_update("x"), withdrawal(request_id), withdrawal(request_id))
    items = await bed.items(lambda got: any(isinstance(item, PermissionWithdrawn) for item in got))
    asked, _, withdrawn = items
    assert isinstance(asked, PermissionAsked)
    assert withdrawn == PermissionWithdrawn(asked.key)
    assert bed.connection.respond(asked.key, ALLOWED) is False
    frame = await bed.reads()
    assert (frame["id"], frame["error"]["code"]) == (request_id, -32800)
    assert len(bed.agent.received) == 1
    assert bed.connection.counts["obsolete_withdrawals"] == 1


@pytest.mark.parametrize("wanted", ["1", 1.0, True, None, [1]], ids=repr)
async def test_a_withdrawal_of_something_else_withdraws_nothing(bed: Bed, wanted: Any) -> None:
    bed.inbox()
    bed.says(permission(1), withdrawal(wanted))
    [item] = await bed.items()
    assert isinstance(item, PermissionAsked)
    assert bed.connection.respond(item.key, ALLOWED) is True


async def test_a_withdrawal_of_nothing_spares_a_request_whose_id_is_null(bed: Bed) -> None:
    bed.inbox()
    bed.says(permission(None), {"jsonrpc": "2.0", "method": "$/cancel_request", "params": {}}, text_update("on"))
    items = await bed.items(texts)
    assert bed.connection.respond(keys(items)[0], ALLOWED)
    assert bed.connection.counts["obsolete_withdrawals"] == 1


async def test_an_answer_before_the_withdrawal_stands(bed: Bed) -> None:
    bed.inbox()
    bed.says(permission(1))
    [key] = keys(await bed.items())
    bed.connection.respond(key, CANCELLED)
    bed.says(withdrawal(1), text_update("on"))
    assert texts(await bed.items()) == ["on"]
    assert (await bed.reads())["result"] == CANCELLED


def without(*path: str) -> dict[str, Any]:
    frame = permission(1)
    inner = frame["params"]
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return frame


def with_options(options: Any) -> dict[str, Any]:
    frame = permission(1)
    frame["params"]["options"] = options
    return frame


@pytest.mark.parametrize(
    "frame",
    [
        without("options"),
        without("toolCall"),
        without("toolCall", "toolCallId"),
        with_options({"optionId": "yes"}),
        with_options(["yes"]),
        with_options([{"optionId": 5}]),
    ],
)
async def test_a_malformed_permission_is_refused_and_noticed(bed: Bed, frame: dict[str, Any]) -> None:
    """Case F15."""
    bed.inbox()
    bed.says(frame)
    [item] = await bed.items()
    assert isinstance(item, Updates)
    assert item.updates[0]["sessionUpdate"] == "malformed_permission_request"
    assert (await bed.reads())["error"]["code"] == -32602
    assert bed.connection.counts["malformed"] == 1


async def test_empty_options_are_a_question_all_the_same(bed: Bed) -> None:
    """Case F15."""
    bed.inbox()
    bed.says(with_options([]))
    assert len(keys(await bed.items())) == 1


async def test_a_permission_of_an_unknown_session_is_refused(bed: Bed) -> None:
    bed.says(permission(1, session="nobody"))
    assert (await bed.reads())["error"]["code"] == -32602


async def test_a_permission_too_large_for_us_is_refused(beds: Callable[..., Bed]) -> None:
    """Case E1: the agent is not left waiting."""
    bed = beds(max_line_bytes=1000)
    frame = permission(1)
    frame["params"]["toolCall"]["title"] = "x" * 2000
    bed.says(frame)
    assert (await bed.reads())["error"]["code"] == -32602


async def test_open_permissions_are_bounded(bed: Bed) -> None:
    bed.inbox()
    bed.says(*(permission(n, f"t{n}") for n in range(1001)))
    asked = keys(await bed.items())
    assert len(asked) == 1000
    frame = await bed.reads()
    assert (frame["id"], frame["error"]["code"]) == (1000, -32603)


@pytest.mark.parametrize(
    "method",
    ["fs/read_text_file", "fs/write_text_file", "terminal/create", "terminal/kill", "_vendor/x", "nes/start", ""],
)
@pytest.mark.parametrize("request_id", [0, "u-1"], ids=repr)
async def test_what_we_do_not_offer_is_method_not_found(bed: Bed, method: str, request_id: Any) -> None:
    """Case E10."""
    bed.says({"jsonrpc": "2.0", "id": request_id, "method": method, "params": {"sessionId": SESSION}})
    frame = await bed.reads()
    assert (frame["id"], frame["error"]["code"]) == (request_id, -32601)
    assert bed.connection.counts["unknown_requests"] == 1


async def test_late_frames_of_a_cancelled_turn_keep_their_order(bed: Bed) -> None:
    """Case A10: whose they are is decided by where they stand around the answer."""
    bed.inbox()
    first = bed.connection.prompt(SESSION, [{"type": "text", "text": "a"}])
    bed.connection.cancel(SESSION)
    bed.says(text_update("before"), {"jsonrpc": "2.0", "id": first, "result": {"stopReason": "cancelled"}})
    bed.says(text_update("late 1"), permission(5), text_update("late 2"))
    await asyncio.sleep(0.1)
    items = bed.inbox().drain()
    assert [type(item).__name__ for item in items] == [
        "Updates",
        "PromptAnswered",
        "Updates",
        "PermissionAsked",
        "Updates",
    ]
    assert texts(items) == ["before", "late 1", "late 2"]
    assert bed.connection.respond(keys(items)[0], CANCELLED)


async def test_answers_to_an_agent_whose_stdin_is_closed_hurt_nobody(bed: Bed) -> None:
    """What the agent wrote behind its last request still arrives."""
    bed.inbox()
    bed.says(permission(1))
    await bed.items()
    bed.transport.close_stdin()
    bed.says(
        withdrawal(1),
        {"jsonrpc": "2.0", "id": 2, "method": "fs/read_text_file", "params": {}},
        without("options"),
        permission(3),
        text_update("on"),
    )
    items = await bed.items(texts)
    assert texts(items) == ["on"]
    assert bed.connection.counts["unsent"] == 3
    [key] = keys(items)
    with pytest.raises(ConnectionError):
        bed.connection.respond(key, CANCELLED)
    assert bed.connection.respond(key, CANCELLED) is False


async def test_after_the_exit_nothing_is_open(bed: Bed) -> None:
    bed.inbox()
    bed.says(permission(1))
    [key] = keys(await bed.items())
    bed.agent.exit(ExitInfo(code=1))
    await bed.items(lambda got: any(isinstance(item, Closed) for item in got))
    assert bed.connection.respond(key, ALLOWED) is False


async def test_an_agent_that_stops_reading_cannot_block_a_cancel(bed: Bed) -> None:
    """The turn sees by ``flush`` that the cancel is not through, within its own deadline."""
    bed.inbox()
    bed.agent.reading_stopped = True
    bed.connection.prompt(SESSION, [{"type": "text", "text": "x" * 1_000_000}])
    assert bed.connection.cancel(SESSION) is False
    assert await bed.connection.flush(0.5) is False
    flushing = asyncio.get_running_loop().create_task(bed.connection.flush(5))
    await asyncio.sleep(1)
    assert not flushing.done()
    bed.agent.read_again()
    assert await flushing is True
    assert [frame["method"] for frame in bed.agent.received] == ["session/prompt", "session/cancel"]
    assert bed.connection.cancel(SESSION) is True


async def test_flush_ends_with_the_agent(bed: Bed) -> None:
    bed.agent.reading_stopped = True
    bed.connection.cancel(SESSION)
    flushing = asyncio.get_running_loop().create_task(bed.connection.flush(60))
    await asyncio.sleep(1)
    bed.agent.exit(ExitInfo(code=1))
    assert await asyncio.wait_for(flushing, 0.1) is False


async def test_an_agent_that_asks_on_and_never_reads_is_given_up(beds: Callable[..., Bed]) -> None:
    """Our answers must not fill the memory."""
    bed = beds(unread_bytes=10_000)
    bed.inbox()
    bed.agent.reading_stopped = True
    for n in range(1000):
        bed.says({"jsonrpc": "2.0", "id": n, "method": "_x", "params": {}})
    items = await bed.items(lambda got: any(isinstance(item, Closed) for item in got))
    assert isinstance(items[-1], Closed)
    assert items[-1].error.code == "harness_unresponsive"
    assert bed.transport.unsent < 11_000
    bed.agent.read_again()
