"""What only a cell of bubblewrap can show: its walls, its proofs, its limits."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.acp.transport import ExitInfo
from runner.errors import RunnerError
from runner.sandbox.isolation import needed_by
from runner.sandbox.local import LocalProvider
from tests.sandbox import bed
from tests.sandbox.bed import Talk, spec, until

SHELL = ("sh", "-c", 'while read -r line; do eval "$line"; done')
MIB = 1 << 20
HOG = "import sys, time\nx = b'x' * (int(sys.argv[1]) << 20)\nprint('has', flush=True)\ntime.sleep(600)"


KEY_CALLS = (248, 249, 250) if os.uname().machine == "x86_64" else (217, 218, 219)
ASKS_FOR_KEYS = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(*(ctypes.get_errno() if libc.syscall(number, 0, 0, 0, 0, 0) < 0 else 0 for number in {KEY_CALLS}))
"""


@pytest.fixture
async def cells(tmp_path: Path, store_id: str) -> AsyncIterator[LocalProvider]:
    """A provider of cells; nobody and nothing is left when it was closed."""
    made = bed.local(tmp_path / "state", store_id, level="cell")
    before = bed.descriptors()
    yield made
    await made.close()
    assert made.live == ()
    assert bed.carriers(store_id) == {}
    assert bed.zombies() == []
    assert bed.descriptors() <= before


async def shell(provider: LocalProvider, seat: str = "seat_1", **changes: Any) -> Talk:
    return Talk(await provider.start(spec(seat, *SHELL, **changes)))


async def test_pids_are_those_of_this_machine(cells: LocalProvider) -> None:
    sandbox = await cells.start(spec("seat_1", *SHELL))
    talk = Talk(sandbox)
    assert await talk.say("echo $$ $PPID") == "2 1"
    assert sandbox.agent_pid is not None
    assert bed.command(sandbox.agent_pid).startswith("sh -c")
    assert "init.py" in bed.command(sandbox.init_pid)
    assert sandbox.limits["pids"] == {"limit": 0, "by": "off"}


async def test_a_killed_init_takes_everybody_along_and_that_is_the_proof(cells: LocalProvider, store_id: str) -> None:
    """Case A1: by the kernel, not by a census."""
    sandbox = await cells.start(spec("seat_1", *SHELL))
    talk = Talk(sandbox)
    assert await talk.say("setsid sleep 600 & env -i setsid sleep 600 & echo up") == "up"
    os.kill(sandbox.init_pid, signal.SIGKILL)
    assert (await talk.ended()).reason == "the sandbox is gone"
    gone = await sandbox.destroy()
    assert (gone.proven, gone.proof) == (True, "init_gone")
    assert bed.carriers(store_id) == {}


async def test_a_killed_wrapper_takes_everybody_along(cells: LocalProvider, store_id: str) -> None:
    """Case A1: bubblewrap itself is shot."""
    sandbox = await cells.start(spec("seat_1", *SHELL))
    talk = Talk(sandbox)
    assert await talk.say("setsid sleep 600 & echo up") == "up"
    sandbox._init.kill()
    await talk.ended()
    assert (await sandbox.destroy()).proof == "init_gone"
    assert bed.carriers(store_id) == {}


async def test_a_mute_init_is_killed_with_its_namespace(cells: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D6."""
    sandbox = await cells.start(spec("seat_1", *SHELL))
    monkeypatch.setattr(sandbox._control, "request", lambda op, **members: asyncio.get_running_loop().create_future())
    gone = await sandbox.destroy(0.0, 0.1)
    assert (gone.proven, gone.proof) == (True, "init_gone")


async def test_a_stopped_init_is_woken_for_its_teardown(cells: LocalProvider) -> None:
    sandbox = await cells.start(spec("seat_1", *SHELL))
    os.kill(sandbox.init_pid, signal.SIGSTOP)
    assert (await sandbox.destroy(0.0)).proof == "echild"


async def test_neighbours_see_nothing_of_each_other(cells: LocalProvider, tmp_path: Path) -> None:
    """Case K1: files, processes, temporary files; the store, the token and the runner's environment neither."""
    (tmp_path / "state" / "token").parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "state" / "token").write_text("secret")
    a, b = await shell(cells, "seat_a"), await shell(cells, "seat_b")
    theirs = cells.paths("default", "of_seat_b", None)
    assert await b.say("echo secret > f; echo secret > $HOME/f; echo secret > /tmp/f; echo done") == "done"
    wanted = [theirs.workspace / "f", theirs.home / "f", tmp_path / "state" / "token", f"/proc/{os.getpid()}/environ"]
    for path in (*wanted, "/tmp/f", Path(__file__), "/etc/shadow", "/root/.bashrc"):
        assert await a.say(f"cat {path} >/dev/null 2>&1 && echo seen || echo hidden") == "hidden"
    assert await a.say("echo /proc/[0-9]*") == "/proc/1 /proc/2"
    assert (theirs.tmp / "f").read_text() == "secret\n"


