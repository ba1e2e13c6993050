"""Prompts of a session, and who reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from runner.rules.fingerprint import digest
from runner.session.effective import Effective
from runner.terms import PromptState


def content_digest(blocks: list[dict[str, Any]]) -> str:
    """Tells a retry from a conflict."""
    return digest(blocks)


@dataclass(slots=True)
class Prompt:
    """One submitted prompt, from its admission on.

    Attributes:
        position: where its events begin in the session's log.
        since: the cursor behind which its records begin.
        result: the result of its newest turn; a new future for each turn of a chain.
        seq: its place in the order of admission.
        options: what else its dispatch said, for the store.
        merge: its configuration over the session's.
        stored: its row is written, or is being written.
        told: its ending was told.
        ready: what became of its dispatch is known.
        known: the same id had come before.
    """

    prompt_id: str
    digest: str
    content: list[dict[str, Any]]
    created_at: int
    position: int
    result: asyncio.Future[dict[str, Any]]
    since: tuple[int, int] = (0, 0)
    keep: bool = False
    state: PromptState = PromptState.ACTIVE
    turn_id: str | None = None
    seq: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    merge: Callable[[Effective], Effective] = lambda last: last
    stored: bool = False
    told: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    known: bool = False

    @property
    def restored(self) -> bool:
        """Whether it was read of the store."""
        return self.position < 0

    async def was_known(self, seconds: float) -> bool:
        """Whether its dispatch only asked for one that was there already, as far as that is clear in time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ready.wait(), seconds)
        return self.known


class Presence:
    """Who reads a session: a seat is only parked for somebody (DESIGN 3.4)."""

    def __init__(self) -> None:
        self.count = 0
        self.gone_at = float("-inf")
        self._cut = False

    def left(self, now: float) -> None:
        """One reader detached."""
        self.count -= 1
        self.gone_at = now

    def cut(self) -> None:
        """The server cut a reader that was too slow: it did not leave, and counts until this turn's end."""
        self._cut = True

    def there(self, now: float, grace: float) -> bool:
        """Whether a reader is attached, was within ``grace`` seconds, or was cut since the last turn ended."""
        return self.count > 0 or now - self.gone_at < grace or self._cut

    def turn_over(self) -> None:
        """The next turn has its own readers."""
        self._cut = False
