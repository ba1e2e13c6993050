"""The schema in a PostgreSQL database: created, judged, migrated.

Tables are made in, and looked for on, the connection's ``search_path``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import asyncpg

from runner.errors import RunnerError
from runner.redaction import without_password
from runner.store.sql.schema import SCHEMA_VERSION, creation, foreign, refusal

if TYPE_CHECKING:
    from runner.store.migrations.chain import Step

LOCK: Final = 0x41435052
"""Key of the advisory lock: shared to read the version, alone to make or change the schema."""
APPLICATION_NAME: Final = "acp-runner"
"""What every connection of a runner is called at the server: a migration looks whether there are any."""
HAS_META: Final = (
    "SELECT EXISTS (SELECT 1 FROM pg_tables WHERE tablename = 'meta' AND schemaname = ANY (current_schemas(false)))"
)
"""A scan sees what was committed a moment ago; ``to_regclass`` may answer from this connection's cache."""
CONNECT_SECONDS: Final = 5.0
MIGRATE_SECONDS: Final = 3600.0
RUNNING: Final = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = $1 AND pid <> pg_backend_pid()"
)


async def prepare(connection: asyncpg.Connection, where: str, mint: Callable[[str], str]) -> str:
    """The store's id; an empty database gets the schema first, whoever else starts at the same moment.

    Args:
        connection: outside a transaction.
        where: the database for people, without a password.
        mint: ``mint("store")`` names a new store.

    Raises:
        RunnerError: ``store_unavailable``: the database is another program's or has another schema version.
        asyncpg.PostgresError: whatever else the server says.
    """
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock_shared($1)", LOCK)
        version = await version_of(connection, where)
    if version == 0:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            version = await version_of(connection, where)
            if version == 0:
                await _execute(connection, creation("postgresql", mint("store")), where)
                version = SCHEMA_VERSION
    if version != SCHEMA_VERSION:
        raise refusal(where, version)
    return str(await connection.fetchval("SELECT value FROM meta WHERE name = 'store_id'"))


async def migrate_database(
    url: str, target: int, mint: Callable[[str], str], *, discard: bool = False, dry: bool = False
) -> list[Step]:
    """Bring a database to a version, whole or not at all; the steps. ``dry``: only say them.

    Raises:
        RunnerError: ``store_unavailable``: it cannot be reached, is another program's, or runners are connected to it;
            ``invalid_request``: no such version, or something would be lost.
    """
    where = where_of(url)
    try:
        connection = await asyncpg.connect(url, timeout=CONNECT_SECONDS, command_timeout=MIGRATE_SECONDS)
        try:
            async with connection.transaction():
                return await _migrate(connection, where, target, mint, discard=discard, dry=dry)
        finally:
            await connection.close(timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise RunnerError("store_unavailable", f"The store {where} cannot be migrated: {error}.") from error


async def _migrate(
    connection: asyncpg.Connection, where: str, target: int, mint: Callable[[str], str], *, discard: bool, dry: bool
) -> list[Step]:
    from runner.store.migrations.chain import steps, would_lose

    await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
    planned = steps("postgresql", await version_of(connection, where), target, mint)
    if planned and not dry and (running := await connection.fetchval(RUNNING, APPLICATION_NAME)):
        text = f"Runners hold {running} connections to {where}. Stop them first."
        raise RunnerError("store_unavailable", text)
    for step in () if dry else planned:
        for what, query in step.loses:
            if not discard and await connection.fetchval(query) is not None:
                raise would_lose(step, what)
        await _execute(connection, step.statements, where)
    return planned


def where_of(url: str) -> str:
    """A database's URL for people: without user, password and options."""
    return without_password(url)


async def version_of(connection: asyncpg.Connection, where: str) -> int:
    """The database's schema version, 0 when it has no table of ours.

    Raises:
        RunnerError: ``store_unavailable``: another program has a table ``meta`` there.
    """
    if not await connection.fetchval(HAS_META):
        return 0
    try:
        version = await connection.fetchval("SELECT value FROM meta WHERE name = 'schema'")
    except asyncpg.UndefinedColumnError:
        raise foreign(where) from None
    if version is None or not str(version).isdecimal():
        raise foreign(where)
    return int(version)


async def _execute(connection: asyncpg.Connection, statements: Sequence[str], where: str) -> None:
    try:
        for statement in statements:
            await connection.execute(statement)
    except asyncpg.DuplicateTableError:
        raise foreign(where) from None
