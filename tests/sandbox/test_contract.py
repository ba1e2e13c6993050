"""What every provider keeps, asked of the local one, of its twin in memory and of the remote one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from runner.acp.memory import MemoryAgent
from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.sandbox.memory import MemoryProvider, MemorySandbox
from runner.sandbox.port import Ran
from runner.sandbox.remote import RemoteSandbox
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import bed, daytona_bed
from tests.sandbox.bed import SECONDS, Talk, spec

ECHO = ("cat",)


async def echo(agent: MemoryAgent) -> None:
    """As ``cat``, but for frames."""
    while (frame := await agent.read_frame()) is not None:
        agent.send(frame)


class Bench:
    """A provider and how its faults are brought about."""

    def __init__(self, provider: Any, emulator: EmulatorProcess | None = None) -> None:
        self.provider = provider
        self.emulator = emulator
        self.proof = "echild" if emulator is None else "stopped"

    def start(self, seat: str = "seat_1", **changes: Any) -> Any:
        return self.provider.start(spec(seat, *ECHO, **changes))

    def cannot_run(self, seat: str) -> Any:
        if isinstance(self.provider, MemoryProvider):
            self.provider.faults.start_error = RunnerError("harness_start_failed", "no such command")
        return self.provider.start(spec(seat, "no-such-command-anywhere"))

    async def lose(self, sandbox: Any) -> None:
        if isinstance(sandbox, MemorySandbox):
            sandbox.lose()
        elif isinstance(sandbox, RemoteSandbox):
            assert self.emulator is not None
            self.emulator.scenario("vanished", sandbox=sandbox.name)
        else:
            sandbox._init.kill()


@pytest.fixture(params=["none", "landlock", "cell", "memory", "daytona"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path, store_id: str) -> AsyncIterator[Bench]:
    clock = SystemClock()
    makers: dict[str, Callable[[], Any]] = {
        "memory": lambda: MemoryProvider(echo, clock=clock),
    }
    level = request.param
    if level == "daytona":
        emulator = request.getfixturevalue("daytona_emulator")
        made = Bench(daytona_bed.provider(emulator, store_id), emulator)
    else:
        made = Bench(makers[level]() if level in makers else bed.local(tmp_path / "state", store_id, level=level))
    yield made
    await made.provider.close()
    assert made.provider.live == ()


async def test_an_agent_is_reached_over_its_transport(bench: Bench) -> None:
    sandbox = await bench.start()
    talk = Talk(sandbox)
    assert await talk.say('{"a":1}') == '{"a":1}'
    assert sandbox.agent_pid == sandbox.transport.pid
    assert (sandbox.agent_pid is None) == (bench.emulator is not None)
    assert sandbox.isolation == bench.provider.isolation
    assert bench.provider.live == ("seat_1",)


async def test_the_workspace_is_the_one_that_paths_names(bench: Bench) -> None:
    sandbox = await bench.start()
    paths = bench.provider.paths("default", "of_seat_1", None)
    assert len({paths.workspace, paths.home, paths.tmp}) == 3
    if bench.emulator is not None:
        assert sandbox.workspace.endswith("/acp-runner/workspace")
        with pytest.raises(RunnerError, match=r"workspace\.path"):
            bench.provider.paths("default", "other", Path("/somewhere"))
        return
    assert sandbox.workspace == str(paths.workspace)
    assert bench.provider.paths("default", "other", Path("/somewhere")).workspace == Path("/somewhere")


async def test_a_home_is_told_from_a_later_one_of_the_same_session(bench: Bench) -> None:
    """Case M6: it stays itself over its sandboxes, and what ``remove`` deleted does not come back."""
    assert await bench.provider.home_identity("default", "s") is None
    first = await bench.start("seat_1", session_id="s")
    identity = await bench.provider.home_identity("default", "s")
    await first.destroy()
    second = await bench.start("seat_2", session_id="s")
    await bench.start("seat_3", session_id="other")
    assert await bench.provider.home_identity("default", "s") == identity
    assert identity
    assert await bench.provider.home_identity("default", "other") not in (None, identity)
    await second.destroy()
    await bench.provider.remove("default", "s")
    assert await bench.provider.home_identity("default", "s") is None
    await bench.start("seat_4", session_id="s")
    assert await bench.provider.home_identity("default", "s") not in (None, identity)


async def test_a_marked_turn_is_killed_and_the_agent_lives(bench: Bench) -> None:
    sandbox = await bench.start()
    talk = Talk(sandbox)
    mark = sandbox.mark("turn_1")
    await mark.set(SECONDS)
    reaped = await sandbox.kill_turn("turn_1", 1.0)
    assert (reaped.killed, reaped.survivors) == (0, ())
    assert await talk.say("{}") == "{}"


async def test_a_turn_without_a_mark_is_not_guessed_at(bench: Bench) -> None:
    sandbox = await bench.start()
    with pytest.raises(RunnerError) as refused:
        await sandbox.kill_turn("never_marked", 1.0)
    assert refused.value.code == "sandbox_lost"


async def test_a_teardown_is_proven_and_told_to_the_transport_once(bench: Bench) -> None:
    sandbox = await bench.start()
    talk = Talk(sandbox)
    gone = await sandbox.destroy(1.0)
    assert (gone.proven, gone.proof, gone.survivors) == (True, bench.proof, ())
    assert (await talk.ended()).code == 0
    assert await sandbox.destroy() == gone
    assert len(talk.exits) == 1
    assert bench.provider.live == ()


async def test_callers_at_the_same_time_share_one_teardown(bench: Bench) -> None:
    """Case D6: also when one of them is cancelled meanwhile."""
    sandbox = await bench.start()
    first, second, third = (asyncio.ensure_future(sandbox.destroy()) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    assert (await first).proven
    assert await third == await first
    assert second.cancelled() or second.done()


async def test_a_lost_sandbox_says_so_and_is_still_destroyed(bench: Bench) -> None:
    """Case A1: the transport reports at once, a mark or a kill fails, nobody waits for ever."""
    sandbox = await bench.start()
    talk = Talk(sandbox)
    await bench.lose(sandbox)
    info = await talk.ended()
    assert (info.code, info.signal, str(info)) == (None, None, "the sandbox is gone")
    with pytest.raises(RunnerError) as refused:
        await sandbox.mark("turn_1").set(SECONDS)
    assert refused.value.code == "sandbox_lost"
    with pytest.raises(RunnerError) as refused:
        await sandbox.kill_turn("turn_1", SECONDS)
    assert refused.value.code == "sandbox_lost"
    assert (await sandbox.destroy()).proven
    assert len(talk.exits) == 1


async def test_an_agent_that_exits_by_itself_is_reported(bench: Bench) -> None:
    sandbox = await bench.start()
    talk = Talk(sandbox)
    sandbox.transport.close_stdin()
    assert (await talk.ended()).code == 0
    assert talk.told == ["eof", talk.exits[0]]
    assert (await sandbox.destroy()).proof == bench.proof


async def test_a_command_that_cannot_run_leaves_nothing(bench: Bench) -> None:
    """Case C7."""
    with pytest.raises(RunnerError) as refused:
        await bench.cannot_run("seat_1")
    assert refused.value.code == "harness_start_failed"
    assert bench.provider.live == ()


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a/", "a\0b", "x" * 2000, "d/" * 100 + "x"])
async def test_a_file_that_leaves_the_workspace_is_refused(bench: Bench, path: str) -> None:
    """Case C7."""
    with pytest.raises(RunnerError) as refused:
        await bench.start(workspace_files={"good": b"", path: b""})
    assert refused.value.code == "invalid_request"
    assert bench.provider.live == ()


async def test_a_deadline_that_passed_starts_nothing(bench: Bench) -> None:
    with pytest.raises(RunnerError) as refused:
        await bench.start(deadline=0.001)
    assert refused.value.code == "sandbox_start_failed"
    assert bench.provider.live == ()


async def test_a_seat_holds_one_sandbox(bench: Bench) -> None:
    await bench.start()
    with pytest.raises(RunnerError) as refused:
        await bench.start()
    assert refused.value.code == "sandbox_start_failed"
    assert bench.provider.live == ("seat_1",)


async def test_close_destroys_all_and_starts_no_more(bench: Bench) -> None:
    talks = [Talk(await bench.start(f"seat_{n}")) for n in range(3)]
    await bench.provider.close()
    assert bench.provider.live == ()
    for talk in talks:
        await talk.ended()
    with pytest.raises(RunnerError) as refused:
        await bench.start("seat_9")
    assert refused.value.code == "sandbox_start_failed"


async def ran(sandbox: Any, script: str, name: str = "t1") -> tuple[Any, bytes]:
    heard: list[bytes] = []
    async with asyncio.timeout(SECONDS):
        ended = await sandbox.run(name, ["/bin/sh", "-c", script], heard.append)
    return ended, b"".join(heard)


async def test_a_command_runs_beside_the_agent(bench: Bench) -> None:
    sandbox = await bench.start()
    talk = Talk(sandbox)
    assert await ran(sandbox, "echo one two; exit 3") == (Ran(3), b"one two\n")
    assert await ran(sandbox, "echo again", "t2") == (Ran(0), b"again\n")
    assert await talk.say('{"a":1}') == '{"a":1}'


async def test_a_kill_of_its_turn_ends_a_command_and_not_the_agent(bench: Bench) -> None:
    """Case D4."""
    sandbox = await bench.start()
    talk = Talk(sandbox)
    await sandbox.mark("t1").set(SECONDS)
    up = asyncio.Event()
    running = asyncio.create_task(sandbox.run("t1", ["/bin/sh", "-c", "echo up; sleep 600"], lambda _: up.set()))
    async with asyncio.timeout(SECONDS):
        await up.wait()
        assert (await sandbox.kill_turn("t1", SECONDS)).survivors == ()
        assert await running == Ran(None, 9)
    assert await talk.say('{"a":1}') == '{"a":1}'


@pytest.mark.parametrize("ending", ["lose", "destroy"])
async def test_a_command_of_a_sandbox_that_goes_away_is_lost(bench: Bench, ending: str) -> None:
    sandbox = await bench.start()
    up = asyncio.Event()
    running = asyncio.create_task(sandbox.run("t1", ["/bin/sh", "-c", "echo up; sleep 600"], lambda _: up.set()))
    async with asyncio.timeout(SECONDS):
        await up.wait()
        await (bench.lose(sandbox) if ending == "lose" else sandbox.destroy(0.0))
        with pytest.raises(RunnerError) as caught:
            await running
    assert caught.value.code == "sandbox_lost"
    await sandbox.destroy(0.0)
