"""The one table of routes: the application is built from it, and so is its description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from runner.rules.feed import POSITION_TEXT
from runner.server import events, exposition, histories, interactions, ops, prompts, quarantine, sessions, turns
from runner.server.exposition import TEXT_FORMS
from runner.wire import views
from runner.wire.fields import CURSOR_TEXT
from runner.wire.models import ID_TEXT, AnswerRequest, CancelRequest, DispatchRequest, ForkRequest, ShellRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN: Final = "open"
ANY: Final = "any"

_CURSOR: Final = {"type": "string", "pattern": CURSOR_TEXT}
_POSITION: Final = {"type": "string", "pattern": POSITION_TEXT}
_LIMIT: Final = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 200}
_STATUS: Final = {"type": "string", "enum": ["pending", "answered", "consumed", "cancelled", "expired"]}
_FOLLOW: Final = {"type": "string", "enum": ["0", "1", "true", "false"], "default": "0"}
_PAGE: Final = {"type": "string", "minLength": 1, "maxLength": 1024}
_NUMBER: Final = {"type": "string", "pattern": "^[0-9]{1,18}$"}
_ID: Final = {"type": "string", "pattern": ID_TEXT}
PATH_PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    "session_id": _ID,
    "interaction_id": _ID,
    "prompt_id": _ID,
    "command_id": _ID,
    "call": {"type": "string"},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: its shape, and whether it also comes as a stream of ``views.Line``.

    ``lines``: what each line is of an answer that comes as JSON lines only; ``text_forms``: types of one that is text.
    """

    text: str
    shape: Any = None
    stream: bool = False
    json: bool = True
    lines: Any = None
    text_forms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. ``scope`` is what its token needs: ``open`` no token, ``any`` any token."""

    method: str
    path: str
    handler: Handler
    scope: str
    name: str
    summary: str
    answers: dict[int, Answer]
    errors: tuple[int, ...] = ()
    body: Any = None
    body_required: bool = True
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)


_SESSION: Final = "/v1/sessions/{session_id}"
_COMMAND: Final = {
    200: Answer("Nothing is left to do, or the settled outcome.", views.CommandReply),
    202: Answer("The turn is stopping.", views.CommandReply),
}

# The hot route comes first: the router tries routes of one prefix in this order.
ROUTES: Final[tuple[Route, ...]] = (
    Route(
        "POST",
        f"{_SESSION}/turns",
        turns.post_turn,
        "dispatch",
        "dispatchTurn",
        "Dispatch a prompt: a stream, or the result, or 202 with Prefer: respond-async.",
        {
            200: Answer(
                "The stream, with Accept: application/json the result; of a context-only prompt that it is stored.",
                views.Result | views.Accepted,
                stream=True,
            ),
            202: Answer("Runs, or waits, without a reader (Prefer: respond-async).", views.Accepted),
        },
        (409, 410, 413, 422, 429, 503),
        body=DispatchRequest,
        headers={"Prefer": {"type": "string"}},
    ),
    Route(
        "POST",
        f"{_SESSION}/cancel",
        sessions.cancel_session,
        "dispatch",
        "cancelTurn",
        "Stop the session's turn; the sandbox stays warm.",
        _COMMAND,
        (404, 409, 410, 413, 503),
        body=CancelRequest,
        body_required=False,
    ),
    Route(
        "POST",
        f"{_SESSION}/prompts/{{prompt_id}}/abort",
        prompts.abort_prompt,
        "dispatch",
        "abortPrompt",
        "Abort one prompt and nothing else; what waits behind it runs.",
        {200: Answer("Whether this call cancelled it.", views.Aborted)},
        (404, 410, 413, 503),
    ),
    Route(
        "GET",
        f"{_SESSION}/prompts",
        prompts.list_prompts,
        "read",
        "listPrompts",
        "The prompts that wait, in the order in which they will run.",
        {200: Answer("The queue.", views.PromptList)},
        (404, 410, 503),
    ),
    Route(
        "POST",
        f"{_SESSION}/resume",
        prompts.post_resume,
        "dispatch",
        "resumeSession",
        "Go on where the last prompt has no completed answer.",
        {200: Answer("The turn that goes on.", views.Resumed)},
        (404, 409, 410, 413, 422, 429, 503),
    ),
    Route(
        "POST",
        f"{_SESSION}/shell",
        prompts.post_shell,
        "dispatch",
        "runShell",
        "Run a command in the session's sandbox, without the model.",
        {200: Answer("What the command came to.", views.ShellResult)},
        (409, 410, 413, 422, 429, 503),
        body=ShellRequest,
    ),
    Route(
        "GET",
        f"{_SESSION}/events",
        events.get_events,
        "read",
        "readEvents",
        "History behind a cursor; with follow=1 live events after it.",
        {200: Answer("Events.", None, stream=True, json=False)},
        (404, 410, 503),
        query={"after": _CURSOR, "follow": _FOLLOW},
        headers={"Last-Event-ID": _CURSOR},
    ),
    Route(
        "GET",
        f"{_SESSION}/records",
        sessions.list_records,
        "read",
        "listRecords",
        "The durable transcript.",
        {200: Answer("Records.", views.RecordList)},
        (404, 410, 503),
        query={"after": _CURSOR, "limit": _LIMIT},
    ),
    Route(
        "GET",
        f"{_SESSION}/export",
        histories.get_export,
        "read",
        "exportSession",
        "Everything durable of the session as JSON lines: session, records, end.",
        {200: Answer("Without a last line of kind end it broke off.", json=False, lines=views.ExportLine)},
        (404, 410, 503),
    ),
    Route(
        "POST",
        f"{_SESSION}/fork",
        histories.post_fork,
        "dispatch",
        "forkSession",
        "A new session with the history up to a cursor.",
        {
            200: Answer("It was made before, by the same request.", views.Forked),
            201: Answer("It was made.", views.Forked),
        },
        (404, 410, 413, 503),
        body=ForkRequest,
    ),
    Route(
        "POST",
        f"{_SESSION}/kill",
        sessions.kill_session,
        "dispatch",
        "killSession",
        "Destroy the session's sandbox; the session and its workspace stay.",
        _COMMAND,
        (404, 410, 413, 503),
    ),
    Route(
        "GET",
        f"{_SESSION}/interactions",
        interactions.list_of_session,
        "read",
        "listSessionInteractions",
        "The session's questions.",
        {200: Answer("Questions.", views.InteractionList)},
        (404, 410, 503),
        query={"status": _STATUS},
    ),
    Route(
        "POST",
        f"{_SESSION}/interactions/{{interaction_id}}/answer",
        interactions.post_answer,
        "dispatch",
        "answerInteraction",
        "Answer a question.",
        {
            200: Answer("The answer was used.", views.Interaction),
            202: Answer("The answer is kept; its use is not confirmed yet.", views.Interaction),
        },
        (404, 409, 410, 413, 503),
        body=AnswerRequest,
    ),
    Route(
        "GET",
        f"{_SESSION}/story",
        ops.get_story,
        "read",
        "readStory",
        "What the session's machines did lately.",
        {200: Answer("Moves, oldest first.", views.Story)},
        (404, 410, 503),
    ),
    Route(
        "GET",
        _SESSION,
        sessions.view_session,
        "read",
        "viewSession",
        "The session as it is now.",
        {200: Answer("The session.", views.SessionView)},
        (404, 410, 503),
    ),
    Route(
        "DELETE",
        _SESSION,
        sessions.delete_session,
        "dispatch",
        "deleteSession",
        "Kill and end the session; its workspace and home are removed.",
        _COMMAND,
        (404, 410, 413, 503),
    ),
    Route(
        "GET",
        "/v1/events",
        events.get_feed,
        "read",
        "readFeed",
        "What becomes of the project's sessions: busy, idle, questions, ended; with follow=1 what comes.",
        {200: Answer("Events, each with its session.", None, stream=True, json=False)},
        (503,),
        query={"after": _POSITION, "follow": _FOLLOW},
        headers={"Last-Event-ID": _POSITION},
    ),
    Route(
        "GET",
        "/v1/sessions",
        sessions.list_sessions,
        "read",
        "listSessions",
        "The project's sessions.",
        {200: Answer("Sessions.", views.SessionList)},
        (503,),
        query={"limit": _LIMIT, "cursor": _PAGE},
    ),
    Route(
        "GET",
        "/v1/interactions",
        interactions.list_inbox,
        "read",
        "listInteractions",
        "The project's questions.",
        {200: Answer("Questions.", views.InteractionList)},
        (503,),
        query={"status": _STATUS},
    ),
    Route(
        "GET",
        "/v1/commands/{command_id}",
        sessions.view_command,
        "read",
        "viewCommand",
        "A command's state and outcome.",
        {200: Answer("The command.", views.Command)},
        (404, 503),
    ),
    Route(
        "GET",
        "/v1/pool",
        ops.get_pool,
        "operate",
        "viewPool",
        "Seats, spares and verdicts.",
        {200: Answer("The pool.", views.PoolView)},
    ),
    Route(
        "GET",
        "/v1/quarantine",
        quarantine.list_quarantine,
        "operate",
        "listQuarantine",
        "Records that came too late, or that no store could hold.",
        {200: Answer("Records, with the reason.", views.Quarantine)},
        (503,),
        query={"limit": _LIMIT, "cursor": _NUMBER},
    ),
    Route(
        "GET",
        "/health",
        ops.get_health,
        OPEN,
        "health",
        "Whether the process lives; with a token what it offers.",
        {200: Answer("It lives.", views.Health)},
    ),
    Route(
        "GET",
        "/ready",
        ops.get_ready,
        OPEN,
        "ready",
        "Whether turns can be dispatched here.",
        {200: Answer("Ready.", views.Ready), 503: Answer("Not ready.", views.Ready)},
    ),
    Route(
        "GET",
        "/metrics",
        exposition.get_metrics,
        "read",
        "readMetrics",
        "What this replica counts, for Prometheus; of what is counted by project, the token's.",
        {200: Answer("The text format, or OpenMetrics where Accept prefers it.", json=False, text_forms=TEXT_FORMS)},
    ),
    Route(
        "GET",
        "/openapi.json",
        ops.get_openapi,
        ANY,
        "openapi",
        "This description.",
        {200: Answer("OpenAPI 3.1.", dict[str, Any])},
    ),
)
