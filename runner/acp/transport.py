"""The port between the ACP connection and whatever carries its bytes (stdio pipes, a WebSocket, memory)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """How an agent process ended; both None when the carrier went away without a report.

    Attributes:
        code: exit status, when it exited.
        signal: signal number, when it was killed.
        reason: a sentence when there is no exit status ("the sandbox is gone").
        lost: the place where it ran went with it, so it is not the agent's doing.
    """

    code: int | None = None
    signal: int | None = None
    reason: str | None = None
    lost: bool = False

    def __str__(self) -> str:
        if self.code is not None:
            return f"exit code {self.code}"
        if self.signal is not None:
            return f"signal {self.signal}"
        return self.reason or "no exit status"


class Receiver(Protocol):
    """What a transport calls, always on the event loop's thread and never re-entrantly from ``send``."""

    def data_received(self, data: bytes) -> None:
        """A chunk of the agent's stdout, of any size, cut anywhere."""
        ...

    def stderr_received(self, data: bytes) -> None:
        """A chunk of the agent's stderr."""
        ...

    def eof_received(self) -> None:
        """The agent's stdout ended; at most once, after its last ``data_received``."""
        ...

    def exited(self, info: ExitInfo) -> None:
        """The agent is gone; exactly once, after ``eof_received`` unless a descendant holds its stdout open."""
        ...

    def writable(self) -> None:
        """The buffer drained below its low mark after ``send`` had reported it full, or all of it is taken."""
        ...


class Transport(Protocol):
    """A duplex byte channel to one agent. All methods are called on the event loop's thread."""

    @property
    def pid(self) -> int | None:
        """Process id of the agent as the runner's machine sees it, when there is one."""
        ...

    def connect(self, receiver: Receiver) -> None:
        """Attach the receiver; bytes that arrived before are delivered first. Called once."""
        ...

    def send(self, data: bytes) -> bool:
        """Queue ``data`` for writing, whole and in order, without blocking.

        Returns:
            False when the buffer is above its high mark (the caller waits for ``writable``); data is queued anyway.

        Raises:
            ConnectionError: the agent's stdin is closed; nothing was queued.
        """
        ...

    @property
    def unsent(self) -> int:
        """Bytes queued that the kernel has not taken yet; 0 means every frame was written whole."""
        ...

    def pause_reading(self) -> None:
        """Stop reading stdout (backpressure); idempotent."""
        ...

    def resume_reading(self) -> None:
        """Read stdout again; idempotent."""
        ...

    def close_stdin(self) -> None:
        """Send EOF after what is queued; idempotent."""
        ...

    def close(self) -> None:
        """Drop all descriptors at once; idempotent. Kills nothing by itself."""
        ...
