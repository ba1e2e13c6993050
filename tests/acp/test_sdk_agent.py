"""The published SDK's agent side over real stdio: it validates each of our frames, and we read each of its."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from runner.acp.connection import Closed, ElicitationAsked, Item, PermissionAsked, PromptAnswered, Updates
from runner.acp.updates import grouped
from runner.errors import RunnerError
from tests.acp.bed import texts
from tests.acp.child import Child
from tests.acp.sdk_agent import SESSION

START_SECONDS = 40


@pytest.fixture
async def sdk() -> AsyncIterator[Child]:
    """The SDK's agent, its session open."""
    async with Child(program=Path(__file__).with_name("sdk_agent.py")) as child:
        info = await child.connection.initialize(seconds=START_SECONDS)
        assert (info.protocol_version, info.name, info.version) == (1, "sdk", "acp-runner")
        session = await child.connection.new_session("/", [], seconds=START_SECONDS)
        assert session.agent_session_id == SESSION
        assert session.modes is not None and session.modes["currentModeId"] == "ask"
        yield child


def prompted(child: Child, text: str) -> int:
    return child.connection.prompt(SESSION, [{"type": "text", "text": text}])


async def items_until(child: Child, enough: Callable[[list[Item]], bool]) -> list[Item]:
    inbox = child.connection.inbox(SESSION)
    got: list[Item] = []
    async with asyncio.timeout(START_SECONDS):
        while not enough(got):
            await inbox.wait()
            got.extend(inbox.drain())
            assert not any(isinstance(item, Closed) for item in got), child.connection.stderr_tail()
    return got


def answered(items: list[Item]) -> bool:
    return any(isinstance(item, PromptAnswered) for item in items)


async def turn(child: Child, text: str) -> tuple[list[Item], PromptAnswered]:
    request_id = prompted(child, text)
    items = await items_until(child, answered)
    last = items[-1]
    assert isinstance(last, PromptAnswered) and last.request_id == request_id
    return items, last


async def test_every_kind_of_update_becomes_its_event(sdk: Child) -> None:
    items, _ = await turn(sdk, "kinds")
    updates = [update for item in items if isinstance(item, Updates) for update in item.updates]
    groups = list(grouped(updates))
    assert [(kind, payload) for kind, _, payload in groups[:-2]] == [
        ("thought", ["thinking"]),
        (
            "tool",
            {
                "tool_call_id": "t1",
                "title": "list",
                "kind": "execute",
                "status": "pending",
                "raw_input": {"command": "ls"},
            },
        ),
        (
            "tool",
            {
                "tool_call_id": "t1",
                "status": "completed",
                "content": [{"type": "content", "content": {"type": "text", "text": "a b"}}],
            },
        ),
        ("plan", {"entries": [{"content": "look", "priority": "high", "status": "completed"}]}),
        ("session_info", {"available_commands": [{"name": "web", "description": "search"}]}),
        ("session_info", {"mode": "code"}),
        ("session_info", {"title": "A title"}),
        ("usage", {"used": 10, "size": 200}),
    ]
    assert groups[-2][0] == "notice" and groups[-2][2]["kind"] == "agent_message_chunk"
    assert groups[-1] == ("message", None, ["done"])


@pytest.mark.parametrize(
    ("outcome", "said", "stop_reason"),
    [
        ({"outcome": "selected", "optionId": "yes"}, ["selected"], "end_turn"),
        ({"outcome": "selected", "optionId": "no"}, ["selected"], "end_turn"),
        ({"outcome": "cancelled"}, ["cancelled"], "cancelled"),
    ],
)
async def test_a_permission(sdk: Child, outcome: dict[str, Any], said: list[str], stop_reason: str) -> None:
    prompted(sdk, "ask")
    asked = (await items_until(sdk, bool))[-1]
    assert isinstance(asked, PermissionAsked)
    assert asked.params["toolCall"]["rawInput"] == {"command": "rm x"}
    assert sdk.connection.respond(asked.key, {"outcome": outcome})
    assert not sdk.connection.respond(asked.key, {"outcome": outcome})
    items = await items_until(sdk, answered)
    last = items[-1]
    assert texts(items) == said
    assert isinstance(last, PromptAnswered) and last.result is not None
    assert last.result["stopReason"] == stop_reason


async def test_a_cancel_settles_and_the_next_prompt_runs(sdk: Child) -> None:
    prompted(sdk, "wait")
    sdk.connection.cancel(SESSION)
    assert await sdk.connection.flush(5)
    last = (await items_until(sdk, answered))[-1]
    assert isinstance(last, PromptAnswered) and last.result is not None
    assert last.result["stopReason"] == "cancelled"
    items, _ = await turn(sdk, "stream 1")
    assert texts(items) == ["0"]


async def test_what_we_do_not_offer_is_refused_in_its_words(sdk: Child) -> None:
    """Case E10: requests get method-not-found, notifications are ignored and counted."""
    items, _ = await turn(sdk, "want")
    assert texts(items) == ["[-32601, -32601]"]
    assert sdk.connection.counts == {"unknown_requests": 2, "unknown_notifications": 1}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"action": "accept", "content": {"name": "x"}}, "accept {'name': 'x'}"),
        ({"action": "decline"}, "decline None"),
        ({"action": "cancel"}, "cancel None"),
    ],
)
async def test_an_elicitation(sdk: Child, answer: dict[str, Any], said: str) -> None:
    prompted(sdk, "elicit")
    asked = (await items_until(sdk, bool))[-1]
    assert isinstance(asked, ElicitationAsked)
    assert asked.params["requestedSchema"]["required"] == ["name"]
    assert sdk.connection.respond(asked.key, answer)
    assert texts(await items_until(sdk, answered)) == [said]


async def test_a_closed_session_says_no_more_to_us(sdk: Child) -> None:
    """Case E8: what the agent says there is counted and dropped."""
    await sdk.connection.close_session(SESSION, seconds=START_SECONDS)
    prompted(sdk, "stream 3")
    async with asyncio.timeout(START_SECONDS):
        while not sdk.connection.counts["stray_terminals"]:
            await asyncio.sleep(0.01)
    assert sdk.connection.counts["stray_updates"] == 3


async def test_its_end_is_an_exit(sdk: Child) -> None:
    """Case E5."""
    sdk.transport.close_stdin()
    with pytest.raises(RunnerError) as caught:
        await sdk.connection.set_mode(SESSION, "code", seconds=START_SECONDS)
    assert caught.value.code == "harness_exited"
