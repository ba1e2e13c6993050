"""Commands for sessions that another replica holds, or nobody: handed over, delivered again, swept (DESIGN 3.7)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.command import CLAIM_MS
from runner.store.port import CommandRow
from runner.wire.models import CancelRequest
from tests.session.bed import CALLER, Bed, types
from tests.session.gates import Gate
from tests.session.several import LEASE_SECONDS, Several

pytestmark = pytest.mark.virtual_time


async def two(several: Several) -> tuple[Bed, Bed]:
    return await several.replica("a"), await several.replica("b")


async def running(bed: Bed, prompt: str = "hello", agents: int = 1, nth: int = 1) -> tuple[Any, Any, dict[str, Any]]:
    handle = await bed.dispatch(prompt=prompt, keep_on_disconnect=True)
    agent = await bed.agent(agents)
    return handle, agent, await agent.prompt(nth)


def rows(several: Several) -> list[CommandRow]:
    return list(several.store._commands._all())


def now() -> float:
    return asyncio.get_running_loop().time()


def deaf(several: Several, replica_id: str) -> None:
    """No push of this replica arrives."""

    async def push(to: str, note: Any) -> bool:
        return False

    several.sides[replica_id].push = push  # type: ignore[attr-defined]


async def test_a_stop_at_the_other_replica_stops_at_once_and_keeps_the_session_warm_case_a13(several: Several) -> None:
    a, b = await two(several)
    handle, agent, frame = await running(a)
    began = now()
    stopping = asyncio.create_task(b.cancel(wait_seconds=20))
    await agent.heard("session/cancel")
    assert now() == began, "pushed, not polled"
    agent.answer(frame, "cancelled")
    reply = await stopping
    assert (reply.status, reply.body["outcome"], reply.body["turn_id"]) == (200, "stopped", handle.turn_id)
    assert now() - began < 0.01, "told, not polled"
    assert (await handle.result())["cancel_settled"] is True
    for bed in (a, b):
        stored = await bed.sessions.command(CALLER, reply.body["command_id"])
        assert (stored["state"], stored["outcome"]) == ("applied", "stopped")
    assert (await a.turn(nth=2))["start"] == "hit"


async def test_a_stop_that_does_not_wait_is_accepted(several: Several) -> None:
    a, b = await two(several)
    handle, agent, frame = await running(a)
    reply = await b.cancel()
    assert (reply.status, reply.body["state"], reply.body["turn_id"]) == (202, "stopping", handle.turn_id)
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"


async def test_two_clients_at_two_replicas_give_one_command(several: Several) -> None:
    a, b = await two(several)
    handle, agent, frame = await running(a)
    replies = await asyncio.gather(a.cancel(), b.cancel(), b.cancel())
    assert len({reply.body["command_id"] for reply in replies}) == 1
    assert {reply.status for reply in replies} == {202}
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    await handle.result()
    await asyncio.sleep(1)
    assert [row.outcome for row in rows(several)] == ["stopped"]
    assert len(agent.all("session/cancel")) == 1


async def test_a_key_is_one_command_at_every_replica(several: Several) -> None:
    a, b = await two(several)
    handle, agent, frame = await running(a)
    one, other = await asyncio.gather(a.cancel(idempotency_key="k"), b.cancel(idempotency_key="k"))
    assert one.body["command_id"] == other.body["command_id"]
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    await handle.result()
    second, agent, frame = await running(a, prompt="two", nth=2)
    again = await b.cancel(idempotency_key="k", wait_seconds=5)
    assert (again.body["command_id"], again.body["outcome"]) == (one.body["command_id"], "stopped")
    agent.say("untouched")
    agent.answer(frame)
    assert (await second.result())["outcome"] == "completed"


async def test_a_lost_push_costs_at_most_one_beat(several: Several) -> None:
    """The owner looks for itself, whoever sweeps, and whether it does."""
    a, b = await two(several)
    assert await several.plane.take_lease("sweep", "a sweeper that hangs", 3600)
    handle, agent, frame = await running(a)
    deaf(several, "b")
    began = now()
    reply = await b.cancel()
    assert reply.status == 202
    assert agent.all("session/cancel") == []
    await agent.heard("session/cancel")
    assert 0 < now() - began <= 5.5
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"
    [row] = rows(several)
    assert (row.claimed_by, row.deliveries, row.outcome) == ("a", 1, "stopped")


async def test_commands_of_a_beats_answer_are_applied_once(several: Several) -> None:
    a, b = await two(several)
    _, agent, frame = await running(a)
    deaf(several, "b")
    reply = await b.cancel()
    for _ in range(3):
        a.sessions.commands.due("p", "s", ({"command_id": reply.body["command_id"]},))
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    await asyncio.sleep(1)
    [row] = rows(several)
    assert (row.deliveries, row.outcome) == (1, "stopped")
    assert len(agent.all("session/cancel")) == 1


async def test_a_mismatch_at_the_other_replica_writes_nothing_case_b9(several: Several) -> None:
    a, b = await two(several)
    handle, agent, frame = await running(a)
    with pytest.raises(RunnerError) as caught:
        await b.cancel(expected_execution_id="turn_other")
    assert (caught.value.code, caught.value.extra["current_execution_id"]) == ("execution_mismatch", handle.turn_id)
    assert rows(several) == []
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    ended = await b.cancel(expected_execution_id=handle.turn_id)
    assert (ended.status, ended.body["outcome"]) == (200, "not_running")
    with pytest.raises(RunnerError) as caught:
        await b.cancel(expected_execution_id="turn_other")
    assert caught.value.code == "execution_mismatch"


async def test_a_turn_elsewhere_that_started_after_the_request_arrived_case_b6(several: Several) -> None:
    a, b = await two(several)
    await a.turn()
    arrived = now()
    await asyncio.sleep(1)
    handle, agent, frame = await running(a, prompt="two", nth=2)
    with pytest.raises(RunnerError) as caught:
        await b.sessions.cancel(CALLER, "s", CancelRequest.model_validate({}), arrived_at=arrived)
    assert caught.value.extra["current_execution_id"] == handle.turn_id
    assert rows(several) == []
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"


async def test_a_slow_plane_makes_no_stop_come_too_early(several: Several) -> None:
    """The turn started just before the Stop; the plane's answer is long on its way."""
    a, b = await two(several)
    handle, agent, frame = await running(a)

    async def look(*key: str) -> Any:
        holder = await several.plane.look(*key)
        await asyncio.sleep(2)
        return holder

    several.sides["b"].look = look  # type: ignore[method-assign, assignment]
    reply = await b.cancel()
    assert (reply.status, reply.body["turn_id"]) == (202, handle.turn_id)
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"


