"""What a real server does by itself to its store: what is too old goes, an ending that is missing comes back."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

from runner.client import Client
from tests.e2e.conftest import Serve
from tests.e2e.server import Server
from tests.e2e.talk import Talk

TWO_DAYS_MS = 2 * 24 * 3600 * 1000
RETENTION = "[records]\nretention_days = 1\n"


def change(server: Server, *statements: str) -> None:
    """Change the store's file while nobody uses it."""
    with closing(sqlite3.connect(server.state_dir / "store.sqlite3", isolation_level=None)) as store:
        for statement in statements:
            assert store.execute(statement).rowcount > 0, statement


async def kinds(client: Client, after: str | None = None) -> list[str]:
    return [event["type"] async for event in client.events("s", after=after)]


async def until(server: Server, read: Any, wanted: Any) -> None:
    """Poll until ``read`` says so; the sweep begins five seconds behind the start."""
    async with asyncio.timeout(40):
        while await read() != wanted:
            assert server.running, server.said()
            await asyncio.sleep(0.05)


async def test_a_server_forgets_what_is_older_than_its_days(serve: Serve) -> None:
    server = serve(RETENTION)
    async with server.client() as client:
        first = await Talk(server, client, "s", harness="demo").prompt("say old words")
        assert first["ok"], first
        old = await kinds(client)
        assert "done" in old
    server.stop()
    change(
        server,
        f"UPDATE records SET at = at - {TWO_DAYS_MS}",
        f"UPDATE turns SET started_at = started_at - {TWO_DAYS_MS}, ended_at = ended_at - {TWO_DAYS_MS}",
    )
    server.start()
    async with server.client() as client:
        await until(server, lambda: kinds(client), [])
        assert (await kinds(client, "1.1"))[:1] == ["resync"]
        view = await client.session("s")
        assert view["last_turn"]["turn_id"] == first["turn_id"]
        second = await Talk(server, client, "s", harness="demo").prompt("say new words")
        assert second["ok"], second
        assert second["turn_id"] != first["turn_id"]
        assert (await kinds(client)).count("done") == 1


async def test_an_ending_that_is_missing_is_told_once(serve: Serve) -> None:
    server = serve()
    async with server.client() as client:
        first = await Talk(server, client, "s", harness="demo").prompt("say one")
        second = await Talk(server, client, "s", harness="demo").prompt("say two")
    server.stop()
    change(
        server,
        f"DELETE FROM records WHERE type = 'done' AND turn_id = '{first['turn_id']}'",
        "UPDATE turns SET ended_at = ended_at - 60000",
    )
    server.start()
    async with server.client() as client:

        async def done() -> list[str]:
            return [event["turn_id"] async for event in client.events("s") if event["type"] == "done"]

        await until(server, done, [second["turn_id"], first["turn_id"]])
        assert (await Talk(server, client, "s", harness="demo").prompt("say three"))["ok"]
        assert len(await done()) == 3
    server.stop()
    server.start()
    async with server.client() as client:
        assert len(await done()) == 3
