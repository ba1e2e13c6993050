"""One runner per state directory; what a dead one left is reaped, what a live one owns is not."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.sandbox.census import scan
from runner.sandbox.statelock import StateLock, is_free, reap_leftovers
from tests.sandbox import bed

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[[Path, str], "Replica"]


class Replica:
    """A child process that plays a runner; its first line is known."""

    def __init__(self, state_dir: Path, store_id: str, replica_id: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sandbox.replica", str(state_dir), store_id, replica_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    @property
    def init_pid(self) -> int:
        return int(self.said.split()[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        self.process.communicate("", 20)


@pytest.fixture
def start(store_id: str) -> Iterator[Start]:
    """Starts replicas of one store; none of them is left."""
    made: list[Replica] = []

    def make(state_dir: Path, replica_id: str) -> Replica:
        made.append(Replica(state_dir, store_id, replica_id))
        return made[-1]

    yield make
    for replica in made:
        replica.end()
    for pid in bed.carriers(store_id):
        os.kill(pid, signal.SIGKILL)


async def test_a_second_serve_on_one_state_directory_is_refused(start: Start, tmp_path: Path) -> None:
    """DESIGN 3.10, naming the pid of the one that runs; free again when that one is killed."""
    first = start(tmp_path, "rep_1")
    second = start(tmp_path, "rep_2")
    assert second.said.startswith("invalid_request ")
    assert f"(pid {first.process.pid})" in second.said
    with pytest.raises(RunnerError) as refused:
        StateLock.acquire(tmp_path, "rep_3")
    assert refused.value.code == "invalid_request"
    first.kill()
    StateLock.acquire(tmp_path, "rep_3").release()


def test_the_lock_is_free_after_its_release(tmp_path: Path) -> None:
    state_dir = tmp_path / "new" / "state"
    lock = StateLock.acquire(state_dir, "rep_1")
    assert stat.S_IMODE((state_dir / "lock").stat().st_mode) == 0o600
    assert (state_dir / "lock").read_text() == f"{os.getpid()}\n"
    with pytest.raises(RunnerError) as refused:
        StateLock.acquire(state_dir, "rep_1")
    assert f"(pid {os.getpid()})" in refused.value.message
    lock.release()
    lock.release()
    before = bed.descriptors()
    StateLock.acquire(state_dir, "rep_2").release()
    assert bed.descriptors() == before


def test_a_state_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunnerError) as refused:
        StateLock.acquire(tmp_path / "file", "rep_1")
    assert refused.value.code == "invalid_request"
    assert str(tmp_path / "file") in refused.value.message


def test_a_lock_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunnerError):
        StateLock.acquire(tmp_path, "rep_1")
    assert (tmp_path / "elsewhere").read_text() == "precious"


def test_agents_do_not_inherit_the_locks(start: Start, tmp_path: Path) -> None:
    """Else a leftover agent would hold its dead replica's lock, and never be reaped."""
    replica = start(tmp_path, "rep_1")
    for pid in map(int, replica.said.split()):
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert [link for link in links if link.endswith("lock")] == []


async def test_a_killed_runner_leaves_nothing(start: Start, tmp_path: Path, store_id: str) -> None:
    """Case D2: the end of the control channel tears the cell down."""
    replica = start(tmp_path, "rep_1")
    await bed.until(lambda: len(bed.carriers(store_id)) >= 3, "init, agent and its detached child")
    replica.kill()
    await bed.until(lambda: not bed.carriers(store_id), "the end of the cell")


async def test_leftovers_of_a_dead_replica_are_reaped_and_a_live_one_s_are_not(
    start: Start, tmp_path: Path, store_id: str
) -> None:
    """Case D2: init and runner are killed, so only the marker tells whose the rest is; at boot it goes.

    The live replica of the same store has its lock in the same folder; another has its own state directory.
    """
    dead = start(tmp_path, "rep_dead")
    os.kill(dead.init_pid, signal.SIGSTOP)
    dead.kill()
    os.kill(dead.init_pid, signal.SIGKILL)
    await bed.until(lambda: bed.state(dead.init_pid) in "XZ", "the end of the init")
    live, far = start(tmp_path, "rep_live"), start(tmp_path / "far", "rep_far")
    others = {replica: set(pids(store_id, replica)) for replica in ("rep_live", "rep_far")}
    assert pids(store_id, "rep_dead")
    assert all(others.values())
    assert reap_leftovers(tmp_path, store_id)[0] >= 2
    assert pids(store_id, "rep_dead") == []
    assert {replica: set(pids(store_id, replica)) >= {pid} for replica, pid in agents(live, far).items()} == {
        "rep_live": True,
        "rep_far": True,
    }
    assert [path.name for path in (tmp_path / "replicas").iterdir()] == ["rep_live.lock"]
    assert reap_leftovers(tmp_path, store_id)[0] == 0


def agents(live: Replica, far: Replica) -> dict[str, int]:
    return {"rep_live": int(live.said.split()[0]), "rep_far": int(far.said.split()[0])}


def pids(store_id: str, replica_id: str) -> list[int]:
    return [info.pid for info in scan(f"{store_id}:{replica_id}:")]


async def test_leftovers_of_another_store_are_left_alone(start: Start, tmp_path: Path, store_id: str) -> None:
    dead = start(tmp_path, "rep_dead")
    os.kill(dead.init_pid, signal.SIGKILL)
    dead.kill()
    await bed.until(lambda: bed.state(dead.init_pid) in "XZ", "the end of the init")
    (tmp_path / "replicas" / "rep_dead.lock").rename(tmp_path / "kept.lock")
    assert reap_leftovers(tmp_path, store_id)[0] == 0
    (tmp_path / "kept.lock").rename(tmp_path / "replicas" / "rep_dead.lock")
    assert reap_leftovers(tmp_path, "another_store")[0] == 0
    assert pids(store_id, "rep_dead")


def test_a_lock_tells_that_its_replica_is_gone_case_m1(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "replicas" / "rep_1.lock"
    assert not is_free(path), "a missing file proves nothing"
    replica = start(tmp_path, "rep_1")
    assert not is_free(path)
    replica.kill()
    assert is_free(path)
    assert is_free(path), "looking takes nothing"


def test_a_directory_never_served_has_no_leftovers(tmp_path: Path) -> None:
    assert reap_leftovers(tmp_path / "new", "store_1") == (0, [])
