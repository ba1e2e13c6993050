"""What the server, and anything else above, may ask of the sessions."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from runner.errors import RunnerError
from runner.rules.files import Content, Precondition, Written
from runner.wire.models import AnswerRequest, CancelRequest, DispatchRequest, ForkRequest, ShellRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the project and scopes of the token."""

    project: str
    scopes: frozenset[str]


class ReaderEnded(Exception):
    """A reader has delivered everything there will be."""


class ReaderCut(Exception):
    """A reader was too slow or its cursor cannot be served further; the argument is the reason."""


class Reader(Protocol):
    """One reader of a session's events; it can be slow without anybody else noticing."""

    async def next(self, seconds: float) -> bytes | None:
        """Whole NDJSON event lines (each ends in a newline) that are due now, at most about 256 KiB.

        Returns:
            None when nothing arrived within ``seconds`` (time for a ping).

        Raises:
            ReaderEnded: nothing will follow.
            ReaderCut: the reader fell too far behind.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether it is known already that nothing follows what was delivered; ``next`` tells in any case."""
        ...

    def close(self, *, cut: bool = False) -> None:
        """Detach; idempotent. Never affects the turn.

        ``cut``: the server gave the reader up, it did not leave: it counts at the turn's ending (DESIGN 3.4).
        """
        ...


class PromptHandle(Protocol):
    """A dispatched prompt as its caller sees it."""

    prompt_id: str
    turn_id: str | None
    refused: RunnerError | None
    """``session_turn_in_use``: nothing was persisted; ``reader`` is empty and ``result`` is the failed result."""

    def reader(self) -> Reader:
        """The prompt's own events from its first one on; ends when its result is there."""
        ...

    def result(self) -> Awaitable[dict[str, Any]]:
        """The result object of DESIGN 4.1; cancelling the wait changes nothing."""
        ...

    @property
    def state(self) -> str:
        """``active`` or the prompt's terminal state."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP status with its JSON body."""

    status: int
    body: dict[str, Any]


class Files(Protocol):
    """The files of sessions' workspaces.

    Beside what ``sandbox.port.Files`` raises: ``session_starting``: the sandbox of a turn is being started (case L5);
    ``forbidden``: the workspace is a directory of the host, and the caller lacks the scope ``operate``.
    """

    async def read(self, caller: Caller, session_id: str, path: str) -> Content:
        """A file, whole."""
        ...

    async def write(
        self, caller: Caller, session_id: str, path: str, data: bytes, condition: Precondition
    ) -> Written | None:
        """Put a file in place; None when the condition does not hold. Two writes of a session never overlap."""
        ...

    async def list(self, caller: Caller, session_id: str, path: str, limit: int, cursor: str | None) -> dict[str, Any]:
        """``{path, items, next_cursor}`` of a folder."""
        ...


