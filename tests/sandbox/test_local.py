"""What only real cells can show: environments, hostile processes, lost inits, proofs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.acp.transport import ExitInfo
from runner.errors import RunnerError
from runner.sandbox import local_sandbox
from runner.sandbox.local import LocalProvider
from tests.sandbox import bed
from tests.sandbox.bed import SECONDS, Talk, spec, until

# A wrapper that forks the real agent and waits for it; the agent ignores SIGTERM and the end of its stdin.
WRAPPER = "trap '' TERM; sh -c 'trap \"\" TERM HUP; echo started $$; while :; do sleep 0.05; done' & wait; sleep 600"
ESCAPED = (
    "setsid nohup sh -c 'trap \"\" TERM; while :; do sleep 0.05; done' >/dev/null 2>&1 & env -i setsid sleep 600 &"
)


async def test_environments_are_an_allow_list(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case K1: agent and init, read by the system and not by asking them; a renamed variable is no exception."""
    for name in ("OPENAI_API_KEY", "DATABASE_URL", "PYTHONPATH", "LD_PRELOAD_NOT", "RENAMED_KEY", "USER"):
        monkeypatch.setenv(name, f"secret-{name}")
    sandbox = await provider.start(
        spec(env={"GIVEN": "yes", "HOME": "/elsewhere", "TMPDIR": "/elsewhere", "LANG": "C"})
    )
    paths = provider.paths("default", "of_seat_1", None)
    assert sandbox.agent_pid is not None
    marker = sandbox.marker
    assert bed.environ(sandbox.agent_pid) == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C",
        "TERM": "dumb",
        "GIVEN": "yes",
        "HOME": str(paths.home),
        "TMPDIR": str(paths.tmp),
        "ACP_RUNNER_CELL": marker,
    }
    of_init = bed.environ(sandbox.init_pid)
    assert set(of_init) == {"PATH", "LANG", "ACP_RUNNER_CELL"}
    assert of_init["ACP_RUNNER_CELL"] == marker
    assert "secret-" not in bed.command(sandbox.init_pid)


async def test_the_agent_has_only_its_streams(provider: LocalProvider) -> None:
    sandbox = await provider.start(spec())
    assert (await Talk(sandbox).line()).startswith("ready")
    links = {os.readlink(f"/proc/{sandbox.agent_pid}/fd/{fd}") for fd in os.listdir(f"/proc/{sandbox.agent_pid}/fd")}
    assert len(links) == 3
    assert all(link.startswith("pipe:") for link in links)


async def test_home_and_tmp_are_private_to_the_session(provider: LocalProvider) -> None:
    """Case K1."""
    await provider.start(spec("seat_a", home_files={".config/agent/key.json": b"{}"}))
    await provider.start(spec("seat_b"))
    a, b = (provider.paths("default", f"of_seat_{name}", None) for name in "ab")
    for path in (a.home, a.tmp, a.home / ".config" / "agent", a.workspace):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((a.home / ".config/agent/key.json").stat().st_mode) == 0o600
    assert list(b.home.iterdir()) == []


async def next_tick() -> None:
    now = local_sandbox.boot_ticks()
    await until(lambda: local_sandbox.boot_ticks() > now, "the next clock tick")


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "setsid", "nohup", "daemon", "pair", "loop", "deaf", "stopped"])
async def test_a_turn_s_hostile_children_die_and_the_agent_stays(provider: LocalProvider, kind: str, turn: int) -> None:
    """Also of a later turn, which is told from the agent's helpers by the clock and not by a list."""
    sandbox = await provider.start(spec())
    talk = Talk(sandbox)
    assert (await talk.line()).startswith("ready")
    pong = await talk.say("helper")
    before = set(bed.carriers(sandbox.marker.partition(":")[0]))
    for n in range(turn):
        await sandbox.mark(f"turn_{n}").set(SECONDS)
        await next_tick()
    await talk.say(kind)
    reaped = await sandbox.kill_turn(f"turn_{turn - 1}", 2.0)
    assert reaped.survivors == ()
    assert set(bed.carriers(sandbox.marker.partition(":")[0])) == before
    assert await talk.say("ping") == pong


