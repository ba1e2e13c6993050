"""Steps of a write on a connection of PostgreSQL, inside the caller's transaction."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from runner.errors import RunnerError
from runner.store.port import RecordRow
from runner.store.postgres.faults import is_refusal, translated
from runner.store.rows import Parameters
from runner.store.sql import POSTGRESQL
from runner.store.writes import INSERT_RECORD, Ask, AskAll, Attempt, Run, Step, T, Work

if TYPE_CHECKING:
    import asyncpg

Allow = Callable[[int], Awaitable[None]]

LARGE_BYTES: Final = 1024 * 1024
MANY: Final = 8
"""From so many rows on they go as arrays in one statement, where the statement has such a form."""

COPIED: Final = 100
"""From so many records on those that are not known are copied, which is faster."""


def numbered(text: str) -> str:
    """A named statement as PostgreSQL reads it."""
    return re.sub(r"\?(\d+)", r"$\1", text).replace(" AS BLOB)", " AS BYTEA)")


PROJECT: Final = RecordRow._fields.index("project")
DATA: Final = RecordRow._fields.index("data")
RECORD_ID: Final = RecordRow._fields.index("record_id")

TEXTS: Final = {name: numbered(text) for name, text in POSTGRESQL.items()}


class Refused(Exception):
    """A row of an ``Attempt`` was refused while no savepoint kept the rest: the transaction has to begin again."""


async def perform(work: Work[T], connection: asyncpg.Connection, allow: Allow, *, careful: bool) -> T:
    """Do what a write does.

    Args:
        work: the write.
        connection: in a transaction, which is spoilt when this raises.
        allow: called with the size of a large statement before it is sent.
        careful: each ``Attempt`` has a savepoint. It costs two round trips, so it is for the second try.

    Raises:
        Refused: an ``Attempt`` failed and was not careful.
    """
    steps = work()
    answer: Any = None
    try:
        while True:
            answer = await _do(connection, steps.send(answer), allow, careful)
    except StopIteration as done:
        value: T = done.value
        return value


async def _do(connection: asyncpg.Connection, step: Step, allow: Allow, careful: bool) -> Any:
    if isinstance(step, Run | Attempt) and (size := _bytes(step)) > LARGE_BYTES:
        await allow(size)
    if isinstance(step, Run):
        return await _run(connection, step)
    if isinstance(step, Ask):
        return await _ask(connection, step.statement, step.parameters)
    if isinstance(step, AskAll):
        return await _ask_all(connection, step)
    return await _attempt(connection, step, careful)


def _bytes(step: Run | Attempt) -> int:
    if step.statement == INSERT_RECORD:
        return sum([len(row[DATA]) for row in step.rows])
    return sum(len(value) for row in step.rows for value in row if isinstance(value, bytes | str))


async def _ask(connection: asyncpg.Connection, name: str, parameters: Parameters) -> list[Parameters]:
    return [tuple(row) for row in await connection.fetch(TEXTS[name], *parameters)]


async def _ask_all(connection: asyncpg.Connection, step: AskAll) -> list[list[Parameters]]:
    """One question with the parameters as arrays, where there are several."""
    if len(step.each) < 2:
        return [await _ask(connection, step.statement, parameters) for parameters in step.each]
    answers: list[list[Parameters]] = [[] for _ in step.each]
    for row in await connection.fetch(EACH[step.statement], *zip(*step.each, strict=True)):
        place, *columns = row
        answers[place - 1].append(tuple(columns))
    return answers


async def _run(connection: asyncpg.Connection, step: Run | Attempt) -> int:
    if len(step.rows) == 1:
        return changed(await connection.execute(TEXTS[step.statement], *step.rows[0]))
    if len(step.rows) >= COPIED and step.statement == INSERT_RECORD:
        return await _copy(connection, step.rows)
    if len(step.rows) >= MANY and step.statement in BULK:
        return changed(await connection.execute(BULK[step.statement], *zip(*step.rows, strict=True)))
    if step.rows:
        await connection.executemany(TEXTS[step.statement], step.rows)
    return len(step.rows)


async def _copy(connection: asyncpg.Connection, records: Sequence[Parameters]) -> int:
    """What ``insert_record`` does for many. The lock of their sessions keeps others from writing the same ones."""
    places = {(record[PROJECT], record[RECORD_ID]): place for place, record in reversed([*enumerate(records)])}
    known = await connection.fetch(EACH["record_exists"], *zip(*places, strict=True))
    stored = {place for place, *_ in known}
    fresh = [records[at] for place, at in enumerate(places.values(), 1) if place not in stored]
    fresh.reverse()
    if fresh:
        await connection.copy_records_to_table("records", records=fresh, columns=RecordRow._fields)
    return len(fresh)


async def _attempt(connection: asyncpg.Connection, step: Attempt, careful: bool) -> RunnerError | None:
    if not careful:
        try:
            await _run(connection, step)
        except Exception as error:
            if is_refusal(error):
                raise Refused from error
            raise
        return None
    await connection.execute("SAVEPOINT attempt")
    try:
        await _run(connection, step)
    except Exception as error:
        if not is_refusal(error):
            raise
        await connection.execute("ROLLBACK TO SAVEPOINT attempt")
        return translated(error)
    await connection.execute("RELEASE SAVEPOINT attempt")
    return None


def changed(status: str) -> int:
    """How many rows a command changed, of what the server says of it ("INSERT 0 1")."""
    return int(status.rpartition(" ")[2])


def _arrays(types: str) -> str:
    return ", ".join(f"${place}::{kind}[]" for place, kind in enumerate(types.split(), 1))


def _in_bulk(name: str, types: str) -> str:
    """An ``INSERT … VALUES`` of one row as one of many: each parameter is an array of its column."""
    values = ", ".join(f"${place}" for place in range(1, len(types.split()) + 1))
    bulk = TEXTS[name].replace(f"VALUES ({values})", f"SELECT * FROM unnest({_arrays(types)})")
    assert bulk != TEXTS[name], name
    return bulk


def _for_each(name: str, types: str) -> str:
    """A ``SELECT`` for many parameters at once: its rows behind the place of the parameters that found them."""
    inner = re.sub(r"\$(\d+)", r"given.p\1", TEXTS[name])
    columns = ", ".join(f"p{place}" for place in range(1, len(types.split()) + 1))
    return (
        f"SELECT given.place, found.* FROM unnest({_arrays(types)}) WITH ORDINALITY AS given ({columns}, place)"
        f" CROSS JOIN LATERAL ({inner}) AS found ORDER BY given.place"
    )


BULK: Final = {
    "insert_record": _in_bulk("insert_record", "text text text text text bigint bigint text bytea bigint"),
}
EACH: Final = {
    "standing": _for_each("standing", "text text text"),
    "record_exists": _for_each("record_exists", "text text"),
    "record_place": _for_each("record_place", "text text"),
    "aside_exists": _for_each("aside_exists", "text text"),
}
