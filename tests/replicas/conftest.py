"""Clusters of the tests with several replicas: one for a file's tests, or one of its own for a test that hurts it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from runner.client import Client
from tests.redis_server import RedisServer
from tests.replicas.bed import LEASE, Cluster, Session

_numbers = itertools.count(1)
Sessions = Callable[[], Session]


@pytest.fixture(scope="module", params=["redis", "plane"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, own_redis: RedisServer
) -> Iterator[Cluster]:
    """Shared by a file's tests; each has sessions of its own, and leaves everybody alive."""
    yield from _run(tmp_path_factory, request.param, own_redis)


@pytest.fixture(scope="module")
def own_redis() -> Iterator[RedisServer]:
    """A Redis of the file's own, which nobody else flushes."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(params=["redis", "plane"])
def fresh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[Cluster]:
    """A cluster of one test, which may hurt it."""
    yield from _run(tmp_path_factory, request.param, redis_server)


@pytest.fixture(params=["redis", "plane"])
def patient(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[Cluster]:
    """A cluster of one test, whose leases outlive the restart of a plane."""
    yield from _run(tmp_path_factory, request.param, redis_server, 30.0)


def _run(
    tmp_path_factory: pytest.TempPathFactory, kind: str, redis: RedisServer, lease: float = LEASE
) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp(kind), redis if kind == "redis" else None, lease)
    try:
        made.start()
        yield made
    finally:
        made.over()


@pytest.fixture
async def sessions(request: pytest.FixtureRequest) -> AsyncIterator[Sessions]:
    """Makes sessions of the test's cluster, with a client for every replica."""
    name = next(name for name in ("fresh", "patient", "cluster") if name in request.fixturenames)
    cluster: Cluster = request.getfixturevalue(name)
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for member in cluster.doors:
            clients[member.folder.name] = await stack.enter_async_context(member.client())
        yield lambda: Session(cluster, clients, f"s{next(_numbers)}")
