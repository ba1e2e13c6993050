"""Leases in Redis: the rule of ``rules.lease`` as Lua scripts, one script per question, on Redis's own clock.

Every key has a time to live (``KEYS``). Redis may lose any of them: renewals bring the leases back with their epochs,
new turns start above the store's epoch, and the ending in the store is the tombstone.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from runner.errors import RunnerError
from runner.leases.port import BeatAnswer, HasEnded, Heartbeat, Holder, Note, OnNote, ReplicaInfo
from runner.tasks import Tasks

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.commands.core import AsyncScript

log = logging.getLogger("runner.leases")
T = TypeVar("T")

LEASE: Final = "acp:lease:"
HELD: Final = "acp:held:"
NAMED: Final = "acp:named:"
ANNOUNCED: Final = "acp:announced:"
REPLICAS: Final = "acp:replicas"
CHANNEL: Final = "acp:replica:"

KEYS: Final[dict[str, str]] = {
    LEASE: "<project>:<session>, hash: leases, epoch and tombstones; 7 days after the last granted beat",
    HELD: "<replica>, set: keys that it holds; 3 lease times after its last grant, longer with a longer named lease",
    NAMED: "<name>, string: the replica that has a named lease; as long as it was taken for",
    ANNOUNCED: "<replica>, string: what it announced; 3 lease times after its last announcement",
    REPLICAS: "sorted set: who is announced until when; 3 lease times after the last announcement",
}
"""Every key of the plane by its beginning: what it is, and its time to live."""

KEEP_SECONDS: Final = 7 * 86_400
LANES: Final = 64
MICRO: Final = 1_000_000
RECONNECT_SECONDS: Final = (0.05, 5.0)
QUIET_SECONDS: Final = 15.0


class RedisLeasePlane:
    """Leases that several replicas share; see ``LeasePlane``.

    A call that is cancelled or runs out of time drops its connection, so that no later one reads its reply.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        lease_seconds: how long a grant lasts.
        timeout_seconds: longest wait for one answer.
        has_ended: see ``HasEnded``; None believes an owner that names a predecessor.
        now: the plane's clock in a test, seconds; None: Redis's own.

    Raises:
        RunnerError: ``invalid_request``: the package redis is missing, or the URL cannot be read.
    """

    shared = True

    def __init__(
        self,
        url: str,
        *,
        lease_seconds: float,
        timeout_seconds: float = 3.0,
        has_ended: HasEnded | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._lease_seconds = lease_seconds
        self._timeout = timeout_seconds
        self._has_ended = has_ended
        self._now = now
        self._client = connect(url, timeout_seconds)
        self._lanes = asyncio.Semaphore(LANES)
        self._tasks = Tasks("redis")
        self._keep_ms = round(max(KEEP_SECONDS, 3 * lease_seconds) * 1000)
        self._announced_ms = round(3 * lease_seconds * 1000)
        self._beat = self._script("beat")
        self._look = self._script("look")
        self._release = self._script("release")
        self._announce = self._script("announce")
        self._replicas = self._script("replicas")
        self._take = self._script("take")

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        """Decide one beat; the store is asked first where its word counts."""
        predecessor_ended = True
        if self._has_ended is not None and beat.predecessor is not None and beat.phase == "running":
            predecessor_ended = await self._ended(beat, beat.predecessor)
        reply = await self._decide(beat, predecessor_ended, "0" if self._has_ended is None else "")
        if reply[0] == "ask":
            ended = await self._ended(beat, beat.turn_id)
            reply = await self._decide(beat, predecessor_ended, "1" if ended else "0")
        _, admitted, current, owner, epoch, started_at, now = reply
        return BeatAnswer(
            admitted == 1,
            current == 1,
            owner or None,
            epoch,
            self._lease_seconds,
            started_at=started_at / MICRO,
            now=now / MICRO,
        )

    async def look(self, project: str, session_id: str) -> Holder | None:
        """Who holds a session, without changing anything."""
        keys = [_lease_key(project, session_id), REPLICAS]
        reply = await self._run(self._look, keys, [self._clock(), ANNOUNCED])
        if not reply:
            return None
        owner, text, alive, running, epoch, started_at, now = reply
        url = orjson.loads(text)["advertise_url"] if text else None
        return Holder(owner, url, alive or None, running or None, epoch, started_at / MICRO, now / MICRO)

    async def release_replica(self, replica_id: str) -> int:
        """Release every lease of a replica and forget it."""
        keys = [HELD + replica_id, ANNOUNCED + replica_id, REPLICAS]
        return int(await self._run(self._release, keys, [replica_id, self._keep_ms]))

    async def announce(self, replica: ReplicaInfo) -> None:
        """Make a replica known for three lease times."""
        keys = [ANNOUNCED + replica.replica_id, REPLICAS]
        text = orjson.dumps(asdict(replica))
        await self._run(self._announce, keys, [self._clock(), replica.replica_id, text, self._announced_ms])

    async def replicas(self) -> list[ReplicaInfo]:
        """Every replica that is announced, in order of its id."""
        texts = await self._run(self._replicas, [REPLICAS], [self._clock(), ANNOUNCED])
        return sorted((ReplicaInfo(**orjson.loads(text)) for text in texts), key=lambda info: info.replica_id)

    async def take_lease(self, name: str, replica_id: str, seconds: float) -> bool:
        """Take or renew a named lease."""
        keys = [NAMED + name, HELD + replica_id]
        return bool(await self._run(self._take, keys, [self._clock(), replica_id, max(1, round(seconds * 1000))]))

    async def push(self, replica_id: str, note: Note) -> bool:
        """Publish a note to a replica; whether somebody listened."""
        text = orjson.dumps(dict(note))
        return bool(await self._bounded(lambda: self._client.publish(CHANNEL + replica_id, text)))

    async def listen(self, replica_id: str, on_note: OnNote) -> None:
        """Have the notes for a replica delivered until ``close``.

        Returns once it listens; after the time-out all the same, and goes on trying.
        """
        inbox = _Inbox(self._client, CHANNEL + replica_id, on_note, self._timeout)
        _ = self._tasks.spawn(f"listen:{replica_id}", inbox.run())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await inbox.listening.wait()

    async def close(self) -> None:
        """Stop listening and drop connections, at most the time-out."""
        await self._tasks.close(self._timeout)
        with suppress(RunnerError):
            await self._bounded(self._client.aclose)

    async def _decide(self, beat: Heartbeat, predecessor_ended: bool, turn_ended: str) -> Any:
        keys = [_lease_key(beat.project, beat.session_id), HELD + beat.replica_id]
        args = [
            self._clock(),
            round(self._lease_seconds * MICRO),
            self._keep_ms,
            beat.turn_id,
            beat.replica_id,
            beat.phase,
            beat.predecessor or "",
            beat.epoch_floor,
            int(beat.seat_parked),
            beat.epoch,
            round(beat.started_at * MICRO),
            int(predecessor_ended),
            turn_ended,
            beat.left or "",
        ]
        return await self._run(self._beat, keys, args)

    async def _ended(self, beat: Heartbeat, turn_id: str) -> bool:
        assert self._has_ended is not None
        try:
            return await self._has_ended(beat.project, beat.session_id, turn_id)
        except Exception as error:
            raise RunnerError("plane_unavailable", "The store cannot say whether a turn has ended.") from error

    def _clock(self) -> str:
        return "" if self._now is None else str(round(self._now() * MICRO))

    def _script(self, name: str) -> AsyncScript:
        folder = files("runner.leases") / "lua"
        source = "\n".join((folder / f"{part}.lua").read_text() for part in ("lease", name))
        return self._client.register_script(source)

    async def _run(self, script: AsyncScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._bounded(lambda: script(keys=list(keys), args=list(args)))

    async def _bounded(self, call: Callable[[], Awaitable[T]]) -> T:
        async def in_a_lane() -> T:
            async with self._lanes:
                return await call()

        return await bounded(self._timeout, in_a_lane)


class _Inbox:
    """Receives the notes of one channel over any number of connections, until cancelled."""

    def __init__(self, client: Redis, channel: str, on_note: OnNote, timeout: float) -> None:
        self.listening = asyncio.Event()
        self._client = client
        self._channel = channel
        self._on_note = on_note
        self._timeout = timeout
        self._pause = RECONNECT_SECONDS[0]

    async def run(self) -> None:
        """Receive, and connect again whenever the connection is lost."""
        while True:
            try:
                await self._receive()
            except Exception as error:
                if self.listening.is_set():
                    log.warning("notes are not received for now: %s", type(error).__name__)
            self.listening.clear()
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, RECONNECT_SECONDS[1])

    async def _receive(self) -> None:
        """Until the connection fails; one that is silent has to answer a ping, so a half-open one is noticed."""
        pubsub = self._client.pubsub()
        try:
            async with asyncio.timeout(self._timeout):
                await pubsub.subscribe(self._channel)
            wait = self._timeout
            while True:
                message = await pubsub.get_message(timeout=wait)
                if message is None:
                    if wait == self._timeout:
                        raise TimeoutError
                    async with asyncio.timeout(self._timeout):
                        await pubsub.ping()
                    wait = self._timeout
                    continue
                wait = QUIET_SECONDS
                self._take(message)
        finally:
            with suppress(Exception):
                async with asyncio.timeout(self._timeout):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            self.listening.set()
            self._pause = RECONNECT_SECONDS[0]
        elif message["type"] == "message":
            try:
                self._on_note(orjson.loads(message["data"]))
            except Exception:
                log.exception("a note could not be handled")


def _lease_key(project: str, session_id: str) -> str:
    """A session's id holds no colon, so the last one separates it from the project."""
    return f"{LEASE}{project}:{session_id}"


