"""Admission: the first heartbeat decides, a refusal leaves nothing, a retry attaches (DESIGN 3.1)."""

from __future__ import annotations

import asyncio

import pytest

from runner.errors import TURN_IN_USE_SENTENCE, RunnerError
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import BeatAnswer, Heartbeat
from runner.sandbox.port import Condition
from tests.session.bed import CALLER, Bed, types
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


class DoublePlane(MemoryLeasePlane):
    """Admits, refuses, raises or never answers, as the test says."""

    def __init__(self) -> None:
        super().__init__(LoopClock(), 20)
        self.beats: list[Heartbeat] = []
        self.manner = "rule"

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        self.beats.append(beat)
        match self.manner:
            case "refuse":
                return BeatAnswer(False, False, "rep_other", 0, 20)
            case "raise":
                raise RunnerError("plane_unavailable", "down")
            case "crash":
                raise ValueError("a bug")
            case "silent":
                await asyncio.Event().wait()
            case "admit":
                return BeatAnswer(True, True, "rep_1", beat.epoch_floor + 1, 20)
        return await super().beat(beat)


async def test_second_prompt_is_refused_and_the_first_untouched_case_b1(bed: Bed) -> None:
    first = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    before = await bed.store.records("p", "s", None, 1000)
    second = await bed.dispatch(prompt="me too", prompt_id="second")
    assert second.refused is not None
    assert second.refused.code == "session_turn_in_use"
    assert second.refused.message == TURN_IN_USE_SENTENCE
    result = await second.result()
    assert (result["ok"], result["turn_id"], result["outcome"]) == (False, None, "failed")
    assert result["error"]["message"] == TURN_IN_USE_SENTENCE
    assert await bed.store.prompt("p", "s", "second") is None, "a refused id was never stored"
    assert await bed.store.records("p", "s", None, 1000) == before
    assert bed.sandbox().story == [f"mark {first.turn_id}"]
    assert len(agent.all("session/prompt")) == 1
    agent.say("ok")
    agent.answer(frame)
    assert (await first.result())["ok"] is True
    third = await bed.dispatch(prompt="me too", prompt_id="second", keep_on_disconnect=True)
    assert third.refused is None, "the same id may be sent again"
    frame = await agent.prompt(2)
    agent.say("ok")
    agent.answer(frame)
    assert (await third.result())["start"] == "hit"


async def test_of_two_at_once_exactly_one_is_admitted(bed: Bed) -> None:
    handles = await asyncio.gather(*(bed.dispatch(prompt=f"p{n}", keep_on_disconnect=True) for n in range(10)))
    assert sum(handle.refused is None for handle in handles) == 1
    agent = await bed.agent()
    await agent.finish()
    assert len(bed.provider.sandboxes) == 1


async def test_a_retry_attaches_case_b5(bed: Bed) -> None:
    first, same = await asyncio.gather(
        bed.dispatch(prompt_id="x", keep_on_disconnect=True), bed.dispatch(prompt_id="x", keep_on_disconnect=True)
    )
    assert first.turn_id == same.turn_id
    agent = await bed.agent()
    frame = await agent.prompt()
    later = await bed.dispatch(prompt_id="x")
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch(prompt="other words", prompt_id="x")
    assert caught.value.code == "prompt_conflict"
    agent.say("ok")
    agent.answer(frame)
    results = [await handle.result() for handle in (first, same, later)]
    assert results[0] == results[1] == results[2]
    stored = await bed.dispatch(prompt_id="x")
    assert await stored.result() == results[0]
    assert len(agent.all("session/prompt")) == 1
    live = types(await bed.events(first))
    assert types(await bed.events(later)) == live
    assert [t for t in live if not t.endswith("_delta")] == types(await bed.events(stored))


async def test_a_refusal_by_the_plane_touches_nothing() -> None:
    plane = DoublePlane()
    bed = await Bed.make(plane=plane)
    plane.manner = "refuse"
    handle = await bed.dispatch()
    assert handle.refused is not None
    assert await bed.store.session("p", "s") is None
    assert bed.provider.sandboxes == []
    with pytest.raises(RunnerError) as caught:
        await bed.state()
    assert caught.value.code == "not_found"
    plane.manner = "rule"
    assert (await bed.turn())["ok"] is True
    await bed.close()


