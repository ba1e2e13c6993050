"""The planes that the contract holds for, each as two replicas see it, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from runner.leases.http import HttpLeasePlane
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import Heartbeat, LeasePlane
from runner.leases.redis import RedisLeasePlane
from runner.server.auth import AccessToken
from tests.plane.bed import RUNNER, serve_plane
from tests.redis_server import RedisServer

LEASE = 20.0


class HandClock:
    """The plane's clock: it stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def now_ms(self) -> int:
        return round(self.now * 1000)


@dataclass
class Planes:
    """One plane from two replicas, ``r1`` and ``r2``; ``ended`` is what its store knows.

    ``names``: it gives out named leases; a plane over HTTP has none to give, for it sweeps by itself.
    """

    one: LeasePlane
    two: LeasePlane
    clock: HandClock
    ended: set[str] = field(default_factory=set)
    names: bool = True


@dataclass
class Setting:
    """What a backend is opened with."""

    request: pytest.FixtureRequest
    clock: HandClock
    ended: set[str]
    asks_store: bool

    async def has_ended(self, project: str, session_id: str, turn_id: str) -> bool:
        return turn_id in self.ended


Opened = tuple[LeasePlane, LeasePlane]
Backend = Callable[[Setting], AbstractAsyncContextManager[Opened]]


@asynccontextmanager
async def memory(setting: Setting) -> AsyncIterator[Opened]:
    has_ended = setting.has_ended if setting.asks_store else None
    plane = MemoryLeasePlane(setting.clock, LEASE, has_ended=has_ended, shared=True)
    yield plane, plane
    await plane.close()


@asynccontextmanager
async def redis(setting: Setting) -> AsyncIterator[Opened]:
    server: RedisServer = setting.request.getfixturevalue("redis_server")
    has_ended = setting.has_ended if setting.asks_store else None
    one, two = (
        RedisLeasePlane(server.url, lease_seconds=LEASE, has_ended=has_ended, now=setting.clock.monotonic)
        for _ in range(2)
    )
    yield one, two
    await one.close()
    await two.close()


@asynccontextmanager
async def http(setting: Setting) -> AsyncIterator[Opened]:
    has_ended = setting.has_ended if setting.asks_store else None
    behind = MemoryLeasePlane(setting.clock, LEASE, has_ended=has_ended, shared=True)
    tokens = [AccessToken(f"token{n}", project, RUNNER) for n, project in enumerate(PROJECTS)]
    served = await serve_plane(behind, tokens=tokens)
    one, two = (HttpLeasePlane(served.url, {item.project: item.token for item in tokens}) for _ in range(2))
    yield one, two
    await one.close()
    await two.close()
    await served.stop()


BACKENDS: dict[str, Backend] = {"memory": memory, "redis": redis, "http": http}
PROJECTS = ("p", "p2", "a:b", "a:b:c", "ä €", "*")

Open = Callable[..., Awaitable[Planes]]


@pytest.fixture(params=list(BACKENDS))
async def open_planes(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Opens the plane of this run; ``asks_store``: it has a store to ask for endings, ``Planes.ended``."""
    backend = BACKENDS[request.param]
    async with AsyncExitStack() as stack:

        async def opened(*, asks_store: bool = False) -> Planes:
            clock, ended = HandClock(), set[str]()
            one, two = await stack.enter_async_context(backend(Setting(request, clock, ended, asks_store)))
            return Planes(one, two, clock, ended, names=request.param != "http")

        yield opened


@pytest.fixture
async def planes(open_planes: Open) -> Planes:
    """The plane of this run, without a store."""
    return await open_planes()


def beat(turn: str, replica: str = "r1", phase: str = "running", session: str = "s", project: str = "p", **more):
    """A beat of session ``s`` of project ``p``."""
    return Heartbeat(project, session, turn, replica, phase, **more)  # type: ignore[arg-type]
