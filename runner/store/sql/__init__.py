"""SQL by name: the statements of every backend, and SQLite's schema.

A statement's parameters are numbered ``?1``, ``?2``, …; PostgreSQL reads them as ``$1``, ``$2``, ….
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

SCHEMA_VERSION: Final = 1


def load(name: str) -> str:
    """The text of one file of this folder."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def named(text: str) -> dict[str, str]:
    """Statements of a file in which each one follows a line ``-- name: <name>``; on one line, without semicolon."""
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return {name: " ".join(body.split()).removesuffix(";") for name, body in zip(parts[1::2], parts[2::2], strict=True)}


STATEMENTS: Final = named(load("statements.sql"))
