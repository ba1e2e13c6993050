"""The transport over an agent's standard streams: pipe descriptors on the running loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Final

from runner.acp.transport import ExitInfo, Receiver

READ_BYTES: Final = 256 * 1024
HIGH_MARK: Final = 1024 * 1024
LOW_MARK: Final = 256 * 1024
EXIT_WAIT_SECONDS: Final = 0.5
FINAL_READS: Final = 256


class StdioTransport:
    """Reads stdout and stderr, writes stdin; never blocks the loop.

    The descriptors belong to the transport from here on. Whoever waits for the process calls ``process_exited``.
    """

    def __init__(
        self,
        stdin_fd: int,
        stdout_fd: int,
        stderr_fd: int,
        pid: int | None = None,
        *,
        exit_wait_seconds: float = EXIT_WAIT_SECONDS,
    ) -> None:
        for fd in (stdin_fd, stdout_fd, stderr_fd):
            os.set_blocking(fd, False)
        self._stdin: int | None = stdin_fd
        self._stdout: int | None = stdout_fd
        self._stderr: int | None = stderr_fd
        self._pid = pid
        self._exit_wait = exit_wait_seconds
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
        self._eof_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the agent."""
        return self._pid

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._unsent

    def connect(self, receiver: Receiver) -> None:
        """Attach the receiver and start reading."""
        self._receiver = receiver
        self._read_on()
        if self._stderr is not None:
            self._loop.add_reader(self._stderr, self._read_stderr)
        if self._exit is not None:
            self._loop.call_soon(self._finish)

    # -- writing -----------------------------------------------------------------------------------------------------

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
        self._full = self._full or self._unsent > HIGH_MARK
        return not self._full

    def _write_now(self, data: memoryview) -> int:
        assert self._stdin is not None
        try:
            return os.write(self._stdin, data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._drop_stdin()
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
        if self._unsent <= LOW_MARK and (self._full or not self._queue):
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

    # -- reading -----------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Stop reading stdout."""
        self._paused = True
        self._read_off()

    def resume_reading(self) -> None:
        """Read stdout again."""
        self._paused = False
        self._read_on()
        if self._exit is not None and not self._told:
            self._loop.call_soon(self._finish)

    def _read_on(self) -> None:
        if self._stdout is not None and self._receiver is not None and not self._reading and not self._paused:
            self._reading = True
            self._loop.add_reader(self._stdout, self._read_stdout)

    def _read_off(self) -> None:
        if self._reading and self._stdout is not None:
            self._loop.remove_reader(self._stdout)
        self._reading = False

    def _read(self, fd: int) -> bytes | None:
        """A chunk, None when nothing is there yet, empty at the end."""
        try:
            return os.read(fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def _read_stdout(self) -> None:
        assert self._receiver is not None
        if self._stdout is None:
            return
        data = self._read(self._stdout)
        if data:
            self._receiver.data_received(data)
        elif data is not None:
            self._stdout_ended()

    def _stdout_ended(self) -> None:
        if self._stdout is None:
            return
        self._read_off()
        fd, self._stdout = self._stdout, None
        os.close(fd)
        assert self._receiver is not None
        self._receiver.eof_received()
        if self._exit is None:
            self._eof_timer = self._loop.call_later(self._exit_wait, self._no_report)
        else:
            self._tell()

    def _no_report(self) -> None:
        self._eof_timer = None
        if self._exit is None:
            self._exit = ExitInfo(reason="it closed its stdout")
            self._tell()

    def _read_stderr(self) -> None:
        if self._stderr is None:
            return
        data = self._read(self._stderr)
        if data and self._receiver is not None:
            self._receiver.stderr_received(data)
        elif data is not None:
            self._drop_stderr()

    def _drop_stderr(self) -> None:
        if self._stderr is not None:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def process_exited(self, info: ExitInfo) -> None:
        """The process is gone. What it wrote before is delivered first, even when a descendant holds its stdout."""
        if self._exit is None:
            self._exit = info
        if self._receiver is not None:
            self._finish()

    def _finish(self) -> None:
        """Deliver what is left; while reading is paused the end waits too, in order behind the data."""
        if self._told or self._paused:
            return
        if self._stdout is None:
            self._tell()
            return
        assert self._receiver is not None
        for _ in range(FINAL_READS):
            data = self._left_to_read()
            if not data:
                break
            self._receiver.data_received(data)
            if self._held_back():
                return
        self._stdout_ended()

    def _left_to_read(self) -> bytes | None:
        return self._read(self._stdout) if self._stdout is not None else None

    def _held_back(self) -> bool:
        """Whether the receiver asked for a pause meanwhile."""
        return self._paused

    def _tell(self) -> None:
        if self._told or self._exit is None or self._receiver is None:
            return
        self._told = True
        if self._stderr is not None:
            data = self._read(self._stderr)
            if data:
                self._receiver.stderr_received(data)
        self._receiver.exited(self._exit)

    def close(self) -> None:
        """Drop all descriptors at once."""
        self._drop_stdin()
        self._drop_stderr()
        self._read_off()
        if self._stdout is not None:
            os.close(self._stdout)
            self._stdout = None
        if self._eof_timer is not None:
            self._eof_timer.cancel()
            self._eof_timer = None
