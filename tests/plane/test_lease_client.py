"""The lease plane over HTTP: outages, slow answers, cancelled calls, and the line for notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import pytest
from aiohttp import ClientSession, web

from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.leases.heartbeat import Heartbeats
from runner.leases.http import HttpLeasePlane
from runner.leases.port import BeatAnswer, Heartbeat, ReplicaInfo
from runner.wire.coordination import HeartbeatRequest
from tests.plane.bed import BOTH, ServedPlane
from tests.server.double import auth


@pytest.fixture
async def client(plane: ServedPlane) -> AsyncIterator[HttpLeasePlane]:
    made = HttpLeasePlane(plane.url, BOTH, seconds=2.0, ping_seconds=0.2)
    yield made
    await made.close()


async def until(true: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


def beat(turn: str = "t1", project: str = "p", session: str = "s", **more: Any) -> Heartbeat:
    return Heartbeat(project, session, turn, **{"replica_id": "r1", **more})


async def test_a_plane_that_is_away_is_unavailable_and_back_when_it_is_back(plane: ServedPlane, client: HttpLeasePlane):
    assert (await client.beat(beat())).admitted
    await plane.stop()
    for call in (client.beat(beat()), client.look("p", "s"), client.replicas(), client.release_replica("r1")):
        with pytest.raises(RunnerError) as caught:
            await call
        assert caught.value.code == "plane_unavailable"
    await plane.start()
    assert (await client.beat(beat())).epoch == 1
    holder = await client.look("p", "s")
    assert holder is not None
    assert (holder.replica_id, holder.alive, holder.running, holder.epoch) == ("r1", "t1", "t1", 1)
    assert holder.now >= holder.started_at > 0


async def test_a_project_without_a_token_and_a_token_that_is_refused_are_no_outage(plane: ServedPlane):
    """An outage may admit without a fence; a wrong set-up must not."""
    for tokens, project in ((BOTH, "q"), ({"p": "user-p"}, "p"), ({"p": "nobody"}, "p")):
        client = HttpLeasePlane(plane.url, tokens)
        with pytest.raises(RunnerError) as caught:
            await client.beat(beat(project=project))
        assert caught.value.code == "internal"
        await client.close()
    with pytest.raises(ValueError, match="token"):
        HttpLeasePlane(plane.url, {})


@pytest.mark.parametrize("status", [200, 302, 404, 500, 502, 503])
async def test_whatever_else_answers_there_is_no_plane(status: int):
    async def odd(request: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>", headers={"Location": "/elsewhere"} if status == 302 else {})

    async with serving(odd) as url:
        client = HttpLeasePlane(url, BOTH)
        with pytest.raises(RunnerError) as caught:
            await client.beat(beat())
        assert caught.value.code == "plane_unavailable"
        await client.close()


@asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[str]:
    """One handler on every path of a server of its own."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_silent_plane_costs_one_time_out_case_m8():
    """Case M8: every beat has a deadline."""
    gate = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await gate.wait()
        return web.Response()

    async with serving(silent) as url:
        client = HttpLeasePlane(url, BOTH, seconds=0.1)
        async with asyncio.timeout(2):
            with pytest.raises(RunnerError) as caught:
                await client.beat(beat())
        assert caught.value.code == "plane_unavailable"
        await client.close()
        gate.set()


async def test_a_cancelled_call_leaves_no_answer_behind_for_the_next_one():
    """Each answer names the session that asked: one reply out of step would name another."""
    held: list[asyncio.Event] = []

    async def mirror(request: web.Request) -> web.Response:
        body = await request.json()
        if body["session_id"].startswith("slow"):
            held.append(asyncio.Event())
            await held[-1].wait()
        told = {"replica_id": body["session_id"], "advertise_url": None, "alive": None, "running": None}
        return web.json_response({**told, "epoch": 1, "started_at": 0.0, "now": 0.0})

    async with serving(mirror) as url:
        client = HttpLeasePlane(url, BOTH)
        for n in range(20):
            slow = asyncio.create_task(client.look("p", f"slow{n}"))
            while len(held) <= n:
                await asyncio.sleep(0)
            slow.cancel()
            held[n].set()
            found = await asyncio.gather(*(client.look("p", f"s{n}_{k}") for k in range(5)))
            assert [holder.replica_id for holder in found if holder] == [f"s{n}_{k}" for k in range(5)]
            with pytest.raises(asyncio.CancelledError):
                await slow
        await client.close()


async def test_the_beat_loop_rides_an_outage_out_over_http_case_m8(plane: ServedPlane, client: HttpLeasePlane):
    """Case M8: beats go on after an outage, and the turn keeps its epoch."""
    lost: list[tuple[str, BeatAnswer]] = []
    beats = Heartbeats(
        client,
        SystemClock(),
        beat_seconds=0.05,
        beat_timeout_seconds=0.5,
        on_lost=lambda turn, answer: lost.append((turn, answer)),
    )
    first = await beats.first(beat())
    await plane.stop()
    await asyncio.sleep(0.2)
    await plane.start()
    before = plane.leases.lease("p", "s").expires_at  # type: ignore[attr-defined]
    await until(lambda: plane.leases.lease("p", "s").expires_at > before)  # type: ignore[attr-defined]
    assert plane.leases.lease("p", "s").epoch == first.epoch  # type: ignore[attr-defined]
    assert lost == []
    await beats.close()