async def test_a_wrapper_s_real_agent_dies_with_its_cell(provider: LocalProvider, store_id: str) -> None:
    """Case D2: the wrapper forks the agent, both ignore SIGTERM, the agent ignores the end of its stdin."""
    sandbox = await provider.start(spec("seat_1", "sh", "-c", WRAPPER))
    talk = Talk(sandbox)
    real = int((await talk.line()).split()[1])
    assert real != sandbox.agent_pid
    assert real in bed.carriers(store_id)
    started = asyncio.get_running_loop().time()
    gone = await sandbox.destroy(0.1)
    assert (gone.proven, gone.proof) == (True, "echild")
    assert asyncio.get_running_loop().time() - started < 3.0
    assert bed.carriers(store_id) == {}
    assert bed.state(real) == "X"
    assert talk.exits == [ExitInfo(signal=signal.SIGKILL)]


async def test_the_end_of_stdin_is_a_chance_to_leave_by_itself(provider: LocalProvider) -> None:
    sandbox = await provider.start(spec("seat_1", "sh", "-c", "cat >/dev/null; exit 7"))
    talk = Talk(sandbox)
    assert (await sandbox.destroy(5.0)).proof == "echild"
    assert talk.exits == [ExitInfo(code=7)]


async def test_output_before_the_exit_arrives_before_it(provider: LocalProvider) -> None:
    sandbox = await provider.start(spec("seat_1", "sh", "-c", "echo one; echo two >&2; exit 3"))
    talk = Talk(sandbox)
    assert await talk.ended() == ExitInfo(code=3)
    assert await talk.line() == "one"
    assert ("stderr", b"two\n") in talk.told


async def test_a_killed_init_is_noticed_and_its_cell_killed(provider: LocalProvider, store_id: str) -> None:
    """Case A1: the report comes at once; the agent, which lived on, and what it detached are killed by the census."""
    sandbox = await provider.start(spec("seat_1", "sh", "-c", f"{ESCAPED} echo up; exec sleep 600"))
    talk = Talk(sandbox)
    assert await talk.line() == "up"
    os.kill(sandbox.init_pid, signal.SIGKILL)
    started = asyncio.get_running_loop().time()
    assert (await talk.ended()).reason == "the sandbox is gone"
    assert asyncio.get_running_loop().time() - started < 1.0
    assert bed.carriers(store_id)
    gone = await sandbox.destroy()
    assert (gone.proven, gone.proof) == (True, "census")
    assert bed.carriers(store_id) == {}
    await until(lambda: bed.state(sandbox.init_pid) == "X", "the init's reaping")


async def test_a_killed_agent_is_reported_with_its_signal(provider: LocalProvider) -> None:
    """Case A1."""
    sandbox = await provider.start(spec())
    talk = Talk(sandbox)
    assert sandbox.agent_pid is not None
    os.kill(sandbox.agent_pid, signal.SIGKILL)
    assert await talk.ended() == ExitInfo(signal=signal.SIGKILL)


async def test_an_init_told_to_go_proves_it_by_its_exit(provider: LocalProvider, store_id: str) -> None:
    sandbox = await provider.start(spec("seat_1", "sh", "-c", WRAPPER))
    os.kill(sandbox.init_pid, signal.SIGTERM)
    await until(lambda: not bed.carriers(store_id), "the end of the cell")
    assert (await sandbox.destroy()).proof == "echild"


async def test_a_stopped_init_is_woken_for_its_teardown(provider: LocalProvider) -> None:
    sandbox = await provider.start(spec())
    os.kill(sandbox.init_pid, signal.SIGSTOP)
    with pytest.raises(RunnerError) as refused:
        await sandbox.mark("turn_1").set(0.05)
    assert refused.value.code == "sandbox_lost"
    assert (await sandbox.destroy(0.0)).proof == "echild"


