"""One of several processes on one store: takes part in every race and says what it won, as JSON on its last line."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.store.port import Admission, Appended, Ending, Store
from runner.store.postgres.store import PostgresStore
from runner.store.sqlite import SqliteStore
from tests.store.rows import PROJECT, command, ended, ending, record, session, turn

ROUNDS = 25
SESSIONS = ("shared0", "shared1", "shared2")
FULL = b'"' + b"x" * 2000 + b'"'


class Racer:
    """Races for each epoch's turn, for its ending and for its commands; writes a session of its own meanwhile."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.won: dict[str, list[str]] = {"admit": [], "end": [], "claim": []}
        self.commands: dict[str, str] = {}
        self.slowest = 0.0

    async def timed(self, call: Any) -> Any:
        began = time.monotonic()
        answer = await call
        self.slowest = max(self.slowest, time.monotonic() - began)
        return answer

    async def race(self) -> None:
        for epoch in range(1, ROUNDS + 1):
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await asyncio.gather(*(self.round(name, epoch) for name in SESSIONS), self.write(epoch))

    async def round(self, name: str, epoch: int) -> None:
        mine = turn(f"{name}-{epoch}-{self.name}", epoch, name, replica_id=self.name)
        row = session(name, head_epoch=epoch, config={"by": self.name})
        records = [record(n, epoch, name, turn_id=mine.turn_id, record_id=f"{mine.turn_id}-{n}") for n in (1, 2)]
        if await self.timed(self.store.admit(Admission(row, mine, records=records))):
            self.won["admit"].append(mine.turn_id)
        found = await self.timed(self.store.last_turn(PROJECT, name))
        await self.command(name, found.turn_id)
        over = replace(ended(found, "cancelled"), stop_reason=self.name)
        if await self.timed(self.store.end(Ending(session(name, head_epoch=found.epoch, head_n=2), over))):
            self.won["end"].append(found.turn_id)

    async def command(self, name: str, turn_id: str) -> None:
        for kind, key in (("cancel", turn_id), ("kill", None)):
            mine = command(f"{turn_id}-{kind}-{self.name}", name, kind=kind, turn_id=turn_id, idempotency_key=key)
            stored = await self.timed(self.store.submit_command(mine))
            self.commands[f"{turn_id} {kind}"] = stored.command_id
            if await self.timed(self.store.claim_command(PROJECT, stored.command_id, self.name, 0, 15, 1)):
                self.won["claim"].append(stored.command_id)

    async def write(self, epoch: int) -> None:
        name = f"own-{self.name}"
        own = turn(f"{name}-t{epoch}", epoch, name)
        await self.store.admit(Admission(session(name, head_epoch=epoch), own))
        for first in range(0, 20, 4):
            rows = [record(first + n, epoch, name, turn_id=own.turn_id, data=FULL) for n in range(4)]
            appended = await self.timed(self.store.append(rows))
            assert appended == Appended(4)
        assert await self.store.end(ending(own, session=session(name, head_epoch=epoch)))


async def open_store(place: str) -> Store:
    """The store at a path, or at a URL."""
    return await (PostgresStore.open(place) if "://" in place else SqliteStore.open(Path(place)))


async def main(place: str, name: str) -> None:
    store = await open_store(place)
    racer = Racer(store, name)
    await racer.race()
    doubled = [won for won in racer.won.values() if max(Counter(won).values(), default=1) > 1]
    assert not doubled, doubled
    said = {"store_id": store.store_id, "commands": racer.commands, "slowest": racer.slowest, **racer.won}
    await store.close()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
