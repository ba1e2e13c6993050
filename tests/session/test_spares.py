"""Spares from a dispatch to the last directory: who gets one, who does not, and what is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.ids import SPARES
from runner.metrics import SEATS, Metrics
from runner.metrics import SPARES as COUNTED
from runner.rules.spares import BACKOFF_SECONDS, LATELY_SECONDS
from runner.sandbox.port import Ran
from runner.wire.models import ForkRequest
from tests.session.bed import CALLER, Bed
from tests.session.gates import Gate

pytestmark = pytest.mark.virtual_time
SETTLED = 2.0
"""Long enough for a refill."""


async def made(**pool: Any) -> Bed:
    return await Bed.make(settings={"pool": {"spares": 1, "spare_harnesses": ["demo"], **pool}}, metrics=Metrics())


async def closed(bed: Bed) -> None:
    """Take it apart: no process is left, and no directory of a spare that nobody adopted."""
    await bed.close()
    assert bed.provider.alive == set()
    started = {box.spec.session_id for box in bed.provider.sandboxes if box.spec.spare}
    removed = {name for project, name in bed.provider.removed if project == SPARES}
    assert started - removed <= set(bed.provider.adopted)


@pytest.fixture
async def spared() -> AsyncIterator[Bed]:
    """A replica with one spare, ready."""
    bed = await made()
    await asyncio.sleep(SETTLED)
    yield bed
    await closed(bed)


def shown(bed: Bed) -> list[dict[str, Any]]:
    """The spares as the pool view has them."""
    spares: list[dict[str, Any]] = bed.sessions.pool(CALLER)["spares"]
    return spares


def states(bed: Bed) -> list[str]:
    return [spare["state"] for spare in shown(bed)]


async def first(bed: Bed, session_id: str = "s", agents: int = 1, **fields: Any) -> dict[str, Any]:
    """A session's first turn, served by the ``agents``-th agent."""
    handle = await bed.dispatch(session_id, keep_on_disconnect=True, **fields)
    await (await bed.agent(agents)).finish()
    result: dict[str, Any] = await handle.result()
    return result


async def test_the_first_turn_of_a_session_gets_the_spare_and_another_is_made(spared: Bed) -> None:
    (spare,) = shown(spared)
    assert (spare["state"], spare["harness"], spare["provider"], spare["recipe"]) == (
        "ready",
        "demo",
        "local",
        "default",
    )
    handle = await spared.dispatch(keep_on_disconnect=True)
    await (await spared.agent()).finish()
    result = await handle.result()
    assert (result["start"], result["reason"], result["text"]) == ("spare", "miss", "ok")
    assert len(spared.provider.sandboxes) == 1
    assert spared.provider.adopted == [spare["spare_id"]]
    (phase,) = [event["data"] for event in await spared.events(handle) if event["type"] == "environment"]
    assert (phase["phase"], phase["start"]) == ("ready", "spare")
    view = await spared.sessions.view(CALLER, "s")
    assert (view["pool"]["state"], view["pool"]["start"]) == ("idle", "spare")
    (item,) = spared.sessions.pool(CALLER)["items"]
    assert (item["seat_id"], item["agent_pid"]) == (spare["seat_id"], spare["agent_pid"])
    moves = (await spared.sessions.story(CALLER, "s"))["items"]
    claims = [move for move in moves if move["event"]["name"] == "claim_spare"]
    assert [move["event"]["spare_id"] for move in claims] == [spare["spare_id"]]
    await asyncio.sleep(SETTLED)
    assert states(spared) == ["ready"]
    assert shown(spared)[0]["spare_id"] != spare["spare_id"]
    numbers = spared.replica.services.metrics.numbers()
    assert numbers[COUNTED] == {("ready",): 2, ("claimed",): 1}
    assert numbers[SEATS][("spare",)] == 1


async def test_later_turns_and_starts_stay_at_the_adopted_place(spared: Bed) -> None:
    """Its warm seat is hit, and when that is gone the next agent starts in the same directories."""
    await first(spared)
    assert (await spared.turn(nth=2))["start"] == "hit"
    await asyncio.sleep(120)
    result = await first(spared, agents=len(spared.provider.sandboxes) + 1)
    assert result["start"] == "cold"
    spec = spared.provider.sandboxes[-1].spec
    assert (spec.project, spec.session_id, spec.spare) == (SPARES, spared.provider.adopted[0], False)
    row = await spared.store.session("p", "s")
    assert row.agent_state["place"] == {"provider": "local", "spare": spared.provider.adopted[0]}


