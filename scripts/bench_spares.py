"""What a spare saves: a session's first turn with one, a warm turn, and a cold one, in turn on one server.

Usage as the load: ``bench_spares.py MODE HOST PORT TOKEN NUMBER``; prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from scripts.bench_load import END, Connection
from scripts.bench_server import Server, percentile

ROUNDS: Final = 40
SPARES: Final = 4
CONFIG: Final = f'[pool]\nspares = {SPARES}\nspare_harnesses = ["demo"]\n'
READY_SECONDS: Final = 60
REST_SECONDS: Final = 0.2
RATIOS: dict[str, tuple[str, str, str, float]] = {
    "spare to first update / warm turn": ("spare_first_update_ms_p50", "spares_warm_turn_ms_p50", "<=", 2),
    "spare turn / cold turn": ("spare_turn_ms_p50", "spares_cold_turn_ms_p50", "", 0),
}


def timed(connection: Connection, session: str, body: dict[str, object], start: str) -> tuple[float, float]:
    """Milliseconds of one turn: to its first update, and to its end."""
    began = time.perf_counter()
    connection.post(f"/v1/sessions/{session}/turns", {"prompt": "hi", "harness": "demo", **body})
    seen = connection.until(b'"message_delta"')
    first = time.perf_counter()
    while not seen.endswith(END):
        seen += connection.until(b"\n")
    ended = time.perf_counter()
    if f'"start":"{start}"'.encode() not in seen or b'"ok":true' not in seen:
        raise SystemExit(f"a turn did not start {start}: {seen[-700:]!r}")
    return (first - began) * 1000, (ended - began) * 1000


def ready(connection: Connection) -> None:
    """Wait until every spare is ready and the machine has come to rest."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        connection.get("/v1/pool")
        view = json.loads(connection.answer().partition(b"\r\n\r\n")[2])
        if sum(spare["state"] == "ready" for spare in view["spares"]) == SPARES:
            time.sleep(REST_SECONDS)
            return
        time.sleep(0.05)
    raise SystemExit("the spares do not get ready")


def starts(host: str, port: int, token: str, rounds: int) -> dict[str, list[list[float]]]:
    """First turns with a spare, warm turns, cold turns."""
    connection = Connection(host, port, token)
    found: dict[str, list[list[float]]] = {"spare": [], "hit": [], "cold": []}
    for number in range(rounds):
        if number % SPARES == 0:
            ready(connection)
        session = f"bench-{number}"
        found["spare"].append(list(timed(connection, session, {}, "spare")))
        time.sleep(0.001)
        found["hit"].append(list(timed(connection, session, {}, "hit")))
        if number % SPARES == SPARES - 1:
            found["cold"].append(list(timed(connection, f"{session}-cold", {"env": {"A": "1"}}, "cold")))
    return found


def measure() -> dict[str, float]:
    """Figures by name."""
    with tempfile.TemporaryDirectory(prefix="acp-runner-bench-") as folder:
        server = Server(Path(folder), CONFIG)
        try:
            found = server.load("starts", ROUNDS, by="bench_spares")
        finally:
            server.close()
    spare, warm, cold = ([list(times) for times in zip(*found[name], strict=True)] for name in ("spare", "hit", "cold"))
    return {
        "spare_first_update_ms_p50": round(statistics.median(spare[0]), 3),
        "spare_first_update_ms_p99": round(percentile(spare[0], 0.99), 3),
        "spare_turn_ms_p50": round(statistics.median(spare[1]), 3),
        "spares_warm_first_update_ms_p50": round(statistics.median(warm[0]), 3),
        "spares_warm_turn_ms_p50": round(statistics.median(warm[1]), 3),
        "spares_cold_turn_ms_p50": round(statistics.median(cold[1]), 3),
    }


if __name__ == "__main__":
    mode, host, port, token, rounds = sys.argv[1:]
    print(json.dumps({"starts": starts}[mode](host, int(port), token, int(rounds))))
