"""Leases over HTTP: the plane's side of ``runner.leases.http`` (DESIGN 3.1, 4)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import Any, Final, TypeVar

from aiohttp import WSCloseCode, WSMsgType, web

from runner.errors import RunnerError
from runner.leases.port import Heartbeat, ReplicaInfo
from runner.server.context import CALLER, CONTEXT, json_answer, read_body
from runner.server.runners import COORDINATION, Coordination, Line, projects_of
from runner.wire.codec import to_json
from runner.wire.coordination import (
    LISTENING,
    AnnounceRequest,
    HeartbeatRequest,
    HelloFrame,
    Nothing,
    PushRequest,
    Replica,
    ReplicaRequest,
    SessionRequest,
)
from runner.wire.models import Part, parse

log = logging.getLogger("runner.server")

PING_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.0
HELLO_SECONDS: Final = 10.0
NOTE_BYTES: Final = 16 * 1024
FRAME_MAX: Final = 2 * 1024 * 1024
_REASON_BYTES: Final = 120

Body = TypeVar("Body", bound=Part)


async def body_as(request: web.Request, model: type[Body]) -> Body:
    """The request's body as ``model``.

    Raises:
        RunnerError: ``invalid_request`` naming the field, ``too_large``.
    """
    return parse(model.model_validate, await read_body(request))


async def post_heartbeat(request: web.Request) -> web.Response:
    """Decide a beat of the token's project (DESIGN 3.1.4), and tell the session's open commands."""
    body = await body_as(request, HeartbeatRequest)
    own, project = request.app[COORDINATION], request[CALLER].project
    floor = body.epoch_floor if body.epoch_floor is not None else await _floor(own, project, body)
    mine = own.runners.may_see(body.replica_id, project)
    answer = await own.plane.beat(
        Heartbeat(
            project,
            body.session_id,
            body.turn_id,
            body.replica_id,
            body.phase,
            predecessor=body.predecessor,
            epoch_floor=floor,
            seat_parked=body.seat_parked,
            advertise_url=body.advertise_url if mine else None,
            epoch=body.epoch,
            started_at=body.started_at,
            left=body.left,
        )
    )
    told = asdict(answer)
    told["commands"] = await _commands(own, project, body.session_id) if answer.admitted else []
    return json_answer(told)


async def _floor(own: Coordination, project: str, body: HeartbeatRequest) -> int:
    """What a runner that names no floor would have found in the store (DESIGN 3.1.8); a renewal needs none."""
    if body.phase != "running" or body.epoch:
        return 0
    try:
        last = await own.store.last_turn(project, body.session_id)
    except RunnerError:
        holder = await own.plane.look(project, body.session_id)
        if holder is None or holder.alive != body.turn_id:
            raise
        return 0
    return last.epoch if last is not None and last.turn_id != body.turn_id else 0


async def _commands(own: Coordination, project: str, session_id: str) -> list[dict[str, Any]]:
    try:
        rows = await own.store.open_commands((project, session_id))
    except RunnerError as error:
        log.warning("a beat of session %s told no commands: %s", session_id, error.message)
        return []
    return [{"command_id": row.command_id, "kind": row.kind, "turn_id": row.turn_id} for row in rows]


async def post_look(request: web.Request) -> web.Response:
    """Who holds a session, or null."""
    body = await body_as(request, SessionRequest)
    holder = await request.app[COORDINATION].plane.look(request[CALLER].project, body.session_id)
    return json_answer(None if holder is None else asdict(holder))


async def post_announce(request: web.Request) -> web.Response:
    """Make a replica known, in the name of every project whose token is shown."""
    body = await body_as(request, AnnounceRequest)
    own = request.app[COORDINATION]
    own.runners.bind(body.replica.replica_id, projects_of(request, body.tokens))
    await own.plane.announce(_info(body.replica))
    return json_answer({})


async def post_replicas(request: web.Request) -> web.Response:
    """Known replicas, without those of other projects."""
    _ = await body_as(request, Nothing)
    own, project = request.app[COORDINATION], request[CALLER].project
    known = await own.plane.replicas()
    return json_answer({"items": [asdict(info) for info in known if own.runners.may_see(info.replica_id, project)]})


async def post_release(request: web.Request) -> web.Response:
    """Release every lease of a replica, in the name of all its projects."""
    body = await body_as(request, ReplicaRequest)
    own = request.app[COORDINATION]
    if not own.runners.may_speak(body.replica_id, projects_of(request, body.tokens)):
        raise RunnerError("forbidden", f"Replica {body.replica_id} belongs to another project.")
    return json_answer({"released": await own.plane.release_replica(body.replica_id)})


async def post_push(request: web.Request) -> web.Response:
    """Send a note of the token's project to a replica."""
    body = await body_as(request, PushRequest)
    project = request[CALLER].project
    if body.note.get("project", project) != project:
        raise RunnerError("forbidden", "note.project: is not the token's project.", field="note.project")
    note = {**body.note, "project": project}
    if len(to_json(note)) > NOTE_BYTES:
        raise RunnerError("too_large", f"The note is larger than {NOTE_BYTES} bytes.")
    return json_answer({"listened": await request.app[COORDINATION].plane.push(body.replica_id, note)})


