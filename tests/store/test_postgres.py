"""What only PostgreSQL can do to its store: die, freeze, come back, be shared, be empty, be somebody else's."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from runner.errors import RunnerError
from runner.store.port import Admission, Appended
from runner.store.postgres.faults import is_lost
from runner.store.postgres.steps import TEXTS
from runner.store.postgres.store import PostgresStore, begin
from tests.postgres_server import PostgresServer
from tests.store.rows import PROJECT, admission, command, ended, ending, prompt, question, record, session, turn

HOT = (
    *("insert_turn", "end_turn", "save_session", "save_prompt", "save_interaction", "insert_record", "standing"),
    *("answer_interaction", "claim_command", "settle_command", "end_command", "same_command", "command_of_key"),
    *("session", "sessions", "sessions_before", "prompt", "waiting_prompts_of", "context_prompts", "turn", "last_turn"),
    *("session_open_turns", "records", "interaction", "session_interactions", "session_open_commands", "record_exists"),
    *("quarantined", "expired_records", "expired_quarantine", "ended_turns", "turn_told", "feed", "open_turns"),
)
SECONDS = 1.0
"""Of a call, in tests that wait until one is given up."""


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    made = await PostgresStore.open(postgres_url, seconds=SECONDS)
    yield made
    await made.close()


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of somebody else."""
    made = await asyncpg.connect(postgres_url)
    yield made
    made.terminate()


async def refused(call: Any) -> RunnerError:
    with pytest.raises(RunnerError) as caught:
        await call
    return caught.value


async def test_a_killed_server_is_unavailable_and_found_again(store: PostgresStore, postgres_server: PostgresServer):
    assert await store.admit(admission(records=[record(1)]))
    postgres_server.kill()
    assert (await refused(store.append([record(2)]))).code == "store_unavailable"
    assert (await refused(store.session(PROJECT, "s"))).code == "store_unavailable"
    assert not await store.ready()
    postgres_server.restart()
    assert await store.ready()
    assert await store.append([record(2)]) == Appended(1)
    assert await store.records(PROJECT, "s", None, 10) == [record(1), record(2)]


async def test_a_restarted_server_is_not_noticed(store: PostgresStore, postgres_server: PostgresServer):
    """Connections of before are of no use any more: that is found out before anything was written."""
    await asyncio.gather(*(store.session(PROJECT, "s") for _ in range(20)))
    postgres_server.restart()
    calls = [store.admit(Admission(session(f"s{n}"), turn(f"t{n}", in_session=f"s{n}"))) for n in range(20)]
    assert await asyncio.gather(*calls) == [True] * 20
    for _ in range(3):
        postgres_server.disconnect()
        assert len(await store.open_turns()) == 20
        postgres_server.disconnect()
        assert not await store.admit(admission("t0"))


async def test_a_frozen_server_is_given_up_in_time_and_forgotten(store: PostgresStore, postgres_server: PostgresServer):
    """More calls than connections: each has its deadline from its start, and the pool is as good as new afterwards."""
    await store.admit(admission())
    postgres_server.stop()
    calls = [store.append([record(n)]) for n in range(20)] + [store.session(PROJECT, "s") for _ in range(20)]
    async with asyncio.timeout(SECONDS * 10):
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert {error.code for error in errors if isinstance(error, RunnerError)} == {"store_unavailable"}
    assert len([error for error in errors if isinstance(error, RunnerError)]) == len(calls)
    postgres_server.cont()
    assert await store.append([record(50)]) == Appended(1)
    assert await asyncio.gather(*(store.session(PROJECT, "s") for _ in range(20))) == [session()] * 20


async def test_a_server_that_freezes_after_it_took_the_connection(postgres_server: PostgresServer, postgres_url: str):
    await (await PostgresStore.open(postgres_url)).close()
    postgres_server.stop()
    error = await refused(PostgresStore.open(postgres_url, seconds=SECONDS))
    assert error.code == "store_unavailable"
    assert "no answer within 1 s" in error.message
    assert postgres_url not in error.message


# asyncpg asks the server to cancel on a connection of its own, and nobody hears of that connection's end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_cancelled_call_leaves_no_transaction_open(
    store: PostgresStore, other: asyncpg.Connection, postgres_url: str
):
    await store.admit(admission())
    lock = other.transaction()
    await lock.start()
    await other.execute("LOCK TABLE records IN EXCLUSIVE MODE")
    calls = [asyncio.ensure_future(store.append([record(n)])) for n in range(12)]
    async with asyncio.timeout(SECONDS * 10):
        while not await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    assert {type(one) for one in await asyncio.gather(*calls, return_exceptions=True)} == {asyncio.CancelledError}
    await lock.rollback()
    await asyncio.gather(*(store.append([record(100 + n)]) for n in range(12)))
    found = await other.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
    )
    assert found == 0
    stored = {row.n for row in await store.records(PROJECT, "s", None, 100)}
    assert stored >= set(range(100, 112))


