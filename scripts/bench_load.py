"""The load generator: raw sockets, standard library, its own process, so that it costs the server little.

Usage: ``bench_load.py MODE HOST PORT TOKEN NUMBER [HOST:PORT ...]``; the addresses are of other replicas, or of Redis.
Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import sys
import time

END = b"\r\n0\r\n\r\n"
HELD = re.compile(rb'"text":"held \.*(\d+)"')
ADMITTED_MS = re.compile(rb'"admitted_ms":([\d.]+)')
PING = b"*1\r\n$4\r\nPING\r\n"
RETRY_SECONDS = 0.02
USABLE_SECONDS = 60


class Connection:
    """One keep-alive HTTP connection."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        self._replica = b""

    def post(self, path: str, body: dict[str, object]) -> None:
        """Send a request."""
        data = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {len(data)}\r\n\r\n"
        self.socket.sendall((head + data).encode())

    def get(self, path: str) -> None:
        """Send a request without a body."""
        self.socket.sendall(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode())

    def answer(self) -> bytes:
        """An answer with a length, whole: head and body."""
        parts = self.until(b"\r\n\r\n")
        head, _, body = parts.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if length is None:
            raise SystemExit(f"an answer without a length: {parts!r}")
        missing = int(length[1]) - len(body)
        while missing > 0:
            data = self._read()
            parts += data
            missing -= len(data)
        return parts

    def replica(self) -> bytes:
        """Who answers here; asked once."""
        if not self._replica:
            self.get("/health")
            found = re.search(rb'"replica_id": *("[^"]+")', self.answer())
            if found is None:
                raise SystemExit("the server does not say which replica it is")
            self._replica = found[1]
        return self._replica

    def stream(self) -> bytes:
        """A chunked answer, whole."""
        parts = bytearray()
        while not parts.endswith(END):
            parts += self._read()
        return bytes(parts)

    def until(self, mark: bytes) -> bytes:
        """What came until ``mark`` was in it."""
        parts = bytearray()
        while mark not in parts:
            parts += self._read()
        return bytes(parts)

    def _read(self) -> bytes:
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data


def turns(host: str, port: int, token: str, count: int) -> dict[str, object]:
    """Warm turns, one after the other: milliseconds each."""
    connection = Connection(host, port, token)
    times = []
    for n in range(count + 21):
        began = time.perf_counter()
        connection.post("/v1/sessions/bench-warm/turns", {"prompt": "hi"})
        answer = connection.stream()
        if n > 20:
            times.append((time.perf_counter() - began) * 1000)
        if b'"ok":true' not in answer:
            raise SystemExit(f"a warm turn failed: {answer[-500:]!r}")
        time.sleep(0.001)
    return {"ms": times}


def updates(host: str, port: int, token: str, count: int) -> dict[str, object]:
    """One turn that streams ``count`` updates: rate, and how many deltas were missing."""
    connection = Connection(host, port, token)
    connection.post("/v1/sessions/bench-stream/turns", {"prompt": "hi"})
    connection.stream()
    began = time.perf_counter()
    connection.post("/v1/sessions/bench-stream/turns", {"prompt": f"/stream {count}"})
    answer = connection.stream()
    seconds = time.perf_counter() - began
    return {"per_s": count / seconds, "lost": count - answer.count(b'"type":"message_delta"')}


def many(host: str, port: int, token: str, seconds: int) -> dict[str, object]:
    """Fifty sessions, closed loop, for some seconds: turns a second."""
    selector = selectors.DefaultSelector()
    tails: dict[int, bytes] = {}
    for n in range(50):
        connection = Connection(host, port, token)
        connection.post(f"/v1/sessions/bench-{n}/turns", {"prompt": "hi"})
        connection.stream()
        selector.register(connection.socket, selectors.EVENT_READ, (n, connection))
        tails[n] = b""
    for key in list(selector.get_map().values()):
        n, connection = key.data
        connection.post(f"/v1/sessions/bench-{n}/turns", {"prompt": "hi"})
    began = time.perf_counter()
    done = 0
    while time.perf_counter() - began < seconds:
        for key, _ in selector.select(1):
            n, connection = key.data
            tails[n] = (tails[n] + connection.socket.recv(1 << 16))[-16:]
            if tails[n].endswith(END):
                done += 1
                tails[n] = b""
                connection.post(f"/v1/sessions/bench-{n}/turns", {"prompt": "hi"})
    return {"per_s": done / (time.perf_counter() - began)}


