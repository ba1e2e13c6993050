"""Brings the store of the settings to a schema version (DESIGN 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.assembly.choices import SQLITE, STORE_FILE, is_http, is_postgresql, postgres
from runner.config import Settings
from runner.errors import RunnerError
from runner.ids import Ids
from runner.sandbox.statelock import StateLock, lock_of
from runner.store.migrations.chain import Step, script
from runner.store.migrations.sqlite import migrate as migrate_file
from runner.store.sql.schema import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Migrated:
    """What ``migrate`` did, or would do.

    Attributes:
        where: the database for people, without a password.
        steps: a line for each revision; none when the database had the version already.
        script: the same as SQL.
    """

    where: str
    steps: list[str]
    script: str


async def migrate(
    settings: Settings, state_dir: Path, *, to: int | None = None, discard: bool = False, dry: bool = False
) -> Migrated:
    """Bring the store to version ``to``, by default the one that this code needs; whole or not at all.

    ``discard`` allows a way back to lose what the earlier schema has no place for; ``dry`` changes nothing.

    Raises:
        RunnerError: ``invalid_request``: there is no such version, something would be lost, or the store is a
            plane's; ``store_unavailable``: it cannot be reached, is another program's, or runners use it just now.
    """
    url, target, mint = settings.store.url, SCHEMA_VERSION if to is None else to, Ids().mint
    if is_postgresql(settings):
        schema = postgres("schema")
        planned = await schema.migrate_database(url, target, mint, discard=discard, dry=dry)
        return _told(schema.where_of(url), planned)
    if url:
        path = Path(url.removeprefix(SQLITE))
        return _told(str(path), await asyncio.to_thread(migrate_file, path, target, mint, discard=discard, dry=dry))
    if is_http(settings):
        raise RunnerError("invalid_request", "The store is the plane's: run this on the plane's machine.", field="url")
    replica_id = mint("rep")
    lock = StateLock.acquire(state_dir, replica_id)
    try:
        path = state_dir / STORE_FILE
        planned = await asyncio.to_thread(migrate_file, path, target, mint, discard=discard, dry=dry)
    finally:
        lock_of(state_dir, replica_id).unlink(missing_ok=True)
        lock.release()
    return _told(str(path), planned)


def _told(where: str, planned: Sequence[Step]) -> Migrated:
    return Migrated(where, [step.text for step in planned], script(planned) if planned else "")
