"""A plane's coordination routes over real sockets, in this process."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from runner.clock import Clock, SystemClock
from runner.config import Settings
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import LeasePlane
from runner.server.app import build_app, start_site, stop_site
from runner.server.auth import ALL_BUT_RUNNER, AccessToken
from runner.server.coordination import add_coordination
from runner.store.memory import MemoryStore
from runner.store.port import Store
from tests.server.double import FakeSessions

RUNNER = frozenset({"runner"})
TOKENS = [
    AccessToken("run-p", "p", RUNNER),
    AccessToken("run-p2", "p2", RUNNER),
    AccessToken("run-q", "q", RUNNER),
    AccessToken("user-p", "p", ALL_BUT_RUNNER),
]
BOTH = {"p": "run-p", "p2": "run-p2"}
BODY_MAX = 64 * 1024


@dataclass
class ServedPlane:
    """A plane that is served; ``stop`` and ``start`` again on the same port: an outage."""

    leases: LeasePlane
    store: Store
    clock: Clock
    max_body_bytes: int
    tokens: list[AccessToken]
    url: str = ""
    port: int = 0
    runner: web.AppRunner | None = None

    async def start(self) -> None:
        settings = Settings.model_validate({"server": {"max_body_bytes": self.max_body_bytes}})
        app = build_app(FakeSessions(), settings, self.tokens)
        add_coordination(app, self.leases, self.store, self.clock)
        self.runner, self.url = await start_site(app, "127.0.0.1", self.port, close_seconds=0.2)
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await stop_site(self.runner)
            self.runner = None


async def serve_plane(
    leases: LeasePlane | None = None,
    store: Store | None = None,
    clock: Clock | None = None,
    *,
    max_body_bytes: int = BODY_MAX,
    tokens: list[AccessToken] | None = None,
) -> ServedPlane:
    """A served plane over memory, unless other parts are given."""
    clock = clock or SystemClock()
    plane = leases if leases is not None else MemoryLeasePlane(clock, 20, shared=True)
    served = ServedPlane(plane, store if store is not None else MemoryStore(), clock, max_body_bytes, tokens or TOKENS)
    await served.start()
    return served
