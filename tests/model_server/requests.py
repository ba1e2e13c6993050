"""What the model server remembers of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.model_server.script import Item


@dataclass(eq=False)
class RecordedRequest:
    """One model call as the server saw it.

    Attributes:
        protocol: ``anthropic``, ``responses`` or ``chat``.
        path: the request's path.
        body: the decoded JSON body.
        api_key: the key that came with it, without a ``Bearer`` word.
        items: the conversation in it, oldest first.
        directive: the name of the step that was answered, such as ``hold`` or ``auxiliary``.
        started: seconds of the event loop's clock when the request was read.
        held: it waits for a release now.
        closed_by_client: the client went away before the answer was whole.
        finished: the answer was written whole (or cut, or refused, on purpose).
    """

    protocol: str
    path: str
    body: dict[str, Any]
    api_key: str | None
    items: Sequence[Item]
    directive: str
    started: float
    held: bool = False
    closed_by_client: bool = False
    finished: bool = False

    @property
    def auxiliary(self) -> bool:
        """Whether the harness asked on its own behalf (no tools were offered)."""
        return self.directive == "auxiliary"

    @property
    def user_texts(self) -> list[str]:
        """The texts of the user's side, oldest first."""
        return [item.text for item in self.items if item.kind == "user"]

    @property
    def tool_results(self) -> list[str]:
        """The results of tools, oldest first."""
        return [item.text for item in self.items if item.kind == "tool_result"]
