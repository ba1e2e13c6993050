"""One request to a forward HTTP proxy: how its head is read, changed and answered; pure (RFC 9110, 9112)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from runner.rules.egress import BadEntry, Target, target

MAX_HEAD: Final = 64 * 1024
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_VERSION: Final = re.compile(rb"HTTP/1\.[01]")
_OURS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization", b"proxy-authenticate")
)
_REASONS: Final = {
    400: "Bad Request",
    403: "Forbidden",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


class BadHead(ValueError):
    """A head that is not passed on; the text says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client of the proxy wants.

    Attributes:
        target: where to.
        head: what the target is sent first; None for a tunnel.
    """

    target: Target
    head: bytes | None


def request(head: bytes) -> Asked:
    """Read the head of a request, its end included: ``CONNECT host:port``, or ``GET http://host/path``.

    Raises:
        BadHead: it is neither.
    """
    line, headers = _parts(head)
    words = line.split(b" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or not _VERSION.fullmatch(words[2]):
        raise BadHead("that is no HTTP/1.1 request")
    method, where = words[0], words[1]
    try:
        if method == b"CONNECT":
            return Asked(target(where.decode("ascii")), None)
        scheme, mark, rest = where.partition(b"://")
        if scheme.lower() != b"http" or not mark:
            raise BadHead("send the whole http:// address, or CONNECT for anything else")
        authority, path = _split(rest)
        wanted = target(authority.decode("ascii"), 80)
    except UnicodeDecodeError:
        raise BadHead("the host is not in ASCII") from None
    except BadEntry as error:
        raise BadHead(str(error)) from None
    kept = [(name, value) for name, value in headers if name.lower() not in _OURS and name.lower() != b"host"]
    ours = [(b"Host", wanted.authority.encode()), (b"Connection", _connection(headers))]
    return Asked(wanted, _joined(b" ".join((method, path, b"HTTP/1.1")), ours + kept))


def answer(head: bytes) -> tuple[bytes, bool]:
    """The head of an answer as the client gets it, and whether it is the last one (1xx are not, but for a switch).

    The connection serves one request: the next one may be for another host.

    Raises:
        BadHead: it is none.
    """
    line, headers = _parts(head)
    words = line.split(b" ", 2)
    if len(words) < 2 or not _VERSION.fullmatch(words[0]) or not words[1].isdigit() or len(words[1]) != 3:
        raise BadHead("the answer is not HTTP/1.1")
    kept = [(name, value) for name, value in headers if name.lower() not in _OURS]
    if words[1].startswith(b"1") and words[1] != b"101":
        return _joined(line, kept), False
    switched = words[1] == b"101"
    return _joined(line, [*kept, (b"Connection", b"Upgrade" if switched else b"close")]), True


def refusal(status: int, why: str) -> bytes:
    """An answer of the proxy's own, for people and programs."""
    body = json.dumps({"error": {"type": "egress", "message": f"acp-runner: {why}"}}).encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"


def _split(rest: bytes) -> tuple[bytes, bytes]:
    """Authority and path of what follows ``http://``."""
    at = next((at for at, byte in enumerate(rest) if byte in b"/?#"), len(rest))
    path = rest[at:].partition(b"#")[0]
    return rest[:at], path if path.startswith(b"/") else b"/" + path


def _connection(headers: list[tuple[bytes, bytes]]) -> bytes:
    wanted = any(name.lower() == b"upgrade" for name, _ in headers)
    return b"Upgrade" if wanted else b"close"


def _parts(head: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        # A folded line, or a bare line end, means one thing here and another one there.
        if not colon or not _TOKEN.fullmatch(name) or b"\n" in line or b"\r" in line or b"\0" in line:
            raise BadHead("a header is malformed")
        headers.append((name, value.strip(b" \t")))
    if any(byte in first for byte in b"\r\n\0"):
        raise BadHead("the first line is malformed")
    return first, headers


def _joined(line: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"\r\n".join((line, *(name + b": " + value for name, value in headers))) + b"\r\n\r\n"
