"""A new process goes on with the agent session of an earlier one (DESIGN 3.5, cases D3, G13, I6, M6, M7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.rules.transcript import CLOSING, OPENING
from tests.session.bed import CALLER, Bed, types
from tests.session.resuming import LOADS, first_turn, lose_seat, next_turn, notices, prompt_texts

pytestmark = pytest.mark.virtual_time

MODES = {"currentModeId": "plan", "availableModes": [{"id": "plan", "name": "Plan"}, {"id": "do", "name": "Do"}]}


@pytest.fixture
async def loading() -> AsyncIterator[Bed]:
    """A replica whose agents load."""
    made = await Bed.make()
    made.provider.manners.update(LOADS)
    yield made
    await made.close()
    assert made.provider.alive == set()


def stored_agent(bed: Bed) -> dict[str, Any]:
    session = bed.sessions._registry.known(("p", "s"))
    assert session is not None
    return dict(session.agent_state["agent"])


async def test_a_new_process_loads_the_agent_session_case_g13(loading: Bed) -> None:
    """Nothing of its replay is recorded or shown, and the prompt is sent as it is."""
    loading.provider.manners["session/load"] = {"replay": 500, "late": 3}
    await first_turn(loading)
    await lose_seat(loading)
    result, agent = await next_turn(loading)
    assert (result["ok"], result["start"], result["reason"]) == (True, "resumed", "expired")
    assert "context_lost" not in result
    assert result["text"] == "the next answer"
    load = (await agent.heard("session/load"))["params"]
    assert load == {"sessionId": "agent-session", "cwd": "/w/s", "mcpServers": []}
    assert agent.all("session/new") == []
    assert prompt_texts(agent) == ["next"]
    events = await loading.history()
    assert notices(events) == []
    assert [event["data"]["text"] for event in events if event["type"] == "message"] == [
        "the first answer",
        "the next answer",
    ]
    environments = [event["data"] for event in events if event["type"] == "environment"]
    assert [data["start"] for data in environments] == ["cold", "cold", "cold", "resumed"]
    seat = loading.sessions.pool(CALLER)["items"][0]
    assert (seat["start"], seat["reason"]) == ("resumed", "expired")


async def test_a_warm_agent_is_never_loaded_case_d3(loading: Bed) -> None:
    await first_turn(loading)
    for nth in range(2, 22):
        assert (await loading.turn(nth=nth))["start"] == "hit"
    agent = await loading.agent()
    assert agent.all("session/load") == []
    assert len(loading.provider.sandboxes) == 1


async def test_the_stored_id_is_the_agents_own_case_m6(loading: Bed) -> None:
    await first_turn(loading)
    known = stored_agent(loading)
    assert known["agent_session_id"] == "agent-session"
    assert known["place"]["harness"] == "demo"
    assert (known["place"]["workspace"], known["place"]["home"]) == ("/w", "home-1")
    row = await loading.store.session("p", "s")
    assert row.agent_state["agent"] == known


@pytest.mark.parametrize("way", ["refused", "empty", "silent", "exit", "not offered"])
async def test_a_load_that_fails_costs_the_memory_and_not_the_turn_case_m6(loading: Bed, way: str) -> None:
    """The next best thing: a new agent session that is told of the conversation."""
    manners: dict[str, Any] = {
        "refused": {"error": "no such session"},
        "empty": {"answer": {}},
        "silent": {"silent": True},
        "exit": {"leaves": True},
        "not offered": {},
    }
    await first_turn(loading)
    await lose_seat(loading)
    loading.provider.manners["session/load"] = manners[way]
    if way == "not offered":
        loading.provider.manners["capabilities"] = {"loadSession": False}
    processes = 2 if way in ("refused", "not offered") else 3
    result, agent = await next_turn(loading, processes)
    assert (result["ok"], result["start"], result["context_lost"]) == (True, "cold", True)
    assert result["text"] == "the next answer"
    told, prompt = prompt_texts(agent)
    assert told.startswith(OPENING)
    assert "the first question" in told
    assert "the first answer" in told
    assert told.endswith(CLOSING)
    assert prompt == "next", "the user's own words are a block of their own"
    shown = [data["kind"] for data in notices(await loading.history())]
    assert shown == (["context_lost"] if way == "not offered" else ["resume_failed", "context_lost"])
    said = [event["data"]["content"] for event in await loading.history() if event["type"] == "user_message"]
    assert [blocks[0]["text"] for blocks in said] == ["the first question", "next"]
    assert loading.provider.alive == {loading.sandbox(processes).spec.seat_id}


async def test_an_agent_session_of_another_home_is_not_tried_case_m6(loading: Bed) -> None:
    await first_turn(loading)
    await lose_seat(loading)
    loading.provider.home = "home-2"
    result, agent = await next_turn(loading)
    assert (result["start"], result["context_lost"]) == ("cold", True)
    assert agent.all("session/load") == []
    assert notices(await loading.history())[0]["reason"] == "home_lost"
    await lose_seat(loading)
    result, agent = await next_turn(loading, 3)
    assert result["start"] == "resumed", "the new one was made in the new home"


async def test_another_harness_is_told(loading: Bed) -> None:
    await loading.close()
    made = await Bed.make(settings={"harness": {"other": {"command": ["true"], "resume": "load"}}})
    made.provider.manners.update(LOADS)
    await first_turn(made)
    result, agent = await next_turn(made, harness="other")
    assert (result["start"], result["context_lost"]) == ("cold", True)
    assert agent.all("session/load") == []
    assert "the first answer" in prompt_texts(agent)[0]
    assert notices(await made.history())[0]["reason"] == "changed:harness"
    await made.close()


@pytest.mark.parametrize(
    ("proven", "capabilities", "method"),
    [
        ("resume", {"loadSession": True, "sessionCapabilities": {"resume": {}}}, "session/resume"),
        ("resume", {"loadSession": True}, "session/load"),
        ("load", {"loadSession": True, "sessionCapabilities": {"resume": {}}}, "session/load"),
        ("none", {"loadSession": True, "sessionCapabilities": {"resume": {}}}, None),
    ],
)
async def test_what_a_harness_proved_decides(proven: str, capabilities: dict[str, Any], method: str | None) -> None:
    """Case M6: measured, not trusted. A resume that replays all the same is dropped too (case G13)."""
    made = await Bed.make(settings={"harness": {"mine": {"command": ["true"], "resume": proven}}})
    made.provider.manners.update(LOADS, capabilities=capabilities)
    made.provider.manners["session/resume"] = {"replay": 3, "late": 1}
    handle = await made.dispatch(prompt="the first question", keep_on_disconnect=True, harness="mine")
    await (await made.agent()).finish()
    await handle.result()
    await lose_seat(made)
    result, agent = await next_turn(made)
    asked = [frame["method"] for frame in agent.frames if frame.get("method", "").startswith("session/")]
    assert asked == ([method] if method else ["session/new"]) + ["session/prompt"]
    assert (result["start"], result["text"]) == ("resumed" if method else "cold", "the next answer")
    await made.close()


async def test_a_bad_load_does_not_loop_case_i6(loading: Bed) -> None:
    """Two failures in a row, and the session's later starts no longer try."""
    loading.provider.manners["session/load"] = {"error": "broken"}
    await first_turn(loading)
    for agents in (2, 3, 4, 5):
        await lose_seat(loading)
        result, agent = await next_turn(loading, agents)
        assert (result["ok"], result["start"]) == (True, "cold")
        assert len(agent.all("session/load")) == (1 if agents < 4 else 0)
    reasons = [data["reason"] for data in notices(await loading.history()) if data["kind"] == "context_lost"]
    assert reasons == ["resume_failed", "resume_failed", "failed_before", "failed_before"]


