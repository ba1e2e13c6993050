"""Servers of the black-box tests: one for a file's tests, or one of its own for a test that hurts it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.client import Client
from tests.agents import AgentScript
from tests.e2e.server import Server
from tests.e2e.talk import Talk

Serve = Callable[..., Server]
Scripted = Callable[..., tuple[Talk, AgentScript]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Shared by a file's tests; each has sessions of its own."""
    made = Server(tmp_path_factory.mktemp("server"))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Makes servers that belong to one test; the arguments are those of ``Server`` behind its folder."""
    made: list[Server] = []

    def start(config: str = "", **more: Any) -> Server:
        made.append(Server(tmp_path / f"server{len(made)}", config, **more))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with server.client() as client:
        yield client


_numbers = itertools.count(1)


@pytest.fixture
async def scripted(server: Server, client: Client, tmp_path: Path) -> AsyncIterator[Scripted]:
    """Makes a session of the shared server with a scripted agent of its own.

    Behind the test: one ending for each of its turns, nothing open, nobody but the warm set; then the seat is freed.
    """
    talks: list[Talk] = []

    def make(**switches: Any) -> tuple[Talk, AgentScript]:
        name = f"s{next(_numbers)}"
        script = AgentScript(tmp_path, name, **switches)
        talks.append(scripted_talk(server, client, name, script))
        return talks[-1], script

    yield make
    for talk in talks:
        await talk.check()
        await client.kill(talk.session)


def scripted_talk(server: Server, client: Client, session: str, script: AgentScript) -> Talk:
    """A session whose agent does what ``script`` says."""
    return Talk(server, client, session, harness="scripted", env=script.env)
