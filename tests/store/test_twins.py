"""Any sequence of calls gives the same answers from both stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.store.memory import MemoryStore
from runner.store.port import Admission, RecordKey, RecordRow, Store
from runner.store.postgres.store import PostgresStore
from runner.store.sqlite import SqliteStore
from tests.store.conftest import FixedClock
from tests.store.rows import PROJECT, command, ending, prompt, question, record, session, turn

Call = Callable[[Store], Coroutine[Any, Any, Any]]

SESSIONS = st.sampled_from(["a", "b"])
INSTANTS = st.integers(0, 5)
TURNS = st.builds(turn, st.sampled_from(["t1", "t2", "t3"]), st.integers(1, 3), SESSIONS)
PROMPTS = st.builds(prompt, st.sampled_from(["p1", "p2"]), st.sampled_from(["active", "done"]), SESSIONS)
QUESTIONS = st.builds(
    question,
    st.sampled_from(["i1", "i2"]),
    st.sampled_from(["pending", "answered", "consumed", "cancelled"]),
    SESSIONS,
    created_at=INSTANTS,
    answer=st.none() | st.just({"decision": "allow"}),
)
TYPES = st.sampled_from(["message", "session_busy", "interaction_closed"])
RECORDS = st.builds(record, st.integers(1, 3), st.integers(1, 2), SESSIONS, at=INSTANTS, type=TYPES) | st.builds(
    record, st.integers(1, 3), st.integers(1, 2), SESSIONS, record_id=st.sampled_from(["x", "y"])
)


def ended_session(name: str, at: int, ended: bool, epoch: int, n: int) -> Any:
    return session(name, at, ended_at=at if ended else None, config={"at": at}, head_epoch=epoch, head_n=n)


ROWS = st.builds(ended_session, SESSIONS, INSTANTS, st.booleans(), st.integers(0, 2), st.integers(0, 1))
COMMANDS = st.builds(
    command,
    st.sampled_from(["c1", "c2", "c3"]),
    SESSIONS,
    kind=st.sampled_from(["cancel", "kill"]),
    turn_id=st.sampled_from([None, "t1"]),
    arrived_at=INSTANTS,
    idempotency_key=st.none() | st.sampled_from(["k1", "k2"]),
)
SETTLED = st.builds(
    command,
    st.sampled_from(["c1", "c2", "c3"]),
    state=st.sampled_from(["applied", "obsolete"]),
    outcome=st.just("stopped"),
    finished_at=INSTANTS,
)
MORE = {
    "interactions": st.lists(QUESTIONS, max_size=2),
    "records": st.lists(RECORDS, max_size=3),
}


def admit(row: Any, of: Any, prompt_row: Any, interactions: Any, records: Any) -> Call:
    return lambda store: store.admit(Admission(row, of, prompt_row, interactions, records))


def end(of: Any, outcome: str, prompts: Any, commands: Any, interactions: Any, records: Any) -> Call:
    row = ending(of, outcome, others=prompts, commands=commands, interactions=interactions, records=records)
    return lambda store: store.end(row)


CALLS = st.one_of(
    st.builds(admit, ROWS, TURNS, st.none() | PROMPTS, *MORE.values()),
    st.builds(
        end,
        TURNS,
        st.sampled_from(["completed", "lost", "paused"]),
        st.lists(PROMPTS, max_size=2),
        st.lists(SETTLED, max_size=2),
        *MORE.values(),
    ),
    st.builds(lambda row: lambda store: store.save_session(row), ROWS),
    st.builds(
        lambda records, interactions, prompts: lambda store: store.append(records, interactions, prompts),
        MORE["records"],
        MORE["interactions"],
        st.lists(PROMPTS, max_size=2),
    ),
    st.builds(
        lambda row, expected: lambda store: store.answer_interaction(row, expected),
        QUESTIONS,
        st.sampled_from(["pending", "answered"]),
    ),
    st.builds(lambda row: lambda store: store.submit_command(row), COMMANDS | SETTLED),
    st.builds(
        lambda name, now: lambda store: store.claim_command(PROJECT, name, "r", now, now + 2, 2),
        st.sampled_from(["c1", "c2", "c3"]),
        INSTANTS,
    ),
    st.builds(
        lambda name, state, outcome: lambda store: store.settle_command(PROJECT, name, state, outcome, 9),
        st.sampled_from(["c1", "c2", "c3"]),
        st.sampled_from(["applied", "obsolete"]),
        st.sampled_from([None, "stopped"]),
    ),
    st.builds(lambda records: lambda store: store.quarantine(records, "why", 9), MORE["records"]),
    st.builds(lambda name: lambda store: store.delete_session_content(PROJECT, name), SESSIONS),
    st.builds(lambda records: lambda store: store.write_batch(records), MORE["records"]),
    st.builds(lambda row, records: lambda store: store.create_session(row, records), ROWS, MORE["records"]),
    st.builds(lambda records: lambda store: store.delete_records(keys(records)), MORE["records"]),
    st.builds(lambda records: lambda store: store.delete_quarantined(keys(records)), MORE["records"]),
    st.builds(lambda row: lambda store: store.add_ending(row), RECORDS.map(lambda row: row._replace(type="done"))),
)


def keys(records: list[RecordRow]) -> list[RecordKey]:
    return [RecordKey(row.project, row.record_id) for row in records]


async def answer(call: Call, store: Store) -> Any:
    try:
        return await call(store)
    except RunnerError as error:
        return error.code


async def everything(store: Store) -> list[Any]:
    seen: list[Any] = [await store.sessions(PROJECT, 10), await store.open_turns(), await store.interactions(PROJECT)]
    seen.append(await store.sessions(PROJECT, 10, (3, "a")))
    for name in ("a", "b"):
        seen += [await store.session(PROJECT, name), await store.last_turn(PROJECT, name)]
        seen += [await store.records(PROJECT, name, None, 100), await store.records(PROJECT, name, (1, 2), 2)]
        seen += [await store.turn(PROJECT, name, one) for one in ("t1", "t2", "t3")]
        seen += [await store.prompt(PROJECT, name, one) for one in ("p1", "p2")]
        seen.append(await store.interactions(PROJECT, name, "pending"))
        seen += [await store.open_turns((PROJECT, name)), await store.open_commands((PROJECT, name))]
    seen += [await store.command(PROJECT, name) for name in ("c1", "c2", "c3")]
    seen += [await store.open_commands(), await store.paused_turns()]
    seen.append([row for _, row in await store.quarantined(PROJECT, 100)])
    seen.append([replace(row, position=(0, 0)) for row in await store.feed(PROJECT, (0, 0), 100)])
    for before in (2, 1002, 8000):
        seen += [await store.expired_records(None, before, 5), await store.expired_quarantine(PROJECT, before, 5)]
        seen.append(await store.count_expired(None, before))
    seen += [await store.ended_turns(None, (0, "", ""), 9), *[await store.pruned_to(PROJECT, name) for name in "ab"]]
    seen += [await store.unstorable(PROJECT, name) for name in "ab"]
    return seen


@settings(max_examples=80)
@given(st.lists(st.lists(CALLS, min_size=1, max_size=4), max_size=8))
def test_both_stores_answer_the_same(rounds: list[list[Call]]):
    async def compare() -> None:
        with TemporaryDirectory() as folder:
            clock = FixedClock()
            sqlite, memory = await SqliteStore.open(Path(folder) / "db", clock=clock), MemoryStore(clock=clock)
            try:
                for calls in rounds:
                    one = await asyncio.gather(*(answer(call, sqlite) for call in calls))
                    other = [await answer(call, memory) for call in calls]
                    assert one == other
                    assert await everything(sqlite) == await everything(memory)
            finally:
                await sqlite.close()

    asyncio.run(compare())


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, min_size=1, max_size=12))
def test_postgres_answers_the_same(postgres_url: str, calls: list[Call]):
    """One call behind the other: those that come at once have no order there."""

    async def compare() -> None:
        clock = FixedClock()
        postgres, memory = await PostgresStore.open(postgres_url, clock=clock), MemoryStore(clock=clock)
        try:
            await emptied(postgres_url)
            for call in calls:
                assert await answer(call, postgres) == await answer(call, memory)
            assert await everything(postgres) == await everything(memory)
        finally:
            await postgres.close()

    asyncio.run(compare())


async def emptied(url: str) -> None:
    connection = await asyncpg.connect(url)
    tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    names = ", ".join(row["tablename"] for row in tables if row["tablename"] != "meta")
    await connection.execute(f"TRUNCATE {names} RESTART IDENTITY")
    await connection.close()
