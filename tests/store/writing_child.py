"""Writes turns for ever and says after each finished call what it was; its parent kills it."""

from __future__ import annotations

import asyncio
import sys

from runner.store.port import Admission
from tests.store.rows import ending, record, session, turn
from tests.store.sharing_child import open_store


async def write_for_ever(place: str, prefix: str) -> None:
    store = await open_store(place)
    print("store", store.store_id, flush=True)

    async def work(name: str) -> None:
        epoch = 0
        while True:
            epoch += 1
            row = turn(f"{name}-t{epoch}", epoch, name)
            records = [record(n, epoch, name) for n in (1, 2)]
            await store.admit(Admission(session(name), row, records=records))
            print("admit", name, epoch, flush=True)
            await store.end(ending(row, records=[record(3, epoch, name)]))
            print("end", name, epoch, flush=True)

    await asyncio.gather(*(work(f"{prefix}{n}") for n in range(4)))


asyncio.run(write_for_ever(sys.argv[1], *sys.argv[2:] or ["s"]))
