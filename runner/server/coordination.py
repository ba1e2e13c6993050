"""The routes of a plane for runners on other machines (DESIGN 4); all need the scope ``runner``."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from runner.clock import Clock
from runner.leases.port import LeasePlane
from runner.server import beats, rows
from runner.server.routes import Answer, Handler, Route
from runner.server.runners import COORDINATION, Coordination, Runners
from runner.store.port import Store
from runner.wire import coordination as shapes

__all__ = ["COORDINATION", "COORDINATION_ROUTES", "add_coordination"]

_PREFIX: Final = "/v1/coordination"
_INTERNAL: Final = "Internal to acp-runner: "


def _post(path: str, handler: Handler, name: str, summary: str, answer: Any, body: Any, *errors: int) -> Route:
    answers = {200: Answer("Done.", answer)}
    return Route("POST", f"{_PREFIX}/{path}", handler, "runner", name, summary, answers, (413, 503, *errors), body=body)


COORDINATION_ROUTES: Final[tuple[Route, ...]] = (
    _post(
        "heartbeat",
        beats.post_heartbeat,
        "beat",
        "One beat of a turn; the answer to the first one admits or refuses the turn.",
        shapes.BeatReply,
        shapes.HeartbeatRequest,
    ),
    _post(
        "records",
        rows.post_records,
        "writeRecords",
        "Make records of a turn durable; late ones are set aside.",
        shapes.RecordsReply,
        shapes.RecordsRequest,
    ),
    _post(
        "interactions",
        rows.post_interactions,
        "writeInteractions",
        "Make the questions of a turn durable as they are now.",
        shapes.InteractionsReply,
        shapes.InteractionsRequest,
        404,
        409,
    ),
    _post(
        "commands/{command_id}/outcome",
        rows.post_outcome,
        "settleCommand",
        "Say what became of a command.",
        shapes.OutcomeReply,
        shapes.OutcomeRequest,
        404,
    ),
    Route(
        "GET",
        f"{_PREFIX}/commands",
        beats.get_commands,
        "runner",
        "followCommands",
        "WebSocket: after one `HelloFrame` the notes for a replica, as they are pushed.",
        {101: Answer("A WebSocket.", None, json=False)},
    ),
    _post(
        "look",
        beats.post_look,
        "lookAtLease",
        f"{_INTERNAL}who holds a session, or null.",
        shapes.HolderView | None,
        shapes.SessionRequest,
    ),
    _post(
        "announce",
        beats.post_announce,
        "announceReplica",
        f"{_INTERNAL}make a replica known for three lease times.",
        dict[str, Any],
        shapes.AnnounceRequest,
    ),
    _post(
        "replicas",
        beats.post_replicas,
        "listReplicas",
        f"{_INTERNAL}known replicas.",
        shapes.ReplicaList,
        shapes.Nothing,
    ),
    _post(
        "release",
        beats.post_release,
        "releaseReplica",
        f"{_INTERNAL}release every lease of a replica.",
        shapes.Released,
        shapes.ReplicaRequest,
    ),
    _post(
        "push",
        beats.post_push,
        "pushNote",
        f"{_INTERNAL}send a note to a replica.",
        shapes.Pushed,
        shapes.PushRequest,
    ),
    _post(
        "store/{call}",
        rows.post_store,
        "callStore",
        f"{_INTERNAL}one call of the store's port; parameters and answer are its rows as JSON.",
        Any,
        dict[str, Any],
        404,
    ),
)


def add_coordination(app: web.Application, plane: LeasePlane, store: Store, clock: Clock) -> None:
    """Let ``app`` (of ``build_app``, not served yet) coordinate runners.

    Args:
        app: gets the routes; its tokens of scope ``runner`` may call them.
        plane: where the leases are; the caller closes it.
        store: what the runners share; the caller closes it.
        clock: for instants that the plane sets.
    """
    app[COORDINATION] = Coordination(plane, store, clock, Runners(plane))
    for route in COORDINATION_ROUTES:
        app.router.add_route(route.method, route.path, route.handler)
