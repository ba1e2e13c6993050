"""One command beside the agent: what it says goes to the runner, bounded, until its own process is gone."""

from __future__ import annotations

import base64
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CHUNK = 65536
_LAST_READS = 4


class Command:
    """A command whose stdout and stderr are one pipe.

    Attributes:
        identity: the id of the request that its end answers.
        pid: its own process, which leads a session.
        fd: the init's end of the pipe; None once nobody writes to it any more.
    """

    def __init__(self, identity: Any, name: str, pid: int, fd: int, limit: int) -> None:
        self.identity = identity
        self.pid = pid
        self.fd: int | None = fd
        self._name = name
        self._left = limit
        self._truncated = False
        os.set_blocking(fd, False)

    def read(self) -> dict[str, object] | None:
        """The event of what was said now; None when nothing was, or when it is beyond the limit and dropped."""
        if self.fd is None:
            return None
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.close()
            return None
        kept, self._left = data[: self._left], self._left - min(len(data), self._left)
        self._truncated = self._truncated or len(kept) < len(data)
        if not kept:
            return None
        return {"event": "output", "run": self._name, "data": base64.b64encode(kept).decode("ascii")}

    def rest(self) -> list[dict[str, object]]:
        """What its process left in the pipe; who inherited the pipe is not waited for."""
        events = [self.read() for _ in range(_LAST_READS)]
        self.close()
        return [event for event in events if event is not None]

    def ended(self, status: int) -> dict[str, object]:
        """The reply: how its process ended."""
        code = os.waitstatus_to_exitcode(status)
        how = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
        return {"id": self.identity, "ok": True, **how, "truncated": self._truncated}

    def close(self) -> None:
        """Give the pipe up; idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
