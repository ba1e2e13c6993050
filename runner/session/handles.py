"""What the callers of a prompt hold: its events and its result, live or stored."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from runner.errors import RunnerError
from runner.session.history import HistoryReader, next_live
from runner.session.port import Reader, ReaderEnded
from runner.session.prompts import Prompt
from runner.session.session import Session
from runner.store.port import Store
from runner.turn.log import LogReader

LINGER_SECONDS: Final = 0.001


class LiveReader:
    """A reader of the live log; counts as a reader of the session until it is closed."""

    def __init__(self, session: Session, reader: LogReader) -> None:
        self._session = session
        self._reader = reader
        self._open = True
        session.presence.count += 1

    async def next(self, seconds: float) -> bytes | None:
        """See ``session.port.Reader``."""
        return await next_live(self._session, self._reader, seconds)

    @property
    def ended(self) -> bool:
        """See ``session.port.Reader``."""
        return self._reader.ended

    def close(self, *, cut: bool = False) -> None:
        """See ``session.port.Reader``."""
        if cut and self._open:
            self._session.presence.cut()
        if self._open:
            self._open = False
            self._reader.close()
            self._session.presence.left(self._session.clock.monotonic())


class Handle:
    """A live prompt as its caller sees it."""

    def __init__(self, store: Store, session: Session, prompt: Prompt) -> None:
        self._store = store
        self._session = session
        self._prompt = prompt
        self._result = prompt.result
        self.prompt_id = prompt.prompt_id
        self.turn_id = prompt.turn_id
        self.refused: RunnerError | None = None

    @property
    def state(self) -> str:
        """The prompt's state."""
        return self._prompt.state.value

    def reader(self) -> Reader:
        """The prompt's events; ends when the result of the turn it attached to is there."""
        log, prompt = self._session.log, self._prompt
        if prompt.position < log.start:
            return HistoryReader(self._store, self._session, prompt.since, True, (prompt.prompt_id, self._result))
        reader = log.reader(at=prompt.position, prompt_id=self.prompt_id, linger_seconds=LINGER_SECONDS)
        reader.end_when(self._result.done)
        self._result.add_done_callback(lambda _: reader.wake())
        return LiveReader(self._session, reader)

    async def result(self) -> dict[str, Any]:
        """The result; its waiting caller counts as a reader."""
        if self._result.done():
            return self._result.result()
        with present(self._session):
            return await asyncio.shield(self._result)


@contextmanager
def present(session: Session) -> Generator[None]:
    """Count as a reader of the session meanwhile."""
    session.presence.count += 1
    try:
        yield
    finally:
        session.presence.left(session.clock.monotonic())


class BytesReader:
    """A reader of a finished history."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def next(self, seconds: float) -> bytes | None:
        """The next part; ``ReaderEnded`` when all were given."""
        if not self._parts:
            raise ReaderEnded
        return self._parts.pop(0)

    @property
    def ended(self) -> bool:
        """Whether all parts were given."""
        return not self._parts

    def close(self, *, cut: bool = False) -> None:
        """Nothing is held."""


class DoneHandle:
    """A prompt that is over (or was refused): its stored events and result."""

    def __init__(
        self,
        prompt_id: str,
        turn_id: str | None,
        state: str,
        result: dict[str, Any],
        parts: list[bytes],
        refused: RunnerError | None = None,
    ) -> None:
        self.prompt_id = prompt_id
        self.turn_id = turn_id
        self.state = state
        self.refused = refused
        self._result = result
        self._parts = parts

    def reader(self) -> Reader:
        """The stored events of its last turn."""
        return BytesReader(list(self._parts))

    async def result(self) -> dict[str, Any]:
        """The stored result."""
        return self._result
