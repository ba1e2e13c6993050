"""A command of the user: a turn without the model, whose output the next prompt tells (PROMPT-ABORT.md, shell)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.sandbox.port import Ran
from tests.session.bed import CALLER, Bed, FakeCommand, types

pytestmark = pytest.mark.virtual_time


async def begun(bed: Bed, command: str = "make", agents: int = 1, **fields: Any) -> tuple[Any, FakeCommand]:
    """The shell's call, and the command once it runs."""
    call = asyncio.create_task(bed.shell(command, **fields))
    await bed.agent(agents)
    while (running := bed.sandbox(agents).command) is None:
        await asyncio.sleep(0.001)
    return call, running


async def test_a_command_runs_without_the_model_and_the_next_prompt_tells_its_output(bed: Bed) -> None:
    call, command = await begun(bed)
    assert await bed.state() == "running"
    command.heard(b"all ")
    command.heard(b"good\n")
    command.ended.set_result(Ran(0))
    reply = await call
    assert reply == {"turn_id": reply["turn_id"], "exit_code": 0, "output": "all good\n", "truncated": False}
    agent = await bed.agent()
    assert "session/prompt" not in [frame.get("method") for frame in agent.frames]
    result = await bed.turn(prompt="go on")
    assert (result["start"], "context_lost" in result) == ("hit", False)
    told = (await agent.prompt(1))["params"]["prompt"]
    assert [block["type"] for block in told] == ["text", "text"]
    assert "make\nExit code: 0.\nIts output:\nall good\n" in told[0]["text"]
    assert told[1]["text"] == "go on"
    await bed.turn(prompt="and again", nth=2)
    assert len((await agent.prompt(2))["params"]["prompt"]) == 1, "told once"
    assert len(bed.provider.sandboxes) == 1


async def test_its_events_are_a_turns(bed: Bed) -> None:
    call, command = await begun(bed)
    command.ended.set_result(Ran(2))
    turn_id = (await call)["turn_id"]
    events = await bed.history()
    shown = [kind for kind in types(events) if kind != "environment"]
    assert shown == ["session_busy", "turn_admitted", "tool_call", "tool_call_update", "done", "session_idle"]
    assert events[1]["data"]["prompt_ids"] == []
    assert [event["data"]["status"] for event in events if event["type"].startswith("tool")] == [
        "in_progress",
        "failed",
    ]
    assert events[-2]["data"] == {"turn_id": turn_id, "outcome": "completed"}
    turn = await bed.store.turn("p", "s", turn_id)
    assert (turn.outcome, turn.prompt_id, turn.epoch) == ("completed", None, 1)
    assert bed.sandbox().story == [f"mark {turn_id}", "run make", f"kill {turn_id}"]


async def test_output_that_no_store_can_hold_has_a_marker_everywhere(bed: Bed) -> None:
    call, command = await begun(bed)
    command.heard(b"a\0b\xff\xf0\x9f")
    command.heard(b"\x98\x80")
    command.ended.set_result(Ran(0))
    assert (await call)["output"] == "a\ufffdb\ufffd😀"
    records = await bed.store.records("p", "s", None, 100)
    [row] = [row for row in records if row.type == "tool_call" and b"content" in row.data]
    assert "a\ufffdb\ufffd😀".encode() in row.data
    await bed.turn(prompt="go on")
    assert "a\ufffdb\ufffd😀" in (await (await bed.agent()).prompt(1))["params"]["prompt"][0]["text"]


@pytest.mark.parametrize(("ran", "code"), [(Ran(7), 7), (Ran(None, 15), 143)])
async def test_exit_codes_are_a_shells(bed: Bed, ran: Ran, code: int) -> None:
    call, command = await begun(bed)
    command.ended.set_result(ran)
    assert (await call)["exit_code"] == code