async def test_a_mute_init_is_killed_and_the_census_proves_it(
    provider: LocalProvider, store_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D6: no reply ever comes; the wait is bounded and what follows does not need the init."""
    sandbox = await provider.start(spec())
    talk = Talk(sandbox)
    monkeypatch.setattr(sandbox._control, "request", lambda op, **members: asyncio.get_running_loop().create_future())
    gone = await sandbox.destroy(0.0, 0.1)
    assert (gone.proven, gone.proof) == (True, "census")
    assert bed.carriers(store_id) == {}
    assert len(talk.exits) == 1


async def test_a_lost_exit_notice_does_not_hold_the_teardown(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D6: the watcher never fires although the pid is gone; a look at the pid ends the wait."""
    sandbox = await provider.start(spec())
    init = sandbox._init
    assert init._pidfd is not None
    asyncio.get_running_loop().remove_reader(init._pidfd)
    async with asyncio.timeout(3.0):
        assert (await sandbox.destroy(0.0)).proof == "echild"
    assert bed.state(sandbox.init_pid) == "X"


async def test_without_pidfds_the_init_is_still_reaped(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError("no pidfd here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    sandbox = await provider.start(spec())
    os.kill(sandbox.init_pid, signal.SIGTERM)
    await until(lambda: bed.state(sandbox.init_pid) == "X", "the init's reaping")
    assert (await sandbox.destroy()).proof == "echild"


async def test_survivors_are_told_and_a_later_try_can_prove_it(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D10: an unproven teardown keeps its place in the book and can be tried again."""
    sandbox = await provider.start(spec())
    told = {"ok": True, "proof": None, "killed": 3, "survivors": [4711]}
    request = sandbox._control.request

    def lame(op: str, **members: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_result(told)
        return future

    monkeypatch.setattr(sandbox._control, "request", lame)
    gone = await sandbox.destroy()
    assert (gone.proven, gone.proof, gone.survivors) == (False, "", (4711,))
    assert "seat_1" in provider.live
    monkeypatch.setattr(sandbox._control, "request", request)
    assert (await sandbox.destroy()).proven
    assert provider.live == ()


async def test_survivors_of_a_turn_are_told(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D10: a kill that kills nobody is not taken for one that did."""
    sandbox = await provider.start(spec())
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result({"ok": True, "killed": 2, "survivors": [12, 13]})
    monkeypatch.setattr(sandbox._calls, "_request", lambda op, **members: future)
    reaped = await sandbox.kill_turn("turn_1", 0.1)
    assert (reaped.killed, reaped.survivors) == (2, (12, 13))
    monkeypatch.undo()


async def test_a_mark_is_written_before_mark_returns(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller overlaps the mark with its own work: nothing may wait for a turn of the loop."""
    sandbox = await provider.start(spec())
    assert sandbox._control._unsent == b""
    sandbox.mark("turn_1")
    assert sandbox._control._unsent == b""
    assert len(sandbox._control._replies._waiting) == 1


async def test_a_workspace_in_place_gets_the_files(provider: LocalProvider, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    files = {"new/deep/file.txt": b"1", "there.sh": b"2"}
    (checkout / "there.sh").write_bytes(b"old")
    (checkout / "there.sh").chmod(0o755)
    sandbox = await provider.start(spec(workspace_path=checkout, workspace_files=files))
    assert os.readlink(f"/proc/{sandbox.agent_pid}/cwd") == str(checkout)
    assert {name: (checkout / name).read_bytes() for name in files} == files
    assert stat.S_IMODE((checkout / "there.sh").stat().st_mode) == 0o755
    assert not provider.paths("default", "of_seat_1", None).workspace.exists()
    await sandbox.destroy(0.0)
    await provider.remove("default", "of_seat_1")
    assert (checkout / "there.sh").exists()
    assert not provider.paths("default", "of_seat_1", None).home.exists()


@pytest.mark.parametrize(
    ("changes", "code", "why"),
    [
        ({"argv": ("no-such-agent",)}, "harness_start_failed", "ENOENT"),
        ({"argv": ("/etc/passwd",)}, "harness_start_failed", "EACCES"),
        ({"argv": ("sh",), "env": {"BAD": "\0"}}, "harness_start_failed", "EINVAL"),
        ({"workspace_path": Path("/nonexistent/place")}, "sandbox_start_failed", "ENOENT"),
        ({"workspace_path": Path("relative")}, "invalid_request", "absolute"),
        ({"session_id": "../up"}, "invalid_request", "id"),
        ({"project": "a/b"}, "invalid_request", "id"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    provider: LocalProvider, store_id: str, changes: dict[str, Any], code: str, why: str
) -> None:
    """Case C7: whichever step fails."""
    with pytest.raises(RunnerError) as refused:
        await provider.start(spec(**changes))
    assert refused.value.code == code
    assert why in refused.value.message
    assert provider.live == ()
    assert bed.carriers(store_id) == {}


async def test_a_broken_interpreter_is_named(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C7: the program in the init's place dies before it answers; its last words are the cause."""
    monkeypatch.setattr("runner.sandbox.init_process.resource_path", lambda *parts: Path("/nonexistent/init.py"))
    with pytest.raises(RunnerError) as refused:
        await provider.start(spec())
    assert refused.value.code == "sandbox_start_failed"
    assert "No such file" in refused.value.message


async def test_an_init_that_cannot_be_forked_leaves_nothing(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C7."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(RunnerError) as refused:
        await provider.start(spec())
    assert refused.value.code == "sandbox_start_failed"
    monkeypatch.undo()
    await provider.start(spec())


async def test_an_init_that_never_answers_ends_with_the_deadline(
    provider: LocalProvider, store_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C7: and with the census, for it does not answer the teardown either."""
    mute = tmp_path / "mute.py"
    mute.write_text("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n")
    monkeypatch.setattr("runner.sandbox.init_process.resource_path", lambda *parts: mute)
    monkeypatch.setattr(local_sandbox, "REPLY_SECONDS", -4.9)
    with pytest.raises(RunnerError) as refused:
        await provider.start(spec(deadline=asyncio.get_running_loop().time() + 0.2))
    assert refused.value.code == "sandbox_start_failed"
    assert provider.live == ()
    assert bed.carriers(store_id) == {}


async def test_remove_deletes_read_only_caches_and_follows_no_symlink(provider: LocalProvider, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    sandbox = await provider.start(spec())
    paths = provider.paths("default", "of_seat_1", None)
    (paths.workspace / "link").symlink_to(outside)
    (paths.home / "cache").mkdir()
    (paths.home / "cache" / "file").write_text("")
    (paths.home / "cache").chmod(0o500)
    await sandbox.destroy(0.0)
    await provider.remove("default", "of_seat_1")
    assert not paths.workspace.exists()
    assert not paths.home.parent.exists()
    assert (outside / "kept").exists()
    await provider.remove("default", "of_seat_1")


async def test_remove_does_not_go_through_a_symlinked_project(provider: LocalProvider, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "victim"
    outside.mkdir(parents=True)
    projects = tmp_path / "state" / "workspaces"
    projects.mkdir(parents=True)
    (projects / "linked").symlink_to(outside.parent)
    with pytest.raises(RunnerError) as refused:
        await provider.remove("linked", "victim")
    assert refused.value.code == "internal"
    assert outside.exists()


async def test_a_home_that_somebody_deleted_is_another_one_afterwards(provider: LocalProvider) -> None:
    """Case M6: what an agent keeps there outlives it, and no agent session of a lost home is loaded."""
    sandbox = await provider.start(spec("seat_1", "cat", session_id="s"))
    identity = await provider.home_identity("default", "s")
    home = provider.paths("default", "s", None).home
    (home / "kept").write_text("by the agent")
    await sandbox.destroy()
    assert (home / "kept").read_text() == "by the agent"
    shutil.rmtree(home)
    assert await provider.home_identity("default", "s") is None
    await (await provider.start(spec("seat_2", "cat", session_id="s"))).destroy()
    assert await provider.home_identity("default", "s") not in (None, identity)
    (home.parent / "identity").unlink()
    (home.parent / "identity").symlink_to("/etc/hostname")
    assert await provider.home_identity("default", "s") is None
