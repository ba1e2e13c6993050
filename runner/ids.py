"""Identifiers: minted from a given source of chance, validated by one pattern, or derived."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from typing import Final

ID_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
CURSOR_PATTERN: Final = re.compile(r"(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})\Z")


Key = tuple[str, str]
"""(project, session_id)."""
SPARES: Final = ".spares"
"""Stands for the project of what no session owned at its start; no project can have this id."""
Cursor = tuple[int, int]
"""(epoch, n), written ``<epoch>.<n>``."""


class Ids:
    """Mints identifiers such as ``turn_5f0c…`` from ``entropy(n) -> n bytes`` (``os.urandom`` by default)."""

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._entropy = entropy

    def mint(self, kind: str) -> str:
        """A fresh id ``<kind>_<24 hex digits>``."""
        return f"{kind}_{self._entropy(12).hex()}"


def valid_id(text: str) -> bool:
    """Whether ``text`` may name a session, prompt or turn: ``[A-Za-z0-9_-]{1,128}`` (DESIGN 2)."""
    return ID_PATTERN.match(text) is not None


def record_id(session_id: str, turn_id: str, n: int) -> str:
    """Deterministic record id from (session, turn, n), so that a retry is a no-op (DESIGN 3.9)."""
    digest = hashlib.blake2b(f"{session_id}\0{turn_id}\0{n}".encode(), digest_size=12)
    return f"rec_{digest.hexdigest()}"


def outside_of(epoch: int) -> str:
    """Stands for the turn in record ids of events outside of turns; no turn can have this id."""
    return f".{epoch}"


def format_cursor(epoch: int, n: int) -> str:
    """The per-session cursor ``<epoch>.<n>``."""
    return f"{epoch}.{n}"


def parse_cursor(text: str) -> Cursor | None:
    """``(epoch, n)`` of a cursor, or None when ``text`` is not one."""
    if CURSOR_PATTERN.match(text) is None:
        return None
    epoch, _, n = text.partition(".")
    return int(epoch), int(n)
