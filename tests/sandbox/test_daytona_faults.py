"""What goes wrong at a Daytona, and what it does to an agent's start, life and end (SANDBOXES A5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.sandbox.daytona.provider import DaytonaProvider
from tests.daytona_emulator.fixture import SECRET, EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import provider, spec, states


@pytest.fixture
async def daytona(daytona_emulator: EmulatorProcess, request: pytest.FixtureRequest) -> AsyncIterator[DaytonaProvider]:
    """Its agents outlive their link for so long as the test says."""
    made = provider(daytona_emulator, orphan_seconds=getattr(request, "param", 4.0))
    yield made
    daytona_emulator.scenario("restored")
    await made.close()
    assert made.live == ()
    assert set(states(daytona_emulator).values()) <= {"stopped"}


async def works(daytona: DaytonaProvider, **changes: Any) -> tuple[Any, bed.Talk]:
    sandbox = await daytona.start(spec(**changes))
    talk = bed.Talk(sandbox)
    assert await talk.say("hello") == "hello"
    return sandbox, talk


TRANSIENT: list[tuple[str, dict[str, Any]]] = [
    ("rate_limit", {"retry_after": 1}),
    ("server_error", {"match": "^POST /api/sandbox$", "status": 502}),
    ("server_error", {"match": "^GET /api/sandbox/", "status": 503, "times": 2}),
    ("dropped", {"match": "^POST /api/sandbox$"}),
    ("create_answer_lost", {}),
    ("create_dies_polling", {}),
    ("muted_events", {}),
    ("server_error", {"match": "^POST .*/process/execute", "status": 502}),
    ("dropped", {"match": "^POST .*/files/bulk-upload"}),
    ("server_error", {"match": "preview-url", "status": 500}),
]


@pytest.mark.parametrize(("scenario", "asked"), TRANSIENT)
async def test_a_start_survives(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, scenario: str, asked: dict[str, Any]
) -> None:
    """Whatever answer is lost, one sandbox is there in the end, and it is the one that is used (case D1)."""
    daytona_emulator.scenario(scenario, **asked)
    sandbox, _ = await works(daytona)
    name = daytona.sandbox_name("default", "ses_1")
    assert states(daytona_emulator) == {name: "started"}
    assert (await sandbox.destroy(0.0)).proven


FATAL: list[tuple[str, dict[str, Any], str]] = [
    ("quota", {"cpu": 0}, "provider_at_capacity"),
    ("disk_quota", {"disk": 0}, "provider_at_capacity"),
    ("no_runners", {}, "provider_at_capacity"),
    ("suspended", {}, "sandbox_start_failed"),
]


@pytest.mark.parametrize(("scenario", "asked", "code"), FATAL)
async def test_a_refused_start_leaves_nothing(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, scenario: str, asked: dict[str, Any], code: str
) -> None:
    daytona_emulator.scenario(scenario, **asked)
    with pytest.raises(RunnerError) as caught:
        await daytona.start(spec())
    assert caught.value.code == code
    assert states(daytona_emulator) == {}
    assert daytona.live == ()
    daytona_emulator.scenario("restored")
    sandbox, _ = await works(daytona)
    await sandbox.destroy(0.0)


async def test_a_snapshot_that_is_not_there(daytona_emulator: EmulatorProcess) -> None:
    made = provider(daytona_emulator, snapshot="nothing")
    with pytest.raises(RunnerError, match="nothing") as caught:
        await made.start(spec())
    assert caught.value.code == "sandbox_start_failed"
    await made.close()


async def test_a_program_that_is_not_there_takes_its_sandbox_along(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess
) -> None:
    with pytest.raises(RunnerError, match="ENOENT") as caught:
        await daytona.start(spec("ses_1", "/no/such/program"))
    assert caught.value.code == "harness_start_failed"
    await bed.until(lambda: daytona.live == () and states(daytona_emulator) == {})


async def test_a_start_that_is_given_up_leaves_nothing(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess
) -> None:
    """Case D7: cancelled in the middle of a creation, which happens all the same."""
    daytona_emulator.scenario("slow", match="^POST /api/sandbox$", seconds=0.5)
    start = asyncio.create_task(daytona.start(spec()))
    await bed.until(lambda: daytona_emulator.state()["faults"])
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await bed.until(lambda: daytona.live == ())
    await bed.until(lambda: states(daytona_emulator) == {})
    assert daytona.counts["undone"] == 1


async def test_a_creation_that_comes_too_late_goes(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    daytona_emulator.scenario("slow", match="^POST /api/sandbox$", seconds=2.0)
    with pytest.raises(RunnerError, match="in time"):
        await daytona.start(spec(seconds=0.5))
    await bed.until(lambda: daytona.live == () and states(daytona_emulator) == {})


async def test_capacity_is_strict(daytona_emulator: EmulatorProcess) -> None:
    made = provider(daytona_emulator, capacity=1)
    starts = [made.start(spec(name)) for name in ("ses_1", "ses_2")]
    results = await asyncio.gather(*starts, return_exceptions=True)
    (refused,) = [result for result in results if isinstance(result, RunnerError)]
    assert refused.code == "provider_at_capacity"
    assert len(states(daytona_emulator)) == 1
    await made.close()
    assert set(states(daytona_emulator).values()) == {"stopped"}


HIDDEN: dict[str, Any] = {"env": {"KEY": SECRET, "PLAIN": "p"}, "secret_names": frozenset({"KEY", "UNUSED"})}
SHOW = ("/bin/sh", "-c", "while read line; do echo $KEY $PLAIN; done")


async def test_secrets_are_never_plain_by_accident(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    """Without hosts a placeholder would be as good as the value; an account may have no secrets at all."""
    with pytest.raises(RunnerError, match="KEY") as caught:
        await daytona.start(spec(**HIDDEN))
    assert caught.value.code == "credentials_missing"
    hosts = provider(daytona_emulator, secret_hosts=("api.example.com",))
    daytona_emulator.fault("^POST /api/secret$", status=403, message="Forbidden")
    with pytest.raises(RunnerError, match="did not take") as caught:
        await hosts.start(spec(**HIDDEN))
    assert caught.value.code == "credentials_missing"
    assert states(daytona_emulator) == {}
    await hosts.close()


async def test_an_agent_sees_a_placeholder_of_a_secret(daytona_emulator: EmulatorProcess) -> None:
    """At the first start, and after a sleep with another value; gone with the session."""
    made = provider(daytona_emulator, secret_hosts=("api.example.com",))
    for seat in ("seat_1", "seat_2"):
        sandbox = await made.start(spec("ses_1", *SHOW, seat_id=seat, **HIDDEN))
        shown, plain = (await bed.Talk(sandbox).say("go")).split()
        assert shown.startswith("dtn_secret_")
        assert plain == "p"
        await sandbox.destroy(0.0)
    service = await made.service()
    assert len(await service._secrets("acp_")) == 1
    await made.remove("default", "ses_1")
    assert await service._secrets("acp_") == []
    await made.close()


async def test_secrets_go_as_they_are_where_that_is_wanted(daytona_emulator: EmulatorProcess) -> None:
    made = provider(daytona_emulator, plain_secrets=True)
    sandbox = await made.start(spec("ses_1", *SHOW, **HIDDEN))
    assert await bed.Talk(sandbox).say("go") == f"{SECRET} p"
    await sandbox.destroy(0.0)
    await made.close()


@pytest.mark.parametrize("scenario", ["dropped_links", "expired_link"])
async def test_a_link_is_resumed(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, scenario: str) -> None:
    sandbox, talk = await works(daytona)
    name = daytona.sandbox_name("default", "ses_1")
    daytona_emulator.scenario(scenario, sandbox=name)
    daytona_emulator.scenario("dropped_links", sandbox=name)
    assert await talk.say("still there") == "still there"
    assert sandbox.transport.connection.connections == 2
    await sandbox.destroy(0.0)


LOSSES = [
    ("auto_stop", "stopped", True),
    ("vanished", "deleted", False),
    ("errored", "deleted", False),
    ("daemon_dead", "stopped", True),
    ("container_gone", None, None),
]


@pytest.mark.parametrize("daytona", [1.0], indirect=True)
@pytest.mark.parametrize(("scenario", "proof", "kept"), LOSSES)
async def test_a_lost_sandbox_is_told_and_the_next_start_works(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, scenario: str, proof: str | None, kept: bool | None
) -> None:
    """Cases C5, C8: the agent is gone, nobody waits for ever, the disk is kept where there is one."""
    sandbox, talk = await works(daytona)
    name = daytona.sandbox_name("default", "ses_1")
    identity = await daytona.home_identity("default", "ses_1")
    daytona_emulator.scenario(scenario, sandbox=name)
    assert (await talk.ended()).reason == "the sandbox is gone"
    with pytest.raises(RunnerError) as caught:
        await sandbox.kill_turn("t", 0.5)
    assert caught.value.code == "sandbox_lost"
    gone = await sandbox.destroy(0.0)
    assert gone.proven
    assert proof is None or gone.proof == proof
    again, _ = await works(daytona, seat_id="seat_2")
    if kept is not None:
        assert again.woken == kept
        assert (await daytona.home_identity("default", "ses_1") == identity) == kept
    await again.destroy(0.0)


async def test_a_start_that_errs_is_repaired_once(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    sandbox, _ = await works(daytona)
    identity = await daytona.home_identity("default", "ses_1")
    await sandbox.destroy(0.0)
    daytona_emulator.scenario("start_fails", sandbox=daytona.sandbox_name("default", "ses_1"))
    again, _ = await works(daytona, seat_id="seat_2")
    assert await daytona.home_identity("default", "ses_1") == identity
    await again.destroy(0.0)


async def test_a_sleeping_disk_has_an_end(daytona_emulator: EmulatorProcess) -> None:
    """Case C3."""
    made = provider(daytona_emulator, disk_seconds=0.3)
    sandbox, _ = await works(made)
    await sandbox.destroy(0.0)
    await bed.until(lambda: states(daytona_emulator) == {})
    await made.close()


@pytest.mark.parametrize("daytona", [1.0], indirect=True)
async def test_the_service_s_own_nets_are_set(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    """A runner that never comes back: the agent goes, the sandbox stops, the disk is deleted."""
    sandbox, _ = await works(daytona)
    name = daytona.sandbox_name("default", "ses_1")
    await sandbox.transport.aclose()
    await bed.until(lambda: daytona_emulator.state()["processes"] == [])
    daytona_emulator.advance(16 * 60)
    assert states(daytona_emulator) == {name: "stopped"}
    daytona_emulator.advance(32 * 60)
    assert states(daytona_emulator) == {}
    assert (await sandbox.destroy(0.0)).proof == "deleted"


async def test_the_reaper_takes_what_the_store_does_not_know(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases D9, D10: what a dead runner left, not what a live one holds nor what is another store's."""
    kept, _ = await works(daytona)
    dead, stranger = provider(daytona_emulator), provider(daytona_emulator, store_id="store_2")
    lost, _ = await works(dead, session="ses_2", seat_id="seat_2")
    broken, _ = await works(dead, session="ses_3", seat_id="seat_3")
    theirs, _ = await works(stranger, session="ses_2", seat_id="seat_4")
    daytona_emulator.scenario("errored", sandbox=broken.name)

    async def known(project: str, session_id: str) -> bool:
        return session_id == "ses_3"

    async def owned(project: str, session_id: str) -> bool:
        return True

    assert (await daytona.reap(known, owned)).deleted == []
    monkeypatch.setattr("runner.rules.daytona.ORPHAN_GRACE_SECONDS", 0.0)
    assert set((await daytona.reap(known, owned)).deleted) == {broken.name, lost.name}
    await bed.until(lambda: set(states(daytona_emulator)) == {kept.name, theirs.name})
    assert daytona.counts["reaped"] == 2
    for sandbox in (lost, broken, theirs, kept):
        assert (await sandbox.destroy(0.0)).proven
    await dead.close()
    await stranger.close()


async def test_a_removal_goes_on_until_it_is_done(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    sandbox, _ = await works(daytona)
    await sandbox.destroy(0.0)
    daytona_emulator.scenario("server_error", match="^DELETE /api/sandbox/", status=503, times=3)
    await daytona.remove("default", "ses_1")
    await bed.until(lambda: states(daytona_emulator) == {})