async def test_a_runner_that_boots_later_finds_the_adopted_place(spared: Bed) -> None:
    await first(spared)
    await spared.die()
    later = await Bed.make(store=spared.store, replica_id="rep_2")
    result = await first(later)
    assert result["start"] == "cold"
    assert later.provider.sandboxes[0].spec.session_id == spared.provider.adopted[0]
    await later.sessions.delete(CALLER, "s")
    assert (SPARES, spared.provider.adopted[0]) in later.provider.removed
    assert ("p", "s") in later.provider.removed
    await later.close()


async def test_of_two_claims_exactly_one_gets_the_spare(spared: Bed) -> None:
    """Never handed to two."""
    handles = [await spared.dispatch(name, keep_on_disconnect=True) for name in "ab"]
    for number in (1, 2):
        await (await spared.agent(number)).finish()
    results = [await handle.result() for handle in handles]
    assert sorted(result["start"] for result in results) == ["cold", "spare"]
    assert [result["text"] for result in results] == ["ok", "ok"]


OWN: list[dict[str, Any]] = [
    {"env": {"A": "1"}},
    {"secrets": {"A": "1"}},
    {"mcp_servers": [{"name": "m", "command": "m", "args": [], "env": []}]},
    {"workspace": {"files": [{"path": "AGENTS.md", "content": "be brief"}]}},
]


@pytest.mark.parametrize("fields", OWN, ids=lambda fields: next(iter(fields)))
async def test_a_dispatch_with_something_of_its_own_starts_cold_case_c12(spared: Bed, fields: dict[str, Any]) -> None:
    """Case C12: nothing that a spare lacks is left out of what a turn asked for."""
    result = await first(spared, agents=2, **fields)
    assert result["start"] == "cold"
    assert spared.provider.sandboxes[1].spec.session_id == "s"
    assert states(spared) == ["ready"]


async def test_secrets_of_the_operator_make_a_kind_of_their_own() -> None:
    """A reference is no literal: who names the same ones gets a spare that has them, and nobody else does."""
    secrets = {"ONE": "value-one", "TWO": "value-two"}
    bed = await Bed.make(settings={"pool": {"spares": 1}, "secrets": secrets}, metrics=Metrics())
    one: dict[str, Any] = {"secrets": {"KEY": {"ref": "ONE"}}}
    assert (await first(bed, "a", **one))["start"] == "cold"
    await asyncio.sleep(SETTLED)
    assert states(bed) == ["ready"]
    assert bed.sandbox(2).spec.env["KEY"] == "value-one"
    others: list[dict[str, Any]] = [{"secrets": {"KEY": {"ref": "TWO"}}}, {"secrets": {"OTHER": {"ref": "ONE"}}}]
    for number, fields in enumerate([*others, {}, {"secrets": {"KEY": "value-one"}}]):
        count = len(bed.provider.sandboxes)
        assert (await first(bed, f"other{number}", agents=count + 1, **fields))["start"] == "cold"
    assert (await first(bed, "b", agents=2, **one))["start"] == "spare"
    await closed(bed)


async def test_a_path_of_the_host_starts_cold(spared: Bed, tmp_path: Path) -> None:
    assert (await first(spared, agents=2, workspace={"path": str(tmp_path)}))["start"] == "cold"


async def test_a_session_that_has_files_starts_cold(spared: Bed) -> None:
    """What a client wrote before the first turn is what its agent finds."""
    spared.provider.touched.add(("p", "s"))
    assert (await first(spared, agents=2))["start"] == "cold"


async def test_only_a_first_turn_gets_one(spared: Bed) -> None:
    """A session whose sandbox is gone has files and a memory of its own."""
    await first(spared, "other")
    await asyncio.sleep(120)
    count = len(spared.provider.sandboxes)
    assert states(spared) == ["ready"]
    assert (await first(spared, "other", agents=count + 1))["start"] == "cold"


