"""Which lease plane and which store the settings ask for (DESIGN 1, 5)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from runner.assembly import gauges
from runner.clock import Clock
from runner.config import Settings
from runner.config.model import POSTGRESQL
from runner.errors import RunnerError
from runner.leases.live import LiveBus
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import LeasePlane, ReplicaInfo
from runner.metrics import Metrics
from runner.sandbox.statelock import state_dir_of
from runner.store.counted import CountedStore
from runner.store.port import Store
from runner.store.sqlite import SqliteStore
from runner.store.stream.port import TIMEOUT_SECONDS, RecordStream

log = logging.getLogger("runner")
SQLITE: Final = "sqlite:///"
SPOOL: Final = "spool.sqlite3"
STORE_FILE: Final = "store.sqlite3"


def is_http(settings: Settings) -> bool:
    """Whether leases are an ``acp-runner plane``'s: then so is the store."""
    return settings.leases.url.startswith("http")


def is_postgresql(settings: Settings) -> bool:
    """Whether the store is a PostgreSQL."""
    return settings.store.url.startswith(POSTGRESQL)


def open_plane(settings: Settings, clock: Clock, store: Store, *, gateway: bool) -> LeasePlane:
    """The lease plane of ``[leases] url``; ``gateway``: this process offers its plane to runners.

    Raises:
        RunnerError: ``invalid_request``: a package or a token that it needs is missing.
    """
    lease = settings.leases
    if not lease.url:
        return MemoryLeasePlane(clock, lease.lease_seconds, shared=gateway)
    if is_http(settings):
        from runner.leases.http import HttpLeasePlane

        return HttpLeasePlane(lease.url, runner_tokens(settings), seconds=lease.beat_timeout_seconds)
    from runner.leases.redis import RedisLeasePlane

    async def has_ended(project: str, session_id: str, turn_id: str) -> bool:
        turn = await store.turn(project, session_id, turn_id)
        return turn is not None and turn.outcome is not None

    return RedisLeasePlane(
        lease.url,
        lease_seconds=lease.lease_seconds,
        timeout_seconds=lease.beat_timeout_seconds,
        has_ended=has_ended,
    )


async def look_at_plane(settings: Settings) -> str:
    """Who is found at the lease plane of ``[leases] url``, for people.

    Raises:
        RunnerError: ``plane_unavailable``, ``invalid_request``.
    """
    lease = settings.leases
    if is_http(settings):
        from runner.leases.http import HttpLeasePlane

        plane: LeasePlane = HttpLeasePlane(lease.url, runner_tokens(settings), seconds=lease.beat_timeout_seconds)
    else:
        from runner.leases.redis import RedisLeasePlane

        seconds, longest = lease.lease_seconds, lease.beat_timeout_seconds
        plane = RedisLeasePlane(lease.url, lease_seconds=seconds, timeout_seconds=longest)
    try:
        there = await plane.replicas()
    finally:
        await plane.close()
    return f"the plane is reached; runners there: {len(there)}"


def open_live(settings: Settings) -> LiveBus | None:
    """The live bus beside the lease plane: where that is a Redis, the same one; None where there is none.

    Raises:
        RunnerError: ``invalid_request``: a package that it needs is missing.
    """
    if not settings.leases.url or is_http(settings):
        return None
    from runner.leases.redis_live import RedisLiveBus

    return RedisLiveBus(settings.leases.url, timeout_seconds=settings.leases.beat_timeout_seconds)


@dataclass(frozen=True, slots=True)
class Spooling:
    """Who decides about writes that wait for a remote store; each is asked with (project, session_id, turn_id).

    Attributes:
        may_spool: whether what a turn writes may wait on this machine.
        granted: whether an admission that waits counts, None while that is not known.
        on_rejected: told of a turn of which something that waited did not count.
    """

    may_spool: Callable[[str, str, str], bool]
    granted: Callable[[str, str, str], bool | None]
    on_rejected: Callable[[str, str, str], None]


async def open_database(settings: Settings, known_id: str = "", metrics: Metrics | None = None) -> Store:
    """The shared store of ``[store] url`` itself: nothing waits before it.

    ``known_id``: the store's id of an earlier start; with it an unreachable server is no obstacle. ``metrics``: counts
    what is written and what fails.

    Raises:
        RunnerError: ``store_unavailable``, ``invalid_request``.
    """
    if is_postgresql(settings):
        store: Store = await postgres().PostgresStore.open(settings.store.url, known_id=known_id)
    else:
        store = await SqliteStore.open(Path(settings.store.url.removeprefix(SQLITE)))
    return CountedStore(store, metrics or Metrics())


