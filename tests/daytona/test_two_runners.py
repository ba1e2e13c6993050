"""Two runners of one store and one sandbox: whoever has the session is not stopped by the other (DESIGN 3.1, 3.10)."""

from __future__ import annotations

import asyncio

import pytest

from runner.errors import RunnerError
from runner.sandbox.daytona import visits
from runner.sandbox.daytona.provider import DaytonaProvider
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import provider, spec, states


class Holder:
    """Who has the session: the leases of two runners."""

    def __init__(self) -> None:
        self.name = ""

    def runner(self, emulator: EmulatorProcess, name: str) -> DaytonaProvider:
        made = provider(emulator)

        async def elsewhere(project: str, session_id: str) -> bool:
            assert (project, session_id) == ("default", "ses_1")
            return self.name not in ("", name)

        made.elsewhere = elsewhere
        return made


async def slept(made: DaytonaProvider) -> None:
    sandbox = await made.start(spec(workspace_files={"a": b"1"}))
    assert (await sandbox.destroy(0.0)).proven


async def test_a_look_at_files_does_not_stop_the_turn_that_another_runner_began(
    daytona_emulator: EmulatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox rests behind a file when a turn comes elsewhere; its end there is not this one's to bring about."""
    monkeypatch.setattr(visits, "LINGER_SECONDS", 1.0)
    leases = Holder()
    reader, runner = leases.runner(daytona_emulator, "a"), leases.runner(daytona_emulator, "b")
    await slept(reader)
    assert (await reader.files("default", "ses_1", None).read("a", 10)).data == b"1"
    leases.name = "b"
    talk = bed.Talk(await runner.start(spec(seat_id="seat_2")))
    await bed.until(lambda: not reader._held)
    assert await talk.say("still mine") == "still mine"
    assert (reader.disks(), reader.counts["elsewhere"]) == ((), 1)
    await reader.close()
    await runner.close()
    assert set(states(daytona_emulator).values()) == {"stopped"}


async def test_a_look_at_files_does_not_stop_what_runs_elsewhere(daytona_emulator: EmulatorProcess) -> None:
    """It was on its way when the turn began."""
    leases = Holder()
    reader, runner = leases.runner(daytona_emulator, "a"), leases.runner(daytona_emulator, "b")
    leases.name = "b"
    talk = bed.Talk(await runner.start(spec()))
    with pytest.raises(RunnerError) as caught:
        await reader.files("default", "ses_1", None).read("a", 10)
    assert (caught.value.code, caught.value.retryable) == ("owned_elsewhere", True)
    await bed.until(lambda: not reader._held)
    assert await talk.say("still mine") == "still mine"
    await reader.close()
    await runner.close()


async def test_a_runner_that_stood_still_lets_go_of_what_another_one_has_by_now(
    daytona_emulator: EmulatorProcess,
) -> None:
    """Its lease is lost, its agent was stopped with the sandbox, and the sandbox is the other one's (case G2)."""
    leases = Holder()
    late, runner = leases.runner(daytona_emulator, "a"), leases.runner(daytona_emulator, "b")
    lost = await late.start(spec())
    leases.name = "b"
    talk = bed.Talk(await runner.start(spec(seat_id="seat_2")))
    assert (await lost.destroy(0.0)).proven
    assert late.live == ()
    assert await talk.say("still mine") == "still mine"
    await late.close()
    await runner.close()


async def test_a_start_that_another_runner_overtook_deletes_nothing(daytona_emulator: EmulatorProcess) -> None:
    """It made the sandbox, and stood still before its agent was there."""
    leases = Holder()
    late, runner = leases.runner(daytona_emulator, "a"), leases.runner(daytona_emulator, "b")
    daytona_emulator.scenario("slow", match="POST .*/process/execute", seconds=2.0)
    starting = asyncio.create_task(late.start(spec(seconds=20.0)))
    await bed.until(lambda: "started" in states(daytona_emulator).values() and daytona_emulator.state()["faults"])
    leases.name = "b"
    talk = bed.Talk(await runner.start(spec(seat_id="seat_2")))
    starting.cancel()
    await asyncio.wait({starting})
    await bed.until(lambda: late.live == ())
    assert await talk.say("still mine") == "still mine"
    await late.close()
    await runner.close()
