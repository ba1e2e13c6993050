"""A runner's way to its store, killed with SIGKILL at a named point: python -m tests.plane.spooling_child DIR POINT."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.store.spool import SpooledStore
from runner.store.spool_file import SpoolFile
from runner.store.sqlite import SqliteStore
from tests.store.rows import admission, ending, question, record, turn

POINTS = ("put", "ended", "before_replay", "replay_written", "dropped")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Away:
    """A store that can be taken away."""

    def __init__(self, inner: SqliteStore) -> None:
        self.inner = inner
        self.store_id = inner.store_id
        self.away = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **more: Any) -> Any:
            if self.away:
                raise RunnerError("store_unavailable", "away")
            return await getattr(self.inner, name)(*args, **more)

        return call


def die_at(point: str) -> None:
    """Die at the second entry, around what its replay does on disk."""
    drop = SpoolFile.drop
    seen = 0

    async def dropping(self: SpoolFile, entry: Any, **more: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 2 and point == "replay_written":
            die()
        await drop(self, entry, **more)
        if seen == 2 and point == "dropped":
            die()

    SpoolFile.drop = dropping  # type: ignore[method-assign]


async def main(folder: Path, point: str) -> None:
    remote: Any = Away(await SqliteStore.open(folder / "store.sqlite3"))
    store = await SpooledStore.open(remote, folder / "spool", SystemClock(), may_spool=lambda *_: True)
    await store.admit(admission())
    await store.append([record(1)])
    remote.away = True
    await store.append([record(2)], [question()])
    print("accepted 2", flush=True)
    if point == "put":
        die()
    await store.append([record(3)])
    print("accepted 3", flush=True)
    await store.end(ending(turn(), records=[record(4)]))
    print("accepted 4", flush=True)
    if point == "ended":
        die()
    die_at(point)
    remote.away = False
    if point == "before_replay":
        asyncio.get_running_loop().call_soon(die)
    await asyncio.sleep(30)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
