"""Where a cell with ``[local] network = proxy`` may connect to: an allow-list of hosts, checked by name and by address.

A name opens its public addresses only; an address or a network opens itself. So a name that suddenly resolves into the
runner's own network reaches nothing there, and an address is looked up once, checked, and connected to (case J3).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORTS: Final = (80, 443)
"""What an entry without a port opens."""
MOST_PORTS: Final = 64
"""How many ports of the machine's loopback a cell may have at its own."""
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER: Final = re.compile(r"0x[0-9a-f]*|[0-9]+")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_6TO4: Final = ipaddress.IPv6Network("2002::/16")


class BadEntry(ValueError):
    """An entry, or a target, that names nothing that can be connected to; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the allow-list.

    Attributes:
        text: as it was written.
        name: a host, ``*.`` before it: any below it, ``*``: any; empty for a network.
        network: an address or a network.
        port: the only one, None: those of ``PORTS``.
    """

    text: str
    name: str = ""
    network: Network | None = None
    port: int | None = None

    def opens(self, port: int) -> bool:
        """Whether this port is meant."""
        return port in PORTS if self.port is None else port == self.port


@dataclass(frozen=True, slots=True)
class Target:
    """What a client asked for: a name, or an address in its one true spelling."""

    host: str
    port: int
    address: Address | None = None

    @property
    def authority(self) -> str:
        """``host:port``, as a ``Host`` header has it."""
        host = f"[{self.host}]" if isinstance(self.address, ipaddress.IPv6Address) else self.host
        return host if self.port == 80 else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class AllowList:
    """The allow-list of one runner."""

    entries: tuple[Entry, ...] = ()

    @staticmethod
    def of(texts: Iterable[str]) -> AllowList:
        """Read ``[local] allow_hosts``.

        Raises:
            BadEntry: naming the entry.
        """
        return AllowList(tuple(map(entry, texts)))

    def refusal(self, target: Target) -> str | None:
        """Why this target is refused before anything is looked up; None when it is not."""
        if target.address is not None:
            return None if self.address_allowed(target, target.address) else f"{target.authority} is not allowed"
        named = (item for item in self.entries if item.name and item.opens(target.port))
        if any(_matches(item.name, target.host) for item in named):
            return None
        return f"{target.host}:{target.port} is not in [local] allow_hosts"

    def address_allowed(self, target: Target, address: Address) -> bool:
        """Whether what ``target`` resolved to may be connected to."""
        true = embedded(address)
        listed = any(
            item.network is not None and true in item.network and item.opens(target.port) for item in self.entries
        )
        return listed or (target.address is None and public(true))

    def loopback_ports(self) -> tuple[int, ...]:
        """Ports of the machine's loopback that are opened by number: a cell has them at its own loopback."""
        loopback = ipaddress.IPv4Address("127.0.0.1")
        ports = [item.port for item in self.entries if item.network is not None and loopback in item.network]
        return tuple(dict.fromkeys(port for port in ports if port is not None))


def entry(text: str) -> Entry:
    """One entry: ``host``, ``*.host``, ``*``, an address, a network, each with ``:port`` or without.

    Raises:
        BadEntry: it is none of these.
    """
    given = text.strip().lower()
    bare = _network(given.strip("[]"))
    if bare is not None:
        return Entry(text, network=bare)
    host, port = _split(given)
    network = _network(host)
    if network is not None:
        return Entry(text, network=network, port=port)
    if host == "*":
        return Entry(text, host, port=port)
    name = host.removeprefix("*.")
    return Entry(text, host[: len(host) - len(name)] + _name(name), port=port)


def target(text: str, default_port: int | None = None) -> Target:
    """The target of a request: ``host:port``, ``[address]:port``.

    Raises:
        BadEntry: no host, no port, a user part, or a spelling that systems read in different ways.
    """
    host, port = _split(text.lower())
    number = port if port is not None else default_port
    if number is None:
        raise BadEntry("a port is missing")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Target(_name(host), number)
    if "%" in host:
        raise BadEntry("an address with a zone is not connected to")
    return Target(str(address), number, address)


def public(address: Address) -> bool:
    """Whether an address is one of the internet's: not private, loopback, link-local, multicast or reserved."""
    true = embedded(address)
    return true.is_global and not true.is_multicast and not true.is_reserved and not true.is_unspecified


def embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for (mapped, NAT64, 6to4), else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _6TO4:
        return ipaddress.IPv4Address((int(address) >> 80) & 0xFFFFFFFF)
    return address


def _matches(pattern: str, host: str) -> bool:
    if pattern == "*":
        return True
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _split(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise BadEntry(f"{text!r} is no host")
        return host, _port(rest[1:]) if rest else None
    host, colon, port = text.partition(":")
    if ":" in port:
        raise BadEntry(f"{text!r}: an IPv6 address stands in brackets")
    return host, _port(port) if colon else None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise BadEntry(f"{text!r} is no port")
    return int(text)


def _network(text: str) -> Network | None:
    try:
        found = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    if found.prefixlen == found.max_prefixlen:
        return ipaddress.ip_network(embedded(found.network_address))
    return found


def _name(host: str) -> str:
    """A host name. One whose last label is a number is an address in a spelling such as ``127.1`` or ``0x7f000001``."""
    name = host.removesuffix(".")
    labels = name.split(".")
    if not name or len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise BadEntry(f"{host!r} is no host name")
    if _NUMBER.fullmatch(labels[-1]):
        raise BadEntry(f"{host!r} is an address in a spelling that is not understood")
    return name