async def test_a_fork_gets_none(spared: Bed) -> None:
    await first(spared)
    await asyncio.sleep(SETTLED)
    rows = (await spared.sessions.records(CALLER, "s", None, 100))["items"]
    request = ForkRequest.model_validate({"after": rows[-1]["cursor"], "session_id": "f"})
    await spared.sessions.fork(CALLER, "s", request)
    assert spared.provider.copied == [(spared.provider.adopted[0], "f")]
    assert (await first(spared, "f", agents=3))["start"] == "cold"


async def test_settings_apply_live_at_the_claim() -> None:
    """Case C12: mode, model and options are no facet, and really apply."""
    bed = await Bed.make(settings={"pool": {"spares": 1}})
    modes = {"currentModeId": "a", "availableModes": [{"id": "a", "name": "A"}, {"id": "b", "name": "B"}]}
    bed.provider.manners["new"] = {"modes": modes}
    await first(bed, "other")
    await asyncio.sleep(SETTLED)
    assert (await first(bed, agents=2, mode="b", permissions={"default": "deny"}))["start"] == "spare"
    (frame,) = (await bed.agent(2)).all("session/set_mode")
    assert frame["params"]["modeId"] == "b"
    assert [first_.get("params") for first_ in (await bed.agent(1)).all("session/set_mode")] == []
    await closed(bed)


async def test_what_an_agent_tells_before_its_first_turn_is_shown_in_it_case_e8(spared: Bed) -> None:
    """Case E8: a banner is nobody's answer, and the newest list of commands is not lost."""
    agent = await spared.agent()
    for name in ("old", "new"):
        agent.update(sessionUpdate="available_commands_update", availableCommands=[{"name": name, "description": ""}])
    agent.say("banner")
    await asyncio.sleep(1)
    handle = await spared.dispatch(keep_on_disconnect=True)
    await agent.finish()
    assert (await handle.result())["text"] == "ok"
    told = [event["data"] for event in await spared.events(handle) if event["type"] == "session_info"]
    assert [[command["name"] for command in info["available_commands"]] for info in told] == [["new"]]


async def test_a_shell_command_may_be_the_first_turn(spared: Bed) -> None:
    running = asyncio.get_running_loop().create_task(spared.shell("true"))
    await asyncio.sleep(1)
    box = spared.sandbox()
    assert box.command is not None
    box.command.ended.set_result(Ran(0))
    assert (await running)["exit_code"] == 0
    assert spared.provider.adopted == [box.spec.session_id]


@pytest.mark.parametrize("code", ["store_unavailable", "internal"])
async def test_a_claim_that_is_not_admitted_gives_nothing_back(spared: Bed, code: str) -> None:
    """What was named to one session is never handed to another: it goes, with its directories."""
    (spare,) = shown(spared)
    spared.store.broken["admit"] = RunnerError(code, "no")
    with pytest.raises(RunnerError):
        await spared.dispatch("a", keep_on_disconnect=True)
    spared.store.broken.clear()
    await asyncio.sleep(SETTLED)
    assert (SPARES, spare["spare_id"]) in spared.provider.removed
    assert spare["seat_id"] not in spared.provider.alive
    assert spared.provider.adopted == []
    result = await first(spared, "b", agents=2)
    assert result["start"] == "spare"
    assert spared.provider.adopted != [spare["spare_id"]]


async def test_directories_that_cannot_be_taken_over_are_not_used(spared: Bed) -> None:
    (spare,) = shown(spared)
    spared.provider.adopt_error = OSError("the disk is gone")
    assert (await first(spared, agents=2))["start"] == "cold"
    spared.provider.adopt_error = None
    assert (SPARES, spare["spare_id"]) in spared.provider.removed
    assert spared.provider.sandboxes[1].spec.session_id == "s"
    assert "place" not in (await spared.store.session("p", "s")).agent_state


