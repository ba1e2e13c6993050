"""Readers of one session at every replica, and the project feed at every door: all see the same (DESIGN 3.9, 4)."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from runner.client import ApiError
from tests.agents import Gate, directive, steps
from tests.e2e.server import SECONDS
from tests.normal_form import normal_form
from tests.replicas.bed import TOKEN, Cluster, Member, Session
from tests.replicas.conftest import Sessions

WORDS, BREAKS = 40, 10
BIG = "x" * 100_000


def script(gates: list[Gate]) -> str:
    """Thoughts, a tool call, words with a gate among them now and then, and some that are large."""
    parts = [steps.thought("hm "), steps.thought("so "), steps.tool("t1", "in_progress")]
    for n in range(WORDS):
        parts.append(steps.text(f"word{n} " + (BIG if n % 8 == 0 else "")))
        if n % (WORDS // BREAKS) == 0:
            parts.append(steps.gate(gates[n // (WORDS // BREAKS)]))
    return directive(*parts, steps.tool_status("t1", "completed"), steps.text("end"), steps.reply())


def over(lines: list[dict[str, Any]]) -> bool:
    return any(line.get("type") == "session_idle" for line in lines)


def last(lines: list[dict[str, Any]]) -> str | None:
    return next((line["cursor"] for line in reversed(lines) if "cursor" in line), None)


async def steady(session: Session, member: Member, into: list[dict[str, Any]]) -> None:
    """Reads on, whatever happens."""
    while not over(into):
        try:
            async for line in session.at(member).events(session.session, after=last(into), follow=True):
                into.append(line)
                if over(into):
                    break
        except ApiError:
            await asyncio.sleep(0.05)


async def restless(session: Session, member: Member, into: list[dict[str, Any]], gates: list[Gate]) -> None:
    """Comes back ten times, between any two events: behind each gate it leaves and reads on by its cursor."""
    for gate in gates:
        stream = session.at(member).events(session.session, after=last(into), follow=True)
        await gate.reached(SECONDS)
        try:
            async with asyncio.timeout(0.3):
                async for line in stream:
                    into.append(line)
        except TimeoutError:
            pass
        finally:
            await stream.aclose()
        gate.open()
    await steady(session, member, into)


async def slow(session: Session, member: Member, into: list[dict[str, Any]]) -> None:
    """Takes next to nothing until the turn is over; is cut for it, or not, and reads on by its cursor."""
    host, port = member.address
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, (host, port))
        head = f"GET /v1/sessions/{session.session}/events?follow=1 HTTP/1.1\r\nHost: {host}:{port}\r\n"
        await loop.sock_sendall(raw, f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        got = b""
        while got.count(b"\n") < 12:
            data = await loop.sock_recv(raw, 512)
            if not data:
                break
            got += data
            await asyncio.sleep(0.2)
    # The rest of the lines went with the connection: only whole ones count (case H5).
    into += [json.loads(line) for line in got.split(b"\n") if line.startswith(b"{") and line.rstrip().endswith(b"}}")]
    await steady(session, member, into)


async def test_three_readers_and_one_elsewhere_see_the_same_conversation(
    cluster: Cluster, sessions: Sessions, tmp_path: Any
) -> None:
    """One reads on, one comes back ten times, one is slow, one is at another replica: equal in normal form."""
    session = sessions()
    gates = [Gate(tmp_path / f"gate{n}") for n in range(BREAKS)]
    turn = session.dispatch(cluster.a, script(gates))
    await gates[0].reached(SECONDS)
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in ("steady", "restless", "slow", "elsewhere", "both")}
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(
            steady(session, cluster.a, seen["steady"]),
            restless(session, cluster.a, seen["restless"], gates),
            slow(session, cluster.a, seen["slow"]),
            steady(session, cluster.b, seen["elsewhere"]),
        )
    assert (await turn.result())["ok"]
    await steady(session, cluster.b, seen["both"])
    stored = await session.records(cluster.b)
    expected = normal_form(stored)
    for name, lines in seen.items():
        assert normal_form(lines) == expected, name
        cursors = [tuple(map(int, line["cursor"].split("."))) for line in lines if "cursor" in line]
        assert cursors == sorted(set(cursors)), name


async def test_the_project_feed_is_the_same_at_every_door(cluster: Cluster, sessions: Sessions) -> None:
    """Turns at both runners; each door tells of both, in one order, live and from a cursor."""
    first, second = sessions(), sessions()
    mine = {first.session, second.session}

    async def told(member: Member, after: str | None, into: list[dict[str, Any]]) -> None:
        async for line in first.at(member).feed(after=after, follow=True):
            if line["kind"] == "ping" or line["session_id"] in mine:
                into.append(line)
            if [one.get("type") for one in into].count("session_idle") == 2:
                break

    heard: list[list[dict[str, Any]]] = [[] for _ in cluster.doors]
    following = [asyncio.create_task(told(door, None, into)) for door, into in zip(cluster.doors, heard, strict=True)]
    async with asyncio.timeout(SECONDS):
        while not all(heard):
            await asyncio.sleep(0.01)
        assert (await first.prompt(cluster.a, "hi"))["ok"]
        assert (await second.prompt(cluster.b, "hi"))["ok"]
        await asyncio.gather(*following)
        events = [[line for line in lines if line["kind"] == "event"] for lines in heard]
        assert all(lines == events[0] for lines in events)
        assert {(line["session_id"], line["type"]) for line in events[0]} == {
            (name, kind) for name in mine for kind in ("session_busy", "session_idle")
        }
        again: list[dict[str, Any]] = []
        await told(cluster.doors[-1], heard[0][0]["cursor"], again)
        assert [line for line in again if line["kind"] == "event"] == events[0]
