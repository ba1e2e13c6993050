"""The record stream in Redis 7: one stream, one consumer group; every question but the blocking read is one script."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeVar

from runner.errors import RunnerError
from runner.rules.delivery import EntryId, entry_id
from runner.store.stream.port import (
    MAX_ENTRIES,
    TIMEOUT_SECONDS,
    VERSION,
    Entry,
    GroupGone,
    Published,
    Reclaimed,
    Seen,
    text_of,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.commands.core import AsyncScript

T = TypeVar("T")
STREAM: Final = "acp:records"
GENERATION: Final = "acp:records:generation"
LEFT: Final = "acp:records:left"
GROUP: Final = "store"

KEYS: Final[dict[str, str]] = {
    STREAM: "stream: records that the store may not have yet; no expiry, trimmed to what is acknowledged",
    GENERATION: "string: changes when the stream began anew, or lost entries; no expiry",
    LEFT: "string: how many entries left the stream behind their acknowledgement; no expiry",
}
"""Every key of the record stream: what it is, and how long it stays."""

LANES: Final = 16


class RedisRecordStream:
    """``RecordStream`` of one Redis.

    A call that is cancelled or runs out of time drops its connection, so that no later one reads its reply.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        max_entries: most entries that it may hold; beyond it nothing is published.
        timeout_seconds: longest wait for one answer, beyond what a read may block.

    Raises:
        RunnerError: ``invalid_request``: the package redis is missing, or the URL cannot be read.
    """

    def __init__(self, url: str, *, max_entries: int = MAX_ENTRIES, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._max_entries = max_entries
        self._timeout = timeout_seconds
        self._client = _client(url, timeout_seconds)
        self._lanes = asyncio.Semaphore(LANES)
        names = ("publish", "look", "take", "acknowledge", "again", "reclaim", "forget")
        self._scripts: dict[str, AsyncScript] = {name: self._script(name) for name in names}
        self._from = "0-0"

    async def publish(self, payloads: Sequence[bytes]) -> Published:
        generation, floor, ids = await self._run("publish", self._max_entries, VERSION, *payloads)
        return Published(generation.decode(), _id(floor), tuple(_id(one) for one in ids))

    async def look(self) -> Seen:
        generation, floor, length, pending, _ = await self._run("look")
        return Seen(generation.decode(), _id(floor), length, pending)

    async def scan(self, after: EntryId, limit: int) -> list[Entry]:
        work = self._client.xrange
        found = await self._bounded(lambda: work(STREAM, f"({text_of(after)}", "+", limit), self._timeout)
        return [_entry(one, fields) for one, fields in found]

    async def read(self, consumer: str, limit: int, wait_seconds: float) -> list[Entry]:
        from redis.exceptions import ResponseError

        made, heads, bodies = await self._run("take", consumer, limit)
        if made:
            raise GroupGone
        if heads or wait_seconds <= 0:
            return _packed(heads, bodies)
        group: dict[Any, Any] = {STREAM: ">"}
        wait = max(1, round(wait_seconds * 1000))
        work = self._client.xreadgroup
        try:
            found = await self._bounded(
                lambda: work(GROUP, consumer, group, count=limit, block=wait),
                self._timeout + wait_seconds,
                through=ResponseError,
            )
        except ResponseError as error:
            made = (await self._run("look"))[4]
            if not made:
                raise RunnerError("store_unavailable", f"Redis refused a read: {type(error).__name__}.") from error
            raise GroupGone from None
        return [_entry(one, fields) for _, entries in found or () for one, fields in entries]

    async def again(self, consumer: str, after: EntryId, limit: int) -> list[Entry]:
        return _counted(await self._run("again", consumer, text_of(after), limit))

    async def reclaim(self, consumer: str, idle_seconds: float, limit: int) -> Reclaimed:
        idle = round(idle_seconds * 1000)
        self._from, entries, gone = await self._run("reclaim", consumer, idle, limit, self._from)
        return Reclaimed(tuple(_counted(entries)), tuple(_id(one) for one in gone))

    async def acknowledge(self, entry_ids: Sequence[EntryId]) -> EntryId:
        return _id(await self._run("acknowledge", " ".join(map(text_of, entry_ids))))

    async def forget_consumers(self, keep: str, idle_seconds: float) -> list[str]:
        return [name.decode() for name in await self._run("forget", keep, round(idle_seconds * 1000))]

    async def close(self) -> None:
        with suppress(RunnerError):
            await self._bounded(self._client.aclose, self._timeout)

    def _script(self, name: str) -> AsyncScript:
        folder = files("runner.store.stream") / "lua"
        source = "\n".join((folder / f"{part}.lua").read_text() for part in ("group", name))
        return self._client.register_script(source)

    async def _run(self, name: str, *args: Any) -> Any:
        script, words = self._scripts[name], [GROUP, secrets.token_hex(8), *args]
        return await self._bounded(lambda: script(keys=list(KEYS), args=words), self._timeout)

    async def _bounded(
        self, call: Callable[[], Awaitable[T]], seconds: float, *, through: type[Exception] | tuple[()] = ()
    ) -> T:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(seconds), self._lanes:
                return await call()
        except through:
            raise
        except TimeoutError:
            raise RunnerError("store_unavailable", f"The record stream gave no answer in {seconds:g} s.") from None
        except (RedisError, OSError) as error:
            raise RunnerError(
                "store_unavailable", f"The record stream cannot be used: {type(error).__name__}."
            ) from error


def _id(text: bytes) -> EntryId:
    return entry_id(text.decode())


def _entry(one: bytes, fields: dict[bytes, bytes], deliveries: int = 1) -> Entry:
    for version, payload in fields.items():
        return Entry(_id(one), payload, version.decode(errors="replace"), deliveries)
    return Entry(_id(one), None, VERSION, deliveries)


def _packed(heads: bytes, bodies: bytes) -> list[Entry]:
    """Of lines ``id version size`` and the payloads end to end."""
    entries, at = [], 0
    for line in heads.decode().splitlines():
        one, version, size = line.split(" ")
        end = at + int(size)
        entries.append(Entry(entry_id(one), bodies[at:end], version))
        at = end
    return entries


def _counted(found: Iterable[Any]) -> list[Entry]:
    """Of ``[id, deliveries, [version, payload, …]]``; an empty list is a deleted body."""
    return [_entry(one, dict([flat[:2]]) if flat else {}, deliveries) for one, deliveries, flat in found]


def _client(url: str, timeout: float) -> Redis:
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        install = f"{sys.executable} -m pip install 'acp-runner[redis]'"
        text = f"[records] stream names a Redis, which needs the package redis: {install}"
        raise RunnerError("invalid_request", text, field="records.stream") from error
    try:
        return Redis.from_url(url, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0))
    except ValueError as error:
        raise RunnerError(
            "invalid_request", "[records] stream: not a URL of a Redis.", field="records.stream"
        ) from error
