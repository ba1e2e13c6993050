"""The coordination routes as DESIGN 4 writes them, for a runner that is not ours too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession

from runner.errors import RunnerError
from runner.leases.port import Heartbeat
from runner.server.coordination import COORDINATION_ROUTES
from runner.store.port import CommandRow
from tests.plane.bed import BODY_MAX, ServedPlane
from tests.server.double import auth
from tests.store.rows import admission, ending, prompt, record, session, turn

BASE = "/v1/coordination"
AT = "2026-11-29T16:09:53.123Z"


async def post(http: ClientSession, path: str, body: Any, token: str = "run-p") -> tuple[int, Any]:
    async with http.post(f"{BASE}/{path}", json=body, headers=auth(token)) as answer:
        return answer.status, orjson.loads(await answer.read())


def beat(turn_id: str = "t1", replica_id: str = "r1", phase: str = "running", **more: Any) -> dict[str, Any]:
    return {"session_id": "s", "turn_id": turn_id, "replica_id": replica_id, "phase": phase, **more}


def item(n: int, epoch: int = 1, turn_id: str = "t1", session_id: str = "s", **more: Any) -> dict[str, Any]:
    own = {"record_id": f"rec_{turn_id}_{epoch}_{n}", "session_id": session_id, "turn_id": turn_id}
    return {**own, "cursor": f"{epoch}.{n}", "type": "message", "data": {"text": "ä"}, "at": AT, **more}


def asked(**more: Any) -> dict[str, Any]:
    own = {"interaction_id": "i1", "session_id": "s", "turn_id": "t1", "status": "pending", "kind": "permission"}
    return {
        **own,
        "tool_call": {"title": "rm"},
        "options": [{"option_id": "a"}],
        "created_at": AT,
        "expires_at": AT,
        **more,
    }


async def test_a_heartbeat_admits_then_refuses_another_turn_and_names_the_owner(
    plane: ServedPlane, http: ClientSession
):
    """Case B11: what another replica beats changes nothing and is told the owner, over HTTP too."""
    status, first = await post(http, "heartbeat", beat())
    assert status == 200
    assert {name: first[name] for name in ("admitted", "is_current_turn", "owner", "epoch", "commands")} == {
        "admitted": True,
        "is_current_turn": True,
        "owner": "r1",
        "epoch": 1,
        "commands": [],
    }
    assert first["lease_seconds"] == 20
    for phase in ("running", "paused", "parked", "ended"):
        _, other = await post(http, "heartbeat", beat("t2", "r2", phase))
        assert (other["admitted"], other["owner"], other["epoch"]) == (False, "r1", 0)
        _, again = await post(http, "heartbeat", beat("t1", "r2", phase))
        assert (again["admitted"], again["owner"]) == (False, "r1")
    _, mine = await post(http, "heartbeat", beat(epoch=1))
    assert (mine["admitted"], mine["epoch"]) == (True, 1)


async def test_the_end_beat_frees_the_session(http: ClientSession):
    await post(http, "heartbeat", beat())
    _, ended_beat = await post(http, "heartbeat", beat(phase="ended"))
    assert (ended_beat["admitted"], ended_beat["owner"]) == (True, None)
    _, parked = await post(http, "heartbeat", beat("t2", "r2", epoch_floor=6))
    assert parked["epoch"] == 7
    _, kept = await post(http, "heartbeat", beat("t2", "r2", "ended", seat_parked=True))
    assert kept["owner"] == "r2"


async def test_a_runner_that_names_no_floor_gets_an_epoch_beyond_the_stored_ones(
    plane: ServedPlane, http: ClientSession
):
    await plane.store.admit(admission("old", 41))
    _, answer = await post(http, "heartbeat", beat())
    assert answer["epoch"] == 42
    _, again = await post(http, "heartbeat", beat(epoch=42))
    assert (again["admitted"], again["epoch"]) == (True, 42)


async def test_the_project_is_the_tokens(plane: ServedPlane, http: ClientSession):
    """Case J5."""
    await post(http, "heartbeat", beat())
    _, other = await post(http, "heartbeat", beat("t9", "r9"), "run-q")
    assert (other["admitted"], other["owner"]) == (True, "r9")
    status, refused = await post(http, "heartbeat", beat(project="p"), "run-q")
    assert (status, refused["code"], refused["field"]) == (400, "invalid_request", "project")
    status, holder = await post(http, "look", {"session_id": "s"})
    assert (status, holder["replica_id"], holder["running"]) == (200, "r1", "t1")
    assert (await post(http, "look", {"session_id": "none"}))[1] is None


async def test_a_beat_tells_the_open_commands_of_its_session_and_goes_on_without_a_store(
    plane: ServedPlane, http: ClientSession
):
    await post(http, "heartbeat", beat())
    await plane.store.submit_command(CommandRow("p", "s", "c1", "cancel", "pending", "t1", 5))
    await plane.store.submit_command(CommandRow("q", "s", "c2", "cancel", "pending", "t1", 5))
    _, answer = await post(http, "heartbeat", beat())
    assert answer["commands"] == [{"command_id": "c1", "kind": "cancel", "turn_id": "t1"}]
    _, refused = await post(http, "heartbeat", beat("t2", "r2"))
    assert refused["commands"] == []
    plane.store.unavailable = True  # type: ignore[attr-defined]
    status, answer = await post(http, "heartbeat", beat())
    assert (status, answer["admitted"], answer["commands"]) == (200, True, [])
    status, problem = await post(http, "heartbeat", {**beat("t5"), "session_id": "fresh"})
    assert (status, problem["code"]) == (503, "store_unavailable")


async def test_records_are_accepted_once_durable_and_refused_when_they_cannot_be(
    plane: ServedPlane, http: ClientSession
):
    """Cases G1 and H4: 200 only for what is durable; the sender keeps what got a 503."""
    await plane.store.admit(admission(prompt=prompt()))
    body = {"session_id": "s", "turn_id": "t1", "epoch": 1, "records": [item(1), item(2)]}
    plane.store.unavailable = True  # type: ignore[attr-defined]
    status, problem = await post(http, "records", body)
    assert (status, problem["code"], problem["retryable"]) == (503, "store_unavailable", True)
    plane.store.unavailable = False  # type: ignore[attr-defined]
    assert await post(http, "records", body) == (200, {"accepted": 2, "quarantined": 0})
    assert (await post(http, "records", body))[0] == 200
    stored = await plane.store.records("p", "s", None, 10)
    assert [(row.epoch, row.n, row.prompt_id, orjson.loads(row.data)) for row in stored] == [
        (1, 1, "p1", {"text": "ä"}),
        (1, 2, "p1", {"text": "ä"}),
    ]


@pytest.mark.parametrize(
    ("records", "epoch", "counts"),
    [
        ([item(1), item(2, turn_id="t9")], 1, (1, 1)),
        ([item(1), item(2, epoch=2)], 1, (1, 1)),
        ([item(1), item(2, session_id="other")], 1, (1, 1)),
        ([item(1, epoch=2)], 2, (0, 1)),
        ([item(1, turn_id="t9")], 1, (0, 1)),
    ],
)
async def test_records_of_another_turn_or_epoch_are_set_aside_and_counted(
    plane: ServedPlane, http: ClientSession, records, epoch, counts
):
    await plane.store.admit(admission())
    status, done = await post(http, "records", {"session_id": "s", "turn_id": "t1", "epoch": epoch, "records": records})
    assert (status, done) == (200, {"accepted": counts[0], "quarantined": counts[1]})
    assert len(await plane.store.records("p", "s", None, 10)) == counts[0]
    assert len(await plane.store.quarantined("p", 10)) == counts[1]


async def test_records_of_an_ended_and_of_an_unknown_turn_are_set_aside(plane: ServedPlane, http: ClientSession):
    await plane.store.admit(admission())
    await plane.store.end(ending(turn(), "lost"))
    for turn_id in ("t1", "never"):
        body = {"session_id": "s", "turn_id": turn_id, "epoch": 1, "records": [item(1, turn_id=turn_id)]}
        assert await post(http, "records", body) == (200, {"accepted": 0, "quarantined": 1})
    assert await plane.store.records("p", "s", None, 10) == []


async def test_a_record_that_the_store_refuses_spares_its_neighbours(plane: ServedPlane, http: ClientSession):
    """Cases G2 and G8."""
    await plane.store.admit(admission(records=[record(2)]))
    body = {"session_id": "s", "turn_id": "t1", "epoch": 1, "records": [item(1), item(2), item(3)]}
    assert await post(http, "records", body) == (200, {"accepted": 2, "quarantined": 1})
    assert [row.n for row in await plane.store.records("p", "s", None, 10)] == [1, 2, 3]
    assert [row.reason for _, row in await plane.store.quarantined("p", 10)] == ["refused"]


async def test_questions_are_upserted_while_their_turn_is_current(plane: ServedPlane, http: ClientSession):
    await plane.store.admit(admission())
    body = {"session_id": "s", "turn_id": "t1", "interactions": [asked()]}
    status, told = await post(http, "interactions", body)
    assert (status, [shown["status"] for shown in told["items"]]) == (200, ["pending"])
    body["interactions"] = [asked(status="consumed", answer={"decision": "allow"})]
    await post(http, "interactions", body)
    body["interactions"] = [asked()]
    _, told = await post(http, "interactions", body)
    assert (told["items"][0]["status"], told["items"][0]["answer"]) == ("consumed", {"decision": "allow"})
    await plane.store.end(ending(turn(), "paused"))
    assert (await post(http, "interactions", body))[0] == 200
    await plane.store.admit(admission("t2", 2))
    status, problem = await post(http, "interactions", body)
    assert (status, problem["code"], problem["current_execution_id"]) == (409, "execution_mismatch", "t2")
    status, problem = await post(http, "interactions", {**body, "turn_id": "t9", "interactions": []})
    assert (status, problem["code"]) == (404, "not_found")
    status, problem = await post(http, "interactions", {**body, "interactions": [asked(turn_id="t2")]})
    assert (status, problem["code"]) == (400, "invalid_request")


async def test_the_outcome_of_a_command_is_told_once(plane: ServedPlane, http: ClientSession):
    await plane.store.submit_command(CommandRow("p", "s", "c1", "cancel", "pending", "t1", 5))
    done = {"state": "applied", "outcome": "stopped"}
    assert (await post(http, "commands/c1/outcome", done, "run-q"))[0] == 404
    assert await post(http, "commands/c1/outcome", done) == (200, {"settled": True})
    assert await post(http, "commands/c1/outcome", {"state": "obsolete"}) == (200, {"settled": False})
    row = await plane.store.command("p", "c1")
    assert row is not None and (row.state, row.outcome) == ("applied", "stopped")
    assert (await post(http, "commands/c1/outcome", {"state": "pending"}))[0] == 400


async def test_a_store_call_answers_for_the_tokens_project_alone(plane: ServedPlane, http: ClientSession):
    """Case J5: no row, key or argument of another project passes, and no answer holds one."""
    await plane.store.admit(admission())
    await plane.store.admit(replace(admission("tq"), session=session(project="q"), turn=turn("tq", project="q")))
    own: dict[str, Any] = {"project": "p", "session_id": "s", "turn_id": "t1"}
    status, row = await post(http, "store/turn", own)
    assert (status, row["turn_id"], row["epoch"]) == (200, "t1", 1)
    assert (await post(http, "store/turn", own, "run-q"))[1]["code"] == "forbidden"
    assert (await post(http, "store/open_turns", {"key": ["q", "s"]}))[0] == 403
    _, rows = await post(http, "store/open_turns", {})
    assert [row["turn_id"] for row in rows] == ["t1"]
    foreign = {"records": [record(1)._asdict() | {"data": "{}", "project": "q"}], "interactions": [], "prompts": []}
    assert (await post(http, "store/append", foreign))[0] == 403
    mixed = replace(ending(turn()), others=[prompt(project="q")])
    body = orjson.loads(orjson.dumps({"ending": mixed}))
    assert (await post(http, "store/end", body))[0] == 403
    assert (await plane.store.turn("p", "s", "t1")) == turn()


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("store/vacuum", {}, 404, None),
        ("store/close", {}, 404, None),
        ("store/__init__", {}, 404, None),
        ("store/turn", {"project": "p", "session_id": "s"}, 400, "turn_id"),
        ("store/turn", {"project": "p", "session_id": "s", "turn_id": 1}, 400, "turn_id"),
        ("store/turn", {"project": "p", "session_id": "s", "turn_id": "t", "more": 1}, 400, "more"),
        ("store/save_session", {"row": {"project": "p"}}, 400, "row.session_id"),
        ("store/turn", [], 400, "body"),
        ("heartbeat", beat(phase="idle"), 400, "phase"),
        ("heartbeat", beat(turn_id="../x"), 400, "turn_id"),
        ("heartbeat", beat(advertise_url="file:///etc"), 400, "advertise_url"),
        ("heartbeat", {"session_id": "s"}, 400, "turn_id"),
        (
            "records",
            {"session_id": "s", "turn_id": "t", "epoch": 1, "records": [item(1, cursor="x")]},
            400,
            "records.0.cursor",
        ),
        ("look", {}, 400, "session_id"),
        ("push", {"replica_id": "r", "note": 3}, 400, "note"),
    ],
)
async def test_a_bad_request_names_its_field(http: ClientSession, path, body, status, field):
    got, problem = await post(http, path, body)
    assert (got, problem.get("field")) == (status, field)


async def test_every_route_needs_the_scope_runner_and_bounds_its_body(plane: ServedPlane, http: ClientSession):
    for route in COORDINATION_ROUTES:
        path = route.path.replace("{call}", "ready").replace("{command_id}", "c1")
        for token, status in (("user-p", 403), ("nobody", 401)):
            async with http.request(route.method, path, headers=auth(token), json={}) as answer:
                assert answer.status == status, route.path
        if route.method == "POST":
            async with http.post(path, data=b'{"a":"' + b"x" * BODY_MAX + b'"}') as answer:
                assert answer.status == 413, route.path
    async with http.get(f"{BASE}/commands") as answer:
        assert answer.status == 400


async def test_the_description_of_a_plane_has_its_routes(http: ClientSession):
    async with http.get("/openapi.json") as answer:
        paths = orjson.loads(await answer.read())["paths"]
    assert {route.path for route in COORDINATION_ROUTES} <= set(paths)


async def test_no_token_speaks_for_a_replica_of_another_project(plane: ServedPlane, http: ClientSession):
    """Case J5: who could take a replica's name would be sent its sessions' requests, with their tokens."""
    mine = {"replica_id": "r1", "advertise_url": "http://127.0.0.1:1", "started_at": 3}
    assert await post(http, "announce", {"replica": mine, "tokens": ["run-p2"]}) == (200, {})
    taken = {"replica": {**mine, "advertise_url": "http://127.0.0.1:666"}}
    for tokens in ([], ["run-p"], ["user-p"]):
        assert (await post(http, "announce", {**taken, "tokens": tokens}, "run-q"))[0] == 403
    assert (await post(http, "announce", {**taken, "tokens": []}))[0] == 403
    assert (await post(http, "release", {"replica_id": "r1"}, "run-q"))[0] == 403
    assert await post(http, "replicas", {}, "run-q") == (200, {"items": []})
    _, listed = await post(http, "replicas", {}, "run-p2")
    assert listed == {"items": [{**mine, "host": "", "lock": None}]}
    await post(http, "heartbeat", beat("tq", advertise_url="http://127.0.0.1:666"), "run-q")
    await post(http, "heartbeat", beat())
    _, holder = await post(http, "look", {"session_id": "s"})
    assert holder["advertise_url"] == "http://127.0.0.1:1"
    assert await post(http, "release", {"replica_id": "r1", "tokens": ["run-p2"]}) == (200, {"released": 2})


async def test_an_unreachable_lease_plane_is_a_503(http: ClientSession, plane: ServedPlane, monkeypatch):
    async def fails(beat: Heartbeat) -> None:
        raise RunnerError("plane_unavailable", "gone")

    monkeypatch.setattr(plane.leases, "beat", fails)
    status, problem = await post(http, "heartbeat", beat())
    assert (status, problem["code"]) == (503, "plane_unavailable")
