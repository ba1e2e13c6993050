"""The store over HTTP: outages, identity, large writes and long reads; and a spool in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.store import http
from runner.store.http import HttpStore
from runner.store.memory import MemoryStore
from runner.store.port import Appended
from runner.store.spool import SpooledStore
from tests.plane.bed import BODY_MAX, BOTH, ServedPlane
from tests.plane.remote import Remote
from tests.store.rows import admission, ended, ending, question, record, turn


@pytest.fixture
async def store(plane: ServedPlane) -> AsyncIterator[HttpStore]:
    made = await HttpStore.open(plane.url, BOTH, seconds=2.0)
    yield made
    await made.close()


async def code(work: Any) -> str:
    with pytest.raises(RunnerError) as caught:
        await work
    return caught.value.code


async def test_a_plane_that_is_away_or_has_no_store_is_unavailable(plane: ServedPlane, store: HttpStore):
    await store.admit(admission())
    plane.store.unavailable = True  # type: ignore[attr-defined]
    assert await code(store.append([record(1)])) == "store_unavailable"
    assert not await store.ready()
    plane.store.unavailable = False  # type: ignore[attr-defined]
    await plane.stop()
    for call in (store.append([record(1)]), store.turn("p", "s", "t1"), store.open_turns(), store.end(ending(turn()))):
        assert await code(call) == "store_unavailable"
    assert not await store.ready()
    await plane.start()
    assert await store.ready()
    assert await store.append([record(1)]) == Appended(1)
    assert await store.append([]) == Appended(0)


async def test_the_identity_is_the_planes_and_never_changes_unnoticed(plane: ServedPlane, store: HttpStore):
    assert store.store_id == plane.store.store_id
    await plane.stop()
    assert await code(HttpStore.open(plane.url, BOTH)) == "store_unavailable"
    early = await HttpStore.open(plane.url, BOTH, known_id="store_memory")
    plane.store = MemoryStore("store_other")
    await plane.start()
    assert await code(store.append([record(1)])) == "store_unavailable"
    assert await code(early.turn("p", "s", "t1")) == "store_unavailable"
    assert await code(HttpStore.open(plane.url, BOTH, known_id="store_memory")) == "store_unavailable"
    await early.close()


async def test_a_token_that_is_refused_may_be_right_later(plane: ServedPlane):
    """Nothing that is spooled may count as refused by the store for it."""
    assert await code(HttpStore.open(plane.url, {"p": "user-p"})) == "store_unavailable"
    store = await HttpStore.open(plane.url, BOTH)
    assert await code(store.turn("q", "s", "t1")) == "store_unavailable"
    assert await code(store.admit(admission(records=[record(1)._replace(project="p2")]))) == "store_unavailable"
    await store.close()


async def test_what_is_larger_than_a_request_may_be_goes_in_several(
    plane: ServedPlane, store: HttpStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "BATCH_BYTES", 20_000)
    await store.admit(admission())
    rows = [record(n, data=b'"' + b"x" * 3000 + b'"') for n in range(1, 41)]
    assert await store.append(rows) == Appended(40)
    more = [record(n, data=b'"' + b"x" * 3000 + b'"') for n in range(41, 80)]
    assert await store.end(ending(turn(), records=more))
    assert await store.turn("p", "s", "t1") == ended(turn())
    assert await store.append(rows) == Appended(40)
    assert await store.append([row._replace(record_id=row.record_id + "b") for row in rows]) == Appended(0, 40)
    monkeypatch.setattr(http, "PAGE_ROWS", 7)
    assert await store.records("p", "s", None, 10_000) == [*rows, *more]
    assert await store.records("p", "s", (1, 70), 9) == more[30:]
    assert len(await store.quarantined("p", 100)) == 40
    assert len(await store.quarantined("p", 5)) == 5


async def test_a_plane_with_a_smaller_bound_gets_smaller_requests(plane: ServedPlane, store: HttpStore):
    """The bound of the other side is not known here; only a row beyond it is refused."""
    await store.admit(admission())
    rows = [record(n, data=b'"' + b"x" * 9000 + b'"') for n in range(1, 31)]
    assert await store.append(rows, [question()]) == Appended(30)
    assert await store.interaction("p", "i1") == question()
    huge = record(31, data=b'"' + b"x" * BODY_MAX + b'"')
    assert await code(store.append([huge])) == "internal"
    assert await code(store.append([huge, record(32)])) == "internal"
    more = [record(n, data=b'"' + b"x" * 9000 + b'"') for n in range(40, 60)]
    assert await store.end(ending(turn(), records=more))
    assert await store.records("p", "s", None, 100) == [*rows, *more]


async def test_a_row_that_the_store_refuses_is_no_outage(plane: ServedPlane, store: HttpStore):
    await store.admit(admission(records=[record(1)]))
    assert await code(store.append([record(1, record_id="rec_twin")])) == "internal"


async def test_an_answer_that_does_not_come_costs_one_time_out(plane: ServedPlane):
    plane.store = remote = Remote()
    await plane.stop()
    await plane.start()
    store = await HttpStore.open(plane.url, BOTH, seconds=0.2)
    remote.gate = asyncio.Event()
    async with asyncio.timeout(2):
        assert await code(store.admit(admission())) == "store_unavailable"
    remote.gate.set()
    assert await store.turn("p", "s", "t1") == turn()
    await store.close()


async def test_an_outage_of_the_plane_in_a_turn_costs_nothing_case_g1(plane: ServedPlane, tmp_path: Path):
    """Case G1 over real sockets: the plane goes away in the middle and comes back."""
    remote = await HttpStore.open(plane.url, BOTH, seconds=1.0)
    store = await SpooledStore.open(remote, tmp_path / "spool", SystemClock(), may_spool=lambda *_: True)
    await store.admit(admission())
    for n in range(1, 61):
        if n == 20:
            await plane.stop()
        if n == 45:
            await plane.start()
        assert await store.append([record(n)]) == Appended(1)
    assert await store.end(ending(turn(), records=[record(61)]))
    async with asyncio.timeout(10):
        while store.waiting:
            await asyncio.sleep(0.05)
    assert [row.n for row in await store.records("p", "s", None, 100)] == list(range(1, 62))
    assert await plane.store.quarantined("p", 10) == []
    await store.close()


async def test_a_runner_starts_without_its_plane_once_it_knew_it(plane: ServedPlane, tmp_path: Path):
    path = tmp_path / "spool"
    assert await SpooledStore.known_id(path) == ""
    store = await SpooledStore.open(
        await HttpStore.open(plane.url, BOTH), path, SystemClock(), may_spool=lambda *_: True
    )
    await store.close()
    await plane.stop()
    known = await SpooledStore.known_id(path)
    remote = await HttpStore.open(plane.url, BOTH, known_id=known)
    store = await SpooledStore.open(remote, path, SystemClock(), may_spool=lambda *_: True)
    assert store.store_id == plane.store.store_id
    assert await store.admit(admission(records=[record(1)]))
    await plane.start()
    async with asyncio.timeout(10):
        while store.waiting:
            await asyncio.sleep(0.05)
    assert await plane.store.open_turns() == [turn()]
    await store.close()
