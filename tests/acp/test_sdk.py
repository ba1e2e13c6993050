"""The published SDK as the other side: its schema judges our frames, its agent side answers us over real stdio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from acp import meta

from runner.acp.connection import AgentConnection, Item, PermissionAsked, PromptAnswered
from tests.acp.bed import texts
from tests.acp.child import Child
from tests.acp.oracle import Oracle

AGENT = Path(__file__).parent / "sdk_agent.py"
SESSION = "sdk-1"


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    async with Child(program=AGENT) as made:
        yield made


async def turn(connection: AgentConnection, words: str) -> list[Item]:
    """All that comes up to the answer; a question is answered by ``yes``, a ``wait`` is cancelled."""
    inbox = connection.inbox(SESSION)
    connection.prompt(SESSION, [{"type": "text", "text": words}])
    if words == "wait":
        connection.cancel(SESSION)
    got: list[Item] = []
    async with asyncio.timeout(30):
        while not any(isinstance(item, PromptAnswered) for item in got):
            await inbox.wait()
            for item in inbox.drain():
                got.append(item)
                if isinstance(item, PermissionAsked):
                    connection.respond(item.key, {"outcome": {"outcome": "selected", "optionId": "yes"}})
    return got


def ending(items: list[Item]) -> PromptAnswered:
    assert isinstance(items[-1], PromptAnswered)
    return items[-1]


async def test_a_whole_life_with_an_agent_of_the_sdk(child: Child) -> None:
    connection = child.connection
    info = await connection.initialize(seconds=30)
    assert (info.protocol_version, info.name, info.version) == (meta.PROTOCOL_VERSION, "sdk", "acp-runner")
    servers = [{"name": "m", "command": "/bin/m", "args": ["-x"], "env": [{"name": "A", "value": "b"}]}]
    session = await connection.new_session("/w", servers, seconds=30)
    assert session.agent_session_id == SESSION
    assert session.modes is not None
    assert "/bin/m" in session.modes["availableModes"][0]["name"]

    await connection.set_mode(SESSION, "ask", seconds=30)
    await connection.set_config_option(SESSION, "verbose", True, seconds=30)
    await connection.set_config_option(SESSION, "model", "m", seconds=30)
    said = texts(connection.inbox(SESSION).drain())
    assert said == ["mode ask", "option verbose=True", "option model='m'"]

    items = await turn(connection, "stream 500")
    assert texts(items) == [str(n) for n in range(500)]
    assert ending(items).result == {"stopReason": "end_turn"}
    assert texts(await turn(connection, "ask")) == ["selected"]
    assert texts(await turn(connection, "read")) == ["-32601"]
    assert ending(await turn(connection, "wait")).result == {"stopReason": "cancelled"}
    error = ending(await turn(connection, "fail")).error
    assert error is not None
    assert (error.code, error.message, error.data) == (-32603, "it broke", {"why": "test"})
    assert texts(await turn(connection, "stream 2")) == ["0", "1"]
    await connection.close_session(SESSION, seconds=30)
    assert child.oracle.judged == 13
    assert connection.diagnostics()["noise"] == 0


def test_our_methods_are_the_published_ones() -> None:
    from tests.acp.oracle import NOTIFICATIONS, REQUESTS, RESULTS

    ours = {*REQUESTS, *NOTIFICATIONS} - {"$/cancel_request"}
    assert ours <= set(meta.AGENT_METHODS.values())
    assert set(RESULTS) <= set(meta.CLIENT_METHODS.values())


@pytest.mark.parametrize(
    "frame",
    [
        {"jsonrpc": "2.0", "id": 1, "method": "session/prompt", "params": {"prompt": []}},
        {"jsonrpc": "2.0", "id": 1, "method": "session/set_mode", "params": {"sessionId": "s", "mode": "x"}},
        {"jsonrpc": "2.0", "id": 1, "method": "session/close", "params": {"sessionId": "s", "extra": 1}},
        {"jsonrpc": "2.0", "id": "1", "method": "session/close", "params": {"sessionId": "s"}},
        {"jsonrpc": "2.0", "method": "session/stop", "params": {"sessionId": "s"}},
        {"jsonrpc": "2.0", "id": 1, "result": {}},
        {"id": 1, "method": "session/close", "params": {"sessionId": "s"}},
    ],
)
def test_the_oracle_sees_wrong_frames(frame: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        Oracle().judge(frame)
