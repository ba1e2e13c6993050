"""Files of remote sandboxes: what wakes, what gives way, what goes wrong on the way (DESIGN 3.4, 4)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.files import Precondition
from runner.sandbox.daytona import copying, visits
from runner.sandbox.daytona.provider import DaytonaProvider
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import disk, provider, spec, states

MOST = 1024 * 1024
LARGE = os.urandom(300_000)


@pytest.fixture
async def daytona(daytona_emulator: EmulatorProcess) -> AsyncIterator[DaytonaProvider]:
    made = provider(daytona_emulator)
    yield made
    daytona_emulator.scenario("restored")
    await made.close()
    assert made.live == ()
    assert set(states(daytona_emulator).values()) <= {"stopped"}


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "LINGER_SECONDS", 0.3)


def files(daytona: DaytonaProvider, session: str = "ses_1") -> Any:
    return daytona.files("default", session, None)


async def code_of(work: Any) -> str:
    with pytest.raises(RunnerError) as caught:
        await work
    return caught.value.code


async def slept(daytona: DaytonaProvider, emulator: EmulatorProcess) -> str:
    """A session with a file, whose sandbox sleeps; the sandbox's name."""
    sandbox = await daytona.start(spec(workspace_files={"a": b"1", "large": LARGE}))
    await sandbox.destroy(0.0)
    name = daytona.sandbox_name("default", "ses_1")
    assert states(emulator) == {name: "stopped"}
    return name


async def test_one_that_was_woken_sleeps_again_and_its_disk_is_kept_anew(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, brief: None
) -> None:
    name = await slept(daytona, daytona_emulator)
    assert [one.session_id for one in daytona.disks()] == ["ses_1"]
    first, second = await asyncio.gather(files(daytona).read("a", MOST), files(daytona).read("large", MOST))
    assert (first.data, second.data == LARGE) == (b"1", True)
    assert daytona.live == ()
    await bed.until(lambda: states(daytona_emulator) == {name: "stopped"})
    await bed.until(lambda: [one.session_id for one in daytona.disks()] == ["ses_1"])
    starts = [one for one in daytona_emulator.exchanges() if one["path"].endswith("/start")]
    assert len(starts) == 1


