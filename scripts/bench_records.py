"""Records and readers in figures: what followers cost, how fast a reader catches up, what durability costs."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench_server import Server

UPDATES = 20_000
BEHIND = 10_000
FOLLOWERS = 100
ROUNDS = 3
PAIRS = 15
GATES: dict[str, tuple[str, float]] = {
    "followers_lost": ("<=", 0),
    "catch_up_ring_per_s": (">=", 20_000),
    "catch_up_store_per_s": (">=", 20_000),
    "stored_over_sink": (">=", 0.9),
}
RATIOS: dict[str, tuple[str, str, str, float]] = {
    "100 followers / 1 (CPU)": ("spoken_cpu_us_100_followers", "spoken_cpu_us_1_follower", "<=", 2),
}


def readers(server: Server) -> dict[str, float]:
    """One writer with one follower and with a hundred, in turns; then readers who are far behind.

    ``spoken``: at the pace of a model; ``flood``: 20,000 updates as fast as they come.
    """
    spoken: dict[int, list[float]] = {1: [], FOLLOWERS: []}
    flood: dict[int, list[float]] = {1: [], FOLLOWERS: []}
    lost = 0
    pid = str(server.process.pid)
    for _ in range(ROUNDS):
        for count in (1, FOLLOWERS):
            done = server.load("spoken", count, pid, by="bench_followers")
            spoken[count].append(done["cpu_s"] / done["updates"] * 1e6)
            done = server.load("followers", count, pid, by="bench_followers")
            flood[count].append(done["cpu_s"] / UPDATES * 1e6)
            lost += done["lost"]
    ring: list[float] = server.load("behind", BEHIND, by="bench_followers")["per_s"]
    server.stop()
    server.start()
    store: list[float] = server.load("behind", 0, by="bench_followers")["per_s"]
    return {
        "spoken_cpu_us_1_follower": round(statistics.median(spoken[1])),
        "spoken_cpu_us_100_followers": round(statistics.median(spoken[FOLLOWERS])),
        "flood_cpu_us_1_follower": round(statistics.median(flood[1]), 2),
        "flood_cpu_us_100_followers": round(statistics.median(flood[FOLLOWERS]), 2),
        "followers_lost": lost,
        "catch_up_ring_per_s": round(statistics.median(ring)),
        "catch_up_store_per_s": round(statistics.median(store)),
    }


def durability(server: Server, sink: Server) -> dict[str, float]:
    """The same turn with its records and frames durable and with a sink for them, in pairs: each has its own ratio."""
    pairs = []
    for n in range(PAIRS):
        first, second = (server, sink) if n % 2 else (sink, server)
        rates = {which: which.load("updates", UPDATES)["per_s"] for which in (first, second)}
        pairs.append((rates[server], rates[sink]))
    return {
        "stored_updates_per_s": round(statistics.median(stored for stored, _ in pairs)),
        "sink_updates_per_s": round(statistics.median(sunk for _, sunk in pairs)),
        "stored_over_sink": round(statistics.median(stored / sunk for stored, sunk in pairs), 2),
    }


def measure() -> dict[str, float]:
    """All figures."""
    with tempfile.TemporaryDirectory() as home:
        server: Any = Server(Path(home) / "server")
        try:
            figures = readers(server)
            sink = Server(Path(home) / "sink", module="scripts.bench_sink")
            try:
                return figures | durability(server, sink)
            finally:
                sink.close()
        finally:
            server.close()
