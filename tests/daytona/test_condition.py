"""What the provider says of itself, without a service or with one that refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.assembly import sandboxes
from runner.cli.doctor import check_sandbox
from runner.clock import SystemClock
from runner.config import Settings
from runner.errors import RunnerError
from runner.sandbox.daytona.provider import DaytonaProvider
from runner.sandbox.daytona.service import INSTALL, DaytonaService
from runner.sandbox.daytona.terms import Terms
from runner.sandbox.port import Condition
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import provider, spec


async def yes(project: str, session_id: str) -> bool:
    return True


async def test_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner starts and serves what it can; nothing here asks for a client that cannot be made."""
    monkeypatch.setattr(sandboxes, "find_spec", lambda name: None)
    settings = Settings.model_validate({"daytona": {"api_key": "k"}})
    made = sandboxes.daytona(settings, tmp_path, "store_1", "rep_1", SystemClock())["daytona"]
    assert isinstance(made, DaytonaProvider)
    assert made.condition() == Condition(False, f"its package is missing: {INSTALL}", INSTALL)
    assert (await made.reap(yes, yes)).deleted == []
    await made.remove("default", "ses_1")
    await made.close()


def test_doctor_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "find_spec", lambda name: None)
    (finding,) = check_sandbox(Settings.model_validate({"daytona": {"api_key": "k"}}), "daytona")
    assert not finding.ok
    assert INSTALL in str(finding)


async def test_a_service_that_is_not_there_and_comes_back(daytona_emulator: EmulatorProcess) -> None:
    made = provider(daytona_emulator)
    assert made.condition() == Condition(True)
    daytona_emulator.scenario("dropped", times=-1)
    with pytest.raises(RunnerError) as caught:
        await made.start(spec(seconds=1.0))
    assert caught.value.code == "sandbox_start_failed"
    told = made.condition()
    assert not told.available and "not reached" in (told.reason or "")
    daytona_emulator.scenario("restored")
    await bed.until(lambda: made.live == ())
    sandbox = await made.start(spec())
    assert made.condition() == Condition(True, running=1)
    await sandbox.destroy(0.0)
    assert made.condition() == Condition(True, asleep=1)
    await made.close()


async def test_an_account_that_is_suspended(daytona_emulator: EmulatorProcess) -> None:
    made = provider(daytona_emulator)
    daytona_emulator.scenario("suspended", reason="Payment method required")
    with pytest.raises(RunnerError, match="suspended"):
        await made.start(spec())
    await made.close()


@pytest.mark.parametrize("error", [RunnerError("invalid_request", "its package is broken"), ValueError("a bad url")])
async def test_a_client_that_cannot_be_made_holds_nothing(error: Exception) -> None:
    """Told by each start anew; none is taken for a sandbox that is still being put to sleep."""

    async def opened() -> DaytonaService:
        raise error

    made = DaytonaProvider(opened, Terms(capacity=1), "store_1", "rep_1", clock=SystemClock())
    for seat in ("seat_1", "seat_2"):
        with pytest.raises(type(error), match=str(error)):
            await made.start(spec(seat_id=seat, seconds=2.0))
        assert (made.live, made.condition().running) == ((), 0)
        assert str(error) in (made.condition().reason or "")
    await made.close()