class Sessions(Protocol):
    """Every method takes the caller's project as its scope; an unknown session of it is ``not_found``.

    Ids are validated here again; a foreign project's session is never seen.
    """

    @property
    def files(self) -> Files:
        """The files of their workspaces."""
        ...

    def has_capacity(self) -> bool:
        """Whether another turn may be dispatched (``[server] max_turns``): asked before the body is read."""
        ...

    async def dispatch(
        self, caller: Caller, session_id: str, request: DispatchRequest, *, keep_on_disconnect: bool = False
    ) -> PromptHandle:
        """Admit a prompt; returns when the first heartbeat was answered and, if admitted, the turn is durable.

        Cancelling the call (a disconnect) never ends an admitted turn.
        """
        ...

    async def cancel(
        self, caller: Caller, session_id: str, request: CancelRequest, *, arrived_at: float | None = None
    ) -> Reply:
        """Stop (DESIGN 3.3): never waits behind the turn; only ``wait_seconds`` makes it wait.

        ``arrived_at``: when the request arrived, loop time (None: now): a turn that started later is not stopped.
        """
        ...

    async def abort_prompt(self, caller: Caller, session_id: str, prompt_id: str) -> bool:
        """Abort one prompt and nothing else: whether this call cancelled it. The interrupt follows (DESIGN 3.6)."""
        ...

    async def prompts(self, caller: Caller, session_id: str) -> dict[str, Any]:
        """``{"items": [waiting prompts], "next_cursor": null, "active": prompt id or null}``."""
        ...

    async def resume(self, caller: Caller, session_id: str) -> str | None:
        """Start a turn without an owner if the last prompt sent has no completed answer; a turn's id, or None.

        What runs or waits already is joined: its turn is named. A shell, or a turn that is stopping, is waited for.
        """
        ...

    async def shell(self, caller: Caller, session_id: str, request: ShellRequest) -> dict[str, Any]:
        """Run a command in the session's sandbox, admitted like a turn: ``{turn_id, exit_code, output, truncated}``.

        ``aborted``, ``timed_out`` and ``error`` are there when that is so. Cancelling the call ends nothing.

        Raises:
            RunnerError: ``session_turn_in_use``: something runs, waits or is paused; ``session_starting``: the sandbox
                of a turn is being started.
        """
        ...

    async def kill(self, caller: Caller, session_id: str) -> Reply:
        """Kill: the seat is destroyed, session and workspace stay."""
        ...

    async def command(self, caller: Caller, command_id: str) -> dict[str, Any]:
        """One command of the caller's project: its state and outcome."""
        ...

    async def delete(self, caller: Caller, session_id: str) -> Reply:
        """Kill and end; workspace and home are removed."""
        ...

    async def view(self, caller: Caller, session_id: str) -> dict[str, Any]:
        """The session view of DESIGN 4.1."""
        ...

    async def sessions(self, caller: Caller, limit: int, cursor: str | None) -> dict[str, Any]:
        """``{"items": [views], "next_cursor"}``."""
        ...

    async def records(self, caller: Caller, session_id: str, after: str | None, limit: int) -> dict[str, Any]:
        """``{"items": [records], "next_cursor"}``."""
        ...

    async def export(self, caller: Caller, session_id: str) -> Reader:
        """Everything durable as JSON lines: ``session``, each ``record``, ``end``.

        Its ``next`` also raises ``RunnerError``: the store failed, or the session was deleted meanwhile.
        """
        ...

    async def fork(self, caller: Caller, session_id: str, request: ForkRequest) -> Reply:
        """A new session with the history up to a cursor: 201, or 200 for one that this request made before.

        Raises:
            RunnerError: ``invalid_request``: the cursor is above the head, the history is not whole, or the new id is
                taken; ``too_large``.
        """
        ...

    async def follow(self, caller: Caller, session_id: str, after: str | None, follow: bool) -> Reader:
        """History behind the cursor, then, with ``follow``, live events."""
        ...

    async def feed(self, caller: Caller, after: str | None, follow: bool) -> Reader:
        """The project's feed behind a cursor of it, then, with ``follow``, what comes (``rules.feed``).

        Raises:
            RunnerError: ``invalid_request``, ``store_unavailable``.
        """
        ...

    async def interactions(self, caller: Caller, session_id: str | None, status: str | None) -> dict[str, Any]:
        """``{"items": [interactions], "next_cursor": null}``."""
        ...

    async def answer(self, caller: Caller, session_id: str, interaction_id: str, request: AnswerRequest) -> Reply:
        """Answer a question: 200 consumed, 202 not yet confirmed."""
        ...

    async def story(self, caller: Caller, session_id: str) -> dict[str, Any]:
        """``{"items": [moves]}``: what the session's machines did lately on this replica, oldest first."""
        ...

    async def quarantine(self, caller: Caller, limit: int, cursor: str | None) -> dict[str, Any]:
        """``{"items": [records with reason and set_aside_at], "next_cursor"}``, those set aside first come first."""
        ...

    def pool(self, caller: Caller) -> dict[str, Any]:
        """Seats, spares and verdicts."""
        ...

    def health(self) -> dict[str, Any]:
        """``{status, version, protocol, replica_id, harnesses, providers, isolation, draining}``."""
        ...

    async def ready(self) -> dict[str, Any]:
        """``{ready: bool, store, leases, capacity, draining, live_file}``."""
        ...
