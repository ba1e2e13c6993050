"""Durable commands in every store (DESIGN 3.7)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from runner.store.port import CommandRow, Ending, Store
from runner.store.rows import COMMANDS_KEPT
from tests.store.rows import PROJECT, admission, command, ended, ending, session, turn

KEY = (PROJECT, "s")


async def claim(store: Store, name: str, by: str = "r1", now: int = 1000, deliveries: int = 3) -> CommandRow | None:
    return await store.claim_command(PROJECT, name, by, now, now + 15, deliveries)


async def test_a_command_is_stored_as_it_was_submitted(store: Store):
    row = command("c1", arguments={"queue": "keep", "ä": [1]}, idempotency_key="k")
    assert await store.submit_command(row) == row
    assert await store.command(PROJECT, "c1") == row
    assert await store.command("p2", "c1") is None
    assert await store.command(PROJECT, "c2") is None
    assert await store.open_commands() == await store.open_commands(KEY) == [row]
    assert await store.open_commands(("p2", "s")) == await store.open_commands((PROJECT, "s2")) == []


async def test_two_simultaneous_stops_are_one(store: Store):
    """DESIGN 3.7: whoever submits, there is one open command of a kind for a turn."""
    stored = await asyncio.gather(*(store.submit_command(command(f"c{n}")) for n in range(20)))
    assert {row.command_id for row in stored} == {stored[0].command_id}
    assert await store.open_commands() == [stored[0]]


async def test_what_a_stop_is_told_apart_by(store: Store):
    rows = [
        command("c1"),
        command("c2", kind="kill"),
        command("c3", turn_id="t2"),
        command("c4", turn_id=None),
        command("c5", in_session="s2"),
        command("c6", project="p2"),
    ]
    assert [await store.submit_command(row) for row in rows] == rows
    again = [replace(row, command_id=f"again{n}") for n, row in enumerate(rows)]
    assert [await store.submit_command(row) for row in again] == rows
    assert await store.open_commands(KEY) == rows[:4]


async def test_a_claimed_command_is_still_open_and_a_settled_one_is_not(store: Store):
    await store.submit_command(command("c1"))
    claimed = await claim(store, "c1")
    assert await store.submit_command(command("c2")) == claimed
    await store.settle_command(PROJECT, "c1", "applied", None, 2000)
    assert await store.submit_command(command("c3")) == command("c3"), "an applied one stops nothing any more"
    assert [row.command_id for row in await store.open_commands()] == ["c1", "c3"]


async def test_an_idempotency_key_leads_to_its_command_for_ever(store: Store):
    first = await store.submit_command(command("c1", idempotency_key="k1"))
    merged = await store.submit_command(command("c2", idempotency_key="k2"))
    assert merged == first
    await store.settle_command(PROJECT, "c1", "obsolete", "not_running", 2000)
    settled = await store.command(PROJECT, "c1")
    for key in ("k1", "k2"):
        other = command("c9", kind="kill", turn_id="t2", idempotency_key=key)
        assert await store.submit_command(other) == settled, "also the key of a request that was merged"
    assert await store.submit_command(command("c9", in_session="s2", idempotency_key="k1")) != settled
    assert await store.submit_command(command("c1", turn_id="t7")) == settled, "nor is an id given twice"
    assert len(await store.open_commands()) == 1


async def test_of_many_submits_of_one_key_one_is_stored(store: Store):
    rows = [command(f"c{n}", turn_id=f"t{n}", idempotency_key="k") for n in range(20)]
    stored = await asyncio.gather(*(store.submit_command(row) for row in rows))
    assert {row.command_id for row in stored} == {stored[0].command_id}
    assert len(await store.open_commands()) == 1


async def test_a_command_that_was_settled_at_once_repeats_no_open_one(store: Store):
    await store.submit_command(command("c1"))
    done = command("c2", state="obsolete", outcome="not_running", finished_at=1000)
    assert await store.submit_command(done) == done
    assert [row.command_id for row in await store.open_commands()] == ["c1"]


async def test_a_claim_is_taken_once_until_it_lapses_case_m9(store: Store):
    """Case M9: a claim that nobody settled is taken again, three times at most."""
    await store.submit_command(command("c1"))
    claims = await asyncio.gather(*(claim(store, "c1", f"r{n}") for n in range(5)))
    (first,) = [row for row in claims if row is not None]
    assert (first.state, first.claimed_until, first.deliveries) == ("claimed", 1015, 1)
    assert await store.command(PROJECT, "c1") == first
    assert await claim(store, "c1", first.claimed_by or "", now=1014) is None
    second = await claim(store, "c1", "r8", now=1015)
    assert second is not None
    assert (second.claimed_by, second.claimed_until, second.deliveries) == ("r8", 1030, 2)
    third = await claim(store, "c1", "r9", now=5000)
    assert third is not None
    assert await claim(store, "c1", "r9", now=9000) is None, "it was delivered three times"
    assert await store.open_commands() == [third]
    assert await claim(store, "unknown") is None


@pytest.mark.parametrize("state", ["applied", "obsolete"])
async def test_what_is_settled_is_not_claimed(store: Store, state: str):
    await store.submit_command(command("c1"))
    await store.settle_command(PROJECT, "c1", state, None, 2000)
    assert await claim(store, "c1") is None


async def test_a_command_is_settled_once(store: Store):
    await store.submit_command(command("c1"))
    moves = [("applied", "stopped"), ("obsolete", "superseded"), ("obsolete", "lost")]
    won = await asyncio.gather(*(store.settle_command(PROJECT, "c1", *move, 2000) for move in moves))
    assert won == [True, False, False]
    stored = await store.command(PROJECT, "c1")
    assert stored == command("c1", state="applied", outcome="stopped", finished_at=2000)
    assert await store.open_commands() == []
    assert not await store.settle_command(PROJECT, "unknown", "applied", "stopped", 2000)
    assert not await store.settle_command("p2", "c1", "applied", "stopped", 2000)


async def test_an_applied_command_takes_its_outcome_later(store: Store):
    await store.submit_command(command("c1"))
    claimed = await claim(store, "c1")
    assert claimed is not None
    assert await store.settle_command(PROJECT, "c1", "applied", None, 2000)
    assert await store.open_commands(KEY) == [replace(claimed, state="applied")]
    assert not await store.settle_command(PROJECT, "c1", "applied", None, 2500)
    assert not await store.settle_command(PROJECT, "c1", "obsolete", "lost", 2500)
    assert await store.settle_command(PROJECT, "c1", "applied", "stopped", 3000)
    assert await store.open_commands() == []
    stored = await store.command(PROJECT, "c1")
    assert stored == replace(claimed, state="applied", outcome="stopped", finished_at=3000)
    assert not await store.settle_command(PROJECT, "c1", "applied", "failed", 4000)


async def test_an_obsolete_command_waits_for_nothing(store: Store):
    await store.submit_command(command("c1"))
    assert await store.settle_command(PROJECT, "c1", "obsolete", None, 2000)
    assert await store.open_commands() == []
    assert not await store.settle_command(PROJECT, "c1", "applied", "stopped", 3000)


async def test_an_ending_settles_its_commands_with_it(store: Store):
    """DESIGN 3.9: the ending is committed together with the outcome of its command."""
    await store.admit(admission())
    for name, kind in (("c1", "cancel"), ("c2", "kill"), ("c3", "steer")):
        await store.submit_command(command(name, kind=kind))
    await store.settle_command(PROJECT, "c2", "applied", None, 1500)
    await store.settle_command(PROJECT, "c3", "obsolete", "superseded", 1500)
    done = [command(name, state="applied", outcome="stopped", finished_at=2000) for name in ("c1", "c2", "c3", "c4")]
    assert await store.end(ending(turn(), "cancelled", commands=done))
    assert await store.open_commands() == []
    stored = [await store.command(PROJECT, name) for name in ("c1", "c2", "c3", "c4")]
    assert stored == [
        command("c1", state="applied", outcome="stopped", finished_at=2000),
        command("c2", kind="kill", state="applied", outcome="stopped", finished_at=2000),
        command("c3", kind="steer", state="obsolete", outcome="superseded", finished_at=1500),
        None,
    ]


async def test_an_ending_names_the_turn_that_a_command_without_one_came_to_mean(store: Store):
    await store.admit(admission())
    await store.submit_command(command("c1", turn_id=None))
    await store.submit_command(command("c2", turn_id="t0", kind="kill"))
    done = [command(name, state="applied", outcome="stopped", finished_at=2000) for name in ("c1", "c2")]
    assert await store.end(ending(turn(), "cancelled", commands=done))
    found = [await store.command(PROJECT, name) for name in ("c1", "c2")]
    assert [row.turn_id for row in found if row is not None] == ["t1", "t0"]


async def test_an_ending_that_lost_settles_nothing(store: Store):
    await store.admit(admission())
    await store.submit_command(command("c1"))
    await store.end(ending(turn()))
    done = [command("c1", state="applied", outcome="stopped", finished_at=2000)]
    assert not await store.end(Ending(session(), ended(turn(), "cancelled"), commands=done))
    assert await store.open_commands() == [command("c1")]


async def test_open_commands_are_oldest_first(store: Store):
    rows = [command(f"c{n}", turn_id=f"t{n}", arrived_at=at) for n, at in enumerate([5, 1, 5, 3])]
    for row in rows:
        await store.submit_command(row)
    assert [row.command_id for row in await store.open_commands()] == ["c1", "c3", "c0", "c2"]


async def test_a_session_keeps_its_newest_settled_commands(store: Store):
    await store.submit_command(command("open", turn_id="t0"))
    for n in range(COMMANDS_KEPT + 5):
        await store.submit_command(command(f"c{n}", idempotency_key=f"k{n}"))
        await store.settle_command(PROJECT, f"c{n}", "obsolete", "not_running", 2000)
    await store.submit_command(command("last"))
    kept = [n for n in range(COMMANDS_KEPT + 5) if await store.command(PROJECT, f"c{n}") is not None]
    assert kept == list(range(5, COMMANDS_KEPT + 5))
    assert [row.command_id for row in await store.open_commands()] == ["open", "last"]
    renewed = await store.submit_command(command("new", kind="kill", idempotency_key="k0"))
    assert renewed.command_id == "new", "the key of a command that is gone is free"


async def test_deleting_a_session_deletes_its_commands_and_keys(store: Store):
    await store.submit_command(command("c1", idempotency_key="k"))
    await store.submit_command(command("c2", in_session="s2", idempotency_key="k"))
    await store.save_session(session(ended_at=2000))
    await store.delete_session_content(PROJECT, "s")
    assert await store.command(PROJECT, "c1") is None
    assert [row.command_id for row in await store.open_commands()] == ["c2"]
    again = command("c3", idempotency_key="k")
    assert await store.submit_command(again) == again
