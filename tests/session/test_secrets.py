"""Secret values are nowhere but in the agent (DESIGN 3.11, case K2)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.session.bed import CALLER, Bed
from tests.session.fake_agent import FakeAgent
from tests.session.reading import (
    conversation,
    rest_of,
)

pytestmark = pytest.mark.virtual_time


SECRET = 'hunter2-hunter2-"quoted"-é'


async def everything_known(bed: Bed) -> str:
    """All that a client or the store can show, as one text."""
    views: list[Any] = [
        await bed.history(),
        await bed.sessions.view(CALLER, "s"),
        await bed.sessions.records(CALLER, "s", None, 1000),
        await bed.sessions.interactions(CALLER, None, None),
        await bed.sessions.sessions(CALLER, 10, None),
    ]
    text = json.dumps(views, ensure_ascii=False)
    tables = (bed.store._sessions, bed.store._turns, bed.store._prompts, bed.store._interactions, bed.store._records)
    return text + "".join(repr(row) for table in tables for row in table.values())


def hidden(text: str) -> bool:
    return "hunter2" not in text and "hunter2" not in text.encode().decode("unicode_escape", "replace")


async def test_secrets_are_masked_everywhere_case_k2(bed: Bed) -> None:
    fields: dict[str, Any] = {"secrets": {"KEY": SECRET}, "prompt_id": "x", "keep_on_disconnect": True}
    handle = await bed.dispatch(prompt=f"use {SECRET} please", **fields)
    reading = asyncio.create_task(rest_of(handle.reader()))
    agent = await bed.agent()
    frame = await agent.prompt()
    assert frame["params"]["prompt"][0]["text"] == f"use {SECRET} please", "the agent gets it"
    for cut in (1, 7, len(SECRET) - 1):
        agent.say("text: " + SECRET[:cut])
        await asyncio.sleep(0.5)
        agent.say(SECRET[cut:] + " end ")
    for char in SECRET:
        agent.update(sessionUpdate="agent_thought_chunk", content={"type": "text", "text": char})
    agent.update(
        sessionUpdate="tool_call",
        toolCallId="t1",
        title=f"curl -H {SECRET}",
        status="in_progress",
        rawInput={"command": [SECRET], SECRET: 1},
        content=[{"type": "content", "content": {"type": "text", "text": json.dumps({"k": SECRET})}}],
    )
    agent.update(sessionUpdate="strange", value=SECRET)
    option = {"optionId": "yes", "name": f"Always allow curl {SECRET}", "kind": "allow_once"}
    agent.ask(1, "t1", [option])
    await handle.result()
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    assert hidden(await everything_known(bed))
    await bed.answer(question, option_id="yes")
    assert (await agent.answered(1))["result"]["outcome"]["optionId"] == "yes"
    agent.error(frame["id"], -32603, f"login with {SECRET} failed")
    again = await bed.dispatch(prompt=f"use {SECRET} please", prompt_id="x")
    result = await again.result()
    assert result["error"]["message"].endswith("login with [secret] failed")
    assert hidden(json.dumps(result, ensure_ascii=False))
    assert hidden(json.dumps(await reading, ensure_ascii=False))
    shown = conversation(await bed.history())
    assert shown["blocks"][0] == ("message", "text: [secret] end " * 3)
    assert shown["blocks"][1] == ("thought", "[secret]")
    assert hidden(await everything_known(bed))


async def test_a_limit_that_names_a_tool_names_no_secret_case_k2(bed: Bed) -> None:
    handle = await bed.dispatch(
        secrets={"KEY": SECRET}, limits={"tool_call_seconds": 5}, keep_on_disconnect=True, prompt_id="x"
    )
    agent = await bed.agent()
    await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title=f"curl {SECRET}", status="in_progress")
    result = await handle.result()
    assert result["error"]["code"] == "limit_tool_call"
    assert "curl [secret]" in result["error"]["message"]
    assert hidden(await everything_known(bed))


async def test_an_agent_that_dies_tells_no_secret_case_k2(bed: Bed) -> None:
    handle = await bed.dispatch(secrets={"KEY": SECRET}, keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    agent.transport.agent.send_stderr(f"fatal: bad key {SECRET}\n".encode())
    agent.exit(1)
    result = await handle.result()
    assert "bad key [secret]" in result["error"]["message"]
    assert hidden(await everything_known(bed))


async def test_a_former_secret_stays_masked_case_k2(bed: Bed) -> None:
    """The workspace may still hold it, and a paused agent knows it while it is withdrawn."""
    handle = await bed.dispatch(secrets={"KEY": SECRET}, keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.ask(1)
    await handle.result()
    second = await bed.dispatch(prompt="two", secrets={"KEY": "another-secret"}, keep_on_disconnect=True)
    await agent.heard("session/cancel")
    agent.say(f"old {SECRET}")
    agent.answer(frame, "cancelled")
    newer: FakeAgent = await bed.agent(2)
    frame = await newer.prompt()
    newer.say(f"file says {SECRET}, I know another-secret")
    newer.answer(frame)
    assert (await second.result())["text"] == "file says [secret], I know [secret]"
    assert hidden(await everything_known(bed))