async def bounded(seconds: float, call: Callable[[], Awaitable[T]]) -> T:
    """What Redis answers.

    Raises:
        RunnerError: ``plane_unavailable``: nothing within ``seconds``, or it cannot be used.
    """
    from redis.exceptions import RedisError

    try:
        async with asyncio.timeout(seconds):
            return await call()
    except TimeoutError:
        raise RunnerError("plane_unavailable", f"Redis gave no answer in {seconds:.3g} s.") from None
    except (RedisError, OSError) as error:
        raise RunnerError("plane_unavailable", f"Redis cannot be used: {type(error).__name__}.") from error


def connect(url: str, timeout: float, *, text: bool = True) -> Redis:
    """A client that sends nothing twice; ``text``: replies are decoded.

    Raises:
        RunnerError: ``invalid_request``: the package redis is missing, or the URL cannot be read.
    """
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        install = f"{sys.executable} -m pip install 'acp-runner[redis]'"
        need = f"[leases] url names a Redis, which needs the package redis: {install}"
        raise RunnerError("invalid_request", need, field="leases.url") from error
    try:
        return Redis.from_url(url, decode_responses=text, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0))
    except ValueError as error:
        raise RunnerError("invalid_request", "[leases] url: not a URL of a Redis.", field="leases.url") from error