async def test_a_stop_that_comes_before_the_frame_leaves_a_warm_session_case_a12(spared: Bed) -> None:
    """Case A12: the session keeps the place that it was admitted with."""
    gate = Gate()
    spared.store.gates["admit"] = gate
    sent = asyncio.get_running_loop().create_task(spared.dispatch(keep_on_disconnect=True))
    await gate.reached.wait()
    stop = asyncio.get_running_loop().create_task(spared.cancel())
    await asyncio.sleep(1)
    gate.open()
    await stop
    result = await (await sent).result()
    assert result["outcome"] == "cancelled"
    assert (await first(spared))["start"] == "hit"
    assert len(spared.provider.adopted) == 1


async def test_a_spare_gives_way_to_a_turn_before_any_idle_seat() -> None:
    """Max_seats counts spares, and a spare never blocks a real turn."""
    bed = await made(max_seats=2)
    await asyncio.sleep(SETTLED)
    assert (await first(bed, "a", agents=2, env={"A": "1"}))["start"] == "cold"
    assert states(bed) == ["ready"]
    assert (await first(bed, "b", agents=3, env={"A": "1"}))["start"] == "cold"
    items = bed.sessions.pool(CALLER)["items"]
    assert sorted(item["session_id"] for item in items) == ["a", "b"]
    await asyncio.sleep(SETTLED)
    assert shown(bed) == []
    assert bed.replica.services.metrics.numbers()[COUNTED][("evicted",)] == 1
    await asyncio.sleep(120)
    assert states(bed) == ["ready"]
    await closed(bed)


async def test_one_that_is_still_starting_gives_way_too() -> None:
    """The turn waits until that start is undone, and no more sandboxes live than may."""
    bed = await made(max_seats=1)
    bed.provider.start_gate = asyncio.Event()
    await asyncio.sleep(SETTLED)
    assert states(bed) == ["starting"]
    sent = await bed.dispatch(env={"A": "1"}, keep_on_disconnect=True)
    await asyncio.sleep(1)
    bed.provider.start_gate.set()
    await (await bed.agent()).finish()
    assert (await sent.result())["start"] == "cold"
    assert [box.spec.spare for box in bed.provider.sandboxes] == [False]
    await closed(bed)


@pytest.mark.parametrize("method", ["initialize", "session/new"])
async def test_a_turn_waits_for_the_teardown_of_a_half_started_spare(method: str) -> None:
    bed = await made(max_seats=1)
    gate = bed.provider.manners[f"gate:{method}"] = asyncio.Event()
    bed.provider.destroy_gate = asyncio.Event()
    await asyncio.sleep(SETTLED)
    sent = await bed.dispatch(env={"A": "1"}, keep_on_disconnect=True)
    await asyncio.sleep(5)
    assert len(bed.provider.sandboxes) == 1
    bed.provider.destroy_gate.set()
    gate.set()
    await (await bed.agent(2)).finish()
    assert (await sent.result())["start"] == "cold"
    await closed(bed)


async def test_a_spare_whose_agent_leaves_goes_and_comes_back_later(spared: Bed) -> None:
    (spare,) = shown(spared)
    (await spared.agent()).exit(3)
    await asyncio.sleep(1)
    assert shown(spared) == []
    assert (SPARES, spare["spare_id"]) in spared.provider.removed
    await asyncio.sleep(BACKOFF_SECONDS[0])
    assert states(spared) == ["ready"]
    assert (await first(spared, agents=2))["start"] == "spare"


async def test_a_start_that_fails_is_left_alone_for_longer_and_longer() -> None:
    bed = await made()
    bed.provider.manners["session/new"] = False
    await asyncio.sleep(LATELY_SECONDS)
    count = len(bed.provider.sandboxes)
    assert 5 < count < 25
    bed.provider.manners.clear()
    await asyncio.sleep(2 * BACKOFF_SECONDS[1])
    assert states(bed) == ["ready"]
    assert len(bed.provider.alive) == 1
    await closed(bed)


async def test_what_no_spare_can_have_is_not_tried_again_until_a_turn_needs_it() -> None:
    """Without a key that only a dispatch brings each start would fail, and say so in the log."""
    bed = await Bed.make(settings={"pool": {"spares": 1}})
    bed.provider.start_error = RunnerError("harness_auth_required", "no key")
    for count in (1, 2):
        handle = await bed.dispatch(f"s{count}", keep_on_disconnect=True)
        assert (await handle.result())["error"]["code"] == "harness_auth_required"
        await asyncio.sleep(LATELY_SECONDS / 2)
        assert bed.replica.services.metrics.numbers()[COUNTED] == {("failed",): count}
    await closed(bed)


