"""A store or plane that fails in the worst moment: nothing is held for ever, nothing ends twice (DESIGN 3.1, 3.9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session.reconcile import close_session
from tests.session.bed import CALLER, Bed, types
from tests.session.gates import Gate
from tests.session.several import LEASE_SECONDS, Several

pytestmark = pytest.mark.virtual_time


async def running(bed: Bed, nth: int = 1) -> tuple[Any, Any, dict[str, Any]]:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    return handle, agent, await agent.prompt(nth)


async def stored(several: Several, handle: Any) -> str | None:
    """The ending that the store has."""
    row = await several.store.turn("p", "s", handle.turn_id)
    assert row is not None
    return row.outcome


async def test_a_seat_whose_lease_lapses_under_a_dispatch_goes(several: Several) -> None:
    """Else this replica would answer for a session that another one has: no Stop would reach it."""
    a = await several.replica("a", leases={"on_unreachable": "closed"})
    b = await several.replica("b")
    await asyncio.sleep(3)
    await a.turn()
    several.sides["a"].open.clear()
    await asyncio.sleep(LEASE_SECONDS - 1)
    with pytest.raises(RunnerError) as caught:
        await a.dispatch(prompt="two", keep_on_disconnect=True)
    assert caught.value.code == "plane_unavailable"
    several.sides["a"].open.set()
    handle, agent, frame = await running(b)
    assert a.pool.live(("p", "s")) is None
    reply = await a.cancel()
    assert (reply.status, reply.body["turn_id"]) == (202, handle.turn_id)
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")


@pytest.mark.parametrize("how", ["window", "exit", "paused"])
async def test_an_ending_that_is_owed_keeps_the_lease_whatever_becomes_of_the_seat(several: Several, how: str) -> None:
    """Whoever took the session now would end the turn again, as lost."""
    a, _ = await several.replica("a"), await several.replica("b")
    handle, agent, frame = await running(a)
    several.store.broken["end"] = RunnerError("store_unavailable", "away")
    several.store.broken["append"] = RunnerError("store_unavailable", "away")
    expected = "paused" if how == "paused" else "completed"
    if how == "paused":
        agent.ask(1, "t1")
    else:
        agent.say("ok")
        agent.answer(frame)
    assert (await handle.result())["outcome"] == expected
    if how == "window":
        await asyncio.sleep(70)
    else:
        agent.exit(1)
        await asyncio.sleep(2)
    holder = await several.plane.look("p", "s")
    assert holder is not None and holder.replica_id == "a"
    several.store.broken.clear()
    await asyncio.sleep(5)
    assert await stored(several, handle) == expected
    await asyncio.sleep(70)
    assert await several.plane.look("p", "s") is None


async def test_an_end_beat_that_waits_survives_any_failure_of_the_store(several: Several) -> None:
    a, b = await several.replica("a"), await several.replica("b")
    handle, agent, _ = await running(a)
    several.store.broken["end"] = ValueError("a bug")
    agent.exit(1)
    assert (await handle.result())["outcome"] == "failed"
    await asyncio.sleep(5)
    several.store.broken.clear()
    await asyncio.sleep(120)
    assert await several.plane.look("p", "s") is None
    assert (await b.turn())["ok"]


async def test_an_answer_that_could_not_be_given_back_can_be_given_again_case_f2(several: Several) -> None:
    """The warm chain was not resumed, and the store went away before the claim was undone."""
    bed = await several.replica("a")
    handle, agent, frame = await running(bed)
    agent.ask(1, "t1")
    assert (await handle.result())["outcome"] == "paused"
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    gate = several.store.gates["admit"] = Gate()
    answering = asyncio.create_task(bed.answer(question, decision="allow", idempotency_key="k"))
    await gate.reached.wait()
    for name in ("admit", "answer_interaction"):
        several.store.broken[name] = RunnerError("store_unavailable", "away")
    del several.store.gates["admit"]
    gate.open()
    with pytest.raises(RunnerError) as caught:
        await answering
    assert caught.value.code == "store_unavailable"
    several.store.broken.clear()
    await asyncio.sleep(30)
    again = asyncio.create_task(bed.answer(question, decision="allow", idempotency_key="k"))
    await asyncio.sleep(1)
    assert [f for f in agent.frames if f.get("id") == 1 and "method" not in f], "the agent still waits"
    agent.say("ok")
    agent.answer(frame)
    assert (await again).status == 200


async def test_a_sweep_forgets_what_it_saw_before_a_pause(several: Several) -> None:
    """The plane forgot the lease twice for a moment, minutes apart: that is no silence of minutes."""
    a, b = await several.replica("a"), await several.replica("b", records={"lost_after_seconds": 60})
    handle, agent, frame = await running(a)
    # A running tool call: no limit ends the turn meanwhile.
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="t", status="in_progress")
    owners = b.replica.services.owners
    await several.plane.take_lease("sweep", "x", 10_000)
    several.plane._leases.clear()
    await owners.sweep_lost()
    await asyncio.sleep(10)
    assert several.plane.lease("p", "s").alive == handle.turn_id
    await asyncio.sleep(302)
    several.plane._leases.clear()
    await owners.sweep_lost()
    assert await stored(several, handle) is None
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"


@pytest.mark.parametrize("how", ["bury", "sweep"])
async def test_a_turn_that_cannot_be_ended_holds_up_no_other_one_case_m9(several: Several, how: str) -> None:
    seconds = 30 if how == "sweep" else 3600
    a, _ = await several.replica("a"), await several.replica("b", records={"lost_after_seconds": seconds})
    for n in range(3):
        await a.dispatch(f"s{n}", keep_on_disconnect=True)
        await (await a.agent(n + 1)).prompt()
    real = several.store.end

    async def end(ending: Any) -> bool:
        if ending.turn.session_id == "s0":
            raise RunnerError("internal", "The store refused a row.")
        return await real(ending)

    several.store.end = end  # type: ignore[method-assign]
    await several.kill("a", proven=how == "bury")
    await asyncio.sleep(120)
    left = {turn.session_id for turn in await several.store.open_turns()}
    assert left == {"s0"}


async def test_an_ending_that_was_written_without_an_answer_is_shown() -> None:
    bed = await Bed.make()
    handle, agent, frame = await running(bed)
    real = bed.store.end
    first: list[int] = []

    async def end(ending: Any) -> bool:
        written = await real(ending)
        if not first:
            first.append(1)
            raise RunnerError("store_unavailable", "no answer")
        return written

    bed.store.end = end
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    assert types(await bed.events(handle)).count("done") == 1
    assert types(await bed.history()).count("done") == 1
    assert await bed.store.quarantined("p", 10) == []
    assert (await bed.turn(nth=2))["ok"]
    await bed.close()


async def test_the_look_for_due_questions_survives_any_failure(several: Several) -> None:
    bed = await several.replica("a")
    _, agent, frame = await running(bed)
    real = bed.sessions._chains.expire

    def expire(session: Any, now_ms: int) -> None:
        raise ValueError("a bug")

    bed.sessions._chains.expire = expire  # type: ignore[method-assign]
    await asyncio.sleep(61)
    bed.sessions._chains.expire = real  # type: ignore[method-assign]
    assert "sessions:expire questions" in bed.replica.services.tasks.names
    agent.answer(frame)


async def test_a_turn_that_was_ended_elsewhere_is_over_whatever_the_store_does(several: Several) -> None:
    """Records that cannot even be set aside do not leave a session that is busy for ever."""
    a = await several.replica("a")
    handle, agent, frame = await running(a)
    [turn] = await several.store.open_turns()
    await close_session(several.store, a.replica.services.clock, ("p", "s"), turn)
    for name in ("quarantine", "turn"):
        several.store.broken[name] = ValueError("a bug")
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "lost"
    several.store.broken.clear()
    assert (await a.turn(agents=2))["ok"]


async def test_the_sweep_survives_any_failure_of_the_plane(several: Several) -> None:
    a = await several.replica("a")

    async def take_lease(*args: Any) -> bool:
        raise ValueError("a bug")

    several.sides["a"].take_lease = take_lease  # type: ignore[attr-defined]
    await asyncio.sleep(6)
    del several.sides["a"].take_lease
    await asyncio.sleep(6)
    assert await several.plane.take_lease("sweep", "b", 1) is False, "it sweeps again"
    assert a.replica.services.tasks.names.count("sessions:sweep") == 1


async def test_a_client_that_goes_away_while_a_lost_turn_is_ended_leaves_no_lease(several: Several) -> None:
    a, b = await several.replica("a"), await several.replica("b")
    handle, _, _ = await running(a)
    await several.kill("a", proven=False)
    await several.plane.release_replica("a")
    gate = Gate()

    async def beat(asked: Any) -> Any:
        answer = await several.plane.beat(asked)
        await gate.passes()
        return answer

    several.sides["b"].beat = beat  # type: ignore[method-assign, assignment]
    client = asyncio.create_task(b.dispatch(prompt_id=handle.prompt_id))
    await gate.reached.wait()
    client.cancel()
    await asyncio.sleep(0)
    gate.open()
    await asyncio.sleep(1)
    assert several.plane.lease("p", "s").alive is None
    assert await stored(several, handle) == "lost"
    assert (await b.turn(prompt="go on"))["ok"]


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("call", ["end", "caught_up", "records"])
async def test_a_lost_turn_that_the_store_does_not_let_end_is_told_as_an_outage(
    several: Several, call: str, proven: bool
) -> None:
    """Nobody's turn runs: to a client that is told so, its message never gets through (cases L2 and M1)."""
    a, b = await several.replica("a"), await several.replica("b")
    await running(a)
    await several.kill("a", proven=False)
    await asyncio.sleep(LEASE_SECONDS + 1)
    several.store.broken[call] = RunnerError("store_unavailable", "away")
    if proven:
        several.dead.add("a")
    with pytest.raises(RunnerError) as caught:
        await b.dispatch(prompt="two", keep_on_disconnect=True)
    assert (caught.value.code, caught.value.retryable) == ("store_unavailable", True)
    several.store.broken.clear()
    assert (await b.turn())["ok"]