async def test_notes_reach_their_replica_whatever_project_pushed_them(plane: ServedPlane, client: HttpLeasePlane):
    """A Stop is pushed (DESIGN 3.7); one line carries the notes of all the runner's projects."""
    notes: list[Any] = []
    await client.announce(ReplicaInfo("r1", "http://127.0.0.1:9", "boot", "/lock", 7))
    await client.listen("r1", notes.append)
    for project in ("p", "p2"):
        assert await client.push("r1", {"kind": "command", "project": project, "command_id": "ä"})
    assert await plane.leases.push("r1", {"kind": "command", "project": "p", "command_id": "own"})
    await until(lambda: len(notes) == 3)
    assert [(note["project"], note["command_id"]) for note in notes] == [("p", "ä"), ("p2", "ä"), ("p", "own")]
    assert not await client.push("r2", {"kind": "command", "project": "p"})
    assert await client.replicas() == [ReplicaInfo("r1", "http://127.0.0.1:9", "boot", "/lock", 7)]


async def test_notes_of_another_project_do_not_reach_a_runner(plane: ServedPlane, client: HttpLeasePlane):
    """Case J5."""
    notes: list[Any] = []
    await client.listen("r1", notes.append)
    await plane.leases.push("r1", {"kind": "command", "project": "q"})
    await plane.leases.push("r1", {"kind": "command"})
    other = HttpLeasePlane(plane.url, {"q": "run-q"}, seconds=0.3)
    with pytest.raises(RunnerError):
        await other.push("r1", {"kind": "command", "project": "p"})
    await other.listen("r1", notes.append)
    await client.push("r1", {"kind": "command", "project": "p", "n": 1})
    await until(lambda: notes)
    await asyncio.sleep(0.05)
    assert [note.get("n") for note in notes] == [1]
    await other.close()


async def test_a_note_that_raises_costs_nothing(client: HttpLeasePlane):
    notes: list[Any] = []

    def picky(note: Any) -> None:
        notes.append(note)
        raise KeyError("scripted")

    await client.listen("r1", picky)
    for n in range(3):
        await client.push("r1", {"n": n})
    await until(lambda: len(notes) == 3)


async def test_the_line_comes_back_after_every_outage(plane: ServedPlane, client: HttpLeasePlane):
    notes: list[Any] = []
    await client.listen("r1", notes.append)
    for n in range(3):
        await plane.stop()
        await plane.start()

        def arrived(n: int = n) -> bool:
            return any(note["n"] == n for note in notes)

        async with asyncio.timeout(10):
            while not arrived():
                await plane.leases.push("r1", {"project": "p", "n": n})
                await asyncio.sleep(0.05)


async def test_a_runner_starts_while_its_plane_is_away(plane: ServedPlane):
    notes: list[Any] = []
    await plane.stop()
    client = HttpLeasePlane(plane.url, BOTH, seconds=0.2)
    await client.listen("r1", notes.append)
    await plane.start()
    async with asyncio.timeout(10):
        while not notes:
            await plane.leases.push("r1", {"project": "p"})
            await asyncio.sleep(0.05)
    await client.close()


async def test_the_line_waits_for_leases_that_are_away(
    plane: ServedPlane, client: HttpLeasePlane, monkeypatch: pytest.MonkeyPatch
):
    """A plane whose Redis is away takes no listener yet; the runner comes again."""
    listen, tries = plane.leases.listen, []

    async def fails_twice(replica_id: str, on_note: Any) -> None:
        tries.append(replica_id)
        if len(tries) < 3:
            raise RunnerError("plane_unavailable", "scripted")
        await listen(replica_id, on_note)

    monkeypatch.setattr(plane.leases, "listen", fails_twice)
    notes: list[Any] = []
    await client.listen("r1", notes.append)
    async with asyncio.timeout(10):
        while not notes:
            await plane.leases.push("r1", {"project": "p"})
            await asyncio.sleep(0.05)
    assert len(tries) == 3


async def test_a_note_is_bounded(client: HttpLeasePlane):
    with pytest.raises(RunnerError, match="larger than"):
        await client.push("r1", {"project": "p", "filler": "x" * 20_000})


async def test_a_runner_that_reads_no_notes_is_cut_and_holds_nobody_up(plane: ServedPlane, client: HttpLeasePlane):
    url = f"{plane.url}/v1/coordination/commands"
    async with ClientSession(headers=auth("run-p")) as http, http.ws_connect(url, autoping=False) as deaf:
        await deaf.send_json({"replica": {"replica_id": "r1"}})
        assert (await deaf.receive_json())["kind"] == "listening"
        for n in range(3000):
            await plane.leases.push("r1", {"project": "p", "n": n, "filler": "x" * 10_000})
        async with asyncio.timeout(5):
            assert (await client.beat(beat())).admitted
            while not deaf.closed:
                await deaf.receive()
    notes: list[Any] = []
    await client.listen("r1", notes.append)
    await client.push("r1", {"n": 1})
    await until(lambda: notes)


@pytest.mark.parametrize(
    "hello",
    ["{}", "[]", "nonsense", '{"replica":{"replica_id":"../x"}}', '{"replica":{"replica_id":"r"},"tokens":["nobody"]}'],
)
async def test_a_wrong_first_frame_ends_the_line_with_a_reason(plane: ServedPlane, hello: str):
    url = f"{plane.url}/v1/coordination/commands"
    async with ClientSession(headers=auth("run-p")) as http, http.ws_connect(url) as line:
        await line.send_str(hello)
        frame = await line.receive(5)
        assert (line.close_code, bool(frame.extra)) == (1008, True)


def test_a_beat_travels_whole():
    assert set(HeartbeatRequest.model_fields) == {item.name for item in fields(Heartbeat)} - {"project"}


async def test_named_leases_are_the_planes_own_business(client: HttpLeasePlane):
    assert client.shared
    assert not await client.take_lease("sweep", "r1", 5)
