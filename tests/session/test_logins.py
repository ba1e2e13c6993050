"""When a login runs out: who may still be served by it, and who gives way (cases K4, N1)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.harness.logins import Shelf
from runner.rules.login import Form
from tests.session.bed import Bed
from tests.virtual_time import EPOCH_MS

pytestmark = pytest.mark.virtual_time

HOUR_MS = 3_600_000
FORM = Form("auth.json", ("access", "refresh"), "refresh", "expires")
LOGIN = {"command": [sys.executable], "file": "auth.json", "secrets": ["access", "refresh"]}
SETTINGS: dict[str, Any] = {
    "harness": {"mine": {"command": [sys.executable], "login": LOGIN | {"refresh": "refresh", "expires": "expires"}}},
    "logins": {"projects": ["p"]},
    "pool": {"idle_seconds": 2 * 3600},
}


def content(number: int, expires_ms: int) -> bytes:
    tokens = {"access": f"access-token-{number}", "refresh": f"refresh-token-{number}"}
    return json.dumps(tokens | {"expires": expires_ms}).encode()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    made = Shelf(tmp_path, "mine", FORM)
    made.put(content(1, EPOCH_MS + HOUR_MS))
    return made


@pytest.fixture
async def bed(tmp_path: Path, shelf: Shelf) -> AsyncIterator[Bed]:
    made = await Bed.make(settings=SETTINGS, live_dir=tmp_path / "live")
    yield made
    await made.close()
    assert shelf.lent() is None


async def turn(bed: Bed, session: str, agents: int = 1, nth: int = 1) -> Any:
    """A whole turn, the ``nth`` of the ``agents``-th agent that was started."""
    handle = await bed.dispatch(session, harness="mine", keep_on_disconnect=True)
    await (await bed.agent(agents)).finish(nth)
    return await handle.result()


def given(bed: Bed, session: str) -> Any:
    """The login that the session's newest sandbox was started with."""
    specs = [sandbox.spec for sandbox in bed.provider.sandboxes if sandbox.spec.session_id == session]
    return json.loads(specs[-1].home_files["auth.json"])


async def test_a_login_that_runs_out_ends_reuse_and_an_idle_holder_gives_way_cases_k4_n1(
    bed: Bed, shelf: Shelf
) -> None:
    assert (await turn(bed, "holder"))["start"] == "cold"
    assert (await turn(bed, "one", 2))["start"] == "cold"
    assert [given(bed, name)["refresh"] for name in ("holder", "one")] == ["refresh-token-1", ""]
    assert (await turn(bed, "one", 2, 2))["start"] == "hit"
    await asyncio.sleep(3600 - 59)
    assert (await turn(bed, "holder", 1, 2))["start"] == "hit", "it refreshes by itself"
    assert (await turn(bed, "one", 3))["reason"] == "credentials_expiring"
    assert given(bed, "one")["refresh"] == "refresh-token-1"
    lent = shelf.lent()
    assert lent is not None
    assert lent.session_id == "one"


async def test_a_busy_holder_keeps_it_and_others_are_told_to_try_again_case_k4(bed: Bed, shelf: Shelf) -> None:
    shelf.keep(content(1, EPOCH_MS))
    busy = await bed.dispatch("busy", harness="mine", keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    result = await (await bed.dispatch("one", harness="mine", keep_on_disconnect=True)).result()
    assert (result["error"]["code"], result["error"]["retryable"]) == ("credentials_missing", True)
    assert "the session busy" in result["error"]["message"]
    await agent.finish()
    assert (await busy.result())["ok"]
    assert (await turn(bed, "one", 2))["ok"], "the idle one gave way"
    assert given(bed, "one")["refresh"] == "refresh-token-1"


async def test_a_start_that_failed_gives_back_what_it_was_lent_case_k4(bed: Bed, shelf: Shelf) -> None:
    bed.provider.start_error = RunnerError("sandbox_start_failed", "no room")
    handle = await bed.dispatch("one", harness="mine", keep_on_disconnect=True)
    assert (await handle.result())["error"]["code"] == "sandbox_start_failed"
    assert shelf.lent() is None
    bed.provider.start_error = None
    assert (await turn(bed, "two"))["ok"]
    assert given(bed, "two")["refresh"] == "refresh-token-1"


async def test_a_disk_that_refuses_fails_the_start_with_its_reason(bed: Bed, shelf: Shelf) -> None:
    lock = shelf.directory / "lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()
    handle = await bed.dispatch("one", harness="mine", keep_on_disconnect=True)
    error = (await handle.result())["error"]
    assert error["code"] == "sandbox_start_failed"
    assert "The login of mine is out of reach" in error["message"]


async def test_an_agent_that_wants_another_login_in_the_middle_says_how(bed: Bed, shelf: Shelf) -> None:
    handle = await bed.dispatch("one", harness="mine", keep_on_disconnect=True)
    agent = await bed.agent()
    agent.error((await agent.prompt())["id"], -32000, "it was revoked")
    error = (await handle.result())["error"]
    assert error["code"] == "harness_auth_required"
    assert "it was revoked. Log in on the runner's machine: acp-runner harness login mine." in error["message"]
