"""One runner per state directory, and the reaping of what a dead one left (DESIGN 3.10).

``<state_dir>/lock`` is held by the runner that serves the directory, ``<state_dir>/replicas/<replica_id>.lock`` by
the replica of that name as long as it lives. The kernel frees both when the process ends, however it ends. A marker
that names a replica without a lock file here belongs to another directory and is left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.sandbox.census import kill_all

REAP_SECONDS: Final = 5.0
PROBED_TIMES: Final = 3
PROBED_SECONDS: Final = 0.01
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
log = logging.getLogger("runner.sandbox")


def lock_of(state_dir: Path, replica_id: str) -> Path:
    """The lock file of a replica."""
    return state_dir / "replicas" / f"{replica_id}.lock"


def state_dir_of(lock: Path) -> Path:
    """The state directory of a replica's lock file: the way back from ``lock_of``."""
    return lock.parent.parent


class StateLock:
    """Both locks of a serving runner; made by ``acquire``, given back by ``release`` or the end of the process."""

    def __init__(self, state: int, replica: int) -> None:
        self._state: int | None = state
        self._replica = replica

    @classmethod
    def acquire(cls, state_dir: Path, replica_id: str) -> StateLock:
        """Take the state directory (made with mode 0700 when missing) for this process.

        Raises:
            RunnerError: ``invalid_request`` when another process serves it, naming its pid, or it cannot be used.
        """
        try:
            (state_dir / "replicas").mkdir(mode=0o700, parents=True, exist_ok=True)
            state = hold(state_dir / "lock")
        except OSError as error:
            raise RunnerError("invalid_request", f"The state directory {state_dir} cannot be used: {error}.") from error
        if state is None:
            raise RunnerError("invalid_request", _refusal(state_dir))
        held = [state]
        try:
            replica = hold(lock_of(state_dir, replica_id))
            if replica is None:
                raise RunnerError("invalid_request", f"The replica {replica_id} already runs on {state_dir}.")
            held.append(replica)
            for fd in held:
                _write_pid(fd)
        except BaseException:
            for fd in held:
                os.close(fd)
            raise
        return cls(state, replica)

    def release(self) -> None:
        """Give both locks back; idempotent. Call it after the last teardown.

        The replica's file stays: should a teardown not have been proven, the next boot finds what is left by it.
        """
        if self._state is None:
            return
        state, self._state = self._state, None
        os.close(self._replica)
        os.ftruncate(state, 0)
        os.close(state)


def reap_leftovers(state_dir: Path, store_id: str) -> tuple[int, list[str]]:
    """Kill what replicas of this directory left behind when they died; blocks, for boot.

    A replica is dead when its lock is free. Its lock file is removed once nobody of it is left.

    Returns:
        How many processes were killed, and the ids of the dead replicas.
    """
    killed, dead = 0, []
    for path in sorted((state_dir / "replicas").glob("*.lock")):
        lock = _locked_soon(path)
        if lock is None:
            continue
        dead.append(path.stem)
        try:
            reaped = kill_all(f"{store_id}:{path.stem}:", REAP_SECONDS)
            killed += reaped.killed
            if reaped.survivors:
                log.error("leftovers of replica %s would not die: %s", path.stem, reaped.survivors)
            else:
                path.unlink(missing_ok=True)
        finally:
            os.close(lock)
    return killed, dead


def _locked_soon(path: Path) -> int | None:
    """As ``hold``; another replica that just looks whether this one is dead holds the lock for a moment."""
    for _ in range(PROBED_TIMES):
        lock = hold(path)
        if lock is not None:
            return lock
        time.sleep(PROBED_SECONDS)
    return None


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock file at ``path``: its replica is provably gone. A missing file proves nothing."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def hold(path: Path) -> int | None:
    """A descriptor that holds the lock of the file at ``path``, made when missing; None when another holds it.

    The lock is free again once the descriptor is closed, and so when the process ends.
    """
    while True:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the locked file is still the one of that name: a holder may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _write_pid(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)


def _refusal(state_dir: Path) -> str:
    try:
        text = (state_dir / "lock").read_text("ascii").strip()
    except (OSError, ValueError):
        text = ""
    holder = f"pid {text}" if text.isdigit() else "its pid is not written yet"
    return f"Another acp-runner ({holder}) already serves the state directory {state_dir}."