async def test_who_the_agent_is_inside(cells: LocalProvider) -> None:
    """Never root, with no capability, in a home that the account names."""
    talk = await shell(cells)
    home = cells.paths("default", "of_seat_1", None).home
    expected = f"{os.geteuid() or 1000} agent {home}"
    assert await talk.say("echo $(id -u) $(whoami) $(getent passwd agent | cut -d: -f6)") == expected
    assert await talk.say("grep CapEff /proc/$$/status | tr -d '\\t'") == "CapEff:" + "0" * 16
    assert await talk.say("touch /x 2>/dev/null && echo can || echo cannot") == "cannot"
    assert await talk.say("touch /usr/x 2>/dev/null && echo can || echo cannot") == "cannot"


TAKE_OVER = """
import ctypes, os
def tried(what):
    try:
        return what()
    except OSError as error:
        return error.strerror
attached = ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0
print(attached, *(tried(lambda: bool(open(f"/proc/1/{name}", "rb").read(1))) for name in ("environ", "mem", "maps")))
"""


async def test_nobody_takes_its_init_over(cells: LocalProvider) -> None:
    """Case D10: who says that nobody is left cannot be made to lie by those whom it kills."""
    talk = await shell(cells, workspace_files={"take_over.py": TAKE_OVER.encode()})
    assert await talk.say("python3 take_over.py") == "False" + " Permission denied" * 3


async def test_more_paths_by_name(cells: LocalProvider, tmp_path: Path) -> None:
    for name in ("read", "write", "hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
    talk = await shell(cells, read=(tmp_path / "read", tmp_path / "absent"), write=(tmp_path / "write",))
    assert await talk.say(f"cat {tmp_path}/read/f; echo") == "read"
    assert await talk.say(f"echo x 2>/dev/null > {tmp_path}/read/f || echo refused") == "refused"
    assert await talk.say(f"echo new > {tmp_path}/write/f; echo done") == "done"
    assert await talk.say(f"cat {tmp_path}/hidden/f 2>/dev/null || echo hidden") == "hidden"
    assert (tmp_path / "write" / "f").read_text() == "new\n"


async def test_a_workspace_around_the_state_directory_does_not_show_it(cells: LocalProvider, tmp_path: Path) -> None:
    (tmp_path / "checkout").write_text("shown")
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "token").write_text("secret")
    talk = await shell(cells, workspace_path=tmp_path)
    assert await talk.say("pwd") == str(tmp_path)
    assert await talk.say("cat checkout; echo") == "shown"
    assert await talk.say("cat state/token 2>/dev/null || echo hidden") == "hidden"
    assert await talk.say("touch $HOME/mine && echo mine") == "mine"


async def test_a_workspace_by_a_link_above_the_state_directory_does_not_show_it(
    cells: LocalProvider, tmp_path: Path
) -> None:
    """Case K1: the link has another path than what stays hidden below it."""
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "token").write_text("secret")
    (tmp_path / "acp-runner.toml").write_text("secret")
    cells.secret_files = (tmp_path / "acp-runner.toml",)
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    talk = await shell(cells, workspace_path=link)
    assert await talk.say("pwd") == str(link)
    assert await talk.say("cat state/token acp-runner.toml 2>/dev/null || echo hidden") == "hidden"
    assert await talk.say("touch $HOME/mine && echo mine") == "mine"


async def test_the_runners_files_in_a_workspace_are_neither_read_nor_changed_case_k1(
    cells: LocalProvider, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "conf").mkdir(parents=True)
    (checkout / "shown").write_text("shown")
    secret = checkout / "conf" / "acp-runner.toml"
    secret.write_text("secret")
    cells.secret_files = (secret, checkout / "absent")
    talk = await shell(cells, workspace_path=checkout)
    assert await talk.say("cat shown; echo") == "shown"
    assert await talk.say("cat conf/acp-runner.toml 2>/dev/null || echo hidden") == "hidden"
    assert await talk.say("cd conf; rm -f acp-runner.toml 2>/dev/null || echo kept; cd ..") == "kept"
    assert await talk.say("mv conf other; cat other/acp-runner.toml 2>/dev/null || echo hidden") == "hidden"
    assert await talk.say("ln other/acp-runner.toml mine 2>/dev/null || echo refused") == "refused"
    assert (checkout / "other" / "acp-runner.toml").read_text() == "secret"
    assert not (checkout / "absent").exists()


