"""What the scripted agent can be told to do: each function makes one step of a script.

Steps of one request run in order on a thread of their own. Once the turn was settled by its cancel, the steps that are
left are dropped; what an agent does after its terminal is said in ``on_cancel`` or behind a deaf ``gate``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from tests.agents.gate import Gate

Step = dict[str, Any]

ALLOW_ONCE = {"optionId": "yes", "name": "Allow", "kind": "allow_once"}
ALLOW_ALWAYS = {"optionId": "always", "name": "Always allow", "kind": "allow_always"}
REJECT_ONCE = {"optionId": "no", "name": "Reject", "kind": "reject_once"}
OPTIONS = (ALLOW_ONCE, ALLOW_ALWAYS, REJECT_ONCE)

NOISE: Mapping[str, bytes] = {
    "blank": b"\n  \n",
    "ansi": b"\x1b[1;31mStarting server...\x1b[0m\n",
    "string": b'"started"\n',
    "number": b"42\n",
    "array": b'[{"jsonrpc":"2.0"}]\n',
    "null": b"null\n",
    "bom": b"\xef\xbb\xbf\n",
    "crlf": b"banner\r\n",
    "partial_utf8": b"caf\xc3\n",
    "invalid_utf8": b"\xff\xfe\xfd\n",
    "broken_json": b'{"jsonrpc": "2.0", \n',
}
"""Lines that are no frames (case E4)."""


def reply(*, again: bool = False, as_id: Any = None) -> Step:
    """The polite answer of the request's method; for a prompt ``end_turn``. Answered once, more often with ``again``.

    ``as_id`` answers under another id than the request's (case A4).
    """
    return {"do": "reply", **_again(again), **({} if as_id is None else {"as_id": as_id})}


def reply_with(result: Any, *, again: bool = False) -> Step:
    """Answer with this result, ``None`` included (case A7)."""
    return {"do": "reply", "result": result, **_again(again)}


def reply_stop(stop_reason: str, *, again: bool = False) -> Step:
    """Answer the prompt with this stop reason."""
    return {"do": "reply", "stop": stop_reason, **_again(again)}


def reply_merged(drop: Sequence[str] = (), **members: Any) -> Step:
    """The polite answer with other members or without some: ``protocolVersion="1"``, ``drop=["authMethods"]``."""
    return {"do": "reply", "merge": members, "drop": list(drop)}


def fail(code: int = -32603, message: str = "scripted", *, again: bool = False) -> Step:
    """Answer with a JSON-RPC error."""
    return {"do": "reply", "error": {"code": code, "message": message}, **_again(again)}


def settle(stop_reason: str = "cancelled") -> Step:
    """In ``on_cancel``: answer the session's open prompt and drop its other steps. Nothing when none is open."""
    return {"do": "settle", "stop": stop_reason}


def settle_with(result: Any) -> Step:
    """``settle`` with any result, ``None`` included."""
    return {"do": "settle", "result": result}


def settle_error(code: int = -32800, message: str = "cancelled") -> Step:
    """``settle`` with an error; -32800 is case A16."""
    return {"do": "settle", "error": {"code": code, "message": message}}


def reply_to(prompt: int, stop_reason: str = "cancelled") -> Step:
    """Answer the n-th prompt of this process (from 1) once more: a second terminal (case A4)."""
    return {"do": "reply_to", "prompt": prompt, "stop": stop_reason}


def text(content: str = "some text", times: int = 1) -> Step:
    """Message chunks; NUL and lone surrogates travel as JSON escapes."""
    return {"do": "text", "text": content, "times": times}


def thought(content: str = "hm") -> Step:
    """A thought chunk."""
    return {"do": "thought", "text": content}


def update(session_update: str, /, **members: Any) -> Step:
    """Any ``session/update``, of unknown kinds too (case E10)."""
    return {"do": "update", "update": {"sessionUpdate": session_update, **members}}


def usage(used: int = 10, size: int = 1000) -> Step:
    """A usage update, which is no output (case L1)."""
    return update("usage_update", used=used, size=size)


def tool(call: str, status: str = "pending", title: str = "Run it", kind: str = "execute", **members: Any) -> Step:
    """A new tool call."""
    return update("tool_call", toolCallId=call, title=title, kind=kind, status=status, **members)


def tool_status(call: str, status: str, **members: Any) -> Step:
    """A change of a tool call."""
    return update("tool_call_update", toolCallId=call, status=status, **members)


