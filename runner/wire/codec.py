"""Lines of a stream, built from bytes: no object is made and serialised per event (DESIGN 4.1, SPEED 4)."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import orjson

Value = TypeVar("Value")
PING: Final = b'{"kind":"ping"}\n'
SSE_PING: Final = b": ping\n\n"
_CURSOR_HEAD: Final = b'{"kind":"event","cursor":"'
_PING_HEAD: Final = b'{"kind":"ping","cursor":"'
_PING_LINE: Final = PING.rstrip()
_NO_CURSOR_HEAD: Final = b'{"kind":"event","turn_id":null,'
_RESYNC_FROM: Final = re.compile(rb'"type":"resync","data":\{"from":"([^"]*)"')
_DEEPEST: Final = 200
_LARGEST: Final = 2**64 - 1
_SMALLEST: Final = -(2**63)
_NUL: Final = b"\\u0000"


def to_json(value: Any) -> bytes:
    """Compact JSON of any JSON value, and it never raises for one that came over the wire.

    Lone surrogates become U+FFFD, integers beyond 64 bits become floats, NaN becomes null, what is nested deeper
    than 200 levels becomes ``"…"``.
    """
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        return orjson.dumps(_clean(value, _DEEPEST))


def storable_json(value: Any) -> bytes:
    """``to_json`` of what every store and its operators' tools can hold: U+FFFD for each NUL, too.

    PostgreSQL has no NUL in text, nor in ``jsonb``.
    """
    encoded = to_json(value)
    # A backslash that was written before "u0000" is found as well: cleaning such a value changes nothing.
    return to_json(_clean(value, _DEEPEST, nul=False)) if _NUL in encoded else encoded


def storable(value: Value) -> Value:
    """The value as it comes back from ``storable_json``; the same object when nothing of it changes."""
    try:
        if _NUL not in orjson.dumps(value):
            return value
    except (TypeError, ValueError):
        pass
    cleaned: Value = orjson.loads(storable_json(value))
    return cleaned


def clean_text(text: str) -> str:
    """``text`` with each lone surrogate replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def halves(text: str) -> tuple[str, str]:
    """Clean text, and the half of a surrogate pair at its end, if any, that the next chunk may make whole."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    half = joined[-1:] if "\ud800" <= joined[-1:] <= "\udbff" else ""
    return clean_text(joined.removesuffix(half) if half else joined), half


def is_torn(text: str) -> bool:
    """Whether there are surrogates in it, which no encoding takes."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _clean(value: Any, levels: int, *, nul: bool = True) -> Any:
    if isinstance(value, str):
        return clean_text(value if nul else value.replace("\0", "\ufffd"))
    if isinstance(value, int) and not isinstance(value, bool) and not _SMALLEST <= value <= _LARGEST:
        return float(value) if abs(value) < 1 << 1000 else None
    if isinstance(value, dict | list | tuple):
        if levels == 0:
            return "…"
        if isinstance(value, dict):
            return {_clean(str(key), 0, nul=nul): _clean(item, levels - 1, nul=nul) for key, item in value.items()}
        return [_clean(item, levels - 1, nul=nul) for item in value]
    return value


def event_line(
    cursor: str | None, turn_id: str | None, prompt_id: str | None, at: str, event_type: str, data_json: bytes
) -> bytes:
    """One event line.

    Args:
        cursor: None leaves the member out, as the refusal of a turn does.
        turn_id: None is null; ids hold only ``[A-Za-z0-9_-]`` and need no escape.
        prompt_id: as ``turn_id``.
        at: RFC 3339 instant.
        event_type: a value of ``terms.EventType``.
        data_json: the JSON of ``data``, without a newline (``to_json`` writes none).
    """
    head = b'{"kind":"event"' if cursor is None else b'%b%b"' % (_CURSOR_HEAD, cursor.encode())
    return b'%b,%b"at":"%b","type":"%b","data":%b}\n' % (
        head,
        _ids(turn_id, prompt_id),
        at.encode(),
        event_type.encode(),
        data_json,
    )


def feed_line(
    cursor: str, session_id: str, session_cursor: str, turn_id: str | None, at: str, event_type: str, data_json: bytes
) -> bytes:
    """One item of a project's feed: ``cursor`` is the feed's, ``session_cursor`` the place in its session's events."""
    turn = "null" if turn_id is None else f'"{turn_id}"'
    ids = f'"session_id":"{session_id}","session_cursor":"{session_cursor}","turn_id":{turn}'
    return b'%b%b",%b,"at":"%b","type":"%b","data":%b}\n' % (
        _CURSOR_HEAD,
        cursor.encode(),
        ids.encode(),
        at.encode(),
        event_type.encode(),
        data_json,
    )


def ping_line(cursor: str) -> bytes:
    """A ping that tells from where on a reader can come back, before it saw an event."""
    return b'%b%b"}\n' % (_PING_HEAD, cursor.encode())


