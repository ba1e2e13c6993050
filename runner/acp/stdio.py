"""The transport over an agent's standard streams: pipe descriptors on the running loop."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from typing import Final

from runner.acp.transport import ExitInfo, Receiver

READ_BYTES: Final = 256 * 1024
HIGH_MARK: Final = 1024 * 1024
LOW_MARK: Final = 256 * 1024
EXIT_WAIT_SECONDS: Final = 0.5
UNKNOWN_CAPACITY: Final = 1024 * 1024
CLOSED: Final = "its streams were closed"
DEAF: Final = "it closed its stdin"


class StdioTransport:
    """Reads stdout and stderr, writes stdin; never blocks the loop.

    The descriptors belong to the transport from here on. Whoever waits for the process calls ``process_exited``.

    Args:
        pid: of the agent, as this machine sees it.
        exit_wait_seconds: how long after the end of stdout, a broken stdin, or ``close`` the exit report may take;
            then the agent counts as gone without one.
        high_mark: ``send`` returns False from so many unsent bytes on, until they are below ``low_mark``.
    """

    def __init__(
        self,
        stdin_fd: int,
        stdout_fd: int,
        stderr_fd: int,
        pid: int | None = None,
        *,
        exit_wait_seconds: float = EXIT_WAIT_SECONDS,
        high_mark: int = HIGH_MARK,
        low_mark: int = LOW_MARK,
    ) -> None:
        for fd in (stdin_fd, stdout_fd, stderr_fd):
            os.set_blocking(fd, False)
        self._stdin: int | None = stdin_fd
        self._stdout: int | None = stdout_fd
        self._stderr: int | None = stderr_fd
        self._pid = pid
        self._exit_wait = exit_wait_seconds
        self._high, self._low = high_mark, low_mark
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._queue: deque[memoryview] = deque()
        self._unsent = 0
        self._writing = False
        self._reading = False
        self._closing_stdin = False
        self._full = False
        self._paused = False
        self._exit: ExitInfo | None = None
        self._told = False
        self._report_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the agent."""
        return self._pid

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken; they stay counted when the agent closed its stdin before."""
        return self._unsent

    def connect(self, receiver: Receiver) -> None:
        """Attach the receiver and start reading."""
        self._receiver = receiver
        self._read_on()
        if self._stderr is not None:
            self._loop.add_reader(self._stderr, self._read_stderr)
        if self._exit is not None:
            self._loop.call_soon(self._finish)
        elif self._stdout is None:
            self._await_report(CLOSED)

    # Writing.

    def send(self, data: bytes) -> bool:
        """See ``transport.Transport.send``."""
        if self._stdin is None or self._closing_stdin:
            raise ConnectionError("the agent's stdin is closed")
        rest = memoryview(data)
        if not self._queue:
            rest = rest[self._write_now(rest) :]
            if self._stdin is None:
                raise ConnectionError("the agent's stdin is closed")
        if rest:
            self._queue.append(rest)
            self._unsent += len(rest)
            self._write_on()
        self._full = self._full or self._unsent > self._high
        return not self._full

    def _write_now(self, data: memoryview) -> int:
        assert self._stdin is not None
        try:
            return os.write(self._stdin, data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # What was queued is lost, so who waits for an answer to it must hear of an end.
            self._drop_stdin()
            self._await_report(DEAF)
            return 0

    def _write_on(self) -> None:
        if not self._writing and self._stdin is not None:
            self._writing = True
            self._loop.add_writer(self._stdin, self._write_queued)

    def _write_queued(self) -> None:
        while self._queue and self._stdin is not None:
            head = self._queue[0]
            written = self._write_now(head)
            if not self._queue:
                return
            self._unsent -= written
            if written < len(head):
                self._queue[0] = head[written:]
                break
            self._queue.popleft()
        if not self._queue:
            self._stop_writing()
            if self._closing_stdin:
                self._drop_stdin()
        if self._unsent <= self._low and (self._full or not self._queue):
            self._full = False
            if self._receiver is not None:
                self._receiver.writable()

    def _stop_writing(self) -> None:
        if self._writing and self._stdin is not None:
            self._loop.remove_writer(self._stdin)
        self._writing = False

    def close_stdin(self) -> None:
        """Send EOF after what is queued."""
        self._closing_stdin = True
        if not self._queue:
            self._drop_stdin()

    def _drop_stdin(self) -> None:
        if self._stdin is None:
            return
        self._stop_writing()
        fd, self._stdin = self._stdin, None
        self._queue.clear()
        os.close(fd)

    # Reading.

    def pause_reading(self) -> None:
        """Stop reading stdout; at the agent's exit what is left of it is delivered all the same."""
        self._paused = True
        self._read_off()

    def resume_reading(self) -> None:
        """Read stdout again."""
        self._paused = False
        self._read_on()

    def _read_on(self) -> None:
        if self._stdout is not None and self._receiver is not None and not self._reading and not self._paused:
            self._reading = True
            self._loop.add_reader(self._stdout, self._read_stdout)

    def _read_off(self) -> None:
        if self._reading and self._stdout is not None:
            self._loop.remove_reader(self._stdout)
        self._reading = False

    def _read(self, fd: int, size: int = READ_BYTES) -> bytes | None:
        """A chunk, None when nothing is there yet, empty at the end."""
        try:
            return os.read(fd, size)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def _read_stdout(self) -> None:
        if self._stdout is None or self._receiver is None:
            return
        data = self._read(self._stdout)
        if data:
            self._receiver.data_received(data)
        elif data is not None:
            self._stdout_ended()

    def _stdout_ended(self) -> None:
        if self._stdout is None or self._receiver is None:
            return
        self._drop_stdout()
        self._receiver.eof_received()
        if self._exit is None:
            self._await_report(CLOSED)
        else:
            self._tell()

    def _await_report(self, reason: str) -> None:
        if self._report_timer is None and self._exit is None:
            self._report_timer = self._loop.call_later(self._exit_wait, self._no_report, reason)

    def _no_report(self, reason: str) -> None:
        self.process_exited(ExitInfo(reason=reason))

    def _read_stderr(self) -> None:
        if self._stderr is None or self._receiver is None:
            return
        data = self._read(self._stderr)
        if data:
            self._receiver.stderr_received(data)
        elif data is not None:
            self._drop_stderr()

    def _drop_stdout(self) -> None:
        self._read_off()
        if self._stdout is not None:
            os.close(self._stdout)
            self._stdout = None

    def _drop_stderr(self) -> None:
        if self._stderr is not None:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = None

    # The end.

    def process_exited(self, info: ExitInfo) -> None:
        """The process is gone. What it wrote before is delivered first, even when a descendant holds its stdout."""
        if self._exit is None:
            self._exit = info
        if self._receiver is not None:
            self._finish()

    def _finish(self) -> None:
        """Deliver what is left of stdout: no more than its pipe can hold, for a descendant may write on for ever."""
        assert self._receiver is not None
        left = _capacity(self._stdout)
        while left > 0 and self._stdout is not None:
            data = self._read(self._stdout, min(left, READ_BYTES))
            if not data:
                break
            left -= len(data)
            self._receiver.data_received(data)
        if self._stdout is not None:
            self._stdout_ended()
        else:
            self._tell()

    def _tell(self) -> None:
        if self._told or self._exit is None or self._receiver is None:
            return
        self._told = True
        if self._report_timer is not None:
            self._report_timer.cancel()
        left = _capacity(self._stderr)
        while left > 0 and self._stderr is not None:
            data = self._read(self._stderr, min(left, READ_BYTES))
            if not data:
                break
            left -= len(data)
            self._receiver.stderr_received(data)
        self._receiver.exited(self._exit)

    def close(self) -> None:
        """Drop all descriptors at once; the receiver is told ``exited`` all the same, by its report or without one."""
        self._drop_stdin()
        self._drop_stderr()
        self._drop_stdout()
        if self._receiver is not None:
            self._await_report(CLOSED)


def _capacity(fd: int | None) -> int:
    """How many bytes a pipe can hold; a socket does not say."""
    if fd is None:
        return 0
    try:
        return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    except OSError:
        return UNKNOWN_CAPACITY