def hold(turn: Connection, session: str, prompt: str = "hi") -> None:
    """Start a turn that lasts until its Stop, at the runner that is asked; the agent has it when this returns."""
    replica = turn.replica()
    turn.post(f"/v1/sessions/{session}/turns", {"prompt": prompt, "harness": "bench"})
    seen = turn.until(b"\r\n\r\n")
    while b'"message_delta"' not in seen:
        if seen.endswith(END) or b'"code":' in seen:
            raise SystemExit(f"a turn did not start: {seen[-500:]!r}")
        seen += turn.until(b"}")
    if replica not in seen:
        raise SystemExit(f"the turn runs at another replica: {seen[-500:]!r}")


def stop(control: Connection, session: str) -> None:
    """Send a Stop and wait until it is accepted; an agent that settles first makes it 200."""
    control.post(f"/v1/sessions/{session}/cancel", {})
    answer = control.answer()
    if answer[9:12] not in (b"202", b"200"):
        raise SystemExit(f"a Stop was not accepted: {answer!r}")


def heard(answer: bytes) -> int:
    """When the cancel frame reached the agent, on the machine's monotonic clock."""
    found = HELD.search(answer)
    if found is None or b'"outcome":"cancelled"' not in answer:
        raise SystemExit(f"a Stop did not reach the agent: {answer[-500:]!r}")
    return int(found[1])


def elsewhere(door: str, token: str) -> Connection:
    """A connection to another replica."""
    host, port = door.split(":")
    return Connection(host, int(port), token)


def ms_since(began: int) -> float:
    """Milliseconds since an instant of the monotonic clock."""
    return (time.monotonic_ns() - began) / 1e6


def stops(host: str, port: int, token: str, count: int, *doors: str) -> dict[str, object]:
    """Stops of a held turn, at the runner or through another replica, milliseconds each.

    ``ms``: from writing it to the cancel frame at the agent; ``accepted``: to its 202; ``behind``: from the 202 to the
    frame, below 0 where the frame was faster.
    """
    turn = Connection(host, port, token)
    control = elsewhere(doors[0], token) if doors else Connection(host, port, token)
    whole, accepted, behind = [], [], []
    for _ in range(count):
        hold(turn, "bench-stop")
        began = time.monotonic_ns()
        stop(control, "bench-stop")
        taken = time.monotonic_ns()
        at = heard(turn.stream())
        whole.append((at - began) / 1e6)
        accepted.append((taken - began) / 1e6)
        behind.append((at - taken) / 1e6)
    return {"ms": whole, "accepted": accepted, "behind": behind}


def refusals(host: str, port: int, token: str, count: int, *doors: str) -> dict[str, object]:
    """A second prompt at the owner and through another replica, in turns, whole streams; ``health`` is bare HTTP."""
    turn, here, there = Connection(host, port, token), Connection(host, port, token), elsewhere(doors[0], token)
    hold(turn, "bench-busy")
    times: dict[str, list[float]] = {"here": [], "there": [], "health": []}
    for _ in range(count):
        for name, second in (("here", here), ("there", there)):
            began = time.monotonic_ns()
            second.post("/v1/sessions/bench-busy/turns", {"prompt": "hi", "harness": "bench"})
            answer = second.stream()
            times[name].append(ms_since(began))
            if b'"session_turn_in_use"' not in answer:
                raise SystemExit(f"a second prompt was not refused: {answer!r}")
        began = time.monotonic_ns()
        here.get("/health")
        here.answer()
        times["health"].append(ms_since(began))
    stop(here, "bench-busy")
    heard(turn.stream())
    return dict(times)


