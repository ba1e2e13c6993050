"""One runner whose store is a PostgreSQL, without Redis: killed and restarted under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents import Gate, directive, steps
from tests.e2e.server import SECONDS, Server
from tests.e2e.talk import Talk
from tests.postgres_server import PostgresServer
from tests.replicas.bed import until_async


class OnPostgres(Server):
    """Asks the database who it is."""

    postgres: PostgresServer

    @property
    def store_id(self) -> str:
        return self.postgres.sql("SELECT value FROM meta WHERE name = 'store_id'", self.postgres.database)


@pytest.fixture
def server(tmp_path: Path, postgres_server: PostgresServer, postgres_url: str):
    made = OnPostgres(tmp_path / "server", f'[store]\nurl = "{postgres_url}"\n')
    made.postgres = postgres_server
    made.start()
    yield made
    postgres_server.ready()
    made.stop()


async def test_a_turn_ends_without_its_database_and_is_there_behind_a_restart_of_the_runner(
    server: OnPostgres, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """Case G1: what was streamed waits in the spool, over kill -9 of the runner too."""
    gate = Gate(tmp_path / "gate")
    asked = directive(steps.text("one "), steps.gate(gate), steps.text("two"), steps.reply())
    async with server.client() as client:
        talk = Talk(server, client, "s1", harness="scripted")
        turn = talk.dispatch(asked)
        await gate.reached(SECONDS)
        postgres_server.kill()
        gate.open()
        result = await turn.result()
        assert (result["ok"], result["text"]) == (True, "one two")
    server.kill()
    postgres_server.start()
    server.start()
    async with server.client() as client:
        talk = Talk(server, client, "s1", harness="scripted")
        await until_async(lambda: told(talk), "the history is handed in")
        records = await talk.records()
        assert [one["data"]["text"] for one in records if one["type"] == "message"] == ["one two"]
        assert [one["data"]["outcome"] for one in records if one["type"] == "done"] == ["completed"]
        again = await talk.prompt(directive(steps.text("next"), steps.reply()))
        assert (again["ok"], again["text"]) == (True, "next")


async def told(talk: Talk) -> bool:
    return any(one["type"] == "done" for one in await talk.records())