async def test_a_paused_turn_elsewhere_can_be_named(several: Several) -> None:
    a, b = await two(several)
    handle, agent, frame = await running(a)
    agent.ask(1, "t1")
    assert (await handle.result())["outcome"] == "paused"
    stopping = asyncio.create_task(b.cancel(expected_execution_id=handle.turn_id, wait_seconds=20))
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    reply = await stopping
    assert (reply.status, reply.body["outcome"]) == (200, "stopped")
    assert (await agent.answered(1))["result"] == {"outcome": {"outcome": "cancelled"}}
    done = [event["data"]["outcome"] for event in await a.history() if event["type"] == "done"]
    assert done == ["paused", "cancelled"]


async def test_a_stop_reaches_a_turn_that_its_owner_has_not_admitted_yet_case_a12(several: Several) -> None:
    """The seat is parked at the owner; its next turn's first beat is on its way."""
    a, b = await two(several)
    await a.turn()
    several.sides["a"].open.clear()
    dispatching = asyncio.create_task(a.dispatch(prompt="two", keep_on_disconnect=True))
    await asyncio.sleep(0.1)
    reply = await b.cancel()
    assert (reply.status, reply.body["state"]) == (202, "stopping")
    several.sides["a"].open.set()
    handle = await dispatching
    assert (await handle.result())["outcome"] == "cancelled"
    await asyncio.sleep(1)
    [row] = rows(several)
    assert (row.turn_id, row.outcome) == (handle.turn_id, "stopped")


async def test_a_stop_of_a_parked_session_elsewhere_is_not_running(several: Several) -> None:
    a, b = await two(several)
    await a.turn()
    reply = await b.cancel()
    assert (reply.status, reply.body["outcome"]) == (200, "not_running")
    assert (await a.turn(nth=2))["start"] == "hit"