def admissions(host: str, port: int, token: str, count: int, *doors: str) -> dict[str, object]:
    """``admitted_ms`` of warm turns here and at another runner, in turns; ``ping`` is a round trip to Redis."""
    sides = {"here": Connection(host, port, token), "there": elsewhere(doors[0], token)}
    redis = elsewhere(doors[1], token)
    times: dict[str, list[float]] = {"here": [], "there": [], "ping": []}
    for n in range(count + 10):
        for name, side in sorted(sides.items(), reverse=n % 2 == 0):
            side.post("/v1/sessions/bench-admission/turns", {"prompt": "hi"})
            answer = side.stream()
            found = ADMITTED_MS.search(answer)
            if found is None or b'"ok":true' not in answer:
                raise SystemExit(f"a warm turn failed: {answer[-500:]!r}")
            if n >= 10:
                times[name].append(float(found[1]))
        began = time.monotonic_ns()
        redis.socket.sendall(PING)
        redis.until(b"\r\n")
        if n >= 10:
            times["ping"].append(ms_since(began))
        time.sleep(0.001)
    return dict(times)


def takeover(host: str, port: int, token: str, owner: int, *doors: str) -> dict[str, object]:
    """Kill the process ``owner`` in the middle of a turn: seconds until another replica admits the next one."""
    session = f"bench-orphan-{owner}"
    hold(Connection(host, port, token), session)
    next_turn, control = elsewhere(doors[0], token), elsewhere(doors[0], token)
    survivor = control.replica()
    os.kill(owner, signal.SIGKILL)
    began = time.monotonic_ns()
    tries = 0
    while True:
        tries += 1
        next_turn.post(f"/v1/sessions/{session}/turns", {"prompt": "hi", "harness": "bench"})
        seen = next_turn.until(b"\r\n\r\n")
        if b" 200 " not in seen[:16]:
            while not seen.rstrip().endswith(b"}"):
                seen += next_turn.until(b"}")
        while b" 200 " in seen[:16] and b'"turn_admitted"' not in seen and not seen.endswith(END):
            seen += next_turn.until(b"\n")
        seconds = ms_since(began) / 1000
        if b'"turn_admitted"' in seen:
            break
        if seconds > USABLE_SECONDS:
            raise SystemExit(f"the session is not usable: {seen!r}")
        time.sleep(RETRY_SECONDS)
    while b'"message_delta"' not in seen:
        seen += next_turn.until(b"}")
    if survivor not in seen:
        raise SystemExit(f"the survivor did not admit the next turn: {seen!r}")
    stop(control, session)
    heard(next_turn.stream())
    return {"seconds": seconds, "tries": tries}


def crowd(host: str, port: int, token: str, count: int) -> dict[str, object]:
    """Stops while ``count`` sessions run turns that speak five times a second.

    ``ms``: one at a time, each turn started again behind its Stop; ``burst``: all of them at once.
    """
    turns = [Connection(host, port, token) for _ in range(count)]
    controls = [Connection(host, port, token) for _ in range(count)]
    for n, turn in enumerate(turns):
        hold(turn, f"bench-crowd-{n}", "speak 5")
    times, burst, began = [], [], [0] * count
    for n, (turn, control) in enumerate(zip(turns, controls, strict=True)):
        at = time.monotonic_ns()
        stop(control, f"bench-crowd-{n}")
        times.append((heard(turn.stream()) - at) / 1e6)
        hold(turn, f"bench-crowd-{n}", "speak 5")
    for n, control in enumerate(controls):
        began[n] = time.monotonic_ns()
        control.post(f"/v1/sessions/bench-crowd-{n}/cancel", {})
    for n, turn in enumerate(turns):
        burst.append((heard(turn.stream()) - began[n]) / 1e6)
    return {"ms": times, "burst": burst}


MODES = {
    "turns": turns,
    "updates": updates,
    "many": many,
    "stops": stops,
    "refusals": refusals,
    "admissions": admissions,
    "takeover": takeover,
    "crowd": crowd,
}

if __name__ == "__main__":
    mode, host, port, token, number, *doors = sys.argv[1:]
    print(json.dumps(MODES[mode](host, int(port), token, int(number), *doors)))
