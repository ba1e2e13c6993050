"""The load of readers: followers of one session, and readers who are far behind. Used like ``bench_load``."""

from __future__ import annotations

import json
import os
import re
import selectors
import sys
import time

from scripts.bench_load import END, Connection, heard, hold, stop

CURSOR = re.compile(rb'"cursor":"(\d+\.\d+)"')
TOTAL_MS = re.compile(rb'"total_ms":([\d.]+)')
FOLLOWED = 20_000
SPOKEN = 100


def head_of(connection: Connection, session: str) -> str:
    """The cursor of a session's newest event."""
    connection.get(f"/v1/sessions/{session}/events")
    found = CURSOR.findall(connection.stream())
    return found[-1].decode() if found else "0.0"


def cpu_seconds(pid: str) -> float:
    """CPU time of a process so far, without its children's."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def listening(
    host: str, port: int, token: str, count: int, session: str, after: str
) -> tuple[selectors.BaseSelector, dict[int, bytearray]]:
    """Followers of a session whose head of the answer has come."""
    selector, seen = selectors.DefaultSelector(), {}
    for n in range(count):
        follower = Connection(host, port, token)
        follower.get(f"/v1/sessions/{session}/events?follow=1&after={after}")
        selector.register(follower.socket, selectors.EVENT_READ, n)
        seen[n] = bytearray()
    while any(b"\r\n\r\n" not in got for got in seen.values()):
        for key, _ in selector.select(1):
            seen[key.data] += key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
    time.sleep(0.5)
    return selector, seen


def spoken(host: str, port: int, token: str, count: int, *pids: str) -> dict[str, object]:
    """A turn that speaks as a model does, with ``count`` followers: the server's CPU time and the updates of 5 s."""
    turn, control = Connection(host, port, token), Connection(host, port, token)
    turn.post("/v1/sessions/bench-spoken/turns", {"prompt": "records 1", "harness": "bench"})
    turn.stream()
    selector, seen = listening(host, port, token, count, "bench-spoken", head_of(turn, "bench-spoken"))
    hold(turn, "bench-spoken", f"speak {SPOKEN}")
    before, until = cpu_seconds(pids[0]), time.monotonic() + 5
    while time.monotonic() < until:
        for key, _ in selector.select(0.1):
            seen[key.data] += key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
    cpu = cpu_seconds(pids[0]) - before
    stop(control, "bench-spoken")
    heard(turn.stream())
    counts = [got.count(b'"type":"message_delta"') for got in seen.values()]
    return {"cpu_s": cpu, "updates": max(counts), "behind": max(counts) - min(counts)}


def followers(host: str, port: int, token: str, count: int, *pids: str) -> dict[str, object]:
    """A turn of 20,000 updates that ``count`` followers read live.

    The server's CPU time from the prompt until the last of them has read everything, how long the turn took by its own
    account, and how many updates they missed; ``pids`` names the server's process.
    """
    turn = Connection(host, port, token)
    turn.post("/v1/sessions/bench-followed/turns", {"prompt": "hi"})
    turn.stream()
    selector, seen = listening(host, port, token, count, "bench-followed", head_of(turn, "bench-followed"))
    before = cpu_seconds(pids[0])
    turn.post("/v1/sessions/bench-followed/turns", {"prompt": f"/stream {FOLLOWED}"})
    answer = bytearray()
    selector.register(turn.socket, selectors.EVENT_READ, -1)
    reading = set(seen)
    while reading or not answer.endswith(END):
        for key, _ in selector.select(10):
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            if not data:
                raise SystemExit("a follower was cut")
            if key.data == -1:
                answer += data
                continue
            got = seen[key.data]
            got += data
            if b'"session_idle"' in got[-4096:]:
                reading.discard(key.data)
    cpu = cpu_seconds(pids[0]) - before
    took = TOTAL_MS.search(answer)
    if took is None:
        raise SystemExit(f"a turn failed: {bytes(answer[-500:])!r}")
    lost = sum(FOLLOWED - got.count(b'"type":"message_delta"') for got in seen.values())
    return {"cpu_s": cpu, "turn_ms": float(took[1]), "lost": lost}


def behind(host: str, port: int, token: str, count: int) -> dict[str, object]:
    """Readers of a session with as many records more than they have seen: events a second; 0: it is there already."""
    connection = Connection(host, port, token)
    if count:
        connection.post("/v1/sessions/bench-behind/turns", {"prompt": f"records {count}", "harness": "bench"})
        answer = connection.stream()
        if b'"ok":true' not in answer:
            raise SystemExit(f"a turn failed: {answer[-500:]!r}")
        time.sleep(1)
    rates = []
    for _ in range(7):
        began = time.perf_counter()
        connection.get("/v1/sessions/bench-behind/events?after=1.3")
        got = connection.stream()
        seconds = time.perf_counter() - began
        rates.append(got.count(b'"kind":"event"') / seconds)
        if got.count(b'"type":"plan"') < 9_990:
            raise SystemExit(f"a reader missed something: {got[-500:]!r}")
    return {"per_s": rates}


MODES = {"followers": followers, "spoken": spoken, "behind": behind}

if __name__ == "__main__":
    mode, host, port, token, number, *pids = sys.argv[1:]
    print(json.dumps(MODES[mode](host, int(port), token, int(number), *pids)))