def ask(
    call: str = "call-1",
    title: str = "Run it",
    options: Sequence[Mapping[str, str]] = OPTIONS,
    *,
    wait: bool = True,
    raw_input: Any = None,
    request_id: Any = None,
    allowed: Sequence[Step] = (),
    denied: Sequence[Step] = (),
    cancelled: Sequence[Step] | None = None,
) -> Step:
    """Ask for permission; options may be empty or lack a reject.

    Args:
        call: the tool call it is about.
        title: of the tool call.
        options: as the client is shown them.
        wait: False goes on at once; ``answers()`` waits later, so several are open at a time (case F8).
        raw_input: the tool call's ``rawInput``.
        request_id: instead of the next id of the script's kind.
        allowed: steps after an allow option.
        denied: steps after a reject option or an error.
        cancelled: steps after outcome ``cancelled``; by default the prompt is answered ``cancelled``.
    """
    tool_call = {"toolCallId": call, "title": title, "kind": "execute", "rawInput": raw_input or {"command": title}}
    step = request(
        "session/request_permission", wait=wait, toolCall=tool_call, options=[dict(item) for item in options]
    )
    step["options"] = step["params"]["options"]
    step["then_allowed"] = list(allowed)
    step["then_denied"] = list(denied)
    step["then_cancelled"] = [reply_stop("cancelled")] if cancelled is None else list(cancelled)
    if request_id is not None:
        step["id"] = request_id
    return step


def answers() -> Step:
    """Wait until everything asked without waiting was answered."""
    return {"do": "answers"}


def request(method: str, *, wait: bool = True, **params: Any) -> Step:
    """Any request to the client, known or not; ``sessionId`` is added."""
    return {"do": "request", "method": method, "params": params, "wait": wait}


def notify(method: str, **params: Any) -> Step:
    """Any notification, known or not."""
    return {"do": "notify", "method": method, "params": params}


def raw(data: bytes, pieces: int = 1) -> Step:
    """Bytes to stdout as they are, in so many writes."""
    return {"do": "raw", "base64": base64.b64encode(data).decode("ascii"), "pieces": pieces}


def noise(*kinds: str) -> Step:
    """Lines that are no frames; all of ``NOISE`` without arguments."""
    return raw(b"".join(NOISE[kind] for kind in kinds or NOISE))


def line(size: int, pieces: int = 1) -> Step:
    """A message chunk whose line has exactly ``size`` bytes, without its newline (case E1)."""
    return {"do": "line", "size": size, "pieces": pieces}


def flood(size: int) -> Step:
    """So many bytes on stdout without a newline (case E3)."""
    return {"do": "flood", "bytes": size}


def stderr(size: int) -> Step:
    """So many bytes of log lines on stderr (case E6)."""
    return {"do": "flood", "bytes": size, "stderr": True}


def gate(at: Gate, *, deaf: bool = False) -> Step:
    """Wait until the test opens the gate; with ``deaf`` this and all that follows happens even after a cancel."""
    return {"do": "gate", "path": str(at.path), "deaf": deaf}


def sleep(seconds: float) -> Step:
    """Wait."""
    return {"do": "sleep", "seconds": seconds}


def hang() -> Step:
    """Wait for ever, or until the turn is settled by its cancel. As a method's only step: never answer."""
    return {"do": "hang"}


def exit_with(code: int = 1, stderr_text: str = "") -> Step:
    """Exit at this point (case E5), with a last line on stderr."""
    return {"do": "exit", "code": code, "stderr": stderr_text}


def die_by(name: str = "KILL") -> Step:
    """Be killed by a signal at this point."""
    return {"do": "exit", "signal": name}


def close_stdout() -> Step:
    """Close stdout and live on (case E5)."""
    return {"do": "exit", "close_stdout": True}


def spawn(command: str = "sleep 600", how: str = "plain") -> Step:
    """Start a process that goes on.

    ``how``: ``plain``, ``setsid``, ``nohup`` (and setsid), ``daemon`` (double fork, deaf), ``deaf`` (ignores TERM, HUP,
    INT) or ``holds_stdout`` (inherits the agent's stdout). Its pid is in ``FrameLog.spawned``.
    """
    return {"do": "spawn", "command": command, "how": how}


def run(command: str = "sleep 600") -> Step:
    """Run a command in its own session and be blocked by it, cancelled or not, until it is gone (DESIGN 3.3.4)."""
    return {"do": "run", "command": command}


def _again(again: bool) -> Step:
    return {"again": True} if again else {}
