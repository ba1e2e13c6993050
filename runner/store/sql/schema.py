"""The schema that this code needs: what creates it in an empty database, and the refusal of any other.

A database says its version itself: SQLite in ``PRAGMA user_version``, PostgreSQL in the row ``schema`` of ``meta``. The
versions are the revisions of ``runner.store.migrations``, which is not imported here.
"""

from __future__ import annotations

from typing import Final

from runner.errors import RunnerError
from runner.store.sql import load
from runner.store.sql.dialect import Dialect, statements

SCHEMA_VERSION: Final = 5
APPLICATION_ID: Final = 0x41435052


def creation(dialect: Dialect, store_id: str) -> list[str]:
    """The statements that make an empty database one of this version, with this id."""
    return [*statements(load("schema.sql"), dialect), *marks(dialect, 0, SCHEMA_VERSION), identity(store_id)]


def identity(store_id: str) -> str:
    """The statement that gives a database its id, once."""
    quoted = store_id.replace("'", "''")
    return f"INSERT INTO meta (name, value) VALUES ('store_id', '{quoted}')"


def marks(dialect: Dialect, before: int, version: int) -> list[str]:
    """The statements that note in a database which version it has; 0 is an empty one."""
    if dialect == "sqlite":
        mine = [f"PRAGMA application_id = {APPLICATION_ID}"] if before == 0 else []
        return [*mine, f"PRAGMA user_version = {version}"]
    if before == 0:
        return [f"INSERT INTO meta (name, value) VALUES ('schema', '{version}')"]
    return [f"UPDATE meta SET value = '{version}' WHERE name = 'schema'"] if version else []


def refusal(where: str, found: int) -> RunnerError:
    """Why a database with another schema version is not used; ``where`` names it to people, without a password."""
    text = f"{where} has schema version {found}; this acp-runner needs version {SCHEMA_VERSION}. "
    if found < SCHEMA_VERSION:
        text += "Stop the runners that use it, then run: acp-runner migrate"
    else:
        text += f"Use the acp-runner that made it, or run with that one: acp-runner migrate --to {SCHEMA_VERSION}"
    return RunnerError("store_unavailable", text)


def foreign(where: str) -> RunnerError:
    """A database in which another program keeps something."""
    return RunnerError("store_unavailable", f"{where} is a database of another program.")