async def look_at_database(settings: Settings) -> str:
    """What is found at a PostgreSQL's URL, for people; nothing is written there.

    Raises:
        RunnerError: ``store_unavailable``, ``invalid_request``.
    """
    version, where = await postgres().look(settings.store.url)
    return f"{where} is reached" + (
        f", schema version {version}" if version else ", it is empty: serve makes the schema"
    )


def postgres(name: str = "store") -> ModuleType:
    """A module of the store in PostgreSQL.

    Raises:
        RunnerError: ``invalid_request``: the package that it needs is missing.
    """
    try:
        return import_module(f"runner.store.postgres.{name}")
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        install = f"{sys.executable} -m pip install 'acp-runner[postgres]'"
        text = f"[store] url names a PostgreSQL, which needs the package asyncpg: {install}"
        raise RunnerError("invalid_request", text, field="store.url") from None


def open_stream(settings: Settings, timeout_seconds: float | None = None) -> RecordStream:
    """The record stream of ``[records] stream``; no answer takes longer than ``timeout_seconds``, else a turn's time.

    Raises:
        RunnerError: ``invalid_request``: a package that it needs is missing, or the URL cannot be read.
    """
    from runner.store.stream.redis import RedisRecordStream

    records, seconds = settings.records, timeout_seconds or TIMEOUT_SECONDS
    return RedisRecordStream(records.stream, max_entries=records.stream_entries, timeout_seconds=seconds)


async def look_at_stream(settings: Settings) -> str:
    """What is found in the record stream, for people.

    Raises:
        RunnerError: ``store_unavailable``, ``invalid_request``.
    """
    stream = open_stream(settings)
    try:
        seen = await stream.look()
    finally:
        await stream.close()
    return f"it is reached; {seen.length} records wait there, {seen.pending} of them are delivered to a worker"


def piped(settings: Settings, store: Store, metrics: Metrics, *, gateway: bool) -> Store:
    """A store whose records travel by the stream, where there is one.

    A plane writes them itself: a turn's records may come by several planes, and its ending has to know them all.
    """
    if not settings.records.stream or gateway:
        return store
    from runner.store.stream.pipelined import PipelinedStore

    made = PipelinedStore(store, open_stream(settings))
    gauges.read_stream(metrics, made)
    return made


async def open_store(
    settings: Settings, state_dir: Path, clock: Clock, spooling: Spooling, metrics: Metrics, *, gateway: bool = False
) -> Store:
    """The store of ``[store] url``; ``spooling`` is asked where that is a remote one, ``metrics`` counts.

    Raises:
        RunnerError: ``store_unavailable``, ``invalid_request``.
    """
    if settings.store.url and not is_postgresql(settings):
        return piped(settings, await open_database(settings, metrics=metrics), metrics, gateway=gateway)
    if not settings.store.url and not is_http(settings):
        return CountedStore(await SqliteStore.open(state_dir / STORE_FILE, upgrade=True), metrics)
    from runner.store.spool import SpooledStore

    spool = state_dir / SPOOL
    remote = await _open_remote(settings, await SpooledStore.known_id(spool), metrics, gateway=gateway)
    try:
        spooled = await SpooledStore.open(
            remote,
            spool,
            clock,
            may_spool=spooling.may_spool,
            granted=spooling.granted,
            on_rejected=spooling.on_rejected,
        )
    except BaseException:
        await remote.close()
        raise
    gauges.read_spool(metrics, spooled)
    return spooled


async def _open_remote(settings: Settings, known_id: str, metrics: Metrics, *, gateway: bool) -> Store:
    if settings.store.url:
        return piped(settings, await open_database(settings, known_id, metrics), metrics, gateway=gateway)
    from runner.store.http import HttpStore

    return CountedStore(await HttpStore.open(settings.leases.url, runner_tokens(settings), known_id=known_id), metrics)


async def hand_in_spool(dead: ReplicaInfo, store: Store, clock: Clock) -> None:
    """Write to the store what a dead replica of this machine had accepted while the store was away.

    Raises:
        RunnerError: ``store_unavailable``.
    """
    if dead.lock is not None:
        from runner.store.spooling import hand_in

        count = await hand_in(state_dir_of(Path(dead.lock)) / SPOOL, store, clock)
        if count:
            log.warning("%d writes of the dead replica %s were handed in", count, dead.replica_id)


def runner_tokens(settings: Settings) -> dict[str, str]:
    """Project to the token with scope ``runner`` that this runner shows the plane.

    Raises:
        RunnerError: ``invalid_request`` when there is none.
    """
    tokens = {
        token.project: token.token.get_secret_value() for token in settings.auth.tokens if "runner" in token.scopes
    }
    if not tokens:
        raise RunnerError(
            "invalid_request",
            "[leases] url names a plane, so [[auth.tokens]] needs an entry with scope runner that the plane knows too.",
            field="auth.tokens",
        )
    return tokens
