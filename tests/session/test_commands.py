"""Commands are durable: what is stored of a Stop or a kill, at every moment, and what it came to (DESIGN 3.3, 3.7)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.store.port import CommandRow, Ending
from runner.terms import CommandKind, StopReason
from runner.wire.models import CancelRequest
from tests.session.asking import check, paused
from tests.session.bed import CALLER, Bed, types
from tests.session.gates import Gate

pytestmark = pytest.mark.virtual_time


async def running(bed: Bed, **fields: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A turn whose frame is with the agent."""
    handle = await bed.dispatch(keep_on_disconnect=True, **fields)
    agent = await bed.agent(len(bed.provider.sandboxes) or 1)
    return handle, agent, await agent.prompt(len(agent.all("session/prompt")) or 1)


async def command(bed: Bed, reply: Any) -> dict[str, Any]:
    """What ``GET /v1/commands`` says about a reply's command."""
    return await bed.sessions.command(CALLER, reply.body["command_id"])


async def rows(bed: Bed) -> list[CommandRow]:
    """Every command of the store."""
    return list(bed.store._commands._all())


async def settled(agent: Any, frame: dict[str, Any], handle: Any) -> dict[str, Any]:
    """The agent answers the cancel."""
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    return dict(await handle.result())


async def test_a_stop_is_stored_and_settled_with_the_ending_of_its_turn(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    reply = await bed.cancel()
    stopping = await command(bed, reply)
    assert (stopping["kind"], stopping["turn_id"], stopping["session_id"]) == ("cancel", handle.turn_id, "s")
    assert (stopping["state"], stopping["outcome"], stopping["finished_at"]) == ("claimed", None, None)
    gate = bed.store.gates["end"] = Gate()
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    await gate.reached.wait()
    assert (await command(bed, reply))["outcome"] is None, "no outcome before the ending"
    gate.open()
    await handle.result()
    over = await command(bed, reply)
    assert (over["state"], over["outcome"]) == ("applied", "stopped")
    turn = await bed.store.turn("p", "s", handle.turn_id)
    [row] = await rows(bed)
    assert row.finished_at == turn.ended_at, "one transaction"


async def test_a_command_is_seen_by_its_project_alone(bed: Bed) -> None:
    await bed.turn()
    reply = await bed.cancel()
    for project, command_id in (("q", reply.body["command_id"]), ("p", "cmd_unknown")):
        with pytest.raises(RunnerError) as caught:
            await bed.sessions.command(type(CALLER)(project, CALLER.scopes), command_id)
        assert caught.value.code == "not_found"


async def test_three_stops_at_once_are_one_command(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    replies = await asyncio.gather(*[bed.cancel() for _ in range(3)])
    assert len({reply.body["command_id"] for reply in replies}) == 1
    assert (await settled(agent, frame, handle))["outcome"] == "cancelled"
    assert [row.outcome for row in await rows(bed)] == ["stopped"]
    assert len(agent.all("session/cancel")) == 1


async def test_stops_with_other_keys_at_once_are_one_command_and_keep_it(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    replies = await asyncio.gather(*[bed.cancel(idempotency_key=key) for key in ("a", "b", "a")], bed.cancel())
    assert {reply.status for reply in replies} == {202}
    await settled(agent, frame, handle)
    named = {reply.body["command_id"] for reply in replies[:3]}
    assert len(named) == 1
    for key in ("a", "b"):
        again = await bed.cancel(idempotency_key=key)
        assert ({again.body["command_id"]}, again.body["outcome"]) == (named, "stopped")


async def test_a_key_is_one_command_for_good_case_b9(bed: Bed) -> None:
    """A repeat stops nothing else, not even after a restart has forgotten what was in memory."""
    handle, agent, frame = await running(bed)
    first = await bed.cancel(idempotency_key="k")
    await settled(agent, frame, handle)
    bed.sessions.commands._applying._keys.clear()
    second = await bed.dispatch(prompt="two", keep_on_disconnect=True)
    frame = await agent.prompt(2)
    again = await bed.cancel(idempotency_key="k", wait_seconds=5)
    assert (again.body["command_id"], again.body["outcome"]) == (first.body["command_id"], "stopped")
    agent.say("untouched")
    agent.answer(frame)
    assert (await second.result())["outcome"] == "completed"
    assert len(await rows(bed)) == 1


async def test_a_mismatch_writes_nothing_case_b9(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    for expected in ("turn_unknown", "turn_other"):
        with pytest.raises(RunnerError) as caught:
            await bed.cancel(expected_execution_id=expected, idempotency_key=expected)
        assert caught.value.extra["current_execution_id"] == handle.turn_id
    assert await rows(bed) == []
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"


async def test_a_stop_on_an_idle_session_marks_nothing_case_b9(bed: Bed) -> None:
    await bed.turn()
    reply = await bed.cancel(idempotency_key="k")
    assert (reply.status, reply.body["outcome"], reply.body["turn_id"]) == (200, "not_running", None)
    stored = await command(bed, reply)
    assert (stored["state"], stored["outcome"]) == ("obsolete", "not_running")
    assert stored["finished_at"] is not None
    assert (await bed.turn(nth=2))["start"] == "hit"
    assert (await bed.cancel(idempotency_key="k")).body["command_id"] == reply.body["command_id"]


async def test_a_turn_that_started_after_the_request_arrived_is_not_stopped_case_b6(bed: Bed) -> None:
    """The Stop was meant for turn 1; it was held up until turn 2 runs."""
    await bed.turn()
    arrived = asyncio.get_running_loop().time()
    await asyncio.sleep(1)
    handle, agent, frame = await running(bed, prompt="two")
    with pytest.raises(RunnerError) as caught:
        await bed.sessions.cancel(CALLER, "s", _cancel(), arrived_at=arrived)
    assert (caught.value.code, caught.value.extra["current_execution_id"]) == ("execution_mismatch", handle.turn_id)
    assert await rows(bed) == []
    reply = await bed.sessions.cancel(CALLER, "s", _cancel(handle.turn_id), arrived_at=arrived)
    assert reply.status == 202, "named, it is stopped whenever it started"
    assert (await settled(agent, frame, handle))["outcome"] == "cancelled"


def _cancel(expected: str | None = None) -> Any:
    return CancelRequest.model_validate({"expected_execution_id": expected})


# Every moment of a turn.


async def test_a_stop_before_admission_is_remembered_case_a12(bed: Bed) -> None:
    plane: Any = bed.replica.plane
    gate = plane.gates["running"] = Gate()
    dispatching = asyncio.create_task(bed.dispatch(keep_on_disconnect=True))
    await gate.reached.wait()
    with pytest.raises(RunnerError):
        await bed.cancel(expected_execution_id="turn_other")
    reply = await bed.cancel()
    assert (reply.status, reply.body["state"]) == (202, "stopping")
    gate.open()
    handle = await dispatching
    assert (await handle.result())["outcome"] == "cancelled"
    assert bed.provider.sandboxes == [], "nothing was started"
    assert (await command(bed, reply))["outcome"] == "stopped"
    assert types(await bed.events(handle)).count("done") == 1
    del plane.gates["running"]
    assert (await bed.turn())["ok"] is True


async def test_a_stop_of_a_dispatch_that_is_refused_is_obsolete(bed: Bed) -> None:
    plane: Any = bed.replica.plane
    await bed.turn()
    gate = plane.gates["running"] = Gate()
    dispatching = asyncio.create_task(bed.dispatch(keep_on_disconnect=True))
    await gate.reached.wait()
    plane.down = True
    reply = await bed.cancel()
    assert reply.status == 202
    gate.open()
    with pytest.raises(RunnerError):
        await dispatching
    await asyncio.sleep(1)
    assert (await command(bed, reply))["outcome"] == "not_running"
    plane.down = False
    del plane.gates["running"]
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_a_stop_while_the_turn_is_written_down_case_a12(bed: Bed) -> None:
    gate = bed.store.gates["admit"] = Gate()
    dispatching = asyncio.create_task(bed.dispatch(keep_on_disconnect=True))
    await gate.reached.wait()
    reply = await bed.cancel()
    gate.open()
    handle = await dispatching
    assert reply.body["turn_id"] == handle.turn_id
    assert (await handle.result())["outcome"] == "cancelled"
    assert (await command(bed, reply))["state"] == "applied"


@pytest.mark.parametrize("kind", ["cancel", "kill"])
async def test_a_stop_during_session_new_case_a12(bed: Bed, kind: str) -> None:
    gate = bed.provider.manners["gate:session/new"] = asyncio.Event()
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.heard("session/new")
    reply = await bed.cancel() if kind == "cancel" else await bed.sessions.kill(CALLER, "s")
    result = await handle.result()
    gate.set()
    assert (result["outcome"], agent.all("session/prompt")) == ("cancelled", [])
    stored = await command(bed, reply)
    assert (stored["kind"], stored["outcome"]) == (kind, "stopped")
    bed.provider.manners.clear()
    assert (await bed.turn(agents=2))["ok"] is True


async def test_a_stop_while_paused_addresses_the_paused_turn(bed: Bed) -> None:
    handle, agent, frame, _ = await paused(bed)
    reply = await bed.cancel(expected_execution_id=handle.turn_id)
    stored = await command(bed, reply)
    assert (reply.status, stored["turn_id"]) == (202, handle.turn_id)
    assert reply.body["turn_id"] not in (None, handle.turn_id), "the turn that ends the chain"
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await bed.cancel(wait_seconds=5)).body["outcome"] == "stopped"
    assert (await command(bed, reply))["outcome"] == "stopped"
    await check(bed, ["paused", "cancelled"])


async def test_two_stops_of_a_paused_turn_are_one_ending(bed: Bed) -> None:
    _, agent, frame, _ = await paused(bed)
    one, two = await asyncio.gather(bed.cancel(), bed.cancel())
    assert one.body == two.body
    await agent.heard("session/cancel")
    three = await bed.cancel()
    agent.answer(frame, "cancelled")
    await check(bed, ["paused", "cancelled"])
    assert {(await command(bed, reply))["outcome"] for reply in (one, two, three)} == {"stopped"}


async def test_a_stop_behind_the_terminal_is_obsolete_and_evicts_nothing_case_a15(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    gate = bed.store.gates["end"] = Gate()
    agent.say("done")
    agent.answer(frame)
    await gate.reached.wait()
    reply = await bed.cancel()
    assert (reply.status, reply.body["outcome"]) == (200, "not_running")
    gate.open()
    assert (await handle.result())["outcome"] == "completed"
    assert (await command(bed, reply))["state"] == "obsolete"
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_a_kill_behind_the_terminal_still_destroys_the_seat(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    gate = bed.store.gates["end"] = Gate()
    agent.say("done")
    agent.answer(frame)
    await gate.reached.wait()
    killing = asyncio.create_task(bed.sessions.kill(CALLER, "s"))
    await asyncio.sleep(1)
    gate.open()
    reply = await killing
    assert (reply.status, reply.body["outcome"]) == (200, "not_running")
    assert (await handle.result())["outcome"] == "completed"
    assert bed.provider.alive == set()
    assert (await bed.turn(agents=2))["reason"] == "kill"


async def test_a_kill_of_an_idle_session_is_stored_too(bed: Bed) -> None:
    await bed.turn()
    reply = await bed.sessions.kill(CALLER, "s")
    assert (reply.status, reply.body["outcome"], bed.provider.alive) == (200, "not_running", set())
    stored = await command(bed, reply)
    assert (stored["kind"], stored["state"]) == ("kill", "obsolete")


async def test_a_kill_takes_everything_that_is_on_its_way(bed: Bed) -> None:
    plane: Any = bed.replica.plane
    gate = plane.gates["running"] = Gate()
    on_its_way = asyncio.create_task(bed.dispatch(prompt="one", keep_on_disconnect=True))
    await gate.reached.wait()
    waits = await bed.dispatch(prompt="two", on_busy="queue")
    killing = asyncio.create_task(bed.sessions.kill(CALLER, "s"))
    await asyncio.sleep(0.5)
    assert not killing.done(), "the first may still become a turn"
    assert (await waits.result())["outcome"] == "cancelled"
    gate.open()
    assert (await (await on_its_way).result())["outcome"] == "cancelled"
    assert (await killing).body["outcome"] == "stopped"
    assert (bed.provider.sandboxes, [row.kind for row in await rows(bed)]) == ([], ["kill"])


async def test_a_stop_and_a_kill_are_told_apart_and_both_settled(bed: Bed) -> None:
    handle, _, _ = await running(bed)
    stop = await bed.cancel()
    kill = await bed.sessions.kill(CALLER, "s")
    assert stop.body["command_id"] != kill.body["command_id"]
    assert (await handle.result())["cancel_settled"] is False
    found = {row.kind: (row.state, row.outcome) for row in await rows(bed)}
    assert found == {"cancel": ("applied", "stopped"), "kill": ("applied", "stopped")}
    assert (await bed.turn(agents=2))["reason"] == "kill"


@pytest.mark.parametrize("kind", list(CommandKind))
async def test_each_kind_reaches_the_turn_as_itself(bed: Bed, kind: CommandKind) -> None:
    handle, agent, frame = await running(bed)
    row = CommandRow("p", "s", "cmd_x", kind.value, "pending", handle.turn_id, bed.replica.services.clock.now_ms())
    await bed.store.submit_command(row)
    session = bed.sessions._registry.known(("p", "s"))
    assert session is not None
    run = session.current
    assert run is not None
    bed.sessions.note({"kind": "command", "project": "p", "session_id": "s", "command_id": "cmd_x"})
    await asyncio.sleep(0.5)
    assert run.machine.stop is StopReason(kind.value)
    if kind is not CommandKind.KILL:
        await settled(agent, frame, handle)
    end = await run.ended
    assert end.label is StopReason(kind.value)
    await asyncio.sleep(1)
    stored = await bed.store.command("p", "cmd_x")
    assert (stored.state, stored.outcome, stored.deliveries) == ("applied", "stopped", 1)
    assert bool(bed.provider.alive) is (kind is not CommandKind.KILL)
    story = (await bed.sessions.story(CALLER, "s"))["items"]
    told = [(item["event"]["name"], item["effects"]) for item in story if item["machine"] == "command"]
    assert told == [(kind.value, [{"name": "stop", "turn_id": handle.turn_id}]), ("settled", [])]
    assert {"name": "Stop", "reason": kind.value} in [item["event"] for item in story if item["machine"] == "turn"]


async def test_control_never_waits_behind_a_stuck_turn_case_a13(bed: Bed) -> None:
    """Not even when what is stuck is the store: the agent hears of it at once, the client within a second."""
    _, agent, _ = await running(bed)
    bed.store.gates["submit_command"] = Gate()
    began = asyncio.get_running_loop().time()
    replying = asyncio.create_task(bed.cancel())
    await agent.heard("session/cancel")
    assert asyncio.get_running_loop().time() == began
    assert (await replying).status == 202
    assert asyncio.get_running_loop().time() - began < 1
    bed.store.gates["submit_command"].open()


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("how", ["away", "slow"])
async def test_a_stop_stops_without_a_store(bed: Bed, how: str, key: str | None) -> None:
    handle, agent, frame = await running(bed)
    gate = Gate()
    if how == "away":
        bed.store.broken["submit_command"] = RunnerError("store_unavailable", "The store cannot be used.")
    else:
        bed.store.gates["submit_command"] = gate
    began = asyncio.get_running_loop().time()
    reply = await bed.cancel(**({"idempotency_key": key} if key else {}))
    assert (reply.status, reply.body["turn_id"]) == (202, handle.turn_id)
    assert asyncio.get_running_loop().time() - began < 1
    assert (await settled(agent, frame, handle))["outcome"] == "cancelled"
    bed.store.broken.clear()
    if how == "slow":
        gate.open()
        await asyncio.sleep(1)
        assert (await command(bed, reply))["outcome"] == "stopped", "the row came behind the ending"
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_the_outcome_of_an_ending_that_is_owed_comes_with_it(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    reply = await bed.cancel()
    bed.store.failing["end"] = 5
    assert (await settled(agent, frame, handle))["outcome"] == "cancelled"
    await asyncio.sleep(10)
    assert (await command(bed, reply))["outcome"] == "stopped"
    assert (await bed.turn(nth=2))["start"] == "hit"


@pytest.mark.parametrize(("seconds", "state"), [(0, "obsolete"), (9, "applied")])
async def test_a_turn_that_somebody_else_ended_as_lost_takes_its_stop_along(
    bed: Bed, seconds: float, state: str
) -> None:
    handle, agent, frame = await running(bed)
    reply = await bed.cancel()
    await asyncio.sleep(seconds)
    turn = await bed.store.turn("p", "s", handle.turn_id)
    session = await bed.store.session("p", "s")
    assert await bed.store.end(Ending(session, replace(turn, outcome="lost", ended_at=1)))
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    await handle.result()
    await asyncio.sleep(1)
    stored = await command(bed, reply)
    assert (stored["state"], stored["outcome"]) == (state, "lost")
    assert stored["finished_at"] is not None


async def test_a_long_stop_is_applied_before_its_claim_lapses_case_m9() -> None:
    bed = await Bed.make(settings={"turn": {"settle_seconds": 60}})
    handle, agent, frame = await running(bed)
    reply = await bed.cancel()
    await asyncio.sleep(14)
    stored = await command(bed, reply)
    assert (stored["state"], stored["outcome"]) == ("applied", None)
    assert (await bed.cancel()).body["command_id"] == reply.body["command_id"], "pressed again, it is the same Stop"
    await asyncio.sleep(30)
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"
    [row] = await rows(bed)
    assert (row.state, row.outcome, row.deliveries) == ("applied", "stopped", 1)
    await bed.close()


async def test_a_client_that_hangs_up_leaves_its_stop_behind(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    gate = bed.store.gates["submit_command"] = Gate()
    stopping = asyncio.create_task(bed.cancel(wait_seconds=30))
    await gate.reached.wait()
    stopping.cancel()
    gate.open()
    assert (await settled(agent, frame, handle))["outcome"] == "cancelled"
    await asyncio.sleep(1)
    assert [row.outcome for row in await rows(bed)] == ["stopped"]


async def test_nothing_is_kept_of_settled_commands(bed: Bed) -> None:
    for nth in (1, 2, 3):
        handle = await bed.dispatch(prompt=f"n{nth}", keep_on_disconnect=True)
        agent = await bed.agent()
        frame = await agent.prompt(nth)
        await bed.cancel(idempotency_key=f"k{nth}")
        await agent.heard("session/cancel", nth)
        agent.answer(frame, "cancelled")
        await handle.result()
    await asyncio.sleep(1)
    applying = bed.sessions.commands._applying
    assert applying._issued == {}
    assert [issued.runs for issued in applying._keys.values()] == [[]] * 3


async def test_delete_leaves_no_command(bed: Bed) -> None:
    handle, _, _ = await running(bed)
    await bed.cancel()
    await bed.sessions.delete(CALLER, "s")
    assert (await handle.result())["outcome"] == "cancelled"
    await asyncio.sleep(20)
    assert await rows(bed) == []
