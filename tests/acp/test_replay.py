"""``session/load`` and ``session/resume``: the replay window (case G13), and no load of what is live (case D3)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.acp.answers import agent_info
from runner.acp.connection import AgentError, PermissionAsked, PromptAnswered, Updates
from runner.acp.replay import Reopened
from runner.acp.transport import ExitInfo
from runner.errors import RunnerError
from tests.acp.bed import SESSION, Bed, permission, text_update, texts

pytestmark = pytest.mark.virtual_time
METHODS = ("session/load", "session/resume")
MODES = {"currentModeId": "plan", "availableModes": [{"id": "plan", "name": "Plan"}]}


def reopening(bed: Bed, method: str = "session/load") -> asyncio.Task[Reopened]:
    calls = {"session/load": bed.connection.load_session, "session/resume": bed.connection.resume_session}
    return asyncio.get_running_loop().create_task(calls[method](SESSION, "/w", [], seconds=10))


def update(kind: str, **members: Any) -> dict[str, Any]:
    params = {"sessionId": SESSION, "update": {"sessionUpdate": kind, **members}}
    return {"jsonrpc": "2.0", "method": "session/update", "params": params}


def answered(frame: dict[str, Any], result: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": frame["id"], "result": result}


@pytest.mark.parametrize("method", METHODS)
async def test_nothing_of_a_replay_reaches_the_inbox(bed: Bed, method: str) -> None:
    """Case G13: 500 updates before the answer and 3 behind it, by load or by a resume that replays all the same."""
    call = reopening(bed, method)
    frame = await bed.reads(method)
    assert frame["params"] == {"sessionId": SESSION, "cwd": "/w", "mcpServers": []}
    for n in range(500):
        bed.says(text_update(f"old {n}"))
    bed.says(answered(frame), text_update("late 1"))
    await asyncio.sleep(0.09)
    bed.says(text_update("late 2"))
    await asyncio.sleep(0.09)
    assert not call.done()
    bed.says(text_update("late 3"))
    opened = await call
    assert (opened.agent_session_id, opened.replayed) == (SESSION, 503)
    assert bed.connection.counts == {"replayed": 503}
    request = bed.connection.prompt(SESSION, [{"type": "text", "text": "go"}])
    bed.says(text_update("new"), {"jsonrpc": "2.0", "id": request, "result": {"stopReason": "end_turn"}})
    items = await bed.items(lambda got: any(isinstance(item, PromptAnswered) for item in got))
    assert texts(items) == ["new"]


async def test_what_the_answer_says_is_taken(bed: Bed) -> None:
    """Modes and options of the answer; facts of the window are learnt, not shown."""
    call = reopening(bed)
    frame = await bed.reads("session/load")
    option = {"type": "select", "id": "model", "name": "Model", "currentValue": "m", "options": []}
    bed.says(update("current_mode_update", currentModeId="old"), update("current_mode_update", currentModeId="newer"))
    bed.says(answered(frame, {"modes": MODES, "configOptions": [option]}))
    bed.says(update("available_commands_update", availableCommands=[]))
    opened = await call
    assert (opened.modes, opened.config_options, opened.replayed) == (MODES, [option], 0)
    assert [fact["currentModeId"] for fact in opened.facts] == ["newer"]
    assert len(bed.inbox()) == 0
    assert bed.connection.counts["replayed"] == 3


async def test_a_chatty_agent_holds_the_window_open_for_two_seconds_at_most(bed: Bed) -> None:
    call = reopening(bed)
    frame = await bed.reads("session/load")
    bed.says(answered(frame))
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    while not call.done():
        bed.says(text_update("again"))
        await asyncio.sleep(0.05)
    assert 1.9 <= asyncio.get_running_loop().time() - began <= 2.2


async def test_an_own_prompt_ends_the_window(bed: Bed) -> None:
    call = reopening(bed)
    frame = await bed.reads("session/load")
    bed.says(text_update("old"), answered(frame))
    await asyncio.sleep(0.01)
    bed.connection.prompt(SESSION, [{"type": "text", "text": "go"}])
    bed.says(text_update("new"))
    (item,) = await bed.items()
    assert isinstance(item, Updates)
    assert texts([item]) == ["new"]
    assert (await call).replayed == 1


async def test_a_question_of_the_past_is_refused(bed: Bed) -> None:
    call = reopening(bed)
    frame = await bed.reads("session/load")
    bed.says(permission("old"), text_update("x"), answered(frame))
    refused = await bed.reads()
    assert (refused["id"], refused["error"]["code"]) == ("old", -32600)
    await call
    assert len(bed.inbox()) == 0
    bed.says(permission("new"))
    (item,) = await bed.items()
    assert isinstance(item, PermissionAsked)


async def test_a_refused_load_leaves_the_connection_usable(bed: Bed) -> None:
    """Case M6: the load fails; a new session opens in the same process, and what still comes of the old one is none."""
    call = reopening(bed)
    frame = await bed.reads("session/load")
    bed.says(text_update("half"), {"jsonrpc": "2.0", "id": frame["id"], "error": {"code": -32002, "message": "no"}})
    with pytest.raises(AgentError, match="no"):
        await call
    bed.says(text_update("stray"))
    opening = asyncio.get_running_loop().create_task(bed.connection.new_session("/w", []))
    await bed.answers("session/new", {"sessionId": "s2"})
    assert (await opening).agent_session_id == "s2"
    assert bed.connection.counts == {"replayed": 1, "stray_updates": 1}


async def test_a_load_without_an_answer_is_given_up(bed: Bed) -> None:
    call = reopening(bed)
    frame = await bed.reads("session/load")
    with pytest.raises(TimeoutError):
        await call
    assert (await bed.reads("$/cancel_request"))["params"] == {"requestId": frame["id"]}
    bed.says(answered(frame, {"sessionId": SESSION}))
    await asyncio.sleep(0.01)
    assert bed.connection.counts["duplicate_terminals"] == 1


@pytest.mark.parametrize("when", ["before the answer", "in the quiet gap"])
async def test_an_agent_that_exits_fails_its_load(bed: Bed, when: str) -> None:
    call = reopening(bed)
    frame = await bed.reads("session/load")
    if when == "in the quiet gap":
        bed.says(answered(frame))
        await asyncio.sleep(0.01)
    bed.agent.exit(ExitInfo(code=3))
    with pytest.raises(RunnerError, match="code 3") as caught:
        await call
    assert caught.value.code == "harness_exited"


async def test_a_login_is_told_apart(bed: Bed) -> None:
    call = reopening(bed)
    frame = await bed.reads("session/load")
    bed.says({"jsonrpc": "2.0", "id": frame["id"], "error": {"code": -32000, "message": "log in"}})
    with pytest.raises(RunnerError) as caught:
        await call
    assert caught.value.code == "harness_auth_required"


@pytest.mark.parametrize("method", METHODS)
async def test_what_is_live_is_not_loaded_again(bed: Bed, method: str) -> None:
    """Case D3: 20 tries, no frame."""
    opening = asyncio.get_running_loop().create_task(bed.connection.new_session("/w", []))
    await bed.answers("session/new", {"sessionId": SESSION})
    await opening
    for _ in range(20):
        with pytest.raises(ValueError, match="live already"):
            await reopening(bed, method)
    assert [frame["method"] for frame in bed.agent.received] == ["session/new"]


@pytest.mark.parametrize(
    ("capabilities", "loads", "resumes"),
    [
        ({}, False, False),
        ({"loadSession": True}, True, False),
        ({"loadSession": "yes", "sessionCapabilities": {"resume": None}}, False, False),
        ({"loadSession": False, "sessionCapabilities": {"resume": {}}}, False, True),
        ({"sessionCapabilities": []}, False, False),
    ],
)
def test_what_an_agent_advertises(capabilities: dict[str, Any], loads: bool, resumes: bool) -> None:
    info = agent_info({"protocolVersion": 1, "agentCapabilities": capabilities})
    assert (info.loads, info.resumes) == (loads, resumes)
