"""What a remote sandbox's bridge adds to an agent's stdio: echoes of ``cat`` on loopback, and over bare pipes."""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from runner.acp.transport import ExitInfo
from runner.acp.websocket import Address
from runner.sandbox.bridge_files import bridge_files
from runner.sandbox.port import Gone
from runner.sandbox.remote import RemoteSandbox
from scripts.bench_server import percentile, since_ms

SMALL: Final = 200
MIB: Final = 1 << 20
ROUNDS: Final = 1000
LARGE_ROUNDS: Final = 30
SECONDS: Final = 60.0
CAT: Final = ("/bin/cat",)

GATES: dict[str, tuple[str, float]] = {
    "bridge_roundtrip_ms_p50": ("<=", 2),
    "bridge_1_mib_ms_p50": ("<=", 50),
    "bridge_64_mib_missing": ("<=", 0),
}


class Counter:
    """A receiver that waits for a number of bytes, and keeps none; ``left``: those that are still to come."""

    def __init__(self) -> None:
        self.left = 0
        self._done = asyncio.Event()

    async def all_of(self, size: int) -> None:
        """Wait for so many more bytes."""
        self.left += size
        self._done.clear()
        if self.left > 0:
            await asyncio.wait_for(self._done.wait(), SECONDS)

    def data_received(self, data: bytes) -> None:
        self.left -= len(data)
        if self.left <= 0:
            self._done.set()

    def stderr_received(self, data: bytes) -> None:
        sys.stderr.write(data.decode())

    def eof_received(self) -> None:
        pass

    def exited(self, info: ExitInfo) -> None:
        self._done.set()

    def writable(self) -> None:
        pass


async def _bare() -> list[float]:
    """Milliseconds of a small echo through ``cat`` on pipes of our own."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*CAT, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    times, line = [], b"x" * (SMALL - 1) + b"\n"
    for _ in range(ROUNDS):
        began = time.perf_counter()
        process.stdin.write(line)
        await process.stdout.readexactly(SMALL)
        times.append(since_ms(began))
    process.stdin.close()
    await process.wait()
    return times


async def _echo(place: RemoteSandbox, counter: Counter, size: int, rounds: int) -> list[float]:
    times, line = [], b"x" * (size - 1) + b"\n"
    for _ in range(rounds):
        began = time.perf_counter()
        place.transport.send(line)
        await counter.all_of(size)
        times.append(since_ms(began))
    return times


async def _measure(folder: Path) -> dict[str, float]:
    for name, content in bridge_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    secret = secrets.token_hex(32)
    (folder / "secret").write_text(secret)
    words = (sys.executable, "-I", str(folder / "bridge.py"), "--secret-file", str(folder / "secret"))
    bridge = await asyncio.create_subprocess_exec(
        *words, "--orphan-seconds", "5", stdout=asyncio.subprocess.PIPE, env={"PATH": "/usr/bin:/bin"}
    )
    assert bridge.stdout is not None
    port = int(json.loads(await bridge.stdout.readline())["port"])

    async def find(refused: bool) -> Address:
        return Address(f"ws://127.0.0.1:{port}/")

    async def end(said: Gone | None) -> Gone:
        return said or Gone(True, "stopped")

    place = RemoteSandbox("bench", str(folder), find, secret, resume_seconds=5.0, end=end)
    try:
        await place.begin(CAT, {"PATH": "/usr/bin:/bin"}, SECONDS)
        counter = Counter()
        place.transport.connect(counter)
        bare = await _bare()
        small = await _echo(place, counter, SMALL, ROUNDS)
        mib = await _echo(place, counter, MIB, LARGE_ROUNDS)
        (largest,) = await _echo(place, counter, 64 * MIB, 1)
    finally:
        await place.destroy(0.0)
        await bridge.wait()
    return {
        "bare_roundtrip_ms_p50": round(statistics.median(bare), 3),
        "bridge_roundtrip_ms_p50": round(statistics.median(small), 3),
        "bridge_roundtrip_ms_p99": round(percentile(small, 0.99), 3),
        "bridge_1_mib_ms_p50": round(statistics.median(mib), 1),
        "bridge_64_mib_missing": counter.left,
        "bridge_64_mib_ms": round(largest),
    }


def measure() -> dict[str, float]:
    """Figures by name."""
    with tempfile.TemporaryDirectory(prefix="acp-runner-bench-") as folder:
        return asyncio.run(_measure(Path(folder)))