async def test_a_kill_at_the_other_replica(several: Several) -> None:
    a, b = await two(several)
    handle, _, _ = await running(a)
    reply = await b.sessions.kill(CALLER, "s")
    assert (reply.status, reply.body["outcome"]) == (200, "stopped")
    assert (await handle.result())["outcome"] == "cancelled"
    assert a.provider.alive == set()
    assert (await a.turn(agents=2))["reason"] == "kill"
    parked = await b.sessions.kill(CALLER, "s")
    assert (parked.status, parked.body["outcome"], a.provider.alive) == (200, "not_running", set())
    assert [row.kind for row in rows(several)] == ["kill", "kill"]


async def test_nobody_holds_the_session(several: Several) -> None:
    a, b = await two(several)
    first = await a.turn()
    await a.sessions.kill(CALLER, "s")
    await asyncio.sleep(1)
    reply = await b.cancel()
    assert (reply.status, reply.body["outcome"]) == (200, "not_running")
    named = await b.cancel(expected_execution_id=first["turn_id"])
    assert (named.status, named.body["outcome"]) == (200, "not_running")
    assert (await b.turn())["ok"] is True


async def test_a_stop_of_a_turn_whose_owner_is_provably_gone_is_lost(several: Several) -> None:
    a, b = await two(several)
    handle, _, _ = await running(a)
    await several.kill("a")
    deaf(several, "b")
    began = now()
    reply = await b.cancel(wait_seconds=10)
    assert now() - began < 0.5, "it did not wait for a watch round"
    assert (reply.status, reply.body["outcome"], reply.body["turn_id"]) == (200, "lost", handle.turn_id)
    events = await b.history()
    assert [event["data"]["outcome"] for event in events if event["type"] == "done"] == ["lost"]
    assert [(row.state, row.outcome) for row in rows(several)] == [("obsolete", "lost")]
    assert (await b.turn())["ok"] is True


@pytest.mark.parametrize("kind", ["cancel", "kill"])
async def test_a_paused_turn_whose_owner_is_gone_is_stopped_by_another_replica(several: Several, kind: str) -> None:
    a, b = await two(several)
    handle, agent, _ = await running(a)
    agent.ask(1, "t1")
    assert (await handle.result())["outcome"] == "paused"
    await several.kill("a")
    await asyncio.sleep(3)
    reply = await (b.cancel(wait_seconds=10) if kind == "cancel" else b.sessions.kill(CALLER, "s"))
    assert (reply.status, reply.body["outcome"]) == (200, "stopped")
    [row] = rows(several)
    assert (row.turn_id, row.state, row.outcome) == (handle.turn_id, "applied", "stopped")
    assert b.provider.sandboxes == [], "nobody is started in order to be stopped"
    done = [event["data"]["outcome"] for event in await b.history() if event["type"] == "done"]
    assert done == ["paused", "cancelled"]
    assert {row.status for row in await several.store.interactions("p", "s")} == {"cancelled"}
    assert (await b.turn())["ok"] is True


async def test_a_stop_that_was_written_for_a_paused_turn_is_applied_by_whoever_sweeps(several: Several) -> None:
    """Its owner died between the row and the Stop."""
    a, b = await two(several)
    handle, agent, _ = await running(a)
    agent.ask(1, "t1")
    assert (await handle.result())["outcome"] == "paused"
    at = a.replica.services.clock.now_ms()
    await several.store.submit_command(CommandRow("p", "s", "cmd_1", "cancel", "pending", handle.turn_id, at))
    await several.kill("a")
    await asyncio.sleep(30)
    [row] = rows(several)
    assert (row.claimed_by, row.state, row.outcome) == ("b", "applied", "stopped")
    done = [event["data"]["outcome"] for event in await b.history() if event["type"] == "done"]
    assert done == ["paused", "cancelled"]
    assert (await b.turn())["ok"] is True


