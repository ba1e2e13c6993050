"""What the runner costs over its parts, as figures and ratios of one run; nothing here is asserted in tests.

Sections: ``runner``, one process against raw stdio; ``replicas``, session control over Redis and with many sessions;
``records``, followers, readers who are behind, and what durability costs; ``worker``, records into PostgreSQL;
``sandbox``, what isolation costs; ``spares``, what a started agent saves; ``bridge``, what the way into a remote
sandbox costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from scripts import bench_records, bench_replicas, bench_spares
from scripts.bench_server import Server, percentile

DEMO = Path(__file__).resolve().parent.parent / "sandboxes" / "inside" / "demo_agent.py"
UPDATES = 20_000
ROUNDS = 5


def frame(request_id: int, method: str, params: dict[str, Any]) -> bytes:
    """A request line."""
    return orjson.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}) + b"\n"


class Raw:
    """The demo agent without a runner: asyncio's readline, and orjson for every line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._session = ""

    @classmethod
    async def start(cls, home: str) -> Raw:
        """Start the agent and open a session."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-I", "-S", str(DEMO))
        env = {"PATH": os.environ["PATH"], "HOME": home}
        raw = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env))
        await raw.call(1, "initialize", {"protocolVersion": 1, "clientCapabilities": {}})
        raw._session = (await raw.call(2, "session/new", {"cwd": home, "mcpServers": []}))["result"]["sessionId"]
        return raw

    async def call(self, request_id: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """One round trip; updates are parsed and dropped."""
        self._stdin.write(frame(request_id, method, params))
        while True:
            answer: dict[str, Any] = orjson.loads(await self._stdout.readline())
            if answer.get("id") == request_id and "method" not in answer:
                return answer

    async def prompt(self, request_id: int, text: str) -> float:
        """Seconds of one prompt's round trip."""
        params = {"sessionId": self._session, "prompt": [{"type": "text", "text": text}]}
        began = time.perf_counter()
        await self.call(request_id, "session/prompt", params)
        return time.perf_counter() - began

    async def close(self) -> None:
        """End the agent."""
        self._process.kill()
        await self._process.wait()


async def raw_roundtrip(home: str) -> float:
    """Median milliseconds of a prompt straight to the agent, with the pauses that the load generator makes too."""
    raw = await Raw.start(home)
    times = []
    for n in range(220):
        times.append(await raw.prompt(100 + n, "hi") * 1000)
        await asyncio.sleep(0.001)
    await raw.close()
    return statistics.median(times[20:])


async def raw_updates(home: str) -> float:
    """Updates a second straight from the agent."""
    raw = await Raw.start(home)
    seconds = await raw.prompt(100, f"/stream {UPDATES}")
    await raw.close()
    return UPDATES / seconds


def cli_import_s() -> float:
    """Seconds of a cold import of the command line, over a bare interpreter; the best of a few."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import runner.cli.main"], check=True)
        whole = time.perf_counter() - began
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        times.append(whole - (time.perf_counter() - began))
    return min(times)


def measure() -> dict[str, float]:
    """All figures; the raw ones are taken around the server's, so that both meet the same machine."""
    with tempfile.TemporaryDirectory() as home:
        server = Server(Path(home))
        try:
            idle = server.rss_mb()
            raw_turn, raw_rate, warm, streams, lost = [], [], [], [], 0
            growth = 0.0
            for _ in range(ROUNDS):
                raw_turn.append(asyncio.run(raw_roundtrip(home)))
                warm += server.load("turns", 200)["ms"]
                raw_rate.append(asyncio.run(raw_updates(home)))
                before = server.rss_mb()
                stream = server.load("updates", UPDATES)
                growth = max(growth, server.rss_mb() - before)
                streams.append(stream["per_s"])
                lost += stream["lost"]
            rates = [server.load("many", 3)["per_s"] for _ in range(3)]
            stop = server.load("stops", 100)["ms"]
        finally:
            server.close()
    return {
        "raw_updates_per_s": round(statistics.median(raw_rate)),
        "raw_roundtrip_ms_p50": round(statistics.median(raw_turn), 3),
        "warm_turn_ms_p50": round(statistics.median(warm), 3),
        "warm_turn_ms_p99": round(percentile(warm, 0.99), 3),
        "stream_updates_per_s": round(statistics.median(streams)),
        "stream_lost": lost,
        "turns_per_s_50": round(statistics.median(rates)),
        "idle_rss_mb": round(idle, 1),
        "rss_growth_mb": round(growth, 1),
        "stop_cancel_ms_p99": round(percentile(stop, 0.99), 3),
        "cli_import_s": round(cli_import_s(), 3),
    }


GATES: dict[str, tuple[str, float]] = {
    "warm_turn_ms_p50": ("<=", 1.5),
    "stream_lost": ("<=", 0),
    "turns_per_s_50": (">=", 1000),
    "idle_rss_mb": ("<=", 65),
    "rss_growth_mb": ("<=", 20),
    "stop_cancel_ms_p99": ("<=", 5),
    "cli_import_s": ("<=", 0.5),
}


RATIOS: dict[str, tuple[str, str, str, float]] = {
    "warm turn / raw": ("warm_turn_ms_p50", "raw_roundtrip_ms_p50", "<=", 8),
    "stream / raw": ("stream_updates_per_s", "raw_updates_per_s", ">=", 0.4),
}


def row(name: str, value: float, sign: str, goal: float) -> str:
    """A line of the table; without a sign there is no goal."""
    met = "" if not sign else "ok" if (value <= goal if sign == "<=" else value >= goal) else "MISSED"
    return f"{name:34} {value:>12}   {f'{sign} {goal:g}' if sign else '':10} {met}".rstrip()


def table(figures: dict[str, float], more: dict[str, tuple[str, float]]) -> str:
    """The figures with their goals, those of a section that is loaded on demand too, and the ratios."""
    gates = GATES | bench_replicas.GATES | bench_records.GATES | more
    ratios = RATIOS | bench_replicas.RATIOS | bench_records.RATIOS | bench_spares.RATIOS
    rows = [row(name, value, *gates.get(name, ("", 0.0))) for name, value in figures.items()]
    for name, (over, under, sign, goal) in ratios.items():
        if over in figures:
            rows.append(row(name, round(figures[over] / figures[under], 2), sign, goal))
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    sections = ("runner", "replicas", "records", "worker", "sandbox", "spares", "bridge")
    parser.add_argument("section", nargs="*", choices=sections, default=sections[0], help="which figures (runner)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--count", type=int, default=500, help="replicas: samples of each kind (500)")
    parser.add_argument("--sessions", type=int, default=200, help="replicas: concurrent sessions (200)")
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    gates: dict[str, tuple[str, float]] = {}
    if "runner" in asked.section:
        figures |= measure()
    if "replicas" in asked.section:
        figures |= bench_replicas.measure(asked.count, asked.sessions)
    if "records" in asked.section:
        figures |= bench_records.measure()
    if "worker" in asked.section:
        from scripts import bench_worker

        figures |= bench_worker.measure()
        gates |= bench_worker.GATES
    if "sandbox" in asked.section:
        from scripts import bench_sandbox, bench_stops

        figures |= bench_sandbox.measure() | bench_stops.measure()
        gates |= bench_sandbox.GATES | bench_stops.GATES
    if "spares" in asked.section:
        figures |= bench_spares.measure()
    if "bridge" in asked.section:
        from scripts import bench_bridge

        figures |= bench_bridge.measure()
        gates |= bench_bridge.GATES
    print(json.dumps(figures) if asked.json else table(figures, gates))


if __name__ == "__main__":
    main()