async def test_a_spare_gets_old_and_is_replaced(spared: Bed) -> None:
    (old,) = shown(spared)
    await asyncio.sleep(1800 + SETTLED)
    (new,) = shown(spared)
    assert new["spare_id"] != old["spare_id"]
    assert (SPARES, old["spare_id"]) in spared.provider.removed


async def test_the_kinds_that_turns_start_are_kept_for_as_long_as_they_do() -> None:
    bed = await Bed.make(settings={"pool": {"spares": 2}})
    await asyncio.sleep(SETTLED)
    assert shown(bed) == []
    await first(bed)
    await asyncio.sleep(SETTLED)
    assert states(bed) == ["ready", "ready"]
    await asyncio.sleep(LATELY_SECONDS)
    assert shown(bed) == []
    await closed(bed)


async def test_a_harness_that_there_is_not_is_named_at_once() -> None:
    with pytest.raises(RunnerError, match="spare_harnesses: there is no harness nobody"):
        await made(spare_harnesses=["nobody"])


async def test_one_that_is_retired_while_its_failed_start_is_undone_goes_once() -> None:
    bed = await made()
    bed.provider.manners["session/new"] = False
    bed.provider.destroy_gate = asyncio.Event()
    await asyncio.sleep(91)
    assert states(bed) == ["starting"]
    assert bed.replica.services.spares is not None
    bed.replica.services.spares.rest()
    bed.provider.destroy_gate.set()
    await asyncio.sleep(1)
    assert shown(bed) == []
    await closed(bed)


async def test_without_the_setting_there_are_none() -> None:
    bed = await Bed.make()
    await first(bed)
    await asyncio.sleep(SETTLED)
    assert len(bed.provider.sandboxes) == 1
    assert shown(bed) == []
    await bed.close()


async def test_a_drain_takes_the_spares_first_and_starts_none_case_d1(spared: Bed) -> None:
    """Case D1: nobody is left, not even one whose start was under way."""
    handle = await spared.dispatch(keep_on_disconnect=True)
    agent = await spared.agent()
    await agent.prompt()
    await asyncio.sleep(0.6)
    spared.provider.start_gate = asyncio.Event()
    drain = asyncio.get_running_loop().create_task(spared.sessions.drain(30))
    await asyncio.sleep(1)
    assert shown(spared) == []
    await agent.finish()
    assert (await handle.result())["outcome"] == "completed"
    await drain


async def test_a_kill_and_a_delete_take_the_adopted_place_with_them(spared: Bed) -> None:
    await first(spared)
    spare_id = spared.provider.adopted[0]
    await spared.sessions.kill(CALLER, "s")
    assert (SPARES, spare_id) not in spared.provider.removed
    await spared.sessions.delete(CALLER, "s")
    assert (SPARES, spare_id) in spared.provider.removed


async def test_the_time_before_the_claim_is_nobodys(spared: Bed) -> None:
    await asyncio.sleep(600)
    assert (await first(spared))["usage"].get("sandbox_seconds", 0) < 5
    assert (await spared.sessions.view(CALLER, "s"))["usage"].get("warm_seconds", 0) < 5


async def test_a_spare_that_leaves_before_the_frame_costs_its_turn_nothing(spared: Bed) -> None:
    """Nothing was sent to it while its turn was made durable: another agent starts where it was (case L3)."""
    gate = spared.store.gates["admit"] = Gate()
    sent = asyncio.get_running_loop().create_task(spared.dispatch(keep_on_disconnect=True))
    await gate.reached.wait()
    (await spared.agent()).exit(3)
    await asyncio.sleep(1)
    gate.open()
    handle = await sent
    await (await spared.agent(2)).finish()
    result = await handle.result()
    assert (result["outcome"], result["start"], result["reason"]) == ("completed", "cold", "agent_exited")
    first, second = spared.provider.sandboxes[:2]
    assert (second.spec.session_id, second.spec.spare) == (first.spec.session_id, False)
    assert first.spec.seat_id not in spared.provider.alive
    assert (await spared.turn(nth=2, agents=2))["start"] == "hit"
