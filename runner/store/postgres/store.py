"""The store in PostgreSQL, for the processes of many machines (docs/decisions/postgres.md)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Self

import asyncpg

from runner.clock import Clock, SystemClock
from runner.errors import RunnerError
from runner.ids import Ids, Key
from runner.store import rows
from runner.store.postgres.faults import gave_way, is_lost, translated
from runner.store.postgres.schema import APPLICATION_NAME, prepare, version_of, where_of
from runner.store.postgres.steps import TEXTS, Refused, perform
from runner.store.sql.schema import SCHEMA_VERSION, refusal
from runner.store.sql_store import Row, SqlStore
from runner.store.writes import Run, Work

log = logging.getLogger("runner.store")

CALL_SECONDS: Final = 5.0
CONNECTIONS: Final = 8
IDLE_SECONDS: Final = 300.0
SLOW_BYTES: Final = 2 * 1024 * 1024
"""A second, which is what the database may need at worst."""
IDLE_SHARE: Final = 0.3
STATEMENTS_KEPT: Final = 512


class PostgresStore(SqlStore):
    """``Store`` over a pool of connections; ``open`` makes one.

    Every call ends after ``seconds`` at most, one that writes megabytes a little later: a connection that does not
    answer is dropped. A call that is cancelled goes on by itself until then, so no connection is left inside a
    transaction.
    """

    def __init__(
        self, url: str, *, store_id: str, clock: Clock, mint: Callable[[str], str], seconds: float, connections: int
    ) -> None:
        self.store_id = store_id
        self.where = where_of(url)
        self._clock = clock
        self._mint = mint
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Task[Any]] = set()
        self._connections = connections
        self._wrong = False
        self._closed = False
        limit = f"{round(seconds * 1000)}ms"
        self._pool = asyncpg.create_pool(
            url,
            min_size=0,
            max_size=connections,
            max_inactive_connection_lifetime=IDLE_SECONDS,
            statement_cache_size=STATEMENTS_KEPT,
            max_cached_statement_lifetime=0,
            connection_class=_Connection,
            timeout=seconds,
            server_settings={
                "application_name": APPLICATION_NAME,
                "statement_timeout": limit,
                # A replica that is frozen within a write keeps its session from nobody for as long as a call lasts.
                "idle_in_transaction_session_timeout": f"{round(seconds * IDLE_SHARE * 1000)}ms",
            },
        )

    @classmethod
    async def open(
        cls,
        url: str,
        mint: Callable[[str], str] | None = None,
        clock: Clock | None = None,
        *,
        known_id: str = "",
        seconds: float = CALL_SECONDS,
        connections: int = CONNECTIONS,
    ) -> Self:
        """A store whose identity is known; an empty database gets the schema and an id from ``mint("store")``.

        Args:
            url: ``postgresql://user:password@host:port/database``; what it leaves out comes from ``PG…`` variables.
            mint: makes ids.
            clock: tells when a late record was set aside.
            known_id: the store's id of an earlier start: with it an unreachable server is no obstacle.
            seconds: longest duration of a call.
            connections: how many calls run at once; others wait.

        Raises:
            RunnerError: ``store_unavailable``: unreachable, another program's database, another store than
                ``known_id``, or another schema version; ``invalid_request``: the URL cannot be read.
        """
        store = cls(
            url,
            store_id=known_id,
            clock=clock or SystemClock(),
            mint=mint or Ids().mint,
            seconds=seconds,
            connections=connections,
        )
        try:
            await store._pool
            await store._reach()
            await store._settle_feed()
        except BaseException:
            await store.close()
            raise
        return store

    async def _reach(self) -> None:
        async def nothing(connection: asyncpg.Connection, attempt: _Attempt) -> None:
            """Meeting it is all."""

        try:
            await self._call(nothing)
        except RunnerError as error:
            if not self.store_id or self._wrong or error.code != "store_unavailable":
                raise
            log.error("starting although the store cannot be reached: %s", error.message)

    async def _settle_feed(self) -> None:
        """Transactions of the server that a restored database came from are no newer than this server's."""
        with suppress(RunnerError):
            await self._together((), [Run("settle_feed", [()]), Run("settle_feed_floors", [()])])

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._calls:
            await asyncio.wait(self._calls, timeout=self._seconds)
        try:
            await asyncio.wait_for(self._pool.close(), self._seconds)
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            self._pool.terminate()

    async def _write(self, of: Sequence[Key], work: Work[Row], count: int) -> Row:
        opening = begin(of)

        async def transaction(connection: asyncpg.Connection, attempt: _Attempt) -> Row:
            await connection.execute(opening)
            written = await perform(
                work, connection, partial(self._allow, connection, attempt), careful=attempt.careful
            )
            attempt.committing = True
            await connection.execute("COMMIT")
            return written

        return await self._call(transaction)

    async def _all(self, name: str, make: Callable[[rows.Parameters], Row], *parameters: Any) -> list[Row]:
        async def query(connection: asyncpg.Connection, attempt: _Attempt) -> list[Row]:
            return [make(tuple(row)) for row in await connection.fetch(TEXTS[name], *parameters)]

        return await self._call(query)

    async def _call(self, call: Callable[[asyncpg.Connection, _Attempt], Awaitable[Row]]) -> Row:
        if self._closed:
            raise RunnerError("store_unavailable", "The store is closed.")
        task = self._loop.create_task(self._tried(call), name="store:call")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_noted)
            raise

    async def _tried(self, call: Callable[[asyncpg.Connection, _Attempt], Awaitable[Row]]) -> Row:
        """Again where nothing can have been written, and with savepoints where a row was refused.

        Every connection of the pool may turn out to be broken before a new one is made.
        """
        deadline = self._loop.time() + self._seconds
        attempt = _Attempt()
        while True:
            try:
                return await self._once(call, attempt, deadline)
            except Refused:
                attempt = _Attempt(careful=True)
            except Exception as error:
                if attempt.late or attempt.tries > self._connections or not attempt.may_be_repeated(error):
                    raise self._said(error, attempt) from error
                attempt = _Attempt(careful=attempt.careful, tries=attempt.tries + 1)

    async def _once(
        self, call: Callable[[asyncpg.Connection, _Attempt], Awaitable[Row]], attempt: _Attempt, deadline: float
    ) -> Row:
        async with self._pool.acquire(timeout=max(0.0, deadline - self._loop.time())) as connection:
            attempt.connected = True
            attempt.timer = self._loop.call_at(deadline, _drop, connection, attempt)
            try:
                if not connection.met:
                    await self._meet(connection)
                return await call(connection, attempt)
            except Exception as error:
                await _leave(connection, error)
                raise
            except asyncio.CancelledError:
                connection.terminate()
                raise
            finally:
                attempt.timer.cancel()

    async def _allow(self, connection: asyncpg.Connection, attempt: _Attempt, size: int) -> None:
        """Time for a large statement, of so many bytes: what a slow disk takes is no outage."""
        seconds = self._seconds + size / SLOW_BYTES
        await connection.execute(f"SET LOCAL statement_timeout = {round(seconds * 1000)}")
        attempt.timer.cancel()
        attempt.timer = self._loop.call_later(seconds, _drop, connection, attempt)

    async def _meet(self, connection: asyncpg.Connection) -> None:
        """Of each new connection: another store than before must not get what was meant for that one."""
        try:
            empty = bool(self.store_id) and await version_of(connection, self.where) == 0
            found = "none" if empty else await prepare(connection, self.where, self._mint)
            if found != (self.store_id or found):
                text = f"{self.where} has store {found}, not {self.store_id}, which this runner wrote to before; "
                raise RunnerError("store_unavailable", text + "if that is meant, remove spool.sqlite3 of its state.")
        except RunnerError:
            self._wrong = True
            raise
        self._wrong = False
        self.store_id = found
        connection.meet()

    def _said(self, error: Exception, attempt: _Attempt) -> RunnerError:
        if attempt.late or isinstance(error, TimeoutError):
            return RunnerError("store_unavailable", f"{self.where} gave no answer within {self._seconds:g} s.")
        if isinstance(error, ValueError) and not attempt.connected:
            return RunnerError("invalid_request", "[store] url cannot be read.", field="store.url")
        return translated(error, self.where)