async def test_an_owner_that_is_silent_keeps_its_stop_until_it_is_swept_case_m9(several: Several) -> None:
    a, b = await two(several)
    handle, _, _ = await running(a)
    await several.kill("a", proven=False)
    deaf(several, "b")
    reply = await b.cancel(wait_seconds=2)
    assert (reply.status, reply.body["state"]) == (202, "stopping")
    [row] = rows(several)
    assert (row.state, row.turn_id) == ("pending", handle.turn_id)
    await asyncio.sleep(LEASE_SECONDS + 150)
    [row] = rows(several)
    assert (row.state, row.outcome) == ("obsolete", "lost")
    assert (await b.turn())["ok"] is True


async def test_a_claim_that_lapsed_is_delivered_again_three_times_case_m9(several: Several) -> None:
    """A replica that claimed and died is no reason to wait; a command that nobody ever applies ends as failed."""
    a, b = await two(several)
    handle, agent, frame = await running(a)
    at = a.replica.services.clock.now_ms()
    lapsing = CommandRow("p", "s", "cmd_1", "cancel", "pending", handle.turn_id, at)
    await several.store.submit_command(lapsing)
    assert await several.store.claim_command("p", "cmd_1", "dead", at, at + CLAIM_MS, 3)
    await b.sessions.commands.sweep()
    await asyncio.sleep(14)
    assert agent.all("session/cancel") == [], "the claim holds"
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"
    [row] = rows(several)
    assert (row.claimed_by, row.deliveries, row.outcome) == ("a", 2, "stopped")


async def test_after_three_deliveries_a_command_has_failed_case_m9(several: Several) -> None:
    a, b = await two(several)
    handle, agent, frame = await running(a)
    at = a.replica.services.clock.now_ms()
    await several.store.submit_command(CommandRow("p", "s", "cmd_1", "cancel", "pending", handle.turn_id, at))
    for n in range(3):
        later = at + n * CLAIM_MS
        assert await several.store.claim_command("p", "cmd_1", "dead", later, later + CLAIM_MS, 3)
    await asyncio.sleep(3 * CLAIM_MS / 1000 - 1)
    assert rows(several)[0].outcome is None
    await asyncio.sleep(7)
    assert (rows(several)[0].state, rows(several)[0].outcome) == ("obsolete", "failed")
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    assert b.provider.sandboxes == []


async def test_a_stop_for_an_older_turn_stops_no_newer_one(several: Several) -> None:
    """Delivered late: the owner was out of reach while the user went on."""
    a, b = await two(several)
    first = await a.turn()
    at = a.replica.services.clock.now_ms()
    second, agent, frame = await running(a, prompt="two", nth=2)
    for n, turn_id in enumerate((first["turn_id"], None)):
        row = CommandRow("p", "s", f"cmd_{n}", "kill" if n else "cancel", "pending", turn_id, at - 1000)
        await several.store.submit_command(row)
        b.sessions.note({"kind": "command", "project": "p", "session_id": "s", "command_id": row.command_id})
        a.sessions.note({"kind": "command", "project": "p", "session_id": "s", "command_id": row.command_id})
    await asyncio.sleep(1)
    assert [(row.state, row.outcome) for row in rows(several)] == [("obsolete", "not_running")] * 2
    assert {row.claimed_by for row in rows(several)} == {"a"}, "who does not hold the session claims nothing"
    agent.say("untouched")
    agent.answer(frame)
    assert (await second.result())["outcome"] == "completed"
    assert (await a.turn(nth=3))["start"] == "hit"


@pytest.mark.parametrize("addressed", [True, False])
async def test_a_kill_for_an_older_turn_takes_no_newer_seat(several: Several, addressed: bool) -> None:
    a, _ = await two(several)
    first = await a.turn()
    at = a.replica.services.clock.now_ms()
    await asyncio.sleep(1)
    second = await a.turn(nth=2)
    turn_id = first["turn_id"] if addressed else None
    await several.store.submit_command(CommandRow("p", "s", "cmd_1", "kill", "pending", turn_id, at))
    a.sessions.note({"kind": "command", "project": "p", "session_id": "s", "command_id": "cmd_1"})
    await asyncio.sleep(1)
    assert [(row.state, row.outcome) for row in rows(several)] == [("obsolete", "not_running")]
    assert (second["start"], (await a.turn(nth=3))["start"]) == ("hit", "hit")


