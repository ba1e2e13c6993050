"""Updates a second through ``AgentConnection``, against readline + orjson over the same pipe in the same run.

Run: ``python tests/acp/bench_peer.py [--updates 20000] [--rounds 7] [--size 20] [--json]``. Rounds are interleaved and
the medians are shown, because the machine is noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runner.acp.connection import AgentConnection, Updates
from runner.acp.stdio import StdioTransport
from runner.acp.updates import grouped

SESSION = "bench"
WRITER = """
import json, os, sys
count, size = int(sys.argv[1]), int(sys.argv[2])
update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "x" * size}}
params = {"sessionId": "bench", "update": update}
line = json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": params}, separators=(",", ":")) + "\\n"
data = memoryview(line.encode() * count)
os.write(2, b"ready\\n")
sys.stdin.readline()
while data:
    data = data[os.write(1, data[:65536]):]
"""


class Child:
    """A process that writes its updates once it is told to."""

    def __init__(self, updates: int, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(updates), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def descriptors(self) -> tuple[int, int, int]:
        """Duplicates of its pipes, which the taker owns, once it is ready: interpreter start is nobody's cost."""
        assert self.process.stderr is not None and self.process.stderr.readline()
        pipes = (self.process.stdin, self.process.stdout, self.process.stderr)
        taken = [os.dup(pipe.fileno()) for pipe in pipes if pipe is not None]
        for pipe in pipes:
            if pipe is not None:
                pipe.close()
        return taken[0], taken[1], taken[2]


async def readline_orjson(updates: int, size: int) -> float:
    """Seconds that asyncio's own reader needs."""
    child = Child(updates, size)
    stdin, stdout, stderr = child.descriptors()
    os.close(stderr)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1024 * 1024)
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdout, "rb"))
    os.write(stdin, b"go\n")
    began = time.perf_counter()
    seen = 0
    while line := await reader.readline():
        orjson.loads(line)
        seen += 1
    taken = time.perf_counter() - began
    pipe.close()
    os.close(stdin)
    child.process.wait()
    assert seen == updates
    return taken


async def connection(updates: int, size: int, *, to_groups: bool = False) -> float:
    """Seconds through the transport, the peer and the inbox; with ``to_groups`` up to the texts of events."""
    child = Child(updates, size)
    transport = StdioTransport(*child.descriptors())
    agent = AgentConnection(transport)
    inbox = agent.inbox(SESSION)
    transport.send(b"go\n")
    began = time.perf_counter()
    seen = 0
    while seen < updates:
        await inbox.wait()
        for item in inbox.drain():
            assert isinstance(item, Updates), item
            if to_groups:
                seen += sum(len(texts) for _, _, texts in grouped(item.updates))
            else:
                seen += len(item.updates)
    taken = time.perf_counter() - began
    transport.close()
    child.process.wait()
    return taken


async def connection_grouped(updates: int, size: int) -> float:
    """As ``connection``, and each run of text is grouped as a turn does it."""
    return await connection(updates, size, to_groups=True)


WAYS: dict[str, Callable[[int, int], Coroutine[Any, Any, float]]] = {
    "readline_orjson": readline_orjson,
    "connection": connection,
    "connection_grouped": connection_grouped,
}


def measured(updates: int, rounds: int, size: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds: updates/s, its ratio to readline + orjson, CPU microseconds an update."""
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    burnt: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            before = resource.getrusage(resource.RUSAGE_SELF)
            taken[name].append(asyncio.run(way(updates, size)))
            after = resource.getrusage(resource.RUSAGE_SELF)
            burnt[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    base = statistics.median(taken["readline_orjson"])
    return {
        name: {
            "updates_per_s": round(updates / statistics.median(taken[name])),
            "ratio": round(base / statistics.median(taken[name]), 2),
            "cpu_us_per_update": round(statistics.median(burnt[name]) / updates * 1e6, 2),
        }
        for name in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=20, help="characters of text an update")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measured(given.updates, given.rounds, given.size)
    if given.json:
        print(json.dumps(found))
        return
    print(f"{'':20}{'updates/s':>12}{'ratio':>8}{'CPU us':>8}")
    for name, row in found.items():
        print(f"{name:20}{row['updates_per_s']:>12,.0f}{row['ratio']:>8.2f}{row['cpu_us_per_update']:>8.2f}")


if __name__ == "__main__":
    main()
