"""The shapes of what the server answers, for the API description (DESIGN 4.1). Nothing is converted by them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

_OPEN = ConfigDict(extra="allow")
Outcome = Literal["completed", "cancelled", "paused", "failed", "lost", "absorbed"]


@with_config(_OPEN)
class Problem(TypedDict):
    """An error before the first line of a stream."""

    code: str
    title: str
    detail: str
    retryable: bool
    retry_after: NotRequired[float]
    field: NotRequired[str]
    current_execution_id: NotRequired[str | None]
    recorded_decision: NotRequired[str | None]
    owner: NotRequired[str | None]


@with_config(_OPEN)
class Failure(TypedDict):
    """An error inside a stream or a result."""

    code: str
    message: str
    retryable: bool


@with_config(_OPEN)
class Timings(TypedDict):
    """Milliseconds since the request was received; null when that point was not reached."""

    admitted_ms: float | None
    ready_ms: float | None
    first_update_ms: float | None
    total_ms: float | None


@with_config(_OPEN)
class Usage(TypedDict, total=False):
    """What is known of what a turn cost; of a session the sum over its ``turns``, and the newest ``context``.

    ``cost`` is by currency. Tokens and cost are there where the agent reports them.
    """

    turns: int
    input_tokens: int
    output_tokens: int
    thought_tokens: int
    cached_read_tokens: int
    cached_write_tokens: int
    total_tokens: int
    cost: dict[str, float]
    context: dict[str, int]
    turn_seconds: float
    sandbox_seconds: float
    warm_seconds: float


@with_config(_OPEN)
class Result(TypedDict):
    """What a prompt came to."""

    ok: bool
    session_id: str
    turn_id: str | None
    prompt_ids: list[str]
    outcome: Outcome
    stop_reason: str | None
    cancel_settled: NotRequired[bool]
    late_completion: NotRequired[bool]
    context_lost: NotRequired[bool]
    absorbed_by: NotRequired[str]
    error: NotRequired[Failure | None]
    text: str
    usage: Usage
    start: str | None
    reason: str | None
    timings: Timings | dict[str, Any]


@with_config(_OPEN)
class Accepted(TypedDict):
    """A prompt that runs without a reader, waits, or (``stored``) is context for the next one."""

    prompt_id: str
    turn_id: NotRequired[str | None]
    state: str


@with_config(_OPEN)
class Aborted(TypedDict):
    """``aborted``: this call cancelled the prompt; false: it did nothing at all."""

    aborted: bool


@with_config(_OPEN)
class QueuedPrompt(TypedDict):
    """A prompt that waits; ``position`` counts from 1, null while it is being prepared."""

    prompt_id: str
    state: Literal["preparing", "persisted", "queued"]
    position: int | None


@with_config(_OPEN)
class PromptList(TypedDict):
    """What waits in a session, in the order in which it will run, and the prompt that a turn answers now."""

    items: list[QueuedPrompt]
    next_cursor: str | None
    active: str | None


@with_config(_OPEN)
class Resumed(TypedDict):
    """The turn that goes on with the session; null when nothing is unanswered."""

    turn_id: str | None


@with_config(_OPEN)
class ShellResult(TypedDict):
    """What a command came to; ``exit_code`` is null when it was killed for a Stop or its time, or never ran."""

    turn_id: str
    exit_code: int | None
    output: str
    truncated: bool
    aborted: NotRequired[bool]
    timed_out: NotRequired[bool]
    error: NotRequired[Failure]


@with_config(_OPEN)
class Line(TypedDict):
    """A line of a stream: an event, a ping or the one result; in the project feed each event names its session."""

    kind: Literal["event", "ping", "result"]
    cursor: NotRequired[str]
    session_id: NotRequired[str]
    session_cursor: NotRequired[str]
    turn_id: NotRequired[str | None]
    prompt_id: NotRequired[str | None]
    at: NotRequired[str]
    type: NotRequired[str]
    data: NotRequired[dict[str, Any]]
    result: NotRequired[Result]


@with_config(_OPEN)
class CommandReply(TypedDict):
    """What a Stop, kill or DELETE has done so far."""

    command_id: NotRequired[str | None]
    state: str
    turn_id: NotRequired[str | None]
    cancelled_prompts: NotRequired[list[str]]
    outcome: NotRequired[Literal["stopped", "not_running", "superseded", "failed", "lost"] | None]


@with_config(_OPEN)
class Command(TypedDict):
    """A durable command: ``turn_id`` is the turn it is addressed to, null for whatever was on its way."""

    command_id: str
    session_id: str
    kind: Literal["cancel", "steer", "kill", "abort_prompt"]
    state: Literal["pending", "claimed", "applied", "obsolete"]
    outcome: Literal["stopped", "not_running", "superseded", "failed", "lost"] | None
    turn_id: str | None
    arrived_at: str
    finished_at: str | None


@with_config(_OPEN)
class Interaction(TypedDict):
    """A question to a human."""

    interaction_id: str
    session_id: str
    turn_id: str | None
    status: Literal["pending", "answered", "consumed", "cancelled", "expired"]
    kind: str
    tool_call: dict[str, Any] | None
    options: list[dict[str, Any]]
    created_at: str
    expires_at: str | None
    answer: NotRequired[dict[str, Any] | None]
    message: NotRequired[str]
    mode: NotRequired[Literal["form", "url"]]
    schema: NotRequired[dict[str, Any]]
    url: NotRequired[str]
    last_error: NotRequired[str]
    reason: NotRequired[str]


@with_config(_OPEN)
class SessionView(TypedDict):
    """A session as it is now."""

    session_id: str
    state: Literal["idle", "running", "awaiting_approval", "stopping", "ended"]
    running_turn: str | None
    stopping: bool
    queue: list[QueuedPrompt]
    pool: dict[str, Any] | None
    harness: str | None
    sandbox: dict[str, Any] | None
    isolation: str | None
    limits: NotRequired[dict[str, Any] | None]
    proxied_keys: NotRequired[list[str] | None]
    last_turn: dict[str, Any] | None
    open_interactions: list[Any]
    usage: Usage
    created_at: str
    updated_at: str
    forked_from: NotRequired[dict[str, str]]


@with_config(_OPEN)
class Record(TypedDict):
    """A durable item of a session's history."""

    record_id: str
    session_id: str
    turn_id: str | None
    prompt_id: NotRequired[str | None]
    cursor: str
    type: str
    data: dict[str, Any]
    at: str


