"""What tests of resumed agent sessions share."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.session.bed import Bed
from tests.session.fake_agent import FakeAgent

LOADS: dict[str, Any] = {"capabilities": {"loadSession": True}, "session/load": {"replay": 2}}


async def first_turn(bed: Bed, text: str = "the first answer") -> None:
    handle = await bed.dispatch(prompt="the first question", keep_on_disconnect=True)
    await (await bed.agent()).finish(text=text)
    assert (await handle.result())["start"] == "cold"


async def next_turn(bed: Bed, agents: int = 2, prompt: str = "next", **fields: Any) -> tuple[Any, FakeAgent]:
    """A turn behind the loss of the seat; its result and its agent."""
    handle = await bed.dispatch(prompt=prompt, keep_on_disconnect=True, **fields)
    agent = await bed.agent(agents)
    await agent.finish(text="the next answer")
    return await handle.result(), agent


async def lose_seat(bed: Bed) -> None:
    await asyncio.sleep(61)
    assert not bed.provider.alive


def notices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["data"] for event in events if event["type"] == "notice"]


def prompt_texts(agent: FakeAgent, nth: int = 0) -> list[str]:
    return [block["text"] for block in agent.all("session/prompt")[nth]["params"]["prompt"]]
