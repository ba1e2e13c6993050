"""The store over HTTP: rows that runners on other machines write, and its port call by call (DESIGN 3.9, 4)."""

from __future__ import annotations

import logging
from typing import Final

from aiohttp import web

from runner.clock import parse_rfc3339
from runner.errors import RunnerError
from runner.ids import parse_cursor
from runner.interactions.desk import view
from runner.rules.late import Late
from runner.server.beats import body_as
from runner.server.context import CALLER, SAFE_HEADERS, json_answer, path_id, read_body
from runner.server.runners import COORDINATION, Coordination
from runner.store.codec import ACROSS_PROJECTS, CALLS, decode_parameters, encode, projects
from runner.store.one_by_one import one_by_one
from runner.store.port import Appended, InteractionRow, RecordRow, TurnRow
from runner.store.rows import REFUSED
from runner.terms import Outcome
from runner.wire.codec import to_json
from runner.wire.coordination import (
    InteractionItem,
    InteractionsRequest,
    OutcomeRequest,
    RecordItem,
    RecordsRequest,
)
from runner.wire.plane import STORE_HEADER

log = logging.getLogger("runner.server")
FOREIGN: Final = "another_turn"


async def post_records(request: web.Request) -> web.Response:
    """Make a turn's records durable; those of another turn or epoch, or of an ended one, are set aside and counted.

    200 says that they are durable (case G1); 503 that the runner has to send them again.
    """
    body = await body_as(request, RecordsRequest)
    own, project = request.app[COORDINATION], request[CALLER].project
    turn = await own.store.turn(project, body.session_id, body.turn_id)
    rows = [_record(project, item, turn) for item in body.records]
    fitting = [row for row in rows if (row.session_id, row.turn_id, row.epoch) == _named(body)]
    foreign = [row for row in rows if (row.session_id, row.turn_id, row.epoch) != _named(body)]
    if turn is None or turn.epoch != body.epoch:
        reason = Late.TURN_UNKNOWN if turn is None else Late.STALE_EPOCH
        await own.store.quarantine(fitting, reason, own.clock.now_ms())
        done = Appended(0, len(fitting))
    else:
        done = await _append(own, fitting)
    if foreign:
        await own.store.quarantine(foreign, FOREIGN, own.clock.now_ms())
    quarantined = done.quarantined + len(foreign)
    if quarantined:
        log.error("%d records of turn %s were set aside", quarantined, body.turn_id)
    return json_answer({"accepted": done.accepted, "quarantined": quarantined})


def _named(body: RecordsRequest) -> tuple[str, str, int]:
    return body.session_id, body.turn_id, body.epoch


async def _append(own: Coordination, rows: list[RecordRow]) -> Appended:
    """All at once, else one by one; one that the store refuses counts as set aside."""
    try:
        return await own.store.append(rows)
    except RunnerError as error:
        if error.code != "internal":
            raise
    store, at = own.store, own.clock.now_ms()
    done = await one_by_one(rows, store.append, lambda row: store.quarantine([row], REFUSED, at))
    return Appended(done.accepted, len(rows) - done.accepted - done.dropped, done.dropped)


def _record(project: str, item: RecordItem, turn: TurnRow | None) -> RecordRow:
    epoch, n = parse_cursor(item.cursor) or (0, 0)
    return RecordRow(
        project,
        item.session_id,
        item.record_id,
        item.turn_id,
        turn.prompt_id if turn is not None else None,
        epoch,
        n,
        item.type,
        to_json(item.data),
        parse_rfc3339(item.at),
    )


async def post_interactions(request: web.Request) -> web.Response:
    """Upsert the questions of a turn that runs or is paused; one that is closed stays as it is."""
    body = await body_as(request, InteractionsRequest)
    own, project = request.app[COORDINATION], request[CALLER].project
    for index, item in enumerate(body.interactions):
        if (item.session_id, item.turn_id) != (body.session_id, body.turn_id):
            raise RunnerError("invalid_request", f"interactions.{index}: is of another turn.", field="interactions")
    turn = await own.store.turn(project, body.session_id, body.turn_id)
    if turn is None:
        raise RunnerError("not_found", f"There is no turn {body.turn_id} in session {body.session_id}.")
    last = await own.store.last_turn(project, body.session_id)
    current = last is not None and last.turn_id == turn.turn_id and turn.outcome in (None, Outcome.PAUSED)
    if not current:
        raise RunnerError(
            "execution_mismatch",
            f"Turn {body.turn_id} is over; its questions are closed.",
            current_execution_id=last.turn_id if last is not None and last.outcome is None else None,
        )
    _ = await own.store.append([], [_interaction(project, item) for item in body.interactions])
    stored = [await own.store.interaction(project, item.interaction_id) for item in body.interactions]
    return json_answer({"items": [view(row) for row in stored if row is not None]})


def _interaction(project: str, item: InteractionItem) -> InteractionRow:
    return InteractionRow(
        project,
        item.session_id,
        item.interaction_id,
        item.turn_id,
        item.status,
        item.kind,
        parse_rfc3339(item.created_at),
        parse_rfc3339(item.expires_at),
        {"tool_call": item.tool_call, "options": item.options},
        item.answer,
    )


async def post_outcome(request: web.Request) -> web.Response:
    """Settle a command (DESIGN 3.7); false: it was settled otherwise before."""
    command_id = path_id(request, "command_id")
    body = await body_as(request, OutcomeRequest)
    own, project = request.app[COORDINATION], request[CALLER].project
    if await own.store.command(project, command_id) is None:
        raise RunnerError("not_found", f"There is no command {command_id}.")
    settled = await own.store.settle_command(project, command_id, body.state, body.outcome, own.clock.now_ms())
    return json_answer({"settled": settled})


async def post_store(request: web.Request) -> web.Response:
    """One call of the store's port, for the token's project alone."""
    call = request.match_info["call"]
    if call not in CALLS:
        raise RunnerError("not_found", f"The store has no call {call[:100]}.")
    store, project = request.app[COORDINATION].store, request[CALLER].project
    parameters = decode_parameters(call, await read_body(request))
    if projects(call, parameters) - {project}:
        raise RunnerError("forbidden", f"{call}: names a project that is not the token's.")
    found = await getattr(store, call)(**parameters)
    if call in ACROSS_PROJECTS:
        found = [row for row in found if row.project == project]
    headers = {**SAFE_HEADERS, "Content-Type": "application/json", STORE_HEADER: store.store_id}
    return web.Response(body=encode(found), headers=headers)
