"""The record stream's twin in memory: same answers as Redis, on the given clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.clock import Clock
from runner.errors import RunnerError
from runner.rules import delivery
from runner.rules.delivery import START, EntryId
from runner.store.stream.port import MAX_ENTRIES, TIMEOUT_SECONDS, VERSION, Entry, GroupGone, Published, Reclaimed, Seen


@dataclass(slots=True)
class _Held:
    consumer: str
    since: float
    deliveries: int = 1


@dataclass(slots=True)
class _Group:
    last: EntryId = START
    pending: dict[EntryId, _Held] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)


class MemoryRecordStream:
    """``RecordStream`` over dictionaries, for one process.

    ``unavailable``: while True every call raises ``store_unavailable``. ``held``: while it is not set no call returns,
    like a server that is frozen, until its deadline.
    """

    def __init__(self, clock: Clock, max_entries: int = MAX_ENTRIES) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self.unavailable = False
        self.held = asyncio.Event()
        self.held.set()
        self._runs = 0
        self._entries: dict[EntryId, tuple[str, bytes]] | None = None
        self._group: _Group | None = None
        self._last: EntryId = START
        self._came = asyncio.Event()

    async def publish(self, payloads: Sequence[bytes]) -> Published:
        await self._reach()
        entries, group = self._ensured()
        if entries and len(entries) + len(payloads) > self._max_entries:
            self._trim(entries, group)
        if not delivery.has_room(len(entries), len(payloads), self._max_entries):
            return Published(self._generation(), self._floor(group), ())
        ids = tuple(self._add(entries, VERSION, payload) for payload in payloads)
        return Published(self._generation(), self._floor(group), ids)

    async def look(self) -> Seen:
        await self._reach()
        entries, group = self._ensured()
        return Seen(self._generation(), self._floor(group), len(entries), len(group.pending))

    async def scan(self, after: EntryId, limit: int) -> list[Entry]:
        await self._reach()
        entries, _ = self._ensured()
        return [Entry(one, body, version) for one, (version, body) in entries.items() if one > after][:limit]

    async def read(self, consumer: str, limit: int, wait_seconds: float) -> list[Entry]:
        deadline = self._clock.monotonic() + wait_seconds
        while True:
            await self._reach()
            if self._group is None:
                self._ensured()
                raise GroupGone
            entries, group = self._ensured()
            group.seen[consumer] = self._clock.monotonic()
            fresh = [one for one in entries if one > group.last][:limit]
            if fresh:
                group.last = fresh[-1]
                group.pending.update((one, _Held(consumer, self._clock.monotonic())) for one in fresh)
                return [self._delivered(entries, group, one) for one in fresh]
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return []
            self._came.clear()
            try:
                async with asyncio.timeout(left):
                    await self._came.wait()
            except TimeoutError:
                pass

    async def again(self, consumer: str, after: EntryId, limit: int) -> list[Entry]:
        await self._reach()
        entries, group = self._ensured()
        group.seen[consumer] = self._clock.monotonic()
        mine = sorted(one for one, held in group.pending.items() if held.consumer == consumer and one > after)[:limit]
        for one in mine:
            if one in entries:
                self._claim(group.pending[one], consumer)
        return [self._delivered(entries, group, one) for one in mine]

    async def reclaim(self, consumer: str, idle_seconds: float, limit: int) -> Reclaimed:
        await self._reach()
        entries, group = self._ensured()
        now = self._clock.monotonic()
        group.seen[consumer] = now
        idle = sorted(one for one, held in group.pending.items() if now - held.since >= idle_seconds)[:limit]
        gone = tuple(one for one in idle if one not in entries)
        for one in idle:
            if one in entries:
                self._claim(group.pending[one], consumer)
            else:
                del group.pending[one]
        return Reclaimed(tuple(self._delivered(entries, group, one) for one in idle if one not in gone), gone)

    async def acknowledge(self, entry_ids: Sequence[EntryId]) -> EntryId:
        await self._reach()
        entries, group = self._ensured()
        for one in entry_ids:
            group.pending.pop(one, None)
        self._trim(entries, group)
        return self._floor(group)

    async def forget_consumers(self, keep: str, idle_seconds: float) -> list[str]:
        await self._reach()
        _, group = self._ensured()
        now = self._clock.monotonic()
        names = [
            name
            for name, seen in group.seen.items()
            if name != keep and delivery.may_forget_consumer(self._holds(group, name), now - seen, idle_seconds)
        ]
        for name in names:
            del group.seen[name]
        return names

    async def close(self) -> None:
        self.unavailable = True

    # -- what may happen to a server ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Everything is forgotten, as by FLUSHALL or a restart."""
        self._entries = self._group = None
        self._last = START
        self._came.set()

    def drop_group(self) -> None:
        """The group is destroyed; entries stay."""
        self._group = None
        self._came.set()

    def delete_bodies(self, entry_ids: Sequence[EntryId]) -> None:
        """Bodies are deleted whoever holds them, or nobody."""
        for one in entry_ids:
            if self._entries is not None and self._entries.pop(one, None) is not None:
                self._runs += 1

    def add_raw(self, version: str, payload: bytes) -> EntryId:
        """An entry that no sender of ours wrote."""
        return self._add(self._ensured()[0], version, payload)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _reach(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self.held.wait()
        except TimeoutError:
            raise RunnerError("store_unavailable", "The record stream gave no answer.") from None
        if self.unavailable:
            raise RunnerError("store_unavailable", "The record stream cannot be used.")

    def _ensured(self) -> tuple[dict[EntryId, tuple[str, bytes]], _Group]:
        if self._entries is None:
            self._entries = {}
            self._runs += 1
        if self._group is None:
            self._group = _Group()
        return self._entries, self._group

    def _generation(self) -> str:
        return f"run{self._runs}"

    def _add(self, entries: dict[EntryId, tuple[str, bytes]], version: str, payload: bytes) -> EntryId:
        now = self._clock.now_ms()
        milliseconds, number = self._last
        self._last = (milliseconds, number + 1) if milliseconds >= now else (now, 0)
        entries[self._last] = (version, payload)
        self._came.set()
        return self._last

    def _floor(self, group: _Group) -> EntryId:
        return delivery.floor(group.last, group.pending)

    def _trim(self, entries: dict[EntryId, tuple[str, bytes]], group: _Group) -> None:
        acknowledged = self._floor(group)
        for one in [one for one in entries if delivery.may_trim(one, acknowledged)]:
            del entries[one]

    def _claim(self, held: _Held, consumer: str) -> None:
        held.consumer = consumer
        held.since = self._clock.monotonic()
        held.deliveries += 1

    @staticmethod
    def _holds(group: _Group, name: str) -> int:
        return sum(held.consumer == name for held in group.pending.values())

    @staticmethod
    def _delivered(entries: dict[EntryId, tuple[str, bytes]], group: _Group, one: EntryId) -> Entry:
        version, body = entries.get(one, (VERSION, None))
        return Entry(one, body, version, group.pending[one].deliveries)
