"""Seats: what keeps them, what ends them, and why a start was cold (DESIGN 3.4, 3.5)."""

from __future__ import annotations

import asyncio

import pytest

from runner.errors import RunnerError
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import text_frame

pytestmark = pytest.mark.virtual_time


async def test_ttl_counts_from_the_end_of_the_turn_case_c10(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("long")
    await asyncio.sleep(120)
    agent.answer(frame)
    await handle.result()
    await asyncio.sleep(59)
    assert bed.provider.alive
    await asyncio.sleep(2)
    assert not bed.provider.alive
    assert (await bed.turn(agents=2))["reason"] == "expired"


async def test_a_running_turn_is_never_idle_case_c11(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("thinking")
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="build", status="in_progress")
    await asyncio.sleep(1500)
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"


@pytest.mark.parametrize(
    ("fields", "facet"),
    [
        ({"env": {"A": "2"}}, "env"),
        ({"secrets": {"KEY": "another-secret"}}, "secrets"),
        ({"mcp_servers": [{"name": "m", "command": "c", "args": [], "env": []}]}, "mcp_servers"),
        ({"workspace": {"files": [{"path": "a", "content": "b"}]}}, "workspace"),
    ],
)
async def test_a_changed_facet_is_a_cold_start_case_c12(bed: Bed, fields: dict, facet: str) -> None:
    await bed.turn()
    handle = await bed.dispatch(keep_on_disconnect=True, **fields)
    agent = await bed.agent(2)
    await agent.finish()
    result = await handle.result()
    assert (result["start"], result["reason"]) == ("cold", f"changed:{facet}")
    assert (await bed.turn(agents=2, nth=2))["start"] == "hit", "fields left out keep their last value"


async def test_policy_mode_and_model_apply_live_case_c12(bed: Bed) -> None:
    bed.provider.manners["new"] = {
        "modes": {"currentModeId": "default", "availableModes": [{"id": "default"}, {"id": "plan"}]},
        "configOptions": [
            {"id": "m", "category": "model", "currentValue": "a", "options": [{"value": "a"}, {"value": "b"}]}
        ],
    }
    await bed.turn()
    handle = await bed.dispatch(keep_on_disconnect=True, mode="plan", model="b", permissions={"default": "allow"})
    agent = await bed.agent()
    frame = await agent.prompt(2)
    assert agent.all("session/set_mode")[0]["params"]["modeId"] == "plan"
    assert agent.all("session/set_config_option")[0]["params"] == {
        "sessionId": "agent-session",
        "configId": "m",
        "value": "b",
    }
    agent.ask(3)
    assert (await agent.answered(3))["result"]["outcome"]["optionId"] == "yes"
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["start"] == "hit"
    unknown = await bed.dispatch(keep_on_disconnect=True, mode="yolo")
    result = await unknown.result()
    assert (result["outcome"], result["error"]["code"]) == ("failed", "invalid_request")


async def test_expiring_secrets_are_not_reused(bed: Bed) -> None:
    handle = await bed.dispatch(
        keep_on_disconnect=True, secrets={"KEY": "secret-value"}, secrets_expire_at="2026-01-01T00:01:30Z"
    )
    agent = await bed.agent()
    await agent.finish()
    await handle.result()
    await asyncio.sleep(40)
    assert (await bed.turn(agents=2))["reason"] == "credentials_expiring"


async def test_nobody_reads_so_nothing_is_kept(bed: Bed) -> None:
    handle = await bed.dispatch()
    agent = await bed.agent()
    frame = await agent.prompt()
    await asyncio.sleep(11)
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)
    assert not bed.provider.alive
    assert (await handle.result())["outcome"] == "completed"
    assert (await bed.turn(agents=2))["reason"] == "no_reader"


async def test_a_reader_or_one_just_gone_keeps_it(bed: Bed) -> None:
    handle = await bed.dispatch()
    reader = handle.reader()
    agent = await bed.agent()
    frame = await agent.prompt()
    await asyncio.sleep(100)
    reader.close()
    await asyncio.sleep(5)
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)
    assert bed.provider.alive
    follower = await bed.sessions.follow(CALLER, "s", None, True)
    second = await bed.dispatch(prompt="two")
    frame = await agent.prompt(2)
    await asyncio.sleep(100)
    agent.say("ok")
    agent.answer(frame)
    assert (await second.result())["start"] == "hit"
    assert bed.provider.alive
    follower.close()


