"""The application of a plane: it coordinates runners, and answers for their sessions (DESIGN 4)."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from runner.clock import Clock
from runner.config import Settings
from runner.leases.port import LeasePlane
from runner.metrics import Metrics
from runner.server.app import build_app
from runner.server.auth import AccessToken
from runner.server.coordination import COORDINATION, add_coordination
from runner.session.owners import Owners
from runner.session.placing import Placement
from runner.session.port import Sessions
from runner.store.port import Store


def build_gateway(
    sessions: Sessions,
    settings: Settings,
    tokens: Iterable[AccessToken],
    *,
    owners: Owners,
    plane: LeasePlane,
    store: Store,
    clock: Clock,
    bind_host: str | None = None,
    metrics: Metrics | None = None,
) -> web.Application:
    """As ``build_app``, with the coordination routes; what nobody holds goes to a runner of the caller's project.

    Args:
        sessions: reads the shared store, and takes commands.
        settings: ``[server]`` is read here.
        tokens: who may call; runners need one with the scope ``runner``.
        owners: who holds which session.
        plane: where the leases are; the caller closes it.
        store: what the runners share; the caller closes it.
        clock: for instants that the plane sets.
        bind_host: where it will listen, when that is not ``[server] host``.
        metrics: see ``build_app``.
    """

    def serves(replica_id: str, project: str) -> bool:
        return app[COORDINATION].runners.may_see(replica_id, project)

    place = Placement(owners.others, serves)
    app = build_app(
        sessions, settings, tokens, bind_host=bind_host, clock=clock, owners=owners, place=place, metrics=metrics
    )
    add_coordination(app, plane, store, clock)
    return app
