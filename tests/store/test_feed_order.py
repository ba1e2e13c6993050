"""The feed on PostgreSQL: a sequence is no order of commits, so a follower goes by what can no longer be preceded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from runner.rules.feed import Position
from runner.store.postgres.store import PostgresStore
from tests.store.rows import PROJECT

INSERT = """
INSERT INTO records (project, session_id, record_id, turn_id, prompt_id, epoch, n, type, data, at)
VALUES ('p', $1, $1, NULL, NULL, 1, 1, 'session_busy', '{}', 1000)
"""


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    made = await PostgresStore.open(postgres_url)
    yield made
    await made.close()


@pytest.fixture
async def writers(store: PostgresStore, postgres_url: str) -> AsyncIterator[list[asyncpg.Connection]]:
    made = [await asyncpg.connect(postgres_url) for _ in range(3)]
    yield made
    for connection in made:
        await connection.close()


class Follower:
    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self.position: Position = (0, 0)
        self.seen: list[str] = []

    async def look(self) -> list[str]:
        for row in await self._store.feed(PROJECT, self.position, 100):
            assert row.position > self.position
            self.position = row.position
            self.seen.append(row.session_id)
        return self.seen


async def test_a_later_commit_of_an_earlier_row_is_not_missed(
    store: PostgresStore, writers: list[asyncpg.Connection]
) -> None:
    early, late, other = writers
    follower = Follower(store)
    first = early.transaction()
    await first.start()
    await early.execute(INSERT, "early")
    await late.execute(INSERT, "late")
    assert await follower.look() == [], "what may still be preceded waits"
    assert (await store.feed_span(PROJECT)).end >= follower.position
    await other.execute(INSERT, "other")
    await first.commit()
    assert await follower.look() == ["early", "late", "other"]


async def test_a_later_transaction_may_take_the_lower_number(
    store: PostgresStore, writers: list[asyncpg.Connection]
) -> None:
    """The older transaction writes its item last: by numbers alone it would stand behind, by transactions before."""
    older, newer, _ = writers
    follower = Follower(store)
    first = older.transaction()
    await first.start()
    await older.execute("SELECT pg_current_xact_id()")
    await newer.execute(INSERT, "newer")
    await older.execute(INSERT, "older")
    assert await follower.look() == []
    await first.commit()
    assert sorted(await follower.look()) == ["newer", "older"]
    begun_after = (await store.feed_span(PROJECT)).end
    await newer.execute(INSERT, "next")
    assert [row.session_id for row in await store.feed(PROJECT, begun_after, 100)] == ["next"]


async def test_a_transaction_that_is_rolled_back_holds_nobody_up(
    store: PostgresStore, writers: list[asyncpg.Connection]
) -> None:
    undone, other, _ = writers
    follower = Follower(store)
    first = undone.transaction()
    await first.start()
    await undone.execute(INSERT, "undone")
    await other.execute(INSERT, "other")
    await first.rollback()
    assert await follower.look() == ["other"]


async def test_followers_who_begin_anywhere_miss_nothing(
    store: PostgresStore, writers: list[asyncpg.Connection]
) -> None:
    """Three writers whose transactions overlap in every way; a follower begins at each step."""
    followers = [Follower(store)]
    open_ones: list[Any] = []
    for step in range(30):
        connection = writers[step % 3]
        if len(open_ones) == 3:
            await open_ones.pop(0).commit()
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(INSERT, f"s{step}")
        open_ones.append(transaction)
        for follower in followers:
            await follower.look()
        begun = Follower(store)
        begun.position = (await store.feed_span(PROJECT)).end
        followers.append(begun)
    for transaction in open_ones:
        await transaction.commit()
    everything = await followers[0].look()
    assert sorted(everything) == sorted(f"s{n}" for n in range(30))
    for follower in followers[1:]:
        seen = await follower.look()
        assert seen == everything[len(everything) - len(seen) :]


async def test_a_restored_database_tells_its_feed_in_the_old_order(postgres_url: str) -> None:
    """A dump carries the numbers of its server's transactions: a younger server has not come that far."""
    store = await PostgresStore.open(postgres_url)
    connection = await asyncpg.connect(postgres_url)
    for name in ("one", "two", "three"):
        await connection.execute(INSERT, name)
    await connection.execute("UPDATE feed SET xid = xid + 1000000")
    await connection.execute("INSERT INTO feed_floors VALUES ('p', 900000, 0)")
    assert await Follower(store).look() == []
    await store.close()
    again = await PostgresStore.open(postgres_url)
    follower = Follower(again)
    assert await follower.look() == ["one", "two", "three"]
    assert (await again.feed_span(PROJECT)).floor <= follower.position
    await connection.execute(INSERT, "four")
    assert await follower.look() == ["one", "two", "three", "four"]
    await again.close()
    await connection.close()


async def test_two_that_trim_at_once_count_nothing_twice(
    store: PostgresStore, writers: list[asyncpg.Connection]
) -> None:
    for n in range(600):
        await writers[n % 3].execute(INSERT, f"s{n}")
    counts = await asyncio.gather(*(store.trim_feed(None, 2000, 200) for _ in range(6)))
    assert sum(counts) + len(await store.feed(PROJECT, (0, 0), 1000)) == 600
    while await store.trim_feed(None, 2000, 200):
        pass
    assert await Follower(store).look() == []
    assert (await store.feed_span(PROJECT)).floor > (0, 0)
