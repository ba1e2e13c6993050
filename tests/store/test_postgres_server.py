"""The tests' own PostgreSQL does what the tests say of it."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from tests.postgres_server import PostgresServer


async def test_it_is_killed_and_restarted_with_what_was_committed(postgres_server: PostgresServer, postgres_url: str):
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("CREATE TABLE kept (n INT)")
    await connection.execute("INSERT INTO kept VALUES (1)")
    postgres_server.kill()
    with pytest.raises((asyncpg.PostgresConnectionError, OSError)):
        await connection.fetch("SELECT 1")
    with pytest.raises(OSError, match="Connect"):
        await asyncpg.connect(postgres_url)
    postgres_server.restart()
    connection = await asyncpg.connect(postgres_url)
    assert await connection.fetchval("SELECT n FROM kept") == 1
    await connection.close()


async def test_it_is_frozen_and_thawed(postgres_server: PostgresServer, postgres_url: str):
    connection = await asyncpg.connect(postgres_url)
    postgres_server.stop()
    asked = asyncio.ensure_future(connection.fetchval("SELECT 7"))
    done, _ = await asyncio.wait([asked], timeout=0.2)
    assert not done
    postgres_server.cont()
    assert await asked == 7
    await connection.close()


async def test_each_test_has_an_empty_database(postgres_server: PostgresServer, postgres_url: str):
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("CREATE TABLE mine (n INT)")
    other = await asyncpg.connect(postgres_server.fresh())
    assert await other.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []
    await other.close()
    connection.terminate()


async def test_its_order_of_text_is_not_the_bytes(postgres_url: str):
    """Whatever sorts by text has to ask for the order that it means."""
    connection = await asyncpg.connect(postgres_url)
    assert [row["x"] for row in await connection.fetch("SELECT x FROM (VALUES ('B'), ('a')) AS v (x) ORDER BY x")] == [
        "a",
        "B",
    ]
    await connection.close()
