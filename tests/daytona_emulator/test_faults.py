"""What goes wrong with the real service, and what its SDK makes of it."""

from __future__ import annotations

import asyncio

import pytest
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromSnapshotParams,
    ListSandboxesQuery,
    SandboxState,
    SessionExecuteRequest,
)
from daytona.common.errors import (
    DaytonaBadGatewayError,
    DaytonaBadRequestError,
    DaytonaConflictError,
    DaytonaConnectionError,
    DaytonaError,
    DaytonaForbiddenError,
    DaytonaGoneError,
    DaytonaInternalServerError,
    DaytonaNotFoundError,
    DaytonaQueueTimeoutError,
    DaytonaRateLimitError,
    DaytonaServiceUnavailableError,
    DaytonaTimeoutError,
    DaytonaUnprocessableEntityError,
)

from tests.daytona_emulator.faults import Fault, Faults
from tests.daytona_emulator.problems import Problem
from tests.daytona_emulator.scenarios import SCENARIOS, play
from tests.daytona_emulator.server import DaytonaEmulator


def named(name: str, **fields: object) -> CreateSandboxFromSnapshotParams:
    return CreateSandboxFromSnapshotParams(name=name, **fields)


async def listed(sdk: AsyncDaytona) -> list[tuple[str, str]]:
    return [(one.name, str(one.state.value)) async for one in sdk.list(ListSandboxesQuery()) if one.state]


def test_a_rule_is_used_up_and_skips() -> None:
    faults = Faults()
    faults.add(Fault.parse({"match": "^GET /a", "times": 2, "skip": 1, "status": 500}))
    faults.add(Fault.parse({"match": "/a", "drop": True, "times": -1}))
    taken = [faults.take("GET /a") for _ in range(4)]
    assert [(rule.status, rule.drop) for rule in taken if rule] == [(0, "before"), (500, ""), (500, ""), (0, "before")]
    assert faults.take("GET /b") is None


@pytest.mark.parametrize("wrong", [{}, {"match": "["}, {"match": "a", "drop": "never"}, {"match": "a", "other": 1}])
def test_a_rule_that_is_none(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"match|drop|unknown"):
        Fault.parse(wrong)


async def test_an_unknown_scenario_names_the_known(emulator: DaytonaEmulator) -> None:
    with pytest.raises(Problem, match="create_dies_polling"):
        await play(emulator, "nonsense", {})
    assert all(scenario.__doc__ for scenario in SCENARIOS.values())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, DaytonaBadRequestError),
        (403, DaytonaForbiddenError),
        (409, DaytonaConflictError),
        (410, DaytonaGoneError),
        (422, DaytonaUnprocessableEntityError),
        (429, DaytonaRateLimitError),
        (500, DaytonaInternalServerError),
        (502, DaytonaBadGatewayError),
        (503, DaytonaServiceUnavailableError),
        (504, DaytonaTimeoutError),
    ],
)
async def test_every_status_once(
    emulator: DaytonaEmulator, sdk: AsyncDaytona, status: int, kind: type[DaytonaError]
) -> None:
    emulator.fault("^GET /api/sandbox$", status=status, message="told", headers={"X-Told": "1"})
    with pytest.raises(kind, match="told") as refused:
        await listed(sdk)
    assert refused.value.status_code == status
    assert refused.value.headers["X-Told"] == "1"
    assert await listed(sdk) == []


@pytest.mark.parametrize(
    ("scenario", "asked", "kind", "told"),
    [
        ("quota", {"cpu": 1}, DaytonaBadRequestError, r"Total CPU limit exceeded\. Maximum allowed: 1\."),
        ("quota", {"cpu": 1, "status": 403}, DaytonaForbiddenError, "Total CPU limit exceeded"),
        ("disk_quota", {"disk": 4}, DaytonaBadRequestError, r"Total disk limit exceeded\. Maximum allowed: 4GiB\."),
        ("no_runners", {}, DaytonaBadRequestError, "No available runners"),
        ("suspended", {"reason": "unpaid"}, DaytonaForbiddenError, "Organization is suspended: unpaid"),
        ("rate_limit", {"retry_after": 7}, DaytonaRateLimitError, "ThrottlerException: Too Many Requests"),
    ],
)
async def test_a_create_that_is_refused(
    emulator: DaytonaEmulator, sdk: AsyncDaytona, scenario: str, asked: dict, kind: type[DaytonaError], told: str
) -> None:
    await sdk.create(named("first"))
    await play(emulator, scenario, asked)
    with pytest.raises(kind, match=told) as refused:
        await sdk.create(named("second"))
    if kind is DaytonaRateLimitError:
        assert refused.value.headers["Retry-After"] == "7"
    assert [name for name, _ in await listed(sdk)] == ["first"]
    await play(emulator, "restored", {})
    await sdk.create(named("second"))


