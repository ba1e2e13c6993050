"""Which model keys stay outside of a sandbox, and whom each may be shown (DESIGN 3.10).

A harness declares its key routes. For each key that a start has, the cell gets a token and a base URL on the runner
instead; the key itself goes to one upstream. An operator's key (of ``[secrets]``, of the runner's environment or of a
harness's configuration) goes to the route's own host, the operator's own base URL or a host of ``[credentials] hosts``,
nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Header = Literal["bearer", "x-api-key"]
"""How a key travels: ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
PORTS: Final = {"http": 80, "https": 443}
PROXIES: Final = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
NOT_PROXIED: Final = ("NO_PROXY", "no_proxy")
OWN_HOST: Final = "127.0.0.1"

_HOST: Final = r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
_URL: Final = re.compile(rf"(?P<scheme>https?)://{_HOST}(?P<path>(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)*)/*", re.IGNORECASE)
_PATTERN: Final = re.compile(rf"(?:(?P<scheme>https?)://)?(?P<any>\*\.)?{_HOST}", re.IGNORECASE)
_NO_HEADER: Final = re.compile(r"[^\x21-\x7e]")


@dataclass(frozen=True, slots=True)
class KeyRoute:
    """One model API as a harness reaches it.

    Attributes:
        name: the first step of the path under which the runner serves it.
        keys: variable that holds a key to how the harness sends it.
        base_urls: variables that hold the API's base URL; the first one that has a value counts.
        upstream: the base URL where none is given.
    """

    name: str
    keys: Mapping[str, Header]
    base_urls: tuple[str, ...]
    upstream: str


@dataclass(frozen=True, slots=True)
class Upstream:
    """A base URL, taken apart: what is judged is what is asked. ``path`` is empty or begins with a slash."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{self.scheme}://{self.host}" + ("" if self.port == PORTS[self.scheme] else f":{self.port}")

    def url(self, rest: str, query: str = "") -> str:
        """The URL of a path below it; both as they came, percent-encoded."""
        return f"{self.origin}{self.path}{rest}" + (f"?{query}" if query else "")


@dataclass(frozen=True, slots=True)
class HostPattern:
    """One of ``[credentials] hosts``: ``[scheme://][*.]host[:port]``."""

    host: str
    scheme: str | None = None
    port: int | None = None
    below: bool = False

    def allows(self, upstream: Upstream) -> bool:
        """Whether keys may go there; without a scheme only by https, or on the loopback interface."""
        if self.scheme is None and upstream.scheme != "https" and upstream.host not in LOOPBACK:
            return False
        if self.scheme not in (None, upstream.scheme) or self.port not in (None, upstream.port):
            return False
        return upstream.host.endswith(f".{self.host}") if self.below else upstream.host == self.host


@dataclass(frozen=True, slots=True)
class Proxied:
    """A key that stays outside: the variable that would have held it, and where it goes."""

    route: KeyRoute
    variable: str
    key: str = field(repr=False)
    upstream: Upstream

    @property
    def header(self) -> Header:
        """How the harness sends it."""
        return self.route.keys[self.variable]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a start is refused: the variable at fault, and a sentence."""

    variable: str
    message: str


def upstream_of(text: str) -> Upstream | None:
    """A base URL; None for what has a user, a query, a step that leads elsewhere, or is none."""
    found = _URL.fullmatch(text.strip())
    if found is None or any(step in (".", "..") for step in found["path"].split("/")):
        return None
    scheme = found["scheme"].lower()
    port = int(found["port"] or PORTS[scheme])
    return Upstream(scheme, found["host"].lower(), port, found["path"]) if 0 < port < 65536 else None


def host_pattern(text: str) -> HostPattern:
    """One of ``[credentials] hosts``.

    Raises:
        ValueError: it is none.
    """
    found = _PATTERN.fullmatch(text)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
        raise ValueError("must be [http(s)://][*.]host[:port]")
    scheme, port = found["scheme"], found["port"]
    below = found["any"] is not None
    return HostPattern(found["host"].lower(), scheme.lower() if scheme else None, int(port) if port else None, below)


def plan(
    routes: Sequence[KeyRoute],
    *,
    own: Mapping[str, str],
    given: Mapping[str, str],
    referred: Collection[str],
    hosts: Sequence[HostPattern],
) -> list[Proxied] | Refusal:
    """The keys of one start that stay outside.

    A caller's own key that goes with a base URL of the caller's which is not listed is not among them: it enters the
    cell, as the runner would else ask any address that a caller names.

    Args:
        routes: of the harness.
        own: the operator's variables: those of the harness's configuration and what it takes from the runner's own.
        given: the dispatch's ``env`` and secrets; they go before ``own``.
        referred: those of ``given`` whose value is of ``[secrets]``.
        hosts: where else keys may go.
    """
    found: list[Proxied] = []
    for route in routes:
        keys = {name: value for name in route.keys if (value := given.get(name, own.get(name)))}
        if not keys:
            continue
        operators = [name for name in keys if name not in given or name in referred]
        upstream = _upstream(route, own, given, hosts)
        if isinstance(upstream, Upstream):
            unfit = next((name for name, key in keys.items() if _NO_HEADER.search(key.strip())), None)
            if unfit is not None:
                return Refusal(unfit, f"{unfit} holds characters that no HTTP header can carry.")
            found += [Proxied(route, name, key.strip(), upstream) for name, key in keys.items()]
        elif operators:
            text = f"{upstream} names a host that {operators[0]}, a key of this runner's operator, may not be sent to;"
            return Refusal(upstream, f"{text} the operator lists it in [credentials] hosts, or the key comes along.")
    return found


def _upstream(
    route: KeyRoute, own: Mapping[str, str], given: Mapping[str, str], hosts: Sequence[HostPattern]
) -> Upstream | str:
    """Where its keys go; else the variable that names a place to which they may not."""
    theirs = next((name for name in route.base_urls if given.get(name)), None)
    ours = next((name for name in route.base_urls if own.get(name)), None)
    known = [found for text in (own[ours] if ours else "", route.upstream) if (found := upstream_of(text))]
    if theirs is None:
        # A base URL of the operator's that cannot be read is no reason to send the key elsewhere.
        return upstream_of(own[ours]) or ours if ours else known[0]
    wanted = upstream_of(given[theirs])
    if wanted is None:
        return theirs
    allowed = any(wanted.origin == one.origin for one in known) or any(one.allows(wanted) for one in hosts)
    return wanted if allowed else theirs


def cell_variables(tokens: Sequence[tuple[Proxied, str]], port: int, env: Mapping[str, str]) -> dict[str, str]:
    """What a cell gets instead of the keys; ``env`` is all that it has else, ``port`` the runner's."""
    found: dict[str, str] = {}
    for item, token in tokens:
        found[item.variable] = token
        found |= dict.fromkeys(item.route.base_urls, f"http://{OWN_HOST}:{port}/{item.route.name}")
    if tokens and any(env.get(name) for name in PROXIES):
        found |= {name: ",".join(filter(None, (env.get(name), OWN_HOST))) for name in NOT_PROXIED}
    return found
