"""Commands that ask the user: for permission, with a form, by a URL."""

from __future__ import annotations

from demo.loop import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from demo.loop import Reply
    from demo.session import Session

    Work = Generator[Wait]

FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "title": "Your name", "maxLength": 40},
        "times": {"type": "integer", "title": "How often", "minimum": 1, "maximum": 9},
        "loud": {"type": "boolean", "title": "Loud"},
    },
    "required": ["name"],
}


def ask(session: Session, rest: str) -> Work:
    """Ask for permission once and do as told."""
    return _asked(session, [rest or "Run the demo command"])


def ask2(session: Session, rest: str) -> Work:
    """Two questions at once."""
    return _asked(session, [f"{rest or 'Run the demo command'} {number}" for number in (1, 2)])


def form(session: Session, rest: str) -> Work:
    """Ask with a form, and say what was filled in."""
    params = {"mode": "form", "message": rest or "Whom shall I greet?", "requestedSchema": FORM}
    return _elicited(session, params)


def url(session: Session, rest: str) -> Work:
    """Ask the user to open URL."""
    params = {
        "mode": "url",
        "message": "Please open this page",
        "url": rest or "https://example.com/",
        "elicitationId": session.loop.new_name("url"),
    }
    return _elicited(session, params)


def _elicited(session: Session, params: dict[str, Any]) -> Work:
    session.keep_open()
    reply = session.loop.request("elicitation/create", {"sessionId": session.id, **params})
    yield from _answered(reply)
    answer = (reply.message or {}).get("result") or {}
    content = "".join(f" {name}={value}" for name, value in sorted((answer.get("content") or {}).items()))
    session.say(f"{answer.get('action', 'no answer')}{content}. ")
    if params["mode"] == "url" and answer.get("action") == "accept":
        done = {"jsonrpc": "2.0", "method": "elicitation/complete"}
        session.loop.send_message({**done, "params": {"elicitationId": params["elicitationId"]}})


def _answered(reply: Reply) -> Work:
    while reply.message is None:
        yield Wait(reply=reply)


def _asked(session: Session, titles: list[str]) -> Work:
    session.keep_open()
    questions = []
    for title in titles:
        call = session.loop.new_name("ask")
        tool = {"toolCallId": call, "title": title, "kind": "execute", "rawInput": {"command": title}}
        session.update("tool_call", status="pending", **tool)
        options = [
            {"optionId": option, "name": option.replace("_", " ").capitalize(), "kind": option}
            for option in ("allow_once", "allow_always", "reject_once")
        ]
        reply = session.loop.request(
            "session/request_permission", {"sessionId": session.id, "toolCall": tool, "options": options}
        )
        questions.append((call, title, reply))
    open_calls = {call for call, _, _ in questions}
    try:
        for call, title, reply in questions:
            yield from _answered(reply)
            outcome = ((reply.message or {}).get("result") or {}).get("outcome") or {}
            if outcome.get("outcome") == "cancelled":
                if session.turn is not None:
                    session.turn.stop_reason = "cancelled"
                return
            choice = outcome.get("optionId", "no answer")
            allowed = choice in ("allow_once", "allow_always")
            open_calls.discard(call)
            session.update("tool_call_update", toolCallId=call, status="completed" if allowed else "failed")
            session.say(f"{title}: {choice}. ")
    finally:
        for call in sorted(open_calls):
            session.update("tool_call_update", toolCallId=call, status="failed")
