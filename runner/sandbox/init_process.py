"""A cell init as this process's child: started in one step, watched by pidfd, never left a zombie."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from runner.resources import resource_path

PROBE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Pipes:
    """The runner's ends of the agent's standard streams; they belong to whoever holds this.

    ``errors``: what a wrapper around the init says; None without one.
    """

    stdin: int
    stdout: int
    stderr: int
    errors: int | None = None

    def close(self) -> None:
        """Close all."""
        for fd in (self.stdin, self.stdout, self.stderr):
            os.close(fd)
        self.close_errors()

    def close_errors(self) -> None:
        """Close what nobody reads once the agent runs."""
        if self.errors is not None:
            os.close(self.errors)


class InitProcess:
    """Knows whether the init lives. Every wait is backed by a look at the process itself (case D6).

    Args:
        process: the child; it belongs to this object from here on.
        on_gone: called once, on the loop, after the child was reaped.
    """

    def __init__(self, process: subprocess.Popen[bytes], on_gone: Callable[[], None]) -> None:
        self._process = process
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._reaped = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(process.pid)
            self._loop.add_reader(self._pidfd, self.probe)
        except OSError:
            self._probe_later()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As ``Popen.returncode``: negative for a signal, None while it lives as far as anybody looked."""
        return self._process.returncode

    def probe(self) -> bool:
        """Look now; True when the init is gone and reaped."""
        if self._reaped.is_set():
            return True
        if self._process.poll() is None:
            return False
        self._reaped.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._on_gone()
        return True

    def _probe_later(self) -> None:
        """Without a pidfd: look now and then."""
        if not self.probe():
            self._timer = self._loop.call_later(PROBE_SECONDS, self._probe_later)

    async def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until it is gone and reaped; False when it is still there."""
        deadline = self._loop.time() + seconds
        while not self.probe():
            left = deadline - self._loop.time()
            if left <= 0:
                return False
            try:
                async with asyncio.timeout(min(left, PROBE_SECONDS)):
                    await self._reaped.wait()
            except TimeoutError:
                continue
        return True

    def signal(self, number: int) -> None:
        """Signal it while it is not reaped."""
        if not self.probe():
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)


def spawn_init(
    env: Mapping[str, str], wrap: Callable[[Sequence[str]], Sequence[str]] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket, Pipes]:
    """Start an init; in one step, so that no cancellation can come between the fork and the handle (case D7).

    Call it on the event loop's thread: a parent-death signal would follow a worker thread's end.

    Args:
        env: the init's whole environment.
        wrap: from the init's command to the one that starts it in a cell. The wrapper keeps its own standard streams
            as long as it lives, so the agent's are handed to the init by other numbers.

    Raises:
        OSError: no process or descriptor could be had; nothing is left open or running.
    """
    command: Sequence[str] = [sys.executable, "-I", "-S", str(resource_path("sandboxes", "inside", "init.py"))]
    ours, theirs = socket.socketpair()
    fds: list[int] = []
    try:
        for _ in range(3 if wrap is None else 4):
            fds += os.pipe()
        stdin, our_stdin, our_stdout, stdout, our_stderr, stderr, *errors = fds
        command = [*command, "--control-fd", str(theirs.fileno())]
        passed = [theirs.fileno()]
        if wrap is not None:
            passed += [stdin, stdout, stderr]
            command = wrap([*command, "--stdio", *map(str, passed[1:])])
        process = subprocess.Popen(
            command,
            stdin=stdin if wrap is None else subprocess.DEVNULL,
            stdout=stdout if wrap is None else subprocess.DEVNULL,
            stderr=stderr if wrap is None else errors[1],
            pass_fds=passed,
            env=dict(env),
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        for fd in fds:
            os.close(fd)
        raise
    finally:
        theirs.close()
    for fd in (stdin, stdout, stderr, *errors[1:]):
        os.close(fd)
    return process, ours, Pipes(our_stdin, our_stdout, our_stderr, errors[0] if errors else None)