@with_config(_OPEN)
class ExportLine(TypedDict):
    """A line of an export: the session, a record (its members are beside ``kind``), a ping, or the end.

    ``records`` counts them, ``head`` is the cursor up to which they were read, and ``missing`` says why ``complete`` is
    false.
    """

    kind: Literal["session", "record", "ping", "end"]
    session: NotRequired[SessionView]
    record_id: NotRequired[str]
    session_id: NotRequired[str]
    turn_id: NotRequired[str | None]
    prompt_id: NotRequired[str | None]
    cursor: NotRequired[str]
    type: NotRequired[str]
    data: NotRequired[dict[str, Any]]
    at: NotRequired[str]
    records: NotRequired[int]
    head: NotRequired[str]
    running_turn: NotRequired[str | None]
    complete: NotRequired[bool]
    missing: NotRequired[list[Literal["begin", "records", "ending"]]]


class FileEntry(TypedDict):
    """What is in a folder; ``size`` in bytes, of files only; ``target``: what a link says.

    A name that is no UTF-8 is shown with U+FFFD, and cannot be asked for.
    """

    name: str
    path: str
    type: Literal["file", "folder", "link", "other"]
    size: int | None
    modified_at: str
    target: NotRequired[str]


class FileList(TypedDict):
    """A page of a folder of the workspace."""

    path: str
    items: list[FileEntry]
    next_cursor: str | None


class FileWritten(TypedDict):
    """A file that was put in place."""

    path: str
    size: int
    etag: str
    created: bool


@with_config(_OPEN)
class Forked(TypedDict):
    """A new session that has another one's history up to a cursor.

    ``workspace``: ``copied``; ``shared`` when it is a directory of the host; ``empty``, and why in ``reason``.
    """

    session_id: str
    forked_from: str
    after: str
    head: str
    records: int
    complete: bool
    workspace: Literal["copied", "shared", "empty"]
    reason: NotRequired[str]


class SetAside(Record):
    """A record that no reader of its session sees."""

    reason: str
    set_aside_at: str


class SessionList(TypedDict):
    """A page of sessions."""

    items: list[SessionView]
    next_cursor: str | None


class RecordList(TypedDict):
    """A page of records."""

    items: list[Record]
    next_cursor: str | None


class Quarantine(TypedDict):
    """A page of what was set aside."""

    items: list[SetAside]
    next_cursor: str | None


class InteractionList(TypedDict):
    """Questions."""

    items: list[Interaction]
    next_cursor: str | None


class Move(TypedDict):
    """One move of one machine; ``event`` and each effect are objects with a ``name`` and their details."""

    at: str
    machine: Literal["turn", "pool", "lease", "command", "interaction"]
    id: str
    event: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    effects: list[dict[str, Any]]


class Story(TypedDict):
    """The newest moves of a session's machines."""

    items: list[Move]


@with_config(_OPEN)
class PoolView(TypedDict):
    """Seats, spares and verdicts."""


@with_config(_OPEN)
class Health(TypedDict):
    """``status`` and ``version`` for everybody, the rest with a token."""

    status: str
    version: str


@with_config(_OPEN)
class Ready(TypedDict):
    """Whether turns can be dispatched here."""

    ready: bool