async def test_given_files_do_not_touch_what_is_the_runners_case_k1(cells: LocalProvider, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "acp-runner.toml").write_text("secret")
    cells.secret_files = (tmp_path / "acp-runner.toml",)
    for number, path in enumerate(("state/token", "state/workspaces/default/other/f", "acp-runner.toml")):
        with pytest.raises(RunnerError) as refused:
            await cells.start(spec(f"seat_{number}", *SHELL, workspace_path=tmp_path, workspace_files={path: b"x"}))
        assert refused.value.code == "invalid_request"
        assert "the runner's own" in refused.value.message
    assert not (tmp_path / "state" / "token").exists()
    assert (tmp_path / "acp-runner.toml").read_text() == "secret"


async def test_root_under_landlock_has_no_right_and_no_device_but_its_own(tmp_path: Path, store_id: str) -> None:
    """Case K1: whoever reads the disk, or makes a device that is it, reads the store."""
    provider = bed.local(tmp_path / "state", store_id, level="landlock")
    talk = await shell(provider)
    assert await talk.say("grep CapEff /proc/$$/status") == "CapEff:\t0000000000000000"
    assert await talk.say("grep CapPrm /proc/$$/status") == "CapPrm:\t0000000000000000"
    for kind in ("b", "c"):
        assert await talk.say(f"mknod disk {kind} 1 7 2>/dev/null && echo made || echo refused") == "refused"
    assert await talk.say("ls /dev/shm 2>/dev/null && echo seen || echo hidden") == "hidden"
    assert await talk.say("head -c 1 /dev/zero >/dev/null && echo read") == "read"
    assert await talk.say("head -c 3 /dev/urandom | wc -c") == "3"
    await provider.close()


@pytest.mark.parametrize("level", ["none", "landlock", "cell"])
async def test_keyrings_of_the_user_are_out_of_reach_case_k1(tmp_path: Path, store_id: str, level: str) -> None:
    """They are shared by all that runs as one user, namespaces or not: whoever may link one may read all in it."""
    provider = bed.local(tmp_path / "state", store_id, level=level)
    sandbox = await provider.start(spec("seat_1", *SHELL, workspace_files={"keys.py": ASKS_FOR_KEYS.encode()}))
    refused = " ".join(["38"] * 3)
    assert (await Talk(sandbox).say("python3 keys.py") == refused) == (level != "none")
    heard: list[bytes] = []
    await sandbox.run("r", ["python3", "keys.py"], heard.append)
    assert (b"".join(heard).decode().strip() == refused) == (level != "none"), "of a command beside the agent as well"
    await provider.close()


@pytest.mark.parametrize("level", ["cell", "landlock"])
async def test_a_state_directory_that_every_sandbox_would_see_starts_none_case_k1(
    tmp_path: Path, store_id: str, level: str
) -> None:
    provider = bed.local(tmp_path / "state", store_id, level=level)
    system = replace(provider._bounds.system, folders=(str(tmp_path),))
    provider._bounds = replace(provider._bounds, system=system)
    with pytest.raises(RunnerError, match="which every sandbox sees") as refused:
        await provider.start(spec("seat_1", *SHELL))
    assert refused.value.code == "sandbox_start_failed"
    assert provider.live == ()


async def test_landlock_takes_no_workspace_that_holds_the_runners_files_case_k1(tmp_path: Path, store_id: str) -> None:
    """It cannot close what lies below an open folder."""
    provider = bed.local(tmp_path / "top" / "state", store_id, level="landlock")
    (tmp_path / "checkout" / "deep").mkdir(parents=True)
    provider.secret_files = (tmp_path / "checkout" / "acp-runner.toml",)
    provider.secret_files[0].write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "top")
    for path in (tmp_path, tmp_path / "top", tmp_path / "link", tmp_path / "checkout"):
        with pytest.raises(RunnerError, match="files of the runner's own") as refused:
            await provider.start(spec("seat_1", *SHELL, workspace_path=path))
        assert refused.value.code == "invalid_request"
    assert provider.live == ()
    talk = await shell(provider, workspace_path=tmp_path / "checkout" / "deep")
    assert await talk.say("cat ../acp-runner.toml 2>/dev/null || echo hidden") == "hidden"
    await provider.close()


@pytest.mark.parametrize("path", ["/", "/proc"])
async def test_the_whole_machine_is_no_workspace(cells: LocalProvider, path: str) -> None:
    with pytest.raises(RunnerError) as refused:
        await cells.start(spec("seat_1", *SHELL, workspace_path=Path(path)))
    assert refused.value.code == "invalid_request"
    assert cells.live == ()