async def test_a_first_turn_that_nobody_kept_says_nothing_about_the_harness_case_i6(loading: Bed) -> None:
    """A model that is down fails the first turns; each refused load that follows has nothing to load."""
    loading.provider.manners["session/load"] = {"error": "no such conversation"}
    for agents in (1, 2, 3, 4):
        handle = await loading.dispatch(prompt="one", keep_on_disconnect=True)
        agent = await loading.agent(agents)
        agent.error((await agent.prompt())["id"], -32603)
        assert (await handle.result())["outcome"] == "failed"
        assert len(agent.all("session/load")) == (agents > 1)
    assert stored_agent(loading)["failures"] == 0


async def test_a_load_that_works_again_is_trusted_again_case_i6(loading: Bed) -> None:
    await first_turn(loading)
    loading.provider.manners["session/load"] = {"error": "broken"}
    await lose_seat(loading)
    await next_turn(loading, 2)
    assert stored_agent(loading)["failures"] == 1
    loading.provider.manners["session/load"] = {"replay": 1}
    await lose_seat(loading)
    assert (await next_turn(loading, 3))[0]["start"] == "resumed"
    assert stored_agent(loading)["failures"] == 0


async def test_a_resumed_agent_that_says_nothing_is_replaced_once_case_m7(loading: Bed) -> None:
    """After 30 s, without a second user message; the turn is one turn with one ending."""
    await first_turn(loading)
    await lose_seat(loading)
    handle = await loading.dispatch(prompt="next", keep_on_disconnect=True)
    silent = await loading.agent(2)
    await silent.prompt()
    began = asyncio.get_running_loop().time()
    fresh = await loading.agent(3)
    assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=0.5)
    await fresh.finish(text="here I am")
    result = await handle.result()
    assert (result["ok"], result["start"], result["reason"]) == (True, "cold", "resume_silent")
    assert (result["text"], result["context_lost"]) == ("here I am", True)
    told, prompt = prompt_texts(fresh)
    assert "the first answer" in told
    assert "next" not in told, "this turn's own prompt is no past"
    assert prompt == "next"
    events = [event for event in await loading.history() if event["turn_id"] == handle.turn_id]
    assert types(events).count("user_message") == types(events).count("done") == 1
    assert [data["kind"] for data in notices(events)] == ["resume_failed", "context_lost"]
    environments = [
        (event["data"]["phase"], event["data"]["start"]) for event in events if event["type"] == "environment"
    ]
    assert environments == [("starting", "cold"), ("ready", "resumed"), ("starting", "cold"), ("ready", "cold")]
    assert stored_agent(loading)["failures"] == 1


