"""One operation of the HTTP API, as the application and its description read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN: Final = "open"
ANY: Final = "any"


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: its shape, and whether it also comes as a stream of ``views.Line``.

    ``lines``: what each line is of an answer that comes as JSON lines only; ``text_forms``: types of one that is text.
    """

    text: str
    shape: Any = None
    stream: bool = False
    json: bool = True
    lines: Any = None
    text_forms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. ``scope`` is what its token needs: ``open`` no token, ``any`` any token.

    ``body`` is ``bytes`` where anything is taken.
    """

    method: str
    path: str
    handler: Handler
    scope: str
    name: str
    summary: str
    answers: dict[int, Answer]
    errors: tuple[int, ...] = ()
    body: Any = None
    body_required: bool = True
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def pattern(self) -> str:
        """``path`` for the router: only a file's own path has slashes, or new lines."""
        return self.path.replace("{path}", r"{path:[\s\S]+}")