async def test_what_an_agent_left_in_its_home_is_there_for_its_next_process(cells: LocalProvider) -> None:
    """Case M6: and by the same path, which agents write down."""
    told = []
    for seat in ("seat_1", "seat_2"):
        talk = await shell(cells, seat, session_id="same")
        told.append(await talk.say("pwd >> $HOME/f; echo $HOME >> $HOME/f; cat $HOME/f | tr '\\n' ' '; echo"))
        for sandbox in list(cells._live.values()):
            assert (await sandbox.destroy()).proven
    paths = cells.paths("default", "same", None)
    once = f"{paths.workspace} {paths.home} "
    assert told == [once, once * 2]


async def test_a_virtual_environment_is_found_through_its_links(cells: LocalProvider, tmp_path: Path) -> None:
    """The interpreter and its libraries; not the rest of its prefix."""
    code = "import sqlite3, sys; print(sys.prefix)"
    talk = Talk(await cells.start(spec("seat_1", sys.executable, "-c", code)))
    assert await talk.line() == sys.prefix
    script = tmp_path / "tool"
    script.write_text(f"#!{sys.executable}\n")
    assert set(needed_by((str(script),), bed.found().system)) >= {f"{sys.prefix}/bin", str(script)}


@pytest.mark.parametrize("level", ["cell", "none"])
@pytest.mark.parametrize("without", [(), ("memory",)])
async def test_memory_is_bounded_and_the_end_has_its_reason(
    tmp_path: Path, store_id: str, level: str, without: tuple[str, ...]
) -> None:
    """Where no control group can be made, the init looks."""
    provider = bed.local(tmp_path / "state", store_id, level=level, memory_bytes=150 * MIB, without=without)
    try:
        sandbox = await provider.start(spec("seat_1", sys.executable, "-c", HOG, "400"))
        talk = Talk(sandbox)
        assert str(await talk.ended()).startswith("killed: ")
        assert (await sandbox.destroy()).proven
    finally:
        await provider.close()


async def test_processes_are_bounded(tmp_path: Path, store_id: str) -> None:
    """A fork bomb meets its limit, its neighbour does not notice."""
    provider = bed.local(tmp_path / "state", store_id, level="cell", pids=30)
    try:
        bomb, neighbour = await shell(provider, "seat_a"), await shell(provider, "seat_b")
        many = "i=0; while [ $i -lt 60 ]; do sleep 600 & i=$((i+1)); done; echo all"
        bomb.transport.send(many.encode() + b"\n")
        await until(lambda: any(isinstance(item, tuple) and b"ork" in item[1] for item in bomb.told), "a refused fork")
        assert await neighbour.say("sh -c 'echo alive'") == "alive"
    finally:
        await provider.close()
    assert bed.carriers(store_id) == {}


@pytest.mark.parametrize("level", ["cell", "none"])
async def test_no_control_group_is_left(tmp_path: Path, store_id: str, level: str) -> None:
    """Not of a sandbox that was destroyed, nor, at the next start, of a runner that was killed."""
    provider = bed.local(tmp_path / "state", store_id, level=level, pids=30)
    groups = bed.found().groups
    mine = [root for root in groups.folders.values() if provider._bounds.groups is not None]
    try:
        sandbox = await provider.start(spec("seat_1", *SHELL))
        made = [path for root in mine for path in root.glob(f"acp-runner-{store_id}*")]
        assert len(made) == (1 if mine else 0)
        await sandbox.destroy(0.0)
    finally:
        await provider.close()
    assert not [path for path in made if path.exists()]
    for path in made:
        path.mkdir()
        groups.sweep()
        assert path.exists(), "one that was made just now stays"
        os.utime(path, (0, 0))
        groups.sweep()
        assert not path.exists()


async def test_no_network_means_not_even_the_runner_s_ports(tmp_path: Path, store_id: str) -> None:
    provider = bed.local(tmp_path / "state", store_id, level="cell", network="none")
    code = "import socket, sys\ns = socket.socket()\nprint(s.connect_ex(('127.0.0.1', int(sys.argv[1]))), flush=True)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        try:
            talk = Talk(await provider.start(spec("seat_1", sys.executable, "-c", code, port)))
            assert await talk.line() != "0"
        finally:
            await provider.close()


def test_a_runner_that_is_not_dumpable_shows_its_environment_to_nobody_of_its_user() -> None:
    code = (
        "import os\n"
        "from runner.sandbox.isolation import not_dumpable\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "not_dumpable()\n"
        "child = os.fork()\n"
        "if child == 0: os.execv('/bin/cat', ['cat', f'/proc/{os.getppid()}/environ'])\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "SECRET": "of the runner", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert ran.stdout.strip() == "1", ran.stderr
    assert "of the runner" not in ran.stdout


def test_an_exit_has_either_a_status_or_a_reason() -> None:
    assert str(ExitInfo(reason="killed: it ran out of memory")) == "killed: it ran out of memory"