async def test_a_start_takes_over_what_is_awake(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    """At once, behind the file that is under way; nothing is stopped in between."""
    await slept(daytona, daytona_emulator)
    daytona_emulator.scenario("slow", match="POST .*/process/execute", seconds=1.0)
    reading = asyncio.create_task(files(daytona).read("a", MOST))
    await bed.until(lambda: [one for one in daytona_emulator.state()["sandboxes"] if one["state"] == "started"])
    sandbox = await daytona.start(spec(seat_id="seat_2"))
    assert (await reading).data == b"1"
    assert (daytona.live, sandbox.woken) == (("seat_2",), True)
    assert await bed.Talk(sandbox).say("hello") == "hello"
    assert (await files(daytona).write("b", b"beside the agent")).created
    stops = [one for one in daytona_emulator.exchanges() if "/stop" in one["path"]]
    assert len(stops) == 1
    await sandbox.destroy(0.0)
    assert (await files(daytona).read("b", MOST)).data == b"beside the agent"


async def test_what_only_rests_gives_its_place_to_a_turn(daytona_emulator: EmulatorProcess) -> None:
    made = provider(daytona_emulator, capacity=1)
    name = await slept(made, daytona_emulator)
    assert (await files(made).read("a", MOST)).data == b"1"
    other = await made.start(spec("ses_2"))
    assert states(daytona_emulator)[name] == "stopped"
    with pytest.raises(RunnerError) as caught:
        await files(made).read("a", MOST)
    assert (caught.value.code, caught.value.status, caught.value.retryable) == ("runner_at_capacity", 429, True)
    await other.destroy(0.0)
    assert (await files(made).read("a", MOST)).data == b"1"
    await made.close()
    assert set(states(daytona_emulator).values()) == {"stopped"}


async def test_a_sandbox_that_is_put_to_sleep_is_waited_for(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess
) -> None:
    sandbox = await daytona.start(spec(workspace_files={"a": b"1"}))
    ending = asyncio.create_task(sandbox.destroy(0.0))
    await asyncio.sleep(0.01)
    assert (await files(daytona).read("a", MOST)).data == b"1"
    assert (await ending).proven


async def test_a_reader_that_leaves_leaves_nothing_awake(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, brief: None
) -> None:
    name = await slept(daytona, daytona_emulator)
    daytona_emulator.scenario("slow", match="POST .*/start", seconds=0.5)
    reading = asyncio.create_task(files(daytona).read("a", MOST))
    await bed.until(lambda: daytona_emulator.state()["faults"])
    reading.cancel()
    await asyncio.wait({reading})
    await bed.until(lambda: daytona.disks() and states(daytona_emulator) == {name: "stopped"})
    assert daytona._held == {}


@pytest.mark.parametrize("how", ["vanished", "errored"])
async def test_a_sandbox_that_is_gone_is_no_workspace_and_a_write_makes_one(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, how: str
) -> None:
    name = await slept(daytona, daytona_emulator)
    assert (await files(daytona).read("a", MOST)).data == b"1"
    daytona_emulator.scenario(how, sandbox=name)
    assert await code_of(files(daytona).read("a", MOST)) == "not_found"
    assert (await files(daytona).write("new/b", b"2")).created
    assert states(daytona_emulator) == {name: "started"}
    sandbox = await daytona.start(spec(seat_id="seat_2"))
    assert (await files(daytona).read("new/b", MOST)).data == b"2"
    await sandbox.destroy(0.0)


TRANSIENT: list[tuple[str, dict[str, Any]]] = [
    ("server_error", {"match": "POST .*/process/execute", "status": 502}),
    ("dropped", {"match": "POST .*/process/execute", "when": "after"}),
    ("dropped", {"match": "POST .*/files/bulk-upload"}),
    ("dropped", {"match": "POST .*/files/bulk-download"}),
    ("server_error", {"match": "POST .*/files/bulk-download", "status": 503}),
    ("server_error", {"match": "DELETE .*/files", "status": 500}),
    ("rate_limit", {"match": "GET .*/user-home-dir", "retry_after": 1}),
    ("server_error", {"match": "^GET /api/sandbox/", "status": 503, "times": 2}),
]


@pytest.mark.parametrize(("scenario", "asked"), TRANSIENT)
async def test_files_survive(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, scenario: str, asked: dict[str, Any]
) -> None:
    sandbox = await daytona.start(spec(workspace_files={"large": LARGE}))
    daytona_emulator.scenario(scenario, **asked)
    assert (await files(daytona).read("large", MOST)).data == LARGE
    daytona_emulator.scenario(scenario, **asked)
    await files(daytona).write("large2", LARGE[::-1])
    daytona_emulator.scenario("restored")
    assert (await files(daytona).read("large2", MOST)).data == LARGE[::-1]
    assert [entry.name for entry in (await files(daytona).list("", b"", 10)).entries] == ["large", "large2"]
    await sandbox.destroy(0.0)


async def test_a_conditional_write_is_never_done_twice(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess
) -> None:
    """Its answer is lost: whether it was done is not known, and a repetition would say that it was not."""
    sandbox = await daytona.start(spec())
    daytona_emulator.scenario("dropped", match="POST .*/process/execute", when="after")
    new = Precondition(none_match=("*",))
    assert await code_of(files(daytona).write("a", b"1", new)) == "sandbox_lost"
    assert (await files(daytona).read("a", MOST)).data == b"1"
    assert await files(daytona).write("a", b"2", new) is None
    await sandbox.destroy(0.0)


@pytest.mark.parametrize(
    ("scenario", "asked", "code"),
    [("quota", {"cpu": 0}, "runner_at_capacity"), ("server_error", {"match": "POST .*/start", "status": 401}, None)],
)
async def test_one_that_cannot_be_woken_says_why(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, scenario: str, asked: dict[str, Any], code: str | None
) -> None:
    name = await slept(daytona, daytona_emulator)
    daytona_emulator.scenario(scenario, **asked)
    assert await code_of(files(daytona).read("a", MOST)) in ((code,) if code else ("sandbox_start_failed", "forbidden"))
    daytona_emulator.scenario("restored")
    await bed.until(lambda: daytona._held == {})
    assert states(daytona_emulator) == {name: "stopped"}
    assert (await files(daytona).read("a", MOST)).data == b"1"


async def test_what_was_cut_off_is_swept(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    sandbox = await daytona.start(spec())
    root = disk(daytona_emulator, daytona.sandbox_name("default", "ses_1")) / "acp-runner"
    for name in ("staged-old", "staged-new"):
        (root / name).write_bytes(b"1")
    os.utime(root / "staged-old", (time.time() - 3600,) * 2)
    await files(daytona).write("large", LARGE)
    assert (await files(daytona).read("large", MOST)).data == LARGE
    assert sorted(path.name for path in root.glob("staged-*")) == ["staged-new"]
    await sandbox.destroy(0.0)


async def test_the_end_of_the_runner_puts_them_to_sleep(daytona_emulator: EmulatorProcess) -> None:
    made = provider(daytona_emulator)
    name = await slept(made, daytona_emulator)
    await files(made).read("a", MOST)
    await made.close()
    assert states(daytona_emulator) == {name: "stopped"}
    assert await code_of(files(made).read("a", MOST)) == "session_starting"


COPY_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("server_error", {"match": "POST .*/process/execute", "status": 502}),
    ("dropped", {"match": "POST .*/process/execute", "when": "after", "skip": 1}),
    ("dropped", {"match": "POST .*/files/bulk-download"}),
    ("dropped", {"match": "POST .*/files/bulk-upload", "when": "after"}),
]


@pytest.mark.parametrize(("scenario", "asked"), COPY_FAULTS)
async def test_a_copy_survives(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, scenario: str, asked: dict[str, Any]
) -> None:
    await slept(daytona, daytona_emulator)
    daytona_emulator.scenario(scenario, **asked)
    assert await daytona.copy_workspace(("default", "ses_1"), ("default", "fork")) == "copied"
    assert (await files(daytona, "fork").read("large", MOST)).data == LARGE
    for session in ("ses_1", "fork"):
        root = disk(daytona_emulator, daytona.sandbox_name("default", session)) / "acp-runner"
        assert [path.name for path in root.iterdir() if path.name.startswith(("staged", "fork"))] == []


async def test_a_copy_that_is_too_large_or_has_no_room_is_none(
    daytona_emulator: EmulatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = provider(daytona_emulator, capacity=1)
    name = await slept(made, daytona_emulator)
    bounds = (("COPY_BYTES", len(LARGE)), ("COPY_ENTRIES", 1), ("ARCHIVE_BYTES", 1000), ("COPY_SECONDS", 0))
    for bound, value in bounds:
        with monkeypatch.context() as patch:
            patch.setattr(copying, bound, value)
            assert await made.copy_workspace(("default", "ses_1"), ("default", "fork")) == "too_large", bound
    assert list(states(daytona_emulator)) == [name]
    other = await made.start(spec("ses_2"))
    assert await code_of(made.copy_workspace(("default", "ses_1"), ("default", "fork"))) == "runner_at_capacity"
    await other.destroy(0.0)
    assert await made.copy_workspace(("default", "nobody"), ("default", "fork")) == "none"
    await made.close()


async def test_a_file_of_what_is_being_deleted_makes_no_sandbox(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, brief: None
) -> None:
    """A read that came while its session was deleted: the sandbox was still there at its look."""
    await slept(daytona, daytona_emulator)
    daytona_emulator.scenario("slow", match="^DELETE /api/sandbox", seconds=1.0)
    removing = asyncio.create_task(daytona.remove("default", "ses_1"))
    await bed.until(lambda: daytona.disks() == ())
    assert await code_of(files(daytona).read("a", MOST)) == "not_found"
    await removing
    await bed.until(lambda: daytona._held == {})
    assert (states(daytona_emulator), daytona.disks()) == ({}, ())


async def test_a_writer_beside_that_reader_makes_one(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, brief: None
) -> None:
    await slept(daytona, daytona_emulator)
    daytona_emulator.scenario("slow", match="^DELETE /api/sandbox", seconds=1.0)
    removing = asyncio.create_task(daytona.remove("default", "ses_1"))
    reading = asyncio.create_task(code_of(files(daytona).read("a", MOST)))
    await bed.until(lambda: daytona._held)
    written = await files(daytona).write("b", b"2")
    assert (await reading, written.created) == ("not_found", True)
    await removing
    assert (await files(daytona).read("b", MOST)).data == b"2"


async def test_a_disk_that_is_used_at_the_end_of_its_window_stays(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess
) -> None:
    """The look at what may go takes a while, and a turn comes meanwhile (case C3)."""
    made = provider(daytona_emulator, disk_seconds=20.0)
    await slept(made, daytona_emulator)
    daytona_emulator.scenario("slow", match="^GET /api/sandbox/acp-", seconds=1.0)
    name = made.sandbox_name("default", "ses_1")
    made._disks.drop(name)
    made._expire(name)
    await asyncio.sleep(0.2)
    sandbox = await made.start(spec(seat_id="seat_2"))
    assert sandbox.woken
    assert (await files(made).read("a", MOST)).data == b"1"
    await made.close()
