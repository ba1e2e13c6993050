"""Session control in figures: two runners on one Redis and one store, a death of the owner, and many sessions."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.bench_server import SHARED_TOKEN, Server, percentile

DEATHS = 4

GATES: dict[str, tuple[str, float]] = {
    "other_stop_accepted_ms_p99": ("<=", 20),
    "other_stop_frame_behind_ms_p99": ("<=", 20),
    "refusal_ms_p99": ("<=", 15),
    "other_refusal_ms_p99": ("<=", 15),
    "redis_adds_ms_p50": ("<=", 1),
    "owner_killed_s_max": ("<=", 5),
    "crowd_stop_ms_p99": ("<=", 50),
}
RATIOS: dict[str, tuple[str, str, str, float]] = {
    "stop at other / health": ("other_stop_accepted_ms_p50", "health_ms_p50", "", 0),
    "refusal / health": ("refusal_ms_p50", "health_ms_p50", "", 0),
    "refusal at other / health": ("other_refusal_ms_p50", "health_ms_p50", "", 0),
    "admission added / redis ping": ("redis_adds_ms_p50", "redis_ping_ms_p50", "", 0),
}


def measure(count: int, sessions: int) -> dict[str, float]:
    """All figures of the section.

    Args:
        count: Stops, refusals and warm turns of each kind.
        sessions: how many turns run at once for the Stops in a crowd.
    """
    with tempfile.TemporaryDirectory() as folder:
        return replicas(Path(folder), count) | crowd(Path(folder), sessions)


def replicas(folder: Path, count: int) -> dict[str, float]:
    """Two runners over Redis, next to one with leases in memory for what Redis adds."""
    # It imports pytest, which a set-up without --dev does not have.
    from tests.redis_server import INSTALL, RedisServer

    if shutil.which("redis-server") is None:
        raise SystemExit(INSTALL)
    with ExitStack() as over:
        redis = RedisServer()
        over.callback(redis.close)
        redis.start()
        store = folder / "shared.sqlite3"
        shared = f'[leases]\nurl = "{redis.url}"\n[store]\nurl = "sqlite:///{store}"\n{SHARED_TOKEN}'
        a = started(over, folder / "a", shared)
        b = started(over, folder / "b", shared)
        alone = started(over, folder / "alone", SHARED_TOKEN)
        stops = a.load("stops", count, b.door)
        refusals = a.load("refusals", count, b.door)
        admissions = a.load("admissions", count, alone.door, f"127.0.0.1:{redis.port}")
        deaths = [death(*((a, b) if n % 2 == 0 else (b, a))) for n in range(DEATHS)]
    over_redis, in_memory = (statistics.median(admissions[side]) for side in ("here", "there"))
    return {
        "redis_ping_ms_p50": round(statistics.median(admissions["ping"]), 3),
        **spread("health_ms", refusals["health"]),
        **spread("other_stop_accepted_ms", stops["accepted"]),
        **spread("other_stop_frame_behind_ms", stops["behind"]),
        **spread("refusal_ms", refusals["here"]),
        **spread("other_refusal_ms", refusals["there"]),
        "redis_admitted_ms_p50": round(over_redis, 3),
        "memory_admitted_ms_p50": round(in_memory, 3),
        "redis_adds_ms_p50": round(over_redis - in_memory, 3),
        "owner_killed_s_p50": round(statistics.median(deaths), 3),
        "owner_killed_s_max": round(max(deaths), 3),
    }


def death(owner: Server, survivor: Server) -> float:
    """Seconds from the owner's SIGKILL to a turn of its session at the survivor; the owner is back behind it."""
    taken: dict[str, Any] = owner.load("takeover", owner.process.pid, survivor.door)
    owner.process.wait(60)
    owner.start()
    return float(taken["seconds"])


def crowd(folder: Path, sessions: int) -> dict[str, float]:
    """Stops among many running turns of one runner, leases in memory."""
    room = f"[server]\nmax_turns = {sessions + 8}\n[pool]\nmax_seats = {sessions + 8}\n"
    with ExitStack() as over:
        times = started(over, folder / "crowd", room).load("crowd", sessions)
    return {
        "crowd_sessions": sessions,
        **spread("crowd_stop_ms", times["ms"]),
        **spread("crowd_burst_stop_ms", times["burst"]),
    }


def started(over: ExitStack, folder: Path, config: str) -> Server:
    """A server that ends with the section."""
    server = Server(folder, config)
    over.callback(server.close)
    return server


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {f"{name}_p50": round(statistics.median(values), 3), f"{name}_p99": round(percentile(values, 0.99), 3)}