async def test_the_replacement_is_not_replaced_case_i6(loading: Bed) -> None:
    await first_turn(loading)
    await lose_seat(loading)
    handle = await loading.dispatch(prompt="next", keep_on_disconnect=True)
    result = await handle.result()
    assert (result["outcome"], result["error"]["code"]) == ("failed", "limit_first_update")
    assert len(loading.provider.sandboxes) == 3
    assert result["timings"]["total_ms"] == pytest.approx(150_000, abs=2000), "30 s, then the limit of any turn"


async def test_a_shorter_first_update_limit_stays_shorter_case_m7(loading: Bed) -> None:
    await first_turn(loading)
    await lose_seat(loading)
    handle = await loading.dispatch(prompt="next", keep_on_disconnect=True, limits={"first_update_seconds": 5})
    await (await loading.agent(2)).prompt()
    began = asyncio.get_running_loop().time()
    await (await loading.agent(3)).finish()
    assert asyncio.get_running_loop().time() - began == pytest.approx(5, abs=0.5)
    assert (await handle.result())["ok"]


@pytest.mark.parametrize("sign", ["thought", "tool", "question"])
async def test_a_resumed_agent_that_gave_a_sign_is_not_replaced(loading: Bed, sign: str) -> None:
    """No side effect is repeated: what it did may not be done twice."""
    await first_turn(loading)
    await lose_seat(loading)
    handle = await loading.dispatch(prompt="next", keep_on_disconnect=True, permissions={"default": "allow"})
    agent = await loading.agent(2)
    frame = await agent.prompt()
    if sign == "thought":
        agent.update(sessionUpdate="agent_thought_chunk", content={"type": "text", "text": "hm"})
    elif sign == "tool":
        agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", status="in_progress")
    else:
        agent.ask(1)
    await asyncio.sleep(200)
    assert len(loading.provider.sandboxes) == 2
    agent.say("done")
    agent.answer(frame)
    assert (await handle.result())["start"] == "resumed"


async def test_a_second_turn_of_a_resumed_agent_has_the_usual_limit(loading: Bed) -> None:
    await first_turn(loading)
    await lose_seat(loading)
    await next_turn(loading)
    handle = await loading.dispatch(prompt="third", keep_on_disconnect=True)
    agent = await loading.agent(2)
    frame = await agent.prompt(2)
    await asyncio.sleep(100)
    agent.say("slow")
    agent.answer(frame)
    result = await handle.result()
    assert (result["ok"], result["start"]) == (True, "hit")


@pytest.mark.parametrize("moment", ["load", "silence", "replacement"])
async def test_a_stop_is_obeyed_at_every_moment(loading: Bed, moment: str) -> None:
    """While the session is loaded, while the resumed agent is silent, and while its replacement starts."""
    await first_turn(loading)
    await lose_seat(loading)
    if moment == "load":
        loading.provider.manners["session/load"] = {"silent": True}
    handle = await loading.dispatch(prompt="next", keep_on_disconnect=True)
    agent = await loading.agent(2)
    frame = await agent.heard("session/load" if moment == "load" else "session/prompt")
    if moment == "replacement":
        loading.provider.start_gate = asyncio.Event()
        await asyncio.sleep(31)
    await loading.cancel()
    if moment == "silence":
        await agent.heard("session/cancel")
        agent.answer(frame, "cancelled")
    result = await handle.result()
    assert (result["outcome"], result["stop_reason"]) == ("cancelled", "cancelled")
    loading.provider.start_gate = None
    loading.provider.manners["session/load"] = {"replay": 1}
    again, _ = await next_turn(loading, 3) if moment != "silence" else (await loading.turn(agents=2, nth=2), None)
    assert again["ok"]


