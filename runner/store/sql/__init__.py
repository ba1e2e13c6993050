"""SQL by name: the statements of every backend, and the schema (``schema.py``).

A statement's parameters are numbered ``?1``, ``?2``, …; PostgreSQL reads them as ``$1``, ``$2``, ….
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, Final


def load(name: str) -> str:
    """The text of one file of this folder."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def named(text: str) -> dict[str, str]:
    """Statements of a file in which each one follows a line ``-- name: <name>``; on one line, without semicolon.

    What follows ``-- part: <name>`` is no statement: it stands for ``:<name>`` in those behind it.
    """
    found: dict[str, dict[str, str]] = {"name": {}, "part": {}}
    pieces = re.split(r"^-- (name|part): (\w+)\n", text, flags=re.MULTILINE)[1:]
    for kind, name, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        whole = re.sub(r"(?<!:):([a-z]\w+)", lambda part: found["part"].get(part[1], part[0]), body)
        found[kind][name] = " ".join(whole.split()).removesuffix(";")
    return found["name"]


class Placed:
    """A statement for a driver that only takes parameters in the order of their places, as Python 3.14's sqlite3.

    Attributes:
        text: with ``?`` for each place.
    """

    __slots__ = ("_order", "text")

    def __init__(self, numbered: str) -> None:
        order = [int(number) - 1 for number in re.findall(r"\?(\d+)", numbered)]
        self.text = re.sub(r"\?\d+", "?", numbered)
        self._order = None if order == list(range(len(order))) else tuple(order)

    def place(self, parameters: tuple[Any, ...]) -> tuple[Any, ...]:
        """Numbered parameters in the order of their places."""
        return parameters if self._order is None else tuple([parameters[number] for number in self._order])

    def place_all(self, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """``place`` for each of many."""
        return rows if self._order is None else [self.place(row) for row in rows]


STATEMENTS: Final = named(load("statements.sql"))
POSTGRESQL: Final = STATEMENTS | named(load("postgresql.sql"))
"""The statements as PostgreSQL performs them: a few have another text there."""
PLACED: Final = {name: Placed(text) for name, text in STATEMENTS.items()}
