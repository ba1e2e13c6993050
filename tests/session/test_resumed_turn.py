"""An explicit resume: a turn without an owner, where something is unanswered (PROMPT-ABORT.md, resume)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.sandbox.port import Ran
from runner.session.ownerless import GO_ON
from tests.session.bed import CALLER, Bed, types

pytestmark = pytest.mark.virtual_time


async def aborted(bed: Bed, *, nth: int = 1) -> None:
    """A prompt whose frame was sent, and that was aborted behind it."""
    handle = await bed.dispatch(prompt="A", prompt_id=f"A{nth}", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt(nth)
    assert await bed.sessions.abort_prompt(CALLER, "s", f"A{nth}")
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"


async def resume(bed: Bed) -> str | None:
    return await bed.sessions.resume(CALLER, "s")


def texts(frame: dict[str, Any]) -> list[str]:
    return [block["text"] for block in frame["params"]["prompt"]]


async def ended(bed: Bed, turn_id: str | None) -> str:
    """The outcome of a turn, once it has one."""
    while (turn := await bed.store.turn("p", "s", str(turn_id))) is None or turn.outcome is None:
        await asyncio.sleep(0.01)
    return str(turn.outcome)


async def test_an_unanswered_prompt_is_gone_on_with_and_its_late_abort_stops_nothing(bed: Bed) -> None:
    """Scenario 38."""
    await aborted(bed)
    await bed.dispatch(prompt="mind the gap", context_only=True)
    turn_id = await resume(bed)
    agent = await bed.agent()
    frame = await agent.prompt(2)
    assert texts(frame) == ["mind the gap", GO_ON]
    assert not await bed.sessions.abort_prompt(CALLER, "s", "A1")
    assert await resume(bed) == turn_id, "a second one joins"
    agent.say("done")
    agent.answer(frame)
    assert await ended(bed, turn_id) == "completed"
    events = [event for event in await bed.history() if event["turn_id"] == turn_id]
    assert [event["data"]["content"] for event in events if event["type"] == "user_message"] == [
        [{"type": "text", "text": GO_ON}]
    ]
    assert "prompt_ended" not in types(events)
    assert types(await bed.history()).count("session_idle") == 2
    assert await resume(bed) is None, "now it is answered"
    assert (await bed.turn(nth=3))["start"] == "hit", "the sandbox stays although nobody read"


async def test_nothing_unanswered_starts_nothing(bed: Bed) -> None:
    """Scenario 39."""
    with pytest.raises(RunnerError) as caught:
        await resume(bed)
    assert caught.value.code == "not_found"
    handle = await bed.dispatch(prompt="A", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    assert await resume(bed) == handle.turn_id, "what runs is joined"
    b = await bed.dispatch(prompt="B", prompt_id="B", on_busy="queue")
    assert await bed.sessions.abort_prompt(CALLER, "s", "B")
    agent.say("ok")
    agent.answer(frame)
    await handle.result()
    assert (await b.result())["outcome"] == "cancelled"
    before = await bed.history()
    assert await resume(bed) is None
    assert await bed.history() == before


async def test_an_abort_of_what_waits_leaves_the_resumed_turn_alone(bed: Bed) -> None:
    """Scenario 40."""
    await aborted(bed)
    turn_id = await resume(bed)
    agent = await bed.agent()
    frame = await agent.prompt(2)
    await bed.dispatch(prompt="B", prompt_id="B", on_busy="queue")
    view = await bed.sessions.prompts(CALLER, "s")
    waiting = {"prompt_id": "B", "state": "queued", "position": 1}
    assert view == {"items": [waiting], "next_cursor": None, "active": None}
    assert (await bed.sessions.view(CALLER, "s"))["queue"] == [waiting]
    assert await bed.sessions.abort_prompt(CALLER, "s", "B")
    agent.say("done")
    agent.answer(frame)
    assert await ended(bed, turn_id) == "completed"
    await asyncio.sleep(1)
    assert sum(frame.get("method") == "session/prompt" for frame in agent.frames) == 2


async def test_a_stop_stops_it_once(bed: Bed) -> None:
    """Scenario 41."""
    await aborted(bed)
    turn_id = await resume(bed)
    agent = await bed.agent()
    frame = await agent.prompt(2)
    reply = await bed.cancel()
    assert (reply.status, reply.body["turn_id"]) == (202, turn_id)
    agent.answer(frame, "cancelled")
    assert await ended(bed, turn_id) == "cancelled"
    assert types(await bed.history()).count("session_idle") == 2
    assert await resume(bed) is not None, "and is still unanswered"
    agent.say("done")
    agent.answer(await agent.prompt(3))


async def test_it_runs_behind_a_shell_and_carries_its_output(bed: Bed) -> None:
    await aborted(bed)
    shell = asyncio.create_task(bed.shell("make"))
    while (command := bed.sandbox().command) is None:
        await asyncio.sleep(0.001)
    resuming = asyncio.create_task(resume(bed))
    await asyncio.sleep(1)
    assert not resuming.done()
    command.heard(b"out")
    command.ended.set_result(Ran(0))
    assert (await shell)["exit_code"] == 0
    agent = await bed.agent()
    frame = await agent.prompt(2)
    told = texts(frame)
    assert (len(told), told[0].endswith("out"), told[1]) == (2, True, GO_ON)
    agent.say("done")
    agent.answer(frame)
    assert await ended(bed, await resuming) == "completed"


async def test_it_waits_until_a_turn_is_torn_down(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="A", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    await bed.cancel()
    resuming = asyncio.create_task(resume(bed))
    await asyncio.sleep(1)
    assert not resuming.done()
    agent.answer(frame, "cancelled")
    await handle.result()
    turn_id = await resuming
    assert turn_id != handle.turn_id
    agent.say("done")
    agent.answer(await agent.prompt(2))
    assert await ended(bed, turn_id) == "completed"


async def test_context_alone_makes_a_session_and_no_turn(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="X", prompt_id="X", context_only=True)
    assert (handle.state, bed.provider.sandboxes) == ("stored", [])
    assert await bed.state() == "idle"
    assert await resume(bed) is None
    assert not await bed.sessions.abort_prompt(CALLER, "s", "X")
    assert await bed.history() == []


async def test_what_a_lost_turn_left_unanswered_is_gone_on_with_behind_a_restart(bed: Bed) -> None:
    await bed.dispatch(prompt="A", keep_on_disconnect=True)
    await (await bed.agent()).prompt()
    await asyncio.sleep(1)
    later = await Bed.make(store=bed.store, plane=type(bed.replica.plane)(), replica_id="rep_2")
    try:
        turn_id = await resume(later)
        agent = await later.agent()
        frame = await agent.prompt()
        assert texts(frame)[-1] == GO_ON
        assert "A" in texts(frame)[0], "the new agent is told of the session"
        agent.say("done")
        agent.answer(frame)
        assert await ended(later, turn_id) == "completed"
        assert await resume(later) is None
    finally:
        await later.close()


async def test_an_agent_that_lost_its_context_is_told_the_newest_of_it_again(bed: Bed) -> None:
    words = [f"{n}" * 400_000 for n in range(4)]
    for text in words:
        await bed.dispatch(prompt=text, context_only=True)
    await bed.turn(prompt="A")
    assert texts(await (await bed.agent()).prompt()) == [*words, "A"], "what nobody was told yet is never left out"
    await bed.sessions.kill(CALLER, "s")
    await bed.turn(prompt="B", agents=2)
    _, *told, last = texts(await (await bed.agent(2)).prompt())
    assert (told, last) == (words[2:], "B"), "a MiB of it"
