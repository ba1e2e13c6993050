"""Several replicas, one store: exactly one of them has a session, and what a dead one left is ended once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session.owners import Elsewhere
from tests.session.bed import CALLER, Bed, types
from tests.session.reading import cursor
from tests.session.several import LEASE_SECONDS, Several

pytestmark = pytest.mark.virtual_time


async def running(bed: Bed, prompt: str = "hello", agents: int = 1, **fields: Any) -> tuple[Any, Any, dict[str, Any]]:
    handle = await bed.dispatch(prompt=prompt, keep_on_disconnect=True, **fields)
    agent = await bed.agent(agents)
    return handle, agent, await agent.prompt()


def dismissed(bed: Bed) -> None:
    """Its warm seat is gone, and so its lease."""
    live = bed.pool.live(("p", "s"))
    assert live is not None
    bed.pool.dismiss(live, "test")


def outcomes(events: list[dict[str, Any]]) -> list[str]:
    return [event["data"]["outcome"] for event in events if event["type"] == "done"]


def records(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without frames: what is read back later has none."""
    return [event for event in events if event["type"] not in ("message_delta", "thought_delta")]


def assert_ordered(events: list[dict[str, Any]]) -> None:
    cursors = [cursor(event) for event in events]
    assert cursors == sorted(set(cursors)), "cursors grow and are never used again"