@pytest.mark.parametrize("asker_knows_it", [True, False])
async def test_a_stop_reaches_the_owner_without_the_store(several: Several, asker_knows_it: bool) -> None:
    """The asker may never have seen the session: its lease says who has it."""
    a, b = await two(several)
    handle, agent, frame = await running(a)
    reads = () if asker_knows_it else ("session", "open_turns")
    for name in ("submit_command", "claim_command", "command", "settle_command", *reads):
        several.store.broken[name] = RunnerError("store_unavailable", "The store cannot be used.")
    reply = await b.cancel()
    assert (reply.status, reply.body["turn_id"]) == (202, handle.turn_id)
    await agent.heard("session/cancel")
    several.store.broken.clear()
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"
    assert types(await a.events(handle)).count("done") == 1


async def test_without_the_store_nobody_says_whether_an_idle_session_exists(several: Several) -> None:
    a, b = await two(several)
    await a.turn()
    several.store.broken["session"] = RunnerError("store_unavailable", "The store cannot be used.")
    with pytest.raises(RunnerError) as caught:
        await b.cancel()
    assert caught.value.code == "store_unavailable"


async def test_a_stop_while_the_plane_is_away_goes_by_the_store(several: Several) -> None:
    a, b = await two(several)
    handle, agent, frame = await running(a)

    async def away(*args: Any) -> Any:
        raise RunnerError("plane_unavailable", "The plane is away.")

    several.sides["b"].look = several.sides["b"].push = away  # type: ignore[attr-defined, method-assign, assignment]
    reply = await b.cancel()
    assert (reply.status, reply.body["turn_id"]) == (202, handle.turn_id)
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"


async def test_the_owner_moves_while_the_stop_is_on_its_way(several: Several) -> None:
    """What is delivered to a replica that lost the session is left for the one that has it."""
    a, b = await two(several)
    await a.turn()
    await a.sessions.kill(CALLER, "s")
    await asyncio.sleep(1)
    handle, agent, frame = await running(b)
    at = a.replica.services.clock.now_ms()
    await several.store.submit_command(CommandRow("p", "s", "cmd_1", "cancel", "pending", handle.turn_id, at))
    a.sessions.note({"kind": "command", "project": "p", "session_id": "s", "command_id": "cmd_1"})
    await asyncio.sleep(0.5)
    assert rows(several)[-1].state == "pending"
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"


async def test_a_restart_settles_what_was_left_open_case_m9() -> None:
    bed = await Bed.make()
    handle = await bed.dispatch(keep_on_disconnect=True)
    await (await bed.agent()).prompt()
    gate = bed.store.gates["end"] = Gate()
    reply = await bed.cancel()
    assert reply.status == 202
    for task in list(bed.replica.services.tasks._live):
        task.cancel()
    await asyncio.sleep(0)
    await bed.replica.services.beats.close()
    del bed.store.gates["end"]
    gate.open()
    after = await Bed.make(store=bed.store, replica_id="rep_2")
    turn = await bed.store.turn("p", "s", handle.turn_id)
    assert turn.outcome == "lost"
    await asyncio.sleep(6)
    stored = await after.sessions.command(CALLER, reply.body["command_id"])
    assert (stored["state"], stored["outcome"]) == ("obsolete", "lost")
    assert (await after.turn())["ok"] is True
    await after.close()
    bed.provider.sandboxes[0].agent.exit(137)
    await bed.replica.services.pool.close(5)


async def test_stops_of_many_sessions_at_the_other_replica(several: Several) -> None:
    a, b = await two(several)
    handles = [await a.dispatch(f"s{n}", keep_on_disconnect=True) for n in range(5)]
    agents = [await a.agent(n + 1) for n in range(5)]
    frames = [await agent.prompt() for agent in agents]
    stops = [asyncio.create_task(b.cancel(f"s{n}", wait_seconds=20)) for n in range(5)]
    for agent, frame in zip(agents, frames, strict=True):
        await agent.heard("session/cancel")
        agent.answer(frame, "cancelled")
    assert {(await stop).body["outcome"] for stop in stops} == {"stopped"}
    assert {(await handle.result())["outcome"] for handle in handles} == {"cancelled"}
    assert [(row.outcome, row.state) for row in rows(several)] == [("stopped", "applied")] * 5
