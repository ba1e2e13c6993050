"""What an agent says about one agent session, in exact order: the single queue that a turn reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runner.errors import RunnerError


class AgentError(Exception):
    """The agent answered a request with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


@dataclass(slots=True)
class Updates:
    """Consecutive ``session/update`` notifications: their ``update`` objects."""

    updates: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PermissionAsked:
    """``session/request_permission``: answer it exactly once by its key."""

    key: int
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ElicitationAsked:
    """``elicitation/create``, as form or as URL: answer it exactly once by its key."""

    key: int
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ElicitationCompleted:
    """``elicitation/complete``: what a URL asked for is done, whether its request was answered or not."""

    elicitation_id: str


@dataclass(frozen=True, slots=True)
class PermissionWithdrawn:
    """The agent took a permission request or an elicitation back; it was answered −32800."""

    key: int


@dataclass(frozen=True, slots=True)
class PromptAnswered:
    """A ``session/prompt`` was answered: the end of its turn."""

    request_id: int
    result: dict[str, Any] | None
    error: AgentError | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """The agent is gone; always the last item."""

    error: RunnerError


Asked = PermissionAsked | ElicitationAsked
Item = Updates | Asked | ElicitationCompleted | PermissionWithdrawn | PromptAnswered | Closed


class Inbox:
    """Ordered queue of one agent session.

    ``on_items`` is called, at most once a chunk, when something was queued; it must not raise.

    Args:
        drained: called after ``drain`` took something.
    """

    def __init__(self, drained: Callable[[], None]) -> None:
        self._items: list[Item] = []
        self._drained = drained
        self._waiter: asyncio.Future[None] | None = None
        self.on_items: Callable[[], None] | None = None
        self.queued_bytes = 0
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put_updates(self, updates: list[dict[str, Any]], size: int) -> None:
        """Queue updates, ``size`` bytes on the wire; consecutive ones are one item. The list becomes the inbox's."""
        self.queued_bytes += size
        if self._items and isinstance(last := self._items[-1], Updates):
            last.updates.extend(updates)
        else:
            self._items.append(Updates(updates))

    def put(self, item: Item, size: int = 0) -> None:
        """Queue anything else; nothing comes behind ``Closed``."""
        if self.closed:
            return
        self.closed = isinstance(item, Closed)
        self.queued_bytes += size
        self._items.append(item)

    def notify(self) -> None:
        """Tell the reader that something was queued."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_items is not None:
            self.on_items()

    def drain(self) -> list[Item]:
        """Everything that is queued, in order; the caller owns the list."""
        if not self._items:
            return []
        items, self._items = self._items, []
        self.queued_bytes = 0
        self._drained()
        return items

    async def wait(self) -> None:
        """Wait until something is queued or the inbox is closed; one waiter at a time; cancellable."""
        while not self._items and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