async def test_two_sends_at_two_replicas_admit_exactly_one_case_b2(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    handles = await asyncio.gather(one.dispatch(prompt="x"), two.dispatch(prompt="y"))
    refused = [handle for handle in handles if handle.refused is not None]
    assert [handle.refused and handle.refused.code for handle in refused] == ["session_turn_in_use"]
    winner = one if handles[0].refused is None else two
    loser = two if winner is one else one
    agent = await winner.agent()
    await agent.finish()
    admitted = next(handle for handle in handles if handle.refused is None)
    assert (await admitted.result())["ok"]
    assert loser.provider.sandboxes == [], "a refused turn starts nothing"
    assert outcomes(await winner.history()) == ["completed"]


async def test_a_session_moves_on_when_nobody_holds_it(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    first = await one.dispatch(prompt="x")
    await (await one.agent()).finish()
    await first.result()
    dismissed(one)
    await asyncio.sleep(1)
    assert (await two.turn())["ok"]
    events = await two.history()
    assert outcomes(events) == ["completed", "completed"]
    assert_ordered(events)
    assert records(await one.history()) == records(events), "what the first remembers is not trusted any more"
    assert (await one.sessions.view(CALLER, "s"))["last_turn"]["turn_id"] == events[-2]["turn_id"]


async def test_the_turn_of_a_dead_owner_is_lost_once_and_the_session_goes_on_case_m1_m3(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    _, agent, _ = await running(one)
    agent.say("half an ans")
    await asyncio.sleep(1)
    seen = await one.history()
    await several.kill("a")
    started = asyncio.get_running_loop().time()
    result = await two.turn(prompt="go on")
    assert asyncio.get_running_loop().time() - started < 5
    assert (result["ok"], result["start"]) == (True, "cold")
    events = await two.history()
    assert outcomes(events) == ["lost", "completed"]
    assert all(cursor(event) > cursor(seen[-1]) for event in events[len(seen) :])
    assert_ordered(events)


async def test_a_death_is_noticed_without_any_request_case_m3(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    await running(one)
    await several.kill("a")
    await asyncio.sleep(3)
    assert (await two.sessions.view(CALLER, "s"))["last_turn"]["outcome"] == "lost"
    assert outcomes(await two.history()) == ["lost"]


async def test_an_unproven_death_is_waited_for_until_the_lease_ran_out(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    await running(one)
    await several.kill("a", proven=False)
    handle = await two.dispatch(prompt="too early")
    assert handle.refused is not None
    await asyncio.sleep(LEASE_SECONDS + 1)
    assert (await two.turn(prompt="go on"))["ok"]
    events = await two.history()
    assert outcomes(events) == ["lost", "completed"]
    assert_ordered(events)


async def test_a_turn_that_nobody_holds_is_ended_by_the_sweep_case_m9(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b", records={"lost_after_seconds": 60})
    await running(one)
    await several.kill("a", proven=False)
    owners = two.replica.services.owners
    for _ in range(20):
        await owners.sweep_lost()
        await asyncio.sleep(5)
    assert outcomes(await two.history()) == ["lost"]


async def test_a_frozen_owner_that_comes_back_counts_for_nothing(several: Several) -> None:
    """SIGSTOP past the lease, and back: fenced."""
    one, two = await several.replica("a"), await several.replica("b")
    _, agent, frame = await running(one)
    several.sides["a"].open.clear()
    await asyncio.sleep(LEASE_SECONDS + 1)
    assert (await two.turn(prompt="mine now"))["ok"]
    agent.say("from the grave")
    agent.answer(frame)
    several.sides["a"].open.set()
    await asyncio.sleep(30)
    events = await two.history()
    assert outcomes(events) == ["lost", "completed"]
    assert "from the grave" not in str(events)
    assert one.pool.live(("p", "s")) is None
    assert records(await one.history()) == records(events)


async def test_the_same_prompt_at_two_replicas_runs_once_case_b5(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    first = await one.dispatch(prompt="x", prompt_id="same", keep_on_disconnect=False)
    await (await one.agent()).finish()
    result = await first.result()
    dismissed(one)
    await asyncio.sleep(1)
    again = await two.dispatch(prompt="x", prompt_id="same")
    assert await again.result() == result
    assert two.provider.sandboxes == []


async def test_a_prompt_that_ran_elsewhere_between_look_up_and_beat_is_attached_to(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    several.sides["b"].open.clear()
    late = asyncio.create_task(two.dispatch(prompt="x", prompt_id="same"))
    await asyncio.sleep(0.1)
    first = await one.dispatch(prompt="x", prompt_id="same")
    await (await one.agent()).finish()
    result = await first.result()
    dismissed(one)
    await asyncio.sleep(1)
    several.sides["b"].open.set()
    assert await (await late).result() == result
    assert two.provider.sandboxes == []


async def test_an_unreachable_plane_admits_unfenced_and_the_turn_counts_when_it_is_granted(several: Several) -> None:
    one = await several.replica("a", leases={"beat_timeout_seconds": 1})
    several.sides["a"].open.clear()
    handle, agent, frame = await running(one)
    several.sides["a"].open.set()
    await asyncio.sleep(5)
    holder = await several.plane.look("p", "s")
    assert holder is not None
    assert holder.alive == handle.turn_id
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["ok"]
    assert outcomes(await one.history()) == ["completed"]


async def test_an_unfenced_turn_does_not_overrun_an_open_one(several: Several) -> None:
    one, two = await several.replica("a", leases={"beat_timeout_seconds": 1}), await several.replica("b")
    taken, agent, frame = await running(two)
    several.sides["a"].open.clear()
    handle = await one.dispatch(prompt="y")
    assert handle.refused is not None, "an open turn of another replica is not overrun"
    agent.answer(frame)
    await taken.result()


async def test_a_closed_runner_refuses_while_the_plane_is_away(several: Several) -> None:
    one = await several.replica("a", leases={"beat_timeout_seconds": 1, "on_unreachable": "closed"})
    several.sides["a"].open.clear()
    with pytest.raises(RunnerError) as caught:
        await one.dispatch(prompt="x")
    assert caught.value.code == "plane_unavailable"
    several.sides["a"].open.set()
    assert (await one.turn())["ok"]


async def test_a_stale_replica_asks_nothing(several: Several) -> None:
    """The question of a turn that another replica ended is not stored, and stops the turn as superseded."""
    one, two = await several.replica("a"), await several.replica("b")
    _, agent, _ = await running(one)
    turn = (await several.store.open_turns())[0]
    await several.plane.release_replica("a")
    assert await two.replica.services.owners.close_lost(turn)
    agent.ask(1, "t1")
    await asyncio.sleep(1)
    assert await several.store.interactions("p") == []
    await asyncio.sleep(20)
    assert one.sessions._runs == {}


async def test_a_stale_replica_is_told_by_the_store(several: Several) -> None:
    """Its records of an ended turn are set aside, and its turn stops as superseded."""
    one, two = await several.replica("a"), await several.replica("b")
    _, agent, _ = await running(one)
    turn = (await several.store.open_turns())[0]
    await several.plane.release_replica("a")
    assert await two.replica.services.owners.close_lost(turn)
    agent.say("late")
    agent.update(sessionUpdate="plan", entries=[])
    await asyncio.sleep(20)
    assert types(await two.history()).count("done") == 1
    assert one.sessions._runs == {}
    assert [row.record.turn_id for _, row in await several.store.quarantined("p", 10)][:1] == [turn.turn_id]


async def test_a_lost_turn_whose_ending_failed_once_is_ended_by_the_next_try_case_m3(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    await running(one)
    await several.kill("a")
    several.store.failing["end"] = 1
    await asyncio.sleep(10)
    assert several.store.failing["end"] == 0, "it was tried"
    assert outcomes(await two.history()) == ["lost"]
    assert (await two.turn())["ok"] is True


async def test_a_single_replica_rides_an_outage_out(several: Several) -> None:
    """Nobody else could take the session: its turn goes on without a lease, and is fenced again afterwards."""
    one = await several.replica("a")
    handle, agent, frame = await running(one)
    await asyncio.sleep(3)
    several.sides["a"].open.clear()
    await asyncio.sleep(5 * LEASE_SECONDS)
    several.sides["a"].open.set()
    await asyncio.sleep(10)
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    assert outcomes(await one.history()) == ["completed"]


async def test_with_rivals_a_lapsed_lease_ends_its_turn(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    handle, agent, _ = await running(one)
    await asyncio.sleep(3)
    several.sides["a"].open.clear()
    await asyncio.sleep(LEASE_SECONDS + 1)
    await agent.heard("session/cancel")
    assert (await two.turn(prompt="mine now"))["ok"]
    several.sides["a"].open.set()
    assert (await handle.result())["outcome"] in ("failed", "lost")
    assert outcomes(await two.history()) == ["lost", "completed"]


async def test_one_prompt_at_two_replicas_at_once_is_never_said_not_to_be_sent_case_b5(several: Several) -> None:
    """Who loses says that another replica has it, so that the client asks again; then it is attached to."""
    one, two = await several.replica("a"), await several.replica("b")
    sent = [bed.dispatch(prompt="x", prompt_id="same", keep_on_disconnect=True) for bed in (one, two)]
    handles: list[Any] = await asyncio.gather(*sent, return_exceptions=True)
    [lost] = [handle for handle in handles if isinstance(handle, RunnerError)]
    assert (lost.code, lost.retryable) == ("owned_elsewhere", True)
    winner = one if handles[1] is lost else two
    await (await winner.agent()).finish()
    loser = two if winner is one else one
    result = await next(handle for handle in handles if handle is not lost).result()
    again = await loser.dispatch(prompt="x", prompt_id="same")
    assert await again.result() == result


async def test_an_owner_is_found_where_it_was_last_while_the_plane_is_away(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    _, agent, frame = await running(one)
    owners = two.replica.services.owners
    await asyncio.sleep(2)
    plane: Any = several.sides["b"]

    async def away(*_: Any) -> Any:
        raise RunnerError("plane_unavailable", "away")

    plane.look = plane.replicas = away
    assert await owners.elsewhere("p", "s") == Elsewhere("a", "http://a")
    assert not await owners.reachable()
    assert (await two.sessions.ready())["leases"] is False
    assert await owners.elsewhere("p", "other") is None
    agent.say("ok")
    agent.answer(frame)


def forget(several: Several) -> None:
    """The plane comes back empty, as a Redis that was killed does."""
    several.plane._leases.clear()
    several.plane._replicas.clear()


async def test_a_plane_that_forgot_everything_gives_no_running_turn_away_case_m8(several: Several) -> None:
    """Twice, minutes apart: what was waited for after the first time does not count after the second."""
    one, two = await several.replica("a"), await several.replica("b")
    handle, agent, frame = await running(one)
    # A running tool call: no limit ends the turn meanwhile.
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="t", status="in_progress")
    for _ in range(2):
        await asyncio.sleep(302)
        forget(several)
        refused = await two.dispatch(prompt="mine")
        assert refused.refused is not None
        assert refused.refused.code == "session_turn_in_use"
        assert several.plane.lease("p", "s").owner is None, "a refusal changes nothing"
    await asyncio.sleep(10)
    assert several.plane.lease("p", "s").alive == handle.turn_id
    assert two.replica.services.owners._forgotten == {}
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    assert outcomes(await two.history()) == ["completed"]
    assert two.provider.sandboxes == []


async def test_a_dead_owner_that_the_plane_forgot_is_taken_over_after_one_lease_time_case_m3(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    await running(one)
    await several.kill("a", proven=False)
    forget(several)
    for _ in range(2):
        early = await two.dispatch(prompt="too early")
        assert early.refused is not None
        await asyncio.sleep(LEASE_SECONDS / 2 + 0.1)
    assert (await two.turn(prompt="go on"))["ok"]
    assert two.replica.services.owners._forgotten == {}
    events = await two.history()
    assert outcomes(events) == ["lost", "completed"]
    assert_ordered(events)


async def test_silence_while_nobody_could_renew_says_nothing(several: Several) -> None:
    """The plane forgets, then is away for longer than a lease, then is back: its owner has a lease time again."""
    one, two = await several.replica("a"), await several.replica("b")
    await running(one)
    await several.kill("a", proven=False)
    forget(several)
    turn = (await several.store.open_turns())[0]
    owners = two.replica.services.owners
    assert not await owners.close_lost(turn)
    assert owners.forgotten(turn)
    several.sides["b"].away = True
    await asyncio.sleep(LEASE_SECONDS + 5)
    several.sides["b"].away = False
    assert not await owners.close_lost(turn), "not yet"
    assert await owners.close_lost(turn, gone=True)
