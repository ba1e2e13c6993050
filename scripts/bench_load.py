"""The load generator: raw sockets, standard library, its own process, so that it costs the server little.

Usage: ``bench_load.py MODE HOST PORT TOKEN NUMBER``; prints one JSON object.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import sys
import time

END = b"\r\n0\r\n\r\n"
RESULT = b'{"kind":"result"'


class Connection:
    """One keep-alive HTTP connection."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"

    def post(self, path: str, body: dict[str, object]) -> None:
        """Send a request."""
        data = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {len(data)}\r\n\r\n"
        self.socket.sendall((head + data).encode())

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


def stops(host: str, port: int, token: str, count: int) -> dict[str, object]:
    """From writing a Stop to its cancel frame at the agent, milliseconds each."""
    turn, control = Connection(host, port, token), Connection(host, port, token)
    times = []
    for _ in range(count):
        turn.post("/v1/sessions/bench-stop/turns", {"prompt": "hi", "harness": "bench"})
        turn.until(b'"message_delta"')
        began = time.monotonic_ns()
        control.post("/v1/sessions/bench-stop/cancel", {})
        control.until(b"}")
        heard = re.search(rb'"text":"held (\d+)"', turn.stream())
        if heard is None:
            raise SystemExit("a Stop did not reach the agent")
        times.append((int(heard.group(1)) - began) / 1e6)
    return {"ms": times}


if __name__ == "__main__":
    mode, host, port, token, number = sys.argv[1:]
    work = {"turns": turns, "updates": updates, "many": many, "stops": stops}[mode]
    print(json.dumps(work(host, int(port), token, int(number))))