@pytest.mark.parametrize("how", ["exit", "error", "empty", "self-cancel", "no reason"])
async def test_failures_destroy_the_agent_and_the_next_prompt_runs_cases_a1_l1_l4(bed: Bed, how: str) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    if how == "exit":
        agent.update(sessionUpdate="tool_call", toolCallId="t", title="x", status="in_progress")
        agent.exit(9)
    elif how == "error":
        agent.error(frame["id"], -32603, "model is down")
    elif how == "empty":
        agent.update(sessionUpdate="usage_update", used=1, size=2)
        agent.update(sessionUpdate="agent_thought_chunk", content={"type": "text", "text": "hm"})
        agent.answer(frame)
    elif how == "self-cancel":
        agent.answer(frame, "cancelled")
    else:
        agent.result(frame["id"], {})
    began = asyncio.get_running_loop().time()
    result = await handle.result()
    assert asyncio.get_running_loop().time() - began < 2
    expected = {"exit": "harness_exited", "empty": "empty_turn"}.get(how, "harness_protocol_error")
    assert (result["outcome"], result["error"]["code"]) == ("failed", expected)
    assert result["stop_reason"] is None
    events = await bed.events(handle)
    assert types(events)[-3:] == ["error", "prompt_ended", "done"]
    if how == "exit":
        closings = [e["data"]["status"] for e in events if e["type"] == "tool_call_update"]
        assert closings == ["failed"]
        assert "exit code 9" in result["error"]["message"]
    second = await bed.turn(agents=2)
    assert (second["ok"], second["reason"], second["context_lost"]) == (True, expected, True)


async def test_an_agent_that_exits_while_idle_frees_its_seat_case_l3(bed: Bed) -> None:
    await bed.turn()
    agent = await bed.agent()
    agent.exit(4)
    await asyncio.sleep(0.1)
    assert bed.pool.book.taken == 0
    assert (await bed.turn(agents=2))["reason"] == "agent_exited"


async def test_updates_between_turns_belong_to_nobody_case_e8(bed: Bed) -> None:
    await bed.turn()
    agent = await bed.agent()
    agent.say("an advertisement")
    await asyncio.sleep(1)
    handle = await bed.dispatch(prompt="two", keep_on_disconnect=True)
    frame = await agent.prompt(2)
    agent.send(text_frame("answer"), {"id": frame["id"], "result": {"stopReason": "end_turn"}})
    assert (await handle.result())["text"] == "answer"


async def test_a_banner_before_the_first_prompt_is_no_answer_case_e8(bed: Bed) -> None:
    bed.provider.manners["banner"] = "Welcome! Please upgrade."
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.answer(frame)
    assert (await handle.result())["error"]["code"] == "empty_turn"


async def test_lru_eviction_and_capacity() -> None:
    bed = await Bed.make(settings={"pool": {"max_seats": 2}})
    await bed.turn("a", agents=1)
    await asyncio.sleep(1)
    await bed.turn("b", agents=2)
    await bed.turn("c", agents=3)
    assert {seat.key[1] for seat in bed.pool.book.seats.values()} == {"b", "c"}
    busy = [await bed.dispatch(s, keep_on_disconnect=True) for s in ("b", "c")]
    agents = [await bed.agent(2), await bed.agent(3)]
    frames = [await agent.prompt(2) for agent in agents]
    full = await bed.dispatch("d", keep_on_disconnect=True)
    result = await full.result()
    assert (result["error"]["code"], result["error"]["retryable"]) == ("provider_at_capacity", True)
    assert {seat.key[1] for seat in bed.pool.book.seats.values()} == {"b", "c"}
    for agent, frame, handle in zip(agents, frames, busy, strict=True):
        agent.say("ok")
        agent.answer(frame)
        assert (await handle.result())["start"] == "hit"
    assert (await bed.turn("a", agents=4))["reason"] == "evicted"
    await bed.close()


