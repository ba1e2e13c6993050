"""The streams that the contract holds for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from runner.clock import SystemClock
from runner.rules.delivery import EntryId
from runner.store.stream.memory import MemoryRecordStream
from runner.store.stream.port import RecordStream, text_of
from runner.store.stream.redis import GROUP, STREAM, RedisRecordStream
from tests.redis_server import RedisServer


@dataclass
class Streams:
    """One stream from two processes, and what may happen to it."""

    one: RecordStream
    two: RecordStream
    server: RedisServer | None = None

    def flush(self) -> None:
        if self.server is not None:
            self.server.flush()
        elif isinstance(self.one, MemoryRecordStream):
            self.one.flush()

    def delete_stream(self) -> None:
        """The key alone goes."""
        if self.server is not None:
            assert self.server.command("DEL", STREAM) == b":1\r\n"
        else:
            self.flush()

    def drop_group(self) -> None:
        if self.server is not None:
            assert self.server.command("XGROUP", "DESTROY", STREAM, GROUP) == b":1\r\n"
        elif isinstance(self.one, MemoryRecordStream):
            self.one.drop_group()

    def delete_bodies(self, ids: Sequence[EntryId]) -> None:
        if self.server is not None:
            self.server.command("XDEL", STREAM, *map(text_of, ids))
        elif isinstance(self.one, MemoryRecordStream):
            self.one.delete_bodies(ids)

    async def trim(self) -> None:
        """Every body goes, by somebody who does not ask what is acknowledged."""
        if self.server is not None:
            self.server.command("XTRIM", STREAM, "MAXLEN", "0")
        else:
            self.delete_bodies([entry.entry_id for entry in await self.one.scan((0, 0), MOST)])


MOST = 20


@pytest.fixture(params=["memory", "redis"])
async def streams(request: pytest.FixtureRequest) -> AsyncIterator[Streams]:
    if request.param == "memory":
        stream = MemoryRecordStream(SystemClock(), MOST)
        yield Streams(stream, stream)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    one, two = (RedisRecordStream(server.url, max_entries=MOST, timeout_seconds=3.0) for _ in range(2))
    yield Streams(one, two, server)
    await one.close()
    await two.close()
