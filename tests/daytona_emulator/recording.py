"""Every exchange of the emulator, kept to be checked."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

MAX_EXCHANGES = 20_000


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer.

    Attributes:
        method: HTTP method.
        template: the route, ``/api/sandbox/{id}``; empty for a path without one.
        path: what was asked, without the query.
        status: of the answer.
        asked: the request's JSON, None without one.
        answered: the answer's JSON, None without one.
        json: the answer said that it is JSON.
        faulted: a fault rule answered, so the answer says nothing about the service.
    """

    method: str
    template: str
    path: str
    status: int
    asked: Any = None
    answered: Any = None
    json: bool = False
    faulted: bool = False

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Recording:
    """The last exchanges, oldest first."""

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=MAX_EXCHANGES)

    def add(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)

    def all(self) -> list[Exchange]:
        return list(self._exchanges)


def parsed(data: bytes | str | None) -> Any:
    """JSON of a body, None when it is none."""
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None
