"""Who may call: tokens, their projects and scopes, and the Host and Origin checks (DESIGN 4, 3.11)."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final
from urllib.parse import urlsplit

from runner.errors import RunnerError
from runner.session.port import Caller

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
ALL_BUT_RUNNER: Final = frozenset({"dispatch", "read", "operate"})


@dataclass(frozen=True, slots=True)
class AccessToken:
    """A token with what it opens."""

    token: str = field(repr=False)
    project: str
    scopes: frozenset[str]


class Gate:
    """Checks requests.

    Args:
        tokens: at least one.
        bind_host: where the server listens; beyond loopback a Host that is an IP address is accepted too, because
            only a name can be rebound to another address.
        allowed_hosts: more host names, each with or without a port; ``*`` accepts every Host.
    """

    def __init__(
        self, tokens: Iterable[AccessToken], *, bind_host: str = "127.0.0.1", allowed_hosts: Iterable[str] = ()
    ) -> None:
        self._known = [(_digest(item.token), Caller(item.project, frozenset(item.scopes))) for item in tokens]
        if not self._known:
            raise ValueError("a server needs at least one token")
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._any_address = not is_loopback(bind_host)
        self._bind_host = bind_host.lower()
        self._good_hosts: set[str] = set()

    def caller(self, authorization: str | None) -> Caller | None:
        """The caller of an ``Authorization`` header, or None.

        Every known token is compared, by digest and in constant time, so that time tells nothing about them.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return None
        presented = _digest(token.strip())
        found: Caller | None = None
        for digest, caller in self._known:
            if hmac.compare_digest(digest, presented):
                found = caller
        return found

    def admit(self, headers: Mapping[str, str], scope: str | None) -> Caller:
        """The caller of a request that may pass.

        Args:
            headers: of the request, case-insensitive.
            scope: what the route needs; None is satisfied by any token.

        Raises:
            RunnerError: ``forbidden`` for a foreign Host or Origin or a missing scope, ``unauthorized`` without a
                known token.
        """
        self._check_host(headers.get("Host", ""))
        origin = headers.get("Origin")
        if origin is not None:
            self._check_origin(origin, headers.get("Host", ""))
        caller = self.caller(headers.get("Authorization"))
        if caller is None:
            raise RunnerError("unauthorized", "This route needs a known token: 'Authorization: Bearer <token>'.")
        if scope is not None and scope not in caller.scopes:
            raise RunnerError("forbidden", f"This token lacks the scope '{scope}'.")
        return caller

    def _check_host(self, host: str) -> None:
        if host in self._good_hosts:
            return
        if not self._host_allowed(host):
            raise RunnerError("forbidden", "This Host is not served here; [server] allowed_hosts names those that are.")
        if len(self._good_hosts) < 64:
            self._good_hosts.add(host)

    def _host_allowed(self, host: str) -> bool:
        name = _host_name(host)
        if name is None:
            return False
        if name in LOOPBACK_NAMES or name == self._bind_host or self._listed(name, host):
            return True
        return self._any_address and _is_address(name)

    def _listed(self, name: str, host: str) -> bool:
        return "*" in self._hosts or name in self._hosts or host.lower() in self._hosts

    def _check_origin(self, origin: str, host: str) -> None:
        parts = urlsplit(origin)
        if parts.scheme in ("http", "https") and parts.netloc:
            if parts.netloc.lower() == host.lower():
                return
            name = _host_name(parts.netloc)
            if name is not None and (name in self._hosts or parts.netloc.lower() in self._hosts):
                return
        raise RunnerError("forbidden", "Requests from this Origin are not accepted.")


def is_loopback(host: str) -> bool:
    """Whether a bind host is reachable from this machine only."""
    if host.lower() in LOOPBACK_NAMES:
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str | None:
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.netloc != host or "@" in host:
        return None
    return parts.hostname.rstrip(".")
