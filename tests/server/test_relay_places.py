"""From where a follower goes on when its source is gone (DESIGN 3.9, case H3)."""

from __future__ import annotations

from typing import Any, cast

from runner.server.relay import Relay
from runner.server.upstream import Peers, Whereabouts
from runner.session.history import resync_line
from runner.session.port import Caller, Reader, ReaderCut, Sessions
from runner.wire.codec import event_line

AT = "2026-11-29T16:09:53.123Z"
CALLER = Caller("p", frozenset({"read"}))


class Nobody:
    """No other replica holds anything."""

    shared = True

    async def elsewhere(self, project: str, session_id: str) -> None:
        return None


class Source:
    """Gives its lines, then is cut."""

    ended = False

    def __init__(self, *lines: bytes) -> None:
        self._lines = list(lines)

    async def next(self, seconds: float) -> bytes:
        if not self._lines:
            raise ReaderCut("gone")
        return self._lines.pop(0)

    def close(self, *, cut: bool = False) -> None:
        self._lines.clear()


class Asked:
    """Sessions that note where each reader begins."""

    def __init__(self, *sources: Source) -> None:
        self.places: list[str | None] = []
        self._sources = list(sources)

    async def follow(self, caller: Caller, session_id: str, after: str | None, follow: bool) -> Reader:
        self.places.append(after)
        return self._sources.pop(0)


def event(cursor: str, data: bytes = b"{}") -> bytes:
    return event_line(cursor, "t", "p", AT, "plan", data)


async def places(*sources: Source) -> list[str | None]:
    """Where each source was asked to begin, when a client came with 3.9 and read them all."""
    asked, whoever = Asked(*sources, Source(event("9.9"))), cast(Any, None)
    relay = Relay(cast(Whereabouts, Nobody()), cast(Peers, whoever), cast(Sessions, asked))
    reader = await relay.follow(CALLER, "s", "3.9", {})
    while await reader.next(5) != event("9.9"):
        pass
    return asked.places


async def test_behind_an_event_it_goes_on_from_there() -> None:
    nested = b'{"raw_input":{"kind":"event","cursor":"8.8"}}'
    assert await places(Source(event("3.10"), event("3.11", nested))) == ["3.9", "3.11"]


async def test_behind_a_resync_it_begins_where_that_says() -> None:
    """Its client has forgotten what it had: the cursor that it came with would leave a hole."""
    assert await places(Source(resync_line("0.0", AT))) == ["3.9", "0.0"]
    assert await places(Source(resync_line("0.0", AT), event("1.1"))) == ["3.9", "1.1"]