async def test_a_create_that_waits_for_a_runner(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    await play(emulator, "queue", {})
    waiting = [asyncio.create_task(sdk.create(named(name, queue_timeout=5))) for name in ("lucky", "late")]
    while len(await listed(sdk)) < 2:
        await asyncio.sleep(0.01)
    emulator.boxes.find("lucky").queue_timeout = 60
    await emulator.advance(301)
    with pytest.raises(DaytonaQueueTimeoutError):
        await waiting[1]
    assert await listed(sdk) == [("lucky", "creating")]
    await play(emulator, "restored", {})
    assert (await waiting[0]).state == SandboxState.STARTED


async def test_a_start_that_the_quota_refuses(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await box.stop()
    await play(emulator, "quota", {"cpu": 0})
    with pytest.raises(DaytonaBadRequestError, match="Total CPU limit exceeded"):
        await box.start()
    await box.refresh_data()
    assert box.state == SandboxState.STOPPED
    await play(emulator, "restored", {})
    await box.start()


async def test_a_stopped_one_still_uses_the_disk_quota(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    box = await sdk.create(named("first"))
    await box.stop()
    await play(emulator, "quota", {"cpu": 1})
    await sdk.create(named("second"))
    await play(emulator, "restored", {})
    await play(emulator, "disk_quota", {"disk": 6})
    with pytest.raises(DaytonaBadRequestError, match="Total disk limit exceeded"):
        await sdk.create(named("third"))


@pytest.mark.parametrize("scenario", ["create_dies_polling", "create_answer_lost"])
async def test_an_orphan_that_nobody_was_told_of(emulator: DaytonaEmulator, sdk: AsyncDaytona, scenario: str) -> None:
    await play(emulator, scenario, {"times": 5})
    with pytest.raises((DaytonaRateLimitError, DaytonaConnectionError)) as lost:
        await sdk.create(named("orphan", labels={"runner": "r1"}))
    assert getattr(lost.value, "sandbox_id", None) is None
    await play(emulator, "restored", {})
    with pytest.raises(DaytonaConflictError):
        await sdk.create(named("orphan"))
    found = await sdk.get("orphan")
    await found.wait_for_sandbox_start()
    assert found.labels["runner"] == "r1"


async def test_a_create_that_is_given_up_goes_on(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    emulator.boxes.step = 0.5
    with pytest.raises(DaytonaTimeoutError) as late:
        await sdk.create(named("late"), timeout=1)
    assert late.value.sandbox_id == (await sdk.get("late")).id


async def test_dropped_connections(emulator: DaytonaEmulator, sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    await play(emulator, "dropped", {"match": "^GET /api/sandbox/", "times": 2})
    assert (await sdk.get(box.id)).id == box.id
    await play(emulator, "dropped", {"match": "/process/execute", "when": "after"})
    with pytest.raises(DaytonaConnectionError):
        await box.process.exec("echo once >> ran")
    assert await box.fs.download_file("ran") == b"once\n"


async def test_slow_answers(emulator: DaytonaEmulator, sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    await play(emulator, "slow", {"seconds": 30})
    late = asyncio.create_task(sdk.get(box.id))
    while not emulator.faults.hits:
        await asyncio.sleep(0.01)
    assert (await sdk.get(box.id)).id == box.id
    assert not late.done()
    late.cancel()


async def test_a_delete_that_hangs(emulator: DaytonaEmulator, sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    await play(emulator, "stuck_delete", {"sandbox": box.id})
    with pytest.raises(DaytonaTimeoutError):
        await box.delete(timeout=1, wait=True)
    await emulator.advance(7200)
    assert [state for _, state in await listed(sdk)] == ["destroying"]
    await play(emulator, "stuck_delete", {"sandbox": box.id, "stuck": False})
    for _ in range(200):
        if not await listed(sdk):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the sandbox is still there")


async def test_stopped_as_idle_although_busy(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    running = asyncio.create_task(box.process.exec("touch here; sleep 300"))
    while not (emulator.boxes.find(box.id).home / "here").exists():
        await asyncio.sleep(0.01)
    await play(emulator, "auto_stop", {"sandbox": box.id})
    with pytest.raises(DaytonaBadGatewayError):
        await running
    await box.refresh_data()
    assert box.state == SandboxState.STOPPED
    await box.start()


async def test_refreshed_but_stopped_anyway(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await play(emulator, "deaf", {"sandbox": box.id})
    await emulator.advance(10 * 60)
    await box.refresh_activity()
    await emulator.advance(6 * 60)
    await box.refresh_data()
    assert box.state == SandboxState.STOPPED


async def test_one_that_vanished(emulator: DaytonaEmulator, sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    await box.process.exec("sleep 300 >/dev/null 2>&1 &")
    await play(emulator, "vanished", {"sandbox": box.id})
    assert emulator.processes.alive() == []
    with pytest.raises(DaytonaNotFoundError):
        await box.process.exec("true")
    with pytest.raises(DaytonaNotFoundError):
        await box.delete()
    assert await listed(sdk) == []


async def test_a_daemon_that_ran_out_of_memory(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await play(emulator, "daemon_dead", {"sandbox": box.id})
    with pytest.raises(DaytonaBadGatewayError):
        await box.process.exec("true")
    await box.refresh_data()
    assert box.state == SandboxState.STARTED
    await emulator.advance(180)
    await box.refresh_data()
    assert (box.state, box.error_reason) == (SandboxState.STOPPED, None)
    await box.start()
    assert (await box.process.exec("echo back")).result == "back\n"


async def test_started_but_its_container_is_gone(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await play(emulator, "container_gone", {"sandbox": box.id})
    with pytest.raises(DaytonaNotFoundError, match="No such container"):
        await box.process.exec("true")
    await box.refresh_data()
    assert box.state == SandboxState.STARTED


async def test_an_error_that_can_be_recovered_once(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await box.stop()
    await play(emulator, "start_fails", {"sandbox": box.id})
    with pytest.raises(DaytonaError, match="entered error state"):
        await box.start()
    # An event tells the SDK of the state and of no reason.
    await box.refresh_data()
    assert box.error_reason == "Timeout while starting sandbox"
    with pytest.raises(DaytonaBadRequestError, match="Sandbox is in an errored state"):
        await box.start()
    assert box.recoverable
    await box.recover()
    assert box.state == SandboxState.STARTED
    await play(emulator, "errored", {"sandbox": box.id, "recoverable": True})
    with pytest.raises(DaytonaConflictError, match="recovery has been attempted recently"):
        await box.recover()
    await box.delete(wait=True)


async def test_one_that_stays_in_a_state(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await play(emulator, "in_state", {"sandbox": box.id, "state": "resizing", "desired": "resized"})
    await box.refresh_data()
    assert box.state == SandboxState.RESIZING
    with pytest.raises(DaytonaConflictError):
        await box.delete()
    with pytest.raises(DaytonaBadRequestError, match="Is the Sandbox started"):
        await box.process.exec("true")


async def test_a_muted_event_channel_costs_a_poll(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    await play(emulator, "muted_events", {})
    assert (await sdk.create(named("polled"))).state == SandboxState.STARTED


async def test_a_broken_event_channel_is_connected_again(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    await sdk.create(named("one"))
    await play(emulator, "dropped_events", {})
    deadline = asyncio.get_running_loop().time() + 20
    while not emulator.events.listeners:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)
    await sdk.create(named("two"))


async def test_a_log_stream_that_broke_can_be_read_again(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await box.process.create_session("s")
    asked = SessionExecuteRequest(command="echo begun; read a; echo done", run_async=True, suppress_input_echo=True)
    command = (await box.process.execute_session_command("s", asked)).cmd_id
    begun = asyncio.Event()
    follow = box.process.get_session_command_logs_async
    following = asyncio.create_task(follow("s", command, lambda _: begun.set(), lambda _: None))
    await begun.wait()
    await play(emulator, "dropped_links", {"sandbox": box.id})
    with pytest.raises(DaytonaError, match="keepalive ping timeout"):
        await following
    await box.process.send_session_command_input("s", command, "")
    out: list[str] = []
    await follow("s", command, out.append, lambda _: None)
    assert "".join(out) == "begun\ndone\n"
