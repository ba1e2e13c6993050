"""The look over all processes: who carries a marker, and that nobody else is ever hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.sandbox import census
from runner.sandbox.census import kill_all, marker, scan, signal_exactly
from tests.sandbox import bed

Carry = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def carry() -> Iterator[Carry]:
    """Starts processes that carry a marker and tell when they are ready."""
    made: list[subprocess.Popen[bytes]] = []

    def start(text: str, script: str = "echo up; exec sleep 600", name: str = census.MARKER) -> subprocess.Popen[bytes]:
        env = {"PATH": os.environ["PATH"], name: text}
        process = subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE)
        made.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in made:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def found(wanted: str) -> set[int]:
    return {info.pid for info in scan(wanted)}


def test_a_prefix_names_many_seats_and_a_marker_exactly_one(carry: Carry, store_id: str) -> None:
    one, ten = carry(marker(store_id, "rep", "seat_1")), carry(marker(store_id, "rep", "seat_10"))
    other = carry(marker(store_id, "rep_2", "seat_1"))
    assert found(f"{store_id}:rep:seat_1") == {one.pid}
    assert found(f"{store_id}:rep:") == {one.pid, ten.pid}
    assert found(f"{store_id}:") == {one.pid, ten.pid, other.pid}
    assert found(f"{store_id}:re") == set()


def test_a_look_alike_is_not_a_carrier(carry: Carry, store_id: str) -> None:
    text = marker(store_id, "rep", "seat")
    carry(text, name="OTHER")
    carry(f"x {census.MARKER}={text}", name="NOTE")
    assert scan(f"{store_id}:") == []
    assert scan(text) == []


def test_what_a_carrier_started_without_the_variable_belongs_to_it(carry: Carry, store_id: str) -> None:
    parent = carry(marker(store_id, "rep", "seat"), "env -i sh -c 'echo up; exec sleep 600' & wait")
    deadline = time.monotonic() + 5
    while True:
        infos = scan(f"{store_id}:")
        assert len(infos) == 2
        child = next(info for info in infos if info.pid != parent.pid)
        # In the middle of its exec a process has no command line.
        if "sleep" in child.command or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert (child.parent, child.marker) == (parent.pid, "")
    assert "sleep" in child.command
    reaped = kill_all(f"{store_id}:", 5.0)
    assert reaped.killed == 2
    assert reaped.survivors == ()
    assert bed.state(child.pid) in "XZ"


LOOP = """
import os, sys, time
end = time.monotonic() + 30
print('up', flush=True)
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    os.setsid()
    os.write(3, b'.')
    time.sleep(0.002)
"""


@pytest.mark.parametrize("loops", [1, 4])
def test_kill_all_ends_fork_loops(carry: Carry, store_id: str, tmp_path: Path, loops: int) -> None:
    """Each child forks the next and leaves; no list of pids is ever up to date. What they write tells the truth."""
    (tmp_path / "loop.py").write_text(LOOP)
    for n in range(loops):
        script = f'exec 3>>"{tmp_path}/beats"; exec "{sys.executable}" -S "{tmp_path}/loop.py"'
        carry(marker(store_id, "rep", f"seat_{n}"), script)
    reaped = kill_all(f"{store_id}:", 20.0)
    beats = (tmp_path / "beats").stat().st_size
    assert reaped.survivors == ()
    assert reaped.killed >= loops
    time.sleep(0.2)
    assert (tmp_path / "beats").stat().st_size == beats
    assert scan(f"{store_id}:") == []


def test_kill_all_is_bounded_and_names_who_is_left(
    carry: Carry, store_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D10: signals that do nothing are noticed."""
    process = carry(marker(store_id, "rep", "seat"))
    monkeypatch.setattr(census, "signal_exactly", lambda pid, start, number: True)
    started = time.monotonic()
    assert kill_all(f"{store_id}:", 0.1).survivors == (process.pid,)
    assert time.monotonic() - started < 5.0


def test_this_process_and_its_ancestors_are_spared(store_id: str) -> None:
    """A runner that an agent of a dead replica started must not kill itself at boot."""
    source = (
        "import os, subprocess, sys\n"
        "from runner.sandbox.census import kill_all, scan\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pids = [info.pid for info in scan(sys.argv[1])]\n"
        "killed = kill_all(sys.argv[1], 5).killed\n"
        "print(os.getpid() in pids, child.pid in pids, killed, child.wait())\n"
    )
    env = {**os.environ, census.MARKER: marker(store_id, "rep", "seat")}
    done = subprocess.run(
        ["sh", "-c", '"$0" "$@"; echo "shell lives"', sys.executable, "-c", source, f"{store_id}:"],
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.splitlines() == ["False True 1 -9", "shell lives"], done.stderr


def test_a_pid_given_to_another_process_is_not_hit(carry: Carry, store_id: str) -> None:
    process = carry(marker(store_id, "rep", "seat"))
    info = scan(f"{store_id}:")[0]
    assert signal_exactly(process.pid, info.start + 1, signal.SIGKILL) is False
    assert process.poll() is None
    assert signal_exactly(process.pid, info.start, signal.SIGKILL) is True
    assert process.wait(10) == -signal.SIGKILL
    assert signal_exactly(process.pid, info.start, signal.SIGKILL) is False


def test_zombies_are_not_counted(carry: Carry, store_id: str) -> None:
    process = carry(marker(store_id, "rep", "seat"))
    process.send_signal(signal.SIGKILL)
    deadline: Any = time.monotonic() + 10
    while bed.state(process.pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.002)
    assert scan(f"{store_id}:") == []