async def test_the_newcomer_waits_for_the_teardown(bed: Bed) -> None:
    await bed.turn()
    bed.provider.destroy_gate = asyncio.Event()
    handle = await bed.dispatch(keep_on_disconnect=True, env={"A": "1"})
    await asyncio.sleep(1)
    assert len(bed.provider.sandboxes) == 1
    bed.provider.destroy_gate.set()
    agent = await bed.agent(2)
    await agent.finish()
    assert (await handle.result())["ok"] is True


async def test_a_failed_start_leaves_nothing_and_the_next_works(bed: Bed) -> None:
    bed.provider.start_error = RunnerError("harness_start_failed", "no such file")
    handle = await bed.dispatch(keep_on_disconnect=True)
    result = await handle.result()
    assert (result["outcome"], result["error"]["code"]) == ("failed", "harness_start_failed")
    assert bed.pool.book.taken == 0
    bed.provider.start_error = None
    second = await bed.turn()
    assert (second["reason"], "context_lost" in second) == ("harness_start_failed", False)


@pytest.mark.parametrize("method", ["initialize", "session/new"])
async def test_a_start_has_a_deadline_cases_e9_l6(method: str) -> None:
    bed = await Bed.make(settings={"acp": {"start_seconds": 5}})
    bed.provider.manners[method] = False
    handle = await bed.dispatch(keep_on_disconnect=True)
    result = await handle.result()
    assert result["error"]["code"] == "harness_unresponsive"
    assert bed.provider.alive == set()
    bed.provider.manners.clear()
    assert (await bed.turn(agents=2))["ok"] is True
    await bed.close()


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ({"total_seconds": 5}, "limit_total"),
        ({"idle_seconds": 5, "first_update_seconds": None}, "limit_idle"),
        ({"first_update_seconds": 5}, "limit_first_update"),
    ],
)
async def test_limits_end_the_turn_cases_i1_i3_i7(bed: Bed, limit: dict, code: str) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True, limits=limit)
    await (await bed.agent()).prompt()
    began = asyncio.get_running_loop().time()
    result = await handle.result()
    assert asyncio.get_running_loop().time() - began == pytest.approx(5, abs=0.1)
    assert (result["outcome"], result["error"]["code"]) == ("failed", code)
    assert (await bed.turn(agents=2))["ok"] is True


async def test_a_tool_call_limit_names_the_tool_case_i1(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True, limits={"tool_call_seconds": 5})
    agent = await bed.agent()
    await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="make all", status="in_progress")
    result = await handle.result()
    assert result["error"]["code"] == "limit_tool_call"
    assert "make all" in result["error"]["message"]


async def test_unknown_notifications_are_life_case_e10(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True, limits={"idle_seconds": 10, "first_update_seconds": None})
    agent = await bed.agent()
    frame = await agent.prompt()
    for _ in range(60):
        agent.send({"method": "_vendor/working", "params": {}})
        await asyncio.sleep(9)
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["ok"] is True


async def test_steady_progress_outlives_every_default_case_i3(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    for _ in range(200):
        agent.say("x")
        await asyncio.sleep(240)
    agent.answer(frame)
    assert (await handle.result())["ok"] is True


async def test_the_total_limit_counts_while_the_agent_starts(bed: Bed) -> None:
    bed.provider.start_gate = asyncio.Event()
    handle = await bed.dispatch(keep_on_disconnect=True, limits={"total_seconds": 5})
    began = asyncio.get_running_loop().time()
    result = await handle.result()
    assert asyncio.get_running_loop().time() - began == pytest.approx(5, abs=0.1)
    assert (result["outcome"], result["error"]["code"]) == ("failed", "limit_total")
    assert bed.pool.book.taken == 0
    bed.provider.start_gate = None
    assert (await bed.turn())["ok"] is True


async def test_what_an_agent_says_about_itself_is_no_first_update(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True, limits={"first_update_seconds": 5})
    agent = await bed.agent()
    await agent.prompt()
    agent.update(sessionUpdate="available_commands_update", availableCommands=[])
    result = await handle.result()
    assert result["error"]["code"] == "limit_first_update"
    assert result["timings"]["first_update_ms"] is None