async def test_a_lock_that_is_not_let_go_is_given_up(store: PostgresStore, other: asyncpg.Connection):
    await store.save_session(session())
    async with other.transaction():
        await other.execute("LOCK TABLE sessions IN EXCLUSIVE MODE")
        assert (await refused(store.save_session(session(at=2000)))).code == "store_unavailable"
        assert await store.session(PROJECT, "s") == session(), "readers do not wait"
    await store.save_session(session(at=2000))


async def test_an_ending_and_a_record_of_its_turn_exclude_each_other(store: PostgresStore, other: asyncpg.Connection):
    """Case G9: whichever is first, a record never lands behind the ending: the session's lock orders them."""
    for n in range(30):
        name = f"s{n}"
        own = turn(f"t{n}", in_session=name)
        await store.admit(Admission(session(name), own))
        row = record(1, in_session=name, turn_id=own.turn_id, record_id=f"r{n}")
        last = record(2, in_session=name, turn_id=own.turn_id, record_id=f"done{n}")
        over = replace(ending(own), session=session(name), records=[last])
        calls = [store.end(over), store.append([row])] if n % 2 else [store.append([row]), store.end(over)]
        answers = await asyncio.gather(*calls)
        appended = answers[n % 2]
        assert answers[1 - n % 2] is True
        stored = [one.record_id for one in await store.records(PROJECT, name, None, 10)]
        assert stored == ([f"r{n}", f"done{n}"] if appended == Appended(1) else [f"done{n}"])


async def test_a_record_that_a_trigger_refuses_keeps_no_turn_from_ending(
    store: PostgresStore, other: asyncpg.Connection
):
    """Case G8: the transaction is done again with savepoints; the poisoned record alone is set aside."""
    await poison(other, "bad")
    await store.admit(admission())
    rows = [record(n) for n in range(1, 20)]
    rows[7] = rows[7]._replace(type="bad")
    assert (await refused(store.append(rows))).code == "internal"
    assert await store.end(ending(turn(), prompt=prompt(state="done"), interactions=[question()], records=rows))
    assert [row.n for row in await store.records(PROJECT, "s", None, 100)] == [row.n for row in rows if row != rows[7]]
    ((_, aside),) = await store.quarantined(PROJECT, 10)
    assert (aside.record, aside.reason) == (rows[7], "refused")
    assert await store.turn(PROJECT, "s", "t1") == ended(turn())


async def poison(connection: asyncpg.Connection, kind: str) -> None:
    """From now on the database refuses records of a type."""
    await connection.execute(
        f"""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN IF NEW.type = '{kind}' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON records FOR EACH ROW EXECUTE FUNCTION refuse()
        """
    )


@pytest.mark.parametrize(
    "row",
    [record(1, data="text"), record(2**70), record(1, type="\x00"), record(1, type="\ud800"), record(1, type=None)],
    ids=["text", "number", "nul", "surrogate", "null"],
)
async def test_what_no_column_can_hold_is_a_refused_row(store: PostgresStore, row: Any):
    await store.admit(admission())
    assert (await refused(store.append([row]))).code == "internal"
    assert (await refused(store.append([row, *(record(n) for n in range(2, 20))]))).code == "internal"
    assert await store.records(PROJECT, "s", None, 10) == []


async def test_what_is_large_has_time(postgres_url: str):
    """A batch of megabytes is no outage, however short the calls are."""
    store = await PostgresStore.open(postgres_url)
    await store.admit(admission())
    hasty = await PostgresStore.open(postgres_url, seconds=0.5)
    rows = [record(n, data=b'"' + random.Random(n).randbytes(100_000).hex().encode() + b'"') for n in range(1, 100)]
    assert await hasty.write_batch(rows) == Appended(len(rows))
    await hasty.close()
    assert await store.records(PROJECT, "s", None, 100) == rows
    await store.close()


async def test_a_changed_plan_is_made_again(store: PostgresStore, other: asyncpg.Connection):
    await store.admit(admission(records=[record(1)]))
    await store.records(PROJECT, "s", None, 10)
    await other.execute("ALTER TABLE records ALTER COLUMN prompt_id TYPE VARCHAR(200)")
    await other.execute("ALTER TABLE turns ALTER COLUMN stop_reason TYPE VARCHAR(200)")
    assert await store.records(PROJECT, "s", None, 10) == [record(1)]
    assert await store.append([record(2)]) == Appended(1)


async def test_a_database_that_may_only_be_read_is_unavailable(
    store: PostgresStore, other: asyncpg.Connection, postgres_server: PostgresServer
):
    await store.save_session(session())
    await other.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on',"
        " current_database()); END $$"
    )
    postgres_server.disconnect()
    assert (await refused(store.save_session(session(at=2000)))).code == "store_unavailable"
    assert not await store.ready()
    assert await store.session(PROJECT, "s") == session()


