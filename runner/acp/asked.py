"""The agent's open questions: permission requests and elicitations, each answered exactly once (cases F15, F16)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from runner.acp.answers import mapping, permission_problem
from runner.acp.inbox import ElicitationAsked, ElicitationCompleted, Inbox, PermissionAsked, PermissionWithdrawn
from runner.acp.peer import Peer
from runner.rules import elicitation, permission

INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
CANCELLED: Final = -32800
MAX_OPEN_REQUESTS: Final = 1000
KEPT_URLS: Final = 100
PERMISSION: Final = "session/request_permission"
ELICITATION: Final = "elicitation/create"
METHODS: Final = frozenset({PERMISSION, ELICITATION})


class Open(NamedTuple):
    """A question: the request's id as it came, who asks, and what cancels it."""

    request_id: Any
    agent_session_id: str
    cancel: dict[str, Any]


class Asked:
    """What an agent asked and nobody answered yet.

    Args:
        reply: takes the frame of an automatic answer; never raises.
        counts: what was dropped, declined or ignored, by name.
    """

    def __init__(self, reply: Callable[[bytes], object], counts: Counter[str]) -> None:
        self._reply = reply
        self._counts = counts
        self._open: dict[int, Open] = {}
        self._next_key = 0
        self._urls: OrderedDict[str, str] = OrderedDict()

    def answered(self, key: int) -> list[Any]:
        """The raw id of an open question, which is closed by this; empty when it was closed before."""
        asked = self._open.pop(key, None)
        return [asked.request_id] if asked is not None else []

    def clear(self) -> None:
        """The agent is gone."""
        self._open.clear()
        self._urls.clear()

    def forget(self, agent_session_id: str) -> None:
        """The session was closed: what it asked is cancelled."""
        for key, asked in list(self._open.items()):
            if asked.agent_session_id == agent_session_id:
                del self._open[key]
                self._reply(Peer.result(asked.request_id, asked.cancel))

    def take(
        self, request_id: Any, method: str, params: dict[str, Any], of: tuple[str, Inbox] | None, size: int
    ) -> Inbox | None:
        """A question, of the session with this id and inbox (None: nobody's); the inbox that got something.

        One that is malformed is refused to the agent and shown as a notice (case F15).
        """
        if any(same_id(asked.request_id, request_id) for asked in self._open.values()):
            # Refusing it would answer the first request too: both have one id.
            self._counts["repeated_requests"] += 1
            return None
        if of is None and method == ELICITATION:
            self._counts["elicitations_without_session"] += 1
            self._reply(Peer.result(request_id, elicitation.CANCEL))
            return None
        problem = _problem(method, params) if of is not None else "unknown session"
        if problem is not None or of is None:
            self._counts["malformed"] += 1
            self._reply(Peer.error(request_id, INVALID_PARAMS, f"Invalid params: {problem}"))
            if of is None:
                return None
            kind = "permission_request" if method == PERMISSION else "elicitation"
            of[1].put_updates([{"sessionUpdate": f"malformed_{kind}", "problem": problem}], size)
            return of[1]
        if len(self._open) >= MAX_OPEN_REQUESTS:
            self._counts["refused_requests"] += 1
            self._reply(Peer.error(request_id, INTERNAL_ERROR, "Too many open questions"))
            return None
        self._put(request_id, method, params, *of, size)
        return of[1]

    def _put(
        self, request_id: Any, method: str, params: dict[str, Any], agent_session_id: str, inbox: Inbox, size: int
    ) -> None:
        self._next_key += 1
        if method == PERMISSION:
            self._open[self._next_key] = Open(request_id, agent_session_id, permission.CANCELLED)
            inbox.put(PermissionAsked(self._next_key, params), size)
            return
        self._open[self._next_key] = Open(request_id, agent_session_id, elicitation.CANCEL)
        if params.get("mode") == "url":
            self._urls[params["elicitationId"]] = agent_session_id
            while len(self._urls) > KEPT_URLS:
                self._urls.popitem(last=False)
        inbox.put(ElicitationAsked(self._next_key, params), size)

    def withdrawn(self, params: Any, inboxes: dict[str, Inbox]) -> Inbox | None:
        """``$/cancel_request``: the agent takes a question back; it is answered with the error that this means."""
        given = mapping(params)
        for key, asked in self._open.items():
            if "requestId" in given and same_id(asked.request_id, given["requestId"]):
                del self._open[key]
                self._reply(Peer.error(asked.request_id, CANCELLED, "Request cancelled"))
                inbox = inboxes.get(asked.agent_session_id)
                if inbox is not None:
                    inbox.put(PermissionWithdrawn(key))
                return inbox
        self._counts["obsolete_withdrawals"] += 1
        return None

    def completed(self, params: Any, inboxes: dict[str, Inbox]) -> Inbox | None:
        """``elicitation/complete``: what a URL asked for is done; an unknown id is ignored."""
        identity = mapping(params).get("elicitationId")
        agent_session_id = self._urls.pop(identity, None) if isinstance(identity, str) else None
        inbox = inboxes.get(agent_session_id) if agent_session_id is not None else None
        if inbox is None:
            self._counts["unknown_completions"] += 1
        else:
            inbox.put(ElicitationCompleted(str(identity)))
        return inbox


def _problem(method: str, params: dict[str, Any]) -> str | None:
    if method == PERMISSION:
        return permission_problem(params)
    if params.get("mode") not in elicitation.MODES:
        return f"mode must be one of {', '.join(elicitation.MODES)}"
    return elicitation.request_problem(params)


def same_id(one: Any, other: Any) -> bool:
    """Whether two JSON-RPC ids are one: 1 and "1" are not, nor are 1 and true."""
    return type(one) is type(other) and bool(one == other)