async def get_commands(request: web.Request) -> web.StreamResponse:
    """WebSocket: after one ``HelloFrame`` the notes for a replica, as they are pushed."""
    socket = web.WebSocketResponse(timeout=CLOSE_SECONDS, heartbeat=PING_SECONDS, max_msg_size=FRAME_MAX)
    if not socket.can_prepare(request).ok:
        raise RunnerError("invalid_request", "This route is a WebSocket.")
    context = request.app[CONTEXT]
    task = asyncio.current_task()
    assert task is not None
    context.streams.add(task)
    try:
        await socket.prepare(request)
        hello, projects = await _hello(request, socket)
        request.app[COORDINATION].runners.bind(hello.replica.replica_id, projects)
        await _serve(request.app[COORDINATION], socket, Line(hello.replica.replica_id, projects, task))
    except RunnerError as error:
        code = WSCloseCode.TRY_AGAIN_LATER if error.retryable else WSCloseCode.POLICY_VIOLATION
        _ = await socket.close(code=code, message=error.message.encode()[:_REASON_BYTES])
    except ConnectionError:
        log.debug("a runner left before its line was up")
    except asyncio.CancelledError:
        if socket.prepared and not (context.closing or socket.closed):
            _ = await socket.close(code=WSCloseCode.TRY_AGAIN_LATER, drain=False)
        raise
    finally:
        context.streams.discard(task)
    return socket


async def _hello(request: web.Request, socket: web.WebSocketResponse) -> tuple[HelloFrame, frozenset[str]]:
    try:
        frame = await socket.receive(HELLO_SECONDS)
    except TimeoutError:
        raise RunnerError("invalid_request", "The first frame did not come in time.") from None
    if frame.type is not WSMsgType.TEXT:
        raise RunnerError("invalid_request", "The first frame must be a text.")
    hello = parse(HelloFrame.model_validate, frame.data.encode())
    return hello, projects_of(request, hello.tokens)


async def _serve(own: Coordination, socket: web.WebSocketResponse, line: Line) -> None:
    await own.runners.join(line)
    sender = asyncio.create_task(_send(socket, line), name=f"notes for {line.replica_id}")
    try:
        async for _ in socket:
            raise RunnerError("invalid_request", "Only one frame is expected here.")
    finally:
        own.runners.leave(line)
        sender.cancel()
        _ = await asyncio.wait([sender])


async def _send(socket: web.WebSocketResponse, line: Line) -> None:
    await socket.send_json({"kind": LISTENING})
    while True:
        await socket.send_str((await line.notes.get()).decode())


def _info(replica: Replica) -> ReplicaInfo:
    return ReplicaInfo(replica.replica_id, replica.advertise_url, replica.host, replica.lock, replica.started_at)