async def test_a_server_that_is_full_is_unavailable(postgres_server: PostgresServer, postgres_url: str):
    store = await PostgresStore.open(postgres_url, seconds=SECONDS)
    name = postgres_url.rpartition("/")[2]
    postgres_server.sql("CREATE ROLE few LOGIN PASSWORD 'x'; ALTER ROLE few CONNECTION LIMIT 0")
    url = f"postgresql://few:x@127.0.0.1:{postgres_server.port}/{name}"
    assert (await refused(PostgresStore.open(url, seconds=SECONDS))).code == "store_unavailable"
    postgres_server.sql("DROP ROLE few")
    await store.close()


@pytest.mark.parametrize("change", ["password", "database", "port"])
async def test_what_cannot_be_reached_says_where_but_not_the_password(postgres_url: str, change: str):
    password = postgres_url.split(":")[2].partition("@")[0]
    wrong = {
        "password": postgres_url.replace(password, "wr0ng"),
        "database": f"{postgres_url}x",
        "port": postgres_url.replace(postgres_url.rpartition(":")[2], "1/x"),
    }
    error = await refused(PostgresStore.open(wrong[change], seconds=SECONDS))
    assert error.code == "store_unavailable"
    assert password not in error.message
    assert "wr0ng" not in error.message


async def test_a_replica_that_is_frozen_within_a_write_keeps_nobody_from_its_session(
    store: PostgresStore, postgres_url: str
):
    """The server ends its transaction before the others' calls are over; when it wakes, it finds out."""
    await store.admit(admission())
    frozen = await PostgresStore.open(postgres_url, seconds=SECONDS)
    async with frozen._pool.acquire() as connection:
        await connection.execute(begin([(PROJECT, "s")]))
        assert await store.append([record(1)]) == Appended(1)
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)) as ended_there:
            await connection.execute("COMMIT")
        assert is_lost(ended_there.value)
    assert await frozen.append([record(2)]) == Appended(1)
    await frozen.close()


async def test_a_statement_finds_its_rows_by_an_index(store: PostgresStore, other: asyncpg.Connection):
    await other.execute("SET enable_seqscan = off; SET plan_cache_mode = force_generic_plan")
    for name in HOT:
        await other.execute(f"PREPARE {name} AS {TEXTS[name]}")
        count = len(set(re.findall(r"\$\d+", TEXTS[name])))
        nulls = f"({', '.join(['NULL'] * count)})" if count else ""
        plan = "\n".join(row[0] for row in await other.fetch(f"EXPLAIN EXECUTE {name} {nulls}"))
        assert "Seq Scan" not in plan, f"{name}:\n{plan}"


async def test_several_replicas_find_an_empty_database_at_once(postgres_url: str):
    stores = await asyncio.gather(*(PostgresStore.open(postgres_url, f"{{}}_{n}".format) for n in range(6)))
    assert len({store.store_id for store in stores}) == 1
    await asyncio.gather(*(store.admit(admission(f"t{n}", n + 1)) for n, store in enumerate(stores)))
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_known_store_may_be_away_at_the_start(postgres_server: PostgresServer, postgres_url: str):
    first = await PostgresStore.open(postgres_url)
    await first.close()
    postgres_server.kill()
    assert (await refused(PostgresStore.open(postgres_url, seconds=SECONDS))).code == "store_unavailable"
    store = await PostgresStore.open(postgres_url, known_id=first.store_id, seconds=SECONDS)
    assert not await store.ready()
    postgres_server.restart()
    assert await store.ready()
    await store.close()


async def test_another_store_than_before_is_not_used(
    store: PostgresStore, other: asyncpg.Connection, postgres_server: PostgresServer, postgres_url: str
):
    """Nor is one that took its place while the runner was up."""
    error = await refused(PostgresStore.open(postgres_url, known_id="store_other"))
    assert "not store_other" in error.message
    await store.save_session(session())
    await other.execute("UPDATE meta SET value = 'store_other' WHERE name = 'store_id'")
    postgres_server.disconnect()
    assert (await refused(store.save_session(session(at=2000)))).code == "store_unavailable"
    assert not await store.ready()


async def test_a_database_that_was_emptied_is_not_made_anew(postgres_server: PostgresServer, postgres_url: str):
    """Whoever restores it finds it as it was left."""
    error = await refused(PostgresStore.open(postgres_url, known_id="store_before"))
    assert "has store none, not store_before" in error.message
    assert (
        postgres_server.sql("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'", postgres_server.database)
        == "0"
    )


async def test_two_stops_of_two_replicas_are_one(store: PostgresStore, postgres_url: str):
    """DESIGN 3.7, with the race between two processes' connections."""
    second = await PostgresStore.open(postgres_url)
    for n in range(20):
        calls = [
            one.submit_command(command(f"{n}-{who}", turn_id=f"t{n}", idempotency_key=f"k{n}{who % 3}"))
            for who, one in enumerate((store, second, store, second))
        ]
        assert len({row.command_id for row in await asyncio.gather(*calls)}) == 1
    assert len(await store.open_commands()) == 20
    await second.close()


async def test_a_closed_store_is_unavailable(postgres_url: str):
    store = await PostgresStore.open(postgres_url)
    await store.close()
    await store.close()
    assert (await refused(store.session(PROJECT, "s"))).code == "store_unavailable"
    assert not await store.ready()