async def test_what_was_applied_is_applied_to_a_resumed_agent_too(loading: Bed) -> None:
    """The modes that the answer to the load names, and none where it names none."""
    loading.provider.manners["session/load"] = {"replay": 1, "answer": {"modes": MODES}}
    await first_turn(loading)
    await lose_seat(loading)
    result, agent = await next_turn(loading, mode="do")
    assert result["start"] == "resumed"
    assert [frame["params"]["modeId"] for frame in agent.all("session/set_mode")] == ["do"]
    loading.provider.manners["session/load"] = {"replay": 1}
    await lose_seat(loading)
    result, agent = await next_turn(loading, 3, config_options={"effort": "high"}, model="m")
    assert result["start"] == "resumed"
    assert [frame["params"]["modeId"] for frame in agent.all("session/set_mode")] == ["do"]
    options = [frame["params"] for frame in agent.all("session/set_config_option")]
    assert [(params["configId"], params["value"]) for params in options] == [("model", "m"), ("effort", "high")]


async def test_a_session_without_context_has_nothing_to_load(loading: Bed) -> None:
    """Its first turn failed before its frame was sent."""
    loading.provider.manners["gate:session/new"] = asyncio.Event()
    handle = await loading.dispatch(prompt="one", keep_on_disconnect=True)
    await (await loading.agent()).heard("session/new")
    await loading.cancel()
    assert (await handle.result())["outcome"] == "cancelled"
    del loading.provider.manners["gate:session/new"]
    result, agent = await next_turn(loading)
    assert (result["start"], "context_lost" in result) == ("cold", False)
    assert prompt_texts(agent) == ["next"]


async def test_a_failed_turn_keeps_the_home_and_the_next_one_loads(loading: Bed) -> None:
    """DESIGN 3.4: the agent's processes are killed; what they kept on the disk stays."""
    handle = await loading.dispatch(prompt="one", keep_on_disconnect=True)
    agent = await loading.agent()
    frame = await agent.prompt()
    agent.error(frame["id"], -32603)
    assert (await handle.result())["outcome"] == "failed"
    result, agent = await next_turn(loading)
    assert result["start"] == "resumed"
    assert prompt_texts(agent) == ["next"]


@pytest.mark.parametrize("silent", [False, True])
async def test_a_cold_chain_is_resumed_and_its_answer_survives_a_silent_agent_case_m7(
    loading: Bed, silent: bool
) -> None:
    """The seat of a paused chain is lost; its answer starts an agent that remembers, or else one that is told."""
    handle = await loading.dispatch(prompt="clean up", keep_on_disconnect=True)
    agent = await loading.agent()
    await agent.prompt()
    agent.ask(1)
    assert (await handle.result())["outcome"] == "paused"
    await asyncio.sleep(601)
    assert not loading.provider.alive
    [question] = (await loading.sessions.view(CALLER, "s"))["open_interactions"]
    answering = asyncio.create_task(loading.answer(question, decision="allow"))
    resumed = await loading.agent(2)
    await resumed.prompt()
    assert "clean up" not in str(prompt_texts(resumed)), "it remembers"
    agents = 2
    if silent:
        await asyncio.sleep(31)
        agents, resumed = 3, await loading.agent(3)
        frame = await resumed.prompt()
        assert prompt_texts(resumed)[0].startswith(OPENING)
        assert "clean up" in str(prompt_texts(resumed)[1:])
    else:
        frame = await resumed.prompt()
    resumed.ask(9)
    assert (await resumed.answered(9))["result"]["outcome"]["optionId"] == "yes"
    assert (await answering).status in (200, 202)
    resumed.say("cleaned")
    resumed.answer(frame)
    await asyncio.sleep(1)
    view = await loading.sessions.view(CALLER, "s")
    assert (view["last_turn"]["outcome"], view["open_interactions"]) == ("completed", [])
    assert len(loading.provider.sandboxes) == agents
    rows = await loading.store.interactions("p", "s")
    assert [row.status for row in rows] == ["consumed"]
    starts = [event["data"]["start"] for event in await loading.history() if event["type"] == "environment"]
    assert starts[-1] == ("cold" if silent else "resumed")


@pytest.mark.parametrize("when", ["idle", "running"])
async def test_a_killed_session_starts_cold(loading: Bed, when: str) -> None:
    """Kill is for an agent that went wrong: nobody goes on with what it had become (DESIGN 3.7)."""
    await first_turn(loading)
    handle = await loading.dispatch(keep_on_disconnect=True) if when == "running" else None
    if handle is not None:
        await loading.provider.sandboxes[0].agent.prompt(2)
    await loading.sessions.kill(CALLER, "s")
    assert handle is None or (await handle.result())["outcome"] == "cancelled"
    row = await loading.store.session("p", "s")
    assert row is not None
    assert row.agent_state["agent"] is None
    result, agent = await next_turn(loading)
    assert (result["start"], result["reason"], result["context_lost"]) == ("cold", "kill", True)
    assert agent.all("session/load") == []