def _ids(turn_id: str | None, prompt_id: str | None) -> bytes:
    turn = "null" if turn_id is None else f'"{turn_id}"'
    prompt = "null" if prompt_id is None else f'"{prompt_id}"'
    return f'"turn_id":{turn},"prompt_id":{prompt},'.encode()


class EventFormatter:
    """Formats the events of one turn; what does not change is encoded once."""

    __slots__ = ("_ids",)

    def __init__(self, turn_id: str | None, prompt_id: str | None) -> None:
        self._ids = _ids(turn_id, prompt_id)

    def line(self, cursor: str, at: str, event_type: str, data_json: bytes) -> bytes:
        """The same bytes as ``event_line``."""
        return b'{"kind":"event","cursor":"%b",%b"at":"%b","type":"%b","data":%b}\n' % (
            cursor.encode(),
            self._ids,
            at.encode(),
            event_type.encode(),
            data_json,
        )

    def deltas(
        self, epoch: int, first_n: int, at: str, event_type: str, message_id: str, texts: list[str]
    ) -> tuple[bytes, bytes]:
        """Lines of consecutive deltas: cursors ``<epoch>.<first_n>``, ``<first_n + 1>`` and so on, one instant.

        Args:
            epoch, first_n: of the first one's cursor.
            at: the instant.
            event_type: ``message_delta`` or ``thought_delta``.
            message_id: any text; it is escaped.
            texts: one delta each, in order; at least one.

        Returns:
            The lines; and all as one line: the first, with ``texts`` in its data in place of ``text``.
        """
        encoded = to_json(texts)
        head = b'{"kind":"event","cursor":"%d.' % epoch
        middle = b'",%b"at":"%b","type":"%b","data":{"message_id":%b,"text' % (
            self._ids,
            at.encode(),
            event_type.encode(),
            to_json(message_id),
        )
        short = b'%b%d%bs":%b}}\n' % (head, first_n, middle, encoded)
        middle, tail = middle + b'":"', b'"}}\n'
        bodies = _string_bodies(texts, encoded)
        lines = [b"%b%d%b%b%b" % (head, n, middle, body, tail) for n, body in enumerate(bodies, start=first_n)]
        return b"".join(lines), short


def _string_bodies(texts: list[str], encoded: bytes) -> list[bytes]:
    """Each text as JSON without its quotes; ``encoded`` is the JSON of all."""
    # Cutting at '","' is exact unless an escaped quote stands before it: every other quote opens or closes a text.
    if b'\\","' in encoded:
        return [to_json(text)[1:-1] for text in texts]
    return encoded[2:-2].split(b'","')


def result_line(result: dict[str, Any]) -> bytes:
    """The last line of a dispatch stream."""
    return b'{"kind":"result","result":%b}\n' % to_json(result)


def last_cursor(lines: bytes) -> str | None:
    """From where a reader of whole lines goes on: the last event's cursor, or what a ``resync`` behind it says.

    None where no line tells. What an agent nests into an event is no line, whatever it looks like.
    """
    end = len(lines)
    while end > 0:
        start = lines.rfind(b"\n", 0, end - 1) + 1
        if (found := _place(lines[start:end])) is not None:
            return found.decode()
        end = start
    return None


def _place(line: bytes) -> bytes | None:
    for head in (_CURSOR_HEAD, _PING_HEAD):
        if line.startswith(head):
            return line[len(head) : line.index(b'"', len(head))]
    if line.startswith(_NO_CURSOR_HEAD) and (found := _RESYNC_FROM.search(line)) is not None:
        return found[1]
    return None


def to_sse(lines: bytes) -> bytes:
    r"""The same objects as server-sent events: ``id: <cursor>\ndata: <json>\n\n`` for each line.

    There is no ``event:`` field: a browser hands named events only to listeners of that name, and a page would
    have to know every type. A line without a cursor has no ``id:``, so the last one stays what a client resumes
    from; that of a ``resync`` is what it tells to begin from. Pings become comments.
    """
    if b"\r" in lines:
        lines = lines.replace(b"\r", b" ")
    out: list[bytes] = []
    for line in lines.split(b"\n"):
        if line.startswith(_CURSOR_HEAD):
            end = line.index(b'"', len(_CURSOR_HEAD))
            out.append(b"id: %b\ndata: %b\n\n" % (line[len(_CURSOR_HEAD) : end], line))
        elif line == _PING_LINE:
            out.append(SSE_PING)
        elif line.startswith(_PING_HEAD):
            out.append(b": ping\nid: %b\n\n" % line[len(_PING_HEAD) : -2])
        elif line:
            place = _place(line)
            out.append(b"data: %b\n\n" % line if place is None else b"id: %b\ndata: %b\n\n" % (place, line))
    return b"".join(out)
