"""What of a model request and its answer the credential proxy passes on (DESIGN 3.10)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from runner.rules.credentials import LOOPBACK, Header

METHODS: Final = ("GET", "HEAD", "POST")
"""All that model APIs are used by; no other one is passed on."""

HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
NOT_ASKED: Final = HOP_BY_HOP | {
    "accept-encoding",
    "authorization",
    "content-encoding",
    "content-length",
    "cookie",
    "cookie2",
    "expect",
    "forwarded",
    "host",
    "via",
    "x-api-key",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-url",
    "x-real-ip",
    "x-rewrite-url",
}
NOT_TOLD: Final = HOP_BY_HOP | {
    "alt-svc",
    "content-encoding",
    "content-length",
    "location",
    "set-cookie",
    "set-cookie2",
    "strict-transport-security",
}
_BEARER: Final = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_HIDDEN: Final = re.compile(r"%(?:2f|5c|00)", re.IGNORECASE)
_PLAIN: Final = re.compile(r"[\x21-\x7e]*")

Pairs = Iterable[tuple[str, str]]


def place_of(target: str) -> tuple[str, str, str] | None:
    """A request's target as the route's name, the path below its base URL, and the query; None: nothing is there.

    A path that another server might read as one above the base URL is nowhere.
    """
    path, _, query = target.partition("?")
    if not path.startswith("/") or _HIDDEN.search(path) or "\\" in path or not _PLAIN.fullmatch(target):
        return None
    _, name, *steps = path.split("/")
    if not name or any(_bare(step) in (".", "..") for step in steps) or "" in steps[:-1] or "#" in target:
        return None
    return name, "".join(f"/{step}" for step in steps), query


def _bare(step: str) -> str:
    """As a server reads it that knows parameters of a step, which ``..;x`` has."""
    return step.lower().replace("%2e", ".").replace("%3b", ";").partition(";")[0]


def is_own_host(host: str) -> bool:
    """Whether a request was meant for this machine; the port is another one where the network is a cell's own."""
    name = re.sub(r":[0-9]*$", "", host.strip()).lower()
    return name in LOOPBACK


def presented(headers: Pairs) -> dict[Header, str]:
    """What a request shows as its credentials, by the form in which it does; the first of a form counts."""
    found: dict[Header, str] = {}
    for name, value in headers:
        if name.lower() == "x-api-key":
            found.setdefault("x-api-key", value.strip())
        elif name.lower() == "authorization" and (bearer := _BEARER.fullmatch(value.strip())):
            found.setdefault("bearer", bearer[1])
    return found


def asked(headers: Pairs, tokens: Sequence[str], keys: Mapping[Header, str]) -> list[tuple[str, str]]:
    """The headers of the request that the upstream gets.

    Args:
        headers: of the request.
        tokens: what it showed; no header that holds one is passed on.
        keys: the real keys by the form in which each is sent.
    """
    given = list(headers)
    dropped = NOT_ASKED | _named_by_connection(given)
    kept = [
        (name, value)
        for name, value in given
        if name.lower() not in dropped
        and not name.lower().startswith("x-forwarded-")
        and not any(token in value for token in tokens)
    ]
    # Usage is read and keys are masked in what comes back, so it must not come compressed.
    kept.append(("Accept-Encoding", "identity"))
    for form, key in keys.items():
        kept.append(("x-api-key", key) if form == "x-api-key" else ("Authorization", f"Bearer {key}"))
    return kept


def told(headers: Pairs) -> list[tuple[str, str]]:
    """The headers of the answer that the agent gets."""
    given = list(headers)
    dropped = NOT_TOLD | _named_by_connection(given)
    return [(name, value) for name, value in given if name.lower() not in dropped]


def _named_by_connection(headers: Pairs) -> frozenset[str]:
    values = (value for name, value in headers if name.lower() == "connection")
    return frozenset(word.strip().lower() for value in values for word in value.split(","))


def problem(kind: str, code: str, message: str) -> dict[str, object]:
    """An error as both families of model APIs tell one; ``kind`` is a word that their clients know."""
    return {"type": "error", "error": {"type": kind, "code": code, "message": message}}