async def test_what_runs_waits_or_is_paused_refuses_it(bed: Bed) -> None:
    """Scenario 42."""
    handle = await bed.dispatch(prompt="A", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    with pytest.raises(RunnerError) as caught:
        await bed.shell("make")
    assert caught.value.code == "session_turn_in_use"
    agent.say("ok")
    agent.answer(frame)
    await handle.result()
    call, command = await begun(bed)
    with pytest.raises(RunnerError) as caught:
        await bed.shell("make")
    assert caught.value.code == "session_turn_in_use"
    assert (await bed.dispatch(prompt="B")).refused is not None
    command.ended.set_result(Ran(0))
    assert (await call)["exit_code"] == 0


async def test_a_sandbox_that_is_being_started_is_not_there_yet(bed: Bed) -> None:
    """Case L5: a retryable refusal, and the start goes on as if nobody had asked."""
    gate = bed.provider.start_gate = asyncio.Event()
    handle = await bed.dispatch(prompt="A", keep_on_disconnect=True)
    with pytest.raises(RunnerError) as caught:
        await bed.shell("make")
    assert (caught.value.code, caught.value.retryable) == ("session_starting", True)
    gate.set()
    agent = await bed.agent()
    agent.say("ok")
    agent.answer(await agent.prompt())
    await handle.result()


async def test_prompts_wait_for_it_and_an_abort_of_one_leaves_it_alone(bed: Bed) -> None:
    """Scenario 43."""
    call, command = await begun(bed)
    p = await bed.dispatch(prompt="P", prompt_id="P", on_busy="queue")
    q = await bed.dispatch(prompt="Q", prompt_id="Q", on_busy="queue", keep_on_disconnect=True)
    assert await bed.sessions.abort_prompt(CALLER, "s", "P")
    assert (await p.result())["outcome"] == "cancelled"
    command.heard(b"out")
    command.ended.set_result(Ran(0))
    assert (await call)["output"] == "out"
    agent = await bed.agent()
    frame = await agent.prompt()
    texts = [block["text"] for block in frame["params"]["prompt"]]
    assert len(texts) == 2
    assert texts[0].endswith("out")
    assert texts[1] == "Q"
    agent.say("ok")
    agent.answer(frame)
    assert (await q.result())["ok"]
    assert types(await bed.history()).count("session_idle") == 1


async def test_a_stop_kills_the_whole_group_before_anything_else_may_run(bed: Bed) -> None:
    """Scenario 44, case D4: no idle, and no second shell, before the group is gone; its output is kept."""
    call, command = await begun(bed)
    command.heard(b"half")
    gate = bed.provider.kill_gate = asyncio.Event()
    p = await bed.dispatch(prompt="P", prompt_id="P", on_busy="queue")
    reply = await bed.cancel()
    assert (reply.status, reply.body["cancelled_prompts"]) == (202, ["P"])
    assert await bed.state() == "stopping"
    assert (await p.result())["outcome"] == "cancelled"
    await asyncio.sleep(1)
    with pytest.raises(RunnerError) as caught:
        await bed.shell("make")
    assert caught.value.code == "session_turn_in_use"
    assert "session_idle" not in types(await bed.history())
    gate.set()
    done = await call
    assert (done["exit_code"], done["output"], done["aborted"]) == (None, "half", True)
    events = await bed.history()
    assert types(events).count("session_idle") == types(events).count("session_busy") == 1
    assert "error" not in types(events)
    assert [event["data"]["outcome"] for event in events if event["type"] == "done"] == ["cancelled"]
    result = await bed.turn(prompt="D")
    assert result["start"] == "hit"
    told = (await (await bed.agent()).prompt())["params"]["prompt"]
    assert "aborted by the user" in told[0]["text"]
    assert told[0]["text"].endswith("half")


async def test_its_time_is_bounded(bed: Bed) -> None:
    call, command = await begun(bed, timeout_seconds=30)
    command.heard(b"slow")
    before = asyncio.get_running_loop().time()
    done = await call
    assert asyncio.get_running_loop().time() - before == pytest.approx(30, abs=0.1)
    assert (done["exit_code"], done["output"], done["timed_out"]) == (None, "slow", True)
    assert "aborted" not in done
    assert (await bed.turn())["start"] == "hit"


async def test_survivors_cost_the_sandbox(bed: Bed) -> None:
    call, command = await begun(bed)
    bed.provider.survivors = True
    command.ended.set_result(Ran(0))
    assert (await call)["exit_code"] == 0
    bed.provider.survivors = False
    assert (await bed.turn(agents=2))["start"] == "cold"


async def test_a_lost_sandbox_ends_it_with_an_error(bed: Bed) -> None:
    call, command = await begun(bed)
    command.ended.set_exception(RunnerError("sandbox_lost", "The sandbox was lost: its init is gone."))
    done = await call
    assert (done["exit_code"], done["error"]["code"]) == (None, "sandbox_lost")
    assert (await bed.turn(agents=2))["start"] == "cold"


async def test_a_start_that_fails_is_told(bed: Bed) -> None:
    bed.provider.start_error = RunnerError("sandbox_start_failed", "No room.")
    done = await bed.shell("make")
    assert (done["exit_code"], done["output"], done["error"]["code"]) == (None, "", "sandbox_start_failed")
    bed.provider.start_error = None
    assert (await bed.turn())["ok"]


async def test_a_refused_beat_leaves_nothing(bed: Bed) -> None:
    plane: Any = bed.replica.plane
    plane.down = True
    with pytest.raises(RunnerError) as caught:
        await bed.shell("make")
    assert caught.value.code == "plane_unavailable"
    plane.down = False
    assert (await bed.turn())["ok"]


async def test_an_agent_that_a_shell_started_is_told_of_the_session(bed: Bed) -> None:
    """Nothing is lost: the frame behind the shell carries what the new agent cannot know."""
    await bed.turn(prompt="remember 42")
    await bed.sessions.kill(CALLER, "s")
    call, command = await begun(bed, agents=2)
    command.ended.set_result(Ran(0))
    await call
    result = await bed.turn(prompt="which number", agents=2)
    assert (result["start"], result["context_lost"]) == ("hit", True)
    told = [block["text"] for block in (await (await bed.agent(2)).prompt())["params"]["prompt"]]
    assert "remember 42" in told[0]
    assert told[-1] == "which number"
    assert "context_lost" not in await bed.turn(agents=2, nth=2)


async def test_a_stop_gives_up_the_start_of_its_sandbox(bed: Bed) -> None:
    """Case L5: a Stop is taken before the sandbox is there."""
    gate = bed.provider.start_gate = asyncio.Event()
    call = asyncio.create_task(bed.shell("make"))
    await asyncio.sleep(0.1)
    assert (await bed.cancel(wait_seconds=5)).body["outcome"] == "stopped"
    reply = await call
    assert (reply["exit_code"], reply["output"], reply["aborted"]) == (None, "", True)
    gate.set()
    await bed.turn()
    assert len((await (await bed.agent()).prompt())["params"]["prompt"]) == 1, "nothing ran: nothing is told"


async def test_a_kill_ends_it_and_its_sandbox(bed: Bed) -> None:
    call, command = await begun(bed)
    command.heard(b"half")
    reply = await bed.sessions.kill(CALLER, "s")
    assert reply.body["outcome"] == "stopped"
    done = await call
    assert (done["output"], done["aborted"]) == ("half", True)
    assert (await bed.turn(agents=2))["start"] == "cold"
    told = (await (await bed.agent(2)).prompt())["params"]["prompt"]
    assert told[0]["text"].endswith("half"), "a kill keeps what waits to be told"


async def test_its_output_outlives_the_runner(bed: Bed) -> None:
    call, command = await begun(bed)
    command.heard(b"kept")
    command.ended.set_result(Ran(0))
    await call
    later = await Bed.make(store=bed.store, plane=type(bed.replica.plane)(), replica_id="rep_2")
    try:
        await later.turn()
        told = (await (await later.agent()).prompt())["params"]["prompt"]
        assert (len(told), told[0]["text"].endswith("kept")) == (2, True)
    finally:
        await later.close()
