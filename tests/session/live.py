"""Followers at one replica of a session at another, over a bus in memory; the owner's address reaches nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

from runner.errors import RunnerError
from runner.leases.live import Arrived, MemoryLiveBus
from runner.server.relay import Relay
from runner.server.upstream import Peers, Unreached
from runner.session.port import Reader, ReaderEnded
from tests.session.bed import CALLER, Bed
from tests.session.reading import Event
from tests.session.several import Several


class Bus(MemoryLiveBus):
    """A bus that takes time, can be away, and loses what it holds."""

    def __init__(self, keep_bytes: int = 1 << 20) -> None:
        super().__init__(keep_bytes)
        self.away = False
        self.latency = 0.001
        self.published = 0
        self.losing = 0

    async def publish(self, replica_id: str, entries: Sequence[bytes]) -> None:
        await asyncio.sleep(self.latency)
        self._check()
        self.published += len(entries)
        if self.losing > 0:
            self.losing -= 1
        else:
            await super().publish(replica_id, entries)

    async def read(self, replica_id: str, place: str, seconds: float) -> Arrived:
        self._check()
        arrived = await super().read(replica_id, place, seconds)
        await asyncio.sleep(self.latency)
        self._check()
        return arrived

    def forget(self) -> None:
        """What was not read yet is gone."""
        for line in self._lines.values():
            line.entries.clear()
            line.bytes = 0

    def _check(self) -> None:
        if self.away:
            raise RunnerError("plane_unavailable", "The bus is away.")


class NoPeers:
    """Nobody is reached over HTTP."""

    asked = 0

    async def ask(self, *args: Any, **named: Any) -> Any:
        self.asked += 1
        raise Unreached("no route")


class Followed:
    """A follower at a replica; a task collects its events until it is told to leave, or the session ends."""

    def __init__(self, bed: Bed, after: str | None = None, session_id: str = "s") -> None:
        self.events: list[Event] = []
        self.ended = False
        self.peers = NoPeers()
        self.bed = bed
        self.relay = Relay(bed.replica.services.owners, cast(Peers, self.peers), bed.sessions, bed.replica.mirrors)
        self._session_id = session_id
        self._after = after
        self.reader: Reader | None = None
        self.task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        self.reader = await self.relay.follow(CALLER, self._session_id, self._after, {})
        try:
            while True:
                lines = await self.reader.next(5)
                self.events += [json.loads(line) for line in (lines or b"").splitlines()]
        except ReaderEnded:
            self.ended = True
        finally:
            self.reader.close()

    async def until(self, kind: str, count: int = 1) -> None:
        """Until so many events of a kind were seen."""
        async with asyncio.timeout(300):
            while [event["type"] for event in self.events].count(kind) < count:
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def leave(self) -> list[Event]:
        """Close it; what it has seen."""
        self.task.cancel()
        await asyncio.wait({self.task})
        return self.events


async def two(several: Several, **settings: Any) -> tuple[Bed, Bed]:
    """The owner-to-be, and the replica at which its sessions are followed."""
    return await several.replica("rep_a", **settings), await several.replica("rep_b", **settings)