@pytest.mark.parametrize("manner", ["raise", "crash", "silent"])
async def test_an_unreachable_plane_is_told(manner: str) -> None:
    plane = DoublePlane()
    bed = await Bed.make(plane=plane)
    plane.manner = manner
    began = asyncio.get_running_loop().time()
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch()
    assert caught.value.code == "plane_unavailable"
    assert asyncio.get_running_loop().time() - began <= 3
    assert bed.provider.sandboxes == []
    plane.manner = "rule"
    await asyncio.sleep(60)
    assert (await bed.turn())["ok"] is True
    await bed.close()


async def test_a_locally_busy_seat_is_the_backstop() -> None:
    plane = DoublePlane()
    bed = await Bed.make(plane=plane)
    plane.manner = "admit"
    first = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    second = await bed.dispatch(prompt="two")
    assert second.refused is not None
    agent.say("ok")
    agent.answer(frame)
    assert (await first.result())["ok"] is True
    await bed.close()


async def test_a_later_not_current_is_a_cancel_not_a_refusal() -> None:
    plane = DoublePlane()
    bed = await Bed.make(plane=plane)
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    plane.manner = "refuse"
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    result = await handle.result()
    assert (result["outcome"], result["error"]["code"]) == ("failed", "superseded")
    assert bed.sandbox().story[-1] == "destroy", "an unlabelled abort does not park"
    plane.manner = "rule"
    await bed.close()


async def test_beats_survive_an_outage() -> None:
    plane = DoublePlane()
    bed = await Bed.make(plane=plane)
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    plane.manner = "raise"
    await asyncio.sleep(60)
    plane.manner = "rule"
    await asyncio.sleep(10)
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["ok"] is True
    await bed.close()


async def test_a_store_that_fails_admits_nothing(bed: Bed) -> None:
    admit = bed.store.admit

    async def broken(admission):
        raise RunnerError("store_unavailable", "disk full")

    bed.store.admit = broken
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch()
    assert caught.value.code == "store_unavailable"
    bed.store.admit = admit
    result = await bed.turn()
    assert result["ok"] is True
    assert next(event["cursor"] for event in await bed.history()) == "2.1"


async def test_epochs_grow_and_cursors_are_contiguous(bed: Bed) -> None:
    for n in range(1, 4):
        await bed.turn(nth=n)
    cursors = [tuple(map(int, event["cursor"].split("."))) for event in await bed.history()]
    assert cursors == sorted(set(cursors))
    for epoch in (1, 2, 3):
        numbers = [n for e, n in cursors if e == epoch]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_turn_id_is_used_once(bed: Bed) -> None:
    handle = await bed.dispatch(turn_id="mine", keep_on_disconnect=True)
    assert handle.turn_id == "mine"
    agent = await bed.agent()
    await agent.finish()
    await handle.result()
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch(turn_id="mine")
    assert (caught.value.code, caught.value.extra["field"]) == ("invalid_request", "turn_id")
    assert (await bed.turn(nth=2))["start"] == "hit"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"harness": "nope"}, "harness_unknown"),
        ({"sandbox": {"recipe": "nope"}}, "recipe_unknown"),
        ({"env": {"HOME": "/x"}}, "invalid_request"),
        ({"env": {"ACP_RUNNER_CELL": "x"}}, "invalid_request"),
        ({"workspace": {"path": "/missing/at/all"}}, "invalid_request"),
        ({"secrets": {"K": {"ref": "missing"}}}, "invalid_request"),
    ],
)
async def test_what_cannot_work_is_refused_before_anything(bed: Bed, fields: dict, code: str) -> None:
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch(**fields)
    assert caught.value.code == code
    with pytest.raises(RunnerError) as caught:
        await bed.state()
    assert caught.value.code == "not_found"


async def test_the_cap_on_turns() -> None:
    bed = await Bed.make(settings={"server": {"max_turns": 1}})
    handle = await bed.dispatch("one", keep_on_disconnect=True)
    assert bed.sessions.has_capacity() is False
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch("two")
    assert (caught.value.code, caught.value.retryable) == ("runner_at_capacity", True)
    agent = await bed.agent()
    await agent.finish()
    await handle.result()
    await asyncio.sleep(0)
    assert bed.sessions.has_capacity() is True
    assert CALLER.project == "p"
    await bed.close()


async def test_a_provider_without_its_package_is_refused_by_name(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Condition(False, "its package is missing: pip install it", "pip install it")
    monkeypatch.setattr(bed.provider, "condition", lambda: missing)
    with pytest.raises(RunnerError, match="pip install it") as caught:
        await bed.dispatch()
    assert caught.value.code == "invalid_request"
    (told,) = (await bed.sessions.ready())["providers"]
    assert (told["name"], told["available"], told["reason"]) == ("local", False, missing.reason)