async def look(url: str, seconds: float = CALL_SECONDS) -> tuple[int, str]:
    """A database's schema version, 0 when it is empty, and where it is; nothing is written.

    Raises:
        RunnerError: ``store_unavailable``: unreachable, another program's, or another schema version.
    """
    where = where_of(url)
    try:
        async with asyncio.timeout(seconds):
            connection = await asyncpg.connect(url, timeout=seconds)
            try:
                version = await version_of(connection, where)
            finally:
                connection.terminate()
    except TimeoutError:
        raise RunnerError("store_unavailable", f"{where} gave no answer within {seconds:g} s.") from None
    except Exception as error:
        raise translated(error, where) from error
    if version not in (0, SCHEMA_VERSION):
        raise refusal(where, version)
    return version, where


class _Attempt:
    """One try of a call, and how far it came."""

    __slots__ = ("careful", "committing", "connected", "late", "timer", "tries")

    timer: asyncio.TimerHandle

    def __init__(self, *, careful: bool = False, tries: int = 1) -> None:
        self.careful = careful
        self.tries = tries
        self.connected = False
        self.committing = False
        self.late = False

    def may_be_repeated(self, error: Exception) -> bool:
        """Whether it failed for what was before it, and nothing of it can have been written."""
        return gave_way(error) or (is_lost(error) and self.connected and not self.committing)


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """Nothing is set on a connection, so nothing has to be reset: that saves a round trip for each call.

    ``met``: whether its database is known to be the store's.
    """

    __slots__ = ("met",)

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.met = False

    def meet(self) -> None:
        """The database is the store's."""
        self.met = True

    def get_reset_query(self) -> str:
        return ""


def _drop(connection: asyncpg.Connection, attempt: _Attempt) -> None:
    """At the deadline: cancelling would ask the server, which may not answer, to stop; this needs nobody."""
    attempt.late = True
    connection.terminate()


async def _leave(connection: asyncpg.Connection, error: Exception) -> None:
    """No connection goes back to the pool broken or inside a transaction."""
    with suppress(asyncpg.InterfaceError):
        try:
            if not is_lost(error):
                if connection.is_in_transaction():
                    await connection.execute("ROLLBACK")
                return
        except Exception as another:
            log.debug("rolling back failed: %s", another)
        connection.terminate()


def begin(of: Sequence[Key]) -> str:
    """What opens a write: a transaction that waits for other writes of the same sessions, in one round trip.

    The order of the locks is the same for everybody. What the transaction reads behind them is what the others left.
    """
    if not of:
        return "BEGIN"
    locks = sorted({_lock(*key) for key in of})
    wanted = f"{{{','.join(map(str, locks))}}}"
    return f"BEGIN; SELECT count(pg_advisory_xact_lock(key)) FROM unnest('{wanted}'::bigint[]) AS sessions (key)"


def _lock(project: str, session_id: str) -> int:
    return int.from_bytes(blake2b(f"{project}\0{session_id}".encode(), digest_size=8).digest(), "big", signed=True)


def _noted(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a call that nobody waited for failed: %s", error)
