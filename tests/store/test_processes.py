"""Several processes on one file or database: nothing is lost, nothing fails, every race has one winner."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest

from runner.store.port import Store
from tests.store.rows import PROJECT, admission
from tests.store.sharing_child import ROUNDS, SESSIONS, open_store

ROOT = Path(__file__).parents[2]
NAMES = ("a", "b", "c")
SECONDS = 60.0


async def child(module: str, *arguments: str) -> Process:
    command = (sys.executable, "-m", f"tests.store.{module}", *arguments)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT)


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def race(place: str, processes: list[Process]) -> list[dict[str, Any]]:
    """Let the children go round by round, all at once; what each said at its end."""
    processes += [await child("sharing_child", place, name) for name in NAMES]
    for _ in range(ROUNDS):
        assert [await line(process) for process in processes] == ["ready"] * len(NAMES)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
    said = [json.loads(await line(process)) for process in processes]
    assert [await process.wait() for process in processes] == [0] * len(NAMES)
    return said


@pytest.fixture
async def processes():
    """Those that a test starts; none outlives it."""
    started: list[Process] = []
    yield started
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the processes meet: a path, or the URL of an empty database."""
    return str(tmp_path / "db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


async def test_three_processes_share_a_store(place: str, processes: list[Process]):
    async with asyncio.timeout(SECONDS):
        said = await race(place, processes)
    assert len({one["store_id"] for one in said}) == 1
    store = await open_store(place)
    try:
        await turns_are_right(store, said)
        await commands_are_right(store, said)
        await records_are_right(store, said)
    finally:
        await store.close()


async def turns_are_right(store: Store, said: list[dict[str, Any]]) -> None:
    admitted = [turn_id for one in said for turn_id in one["admit"]]
    assert sorted(turn_id.rsplit("-", 1)[0] for turn_id in admitted) == sorted(
        f"{name}-{epoch}" for name in SESSIONS for epoch in range(1, ROUNDS + 1)
    ), "one turn for each epoch"
    enders = {turn_id: who for one, who in zip(said, NAMES, strict=True) for turn_id in one["end"]}
    assert sorted(enders) == sorted(admitted), "one ending for each turn"
    assert sum(len(one["end"]) for one in said) == len(enders)
    for turn_id, who in enders.items():
        row = await store.turn(PROJECT, turn_id.split("-")[0], turn_id)
        assert row is not None
        assert (row.outcome, row.stop_reason) == ("cancelled", who)
    assert await store.open_turns() == []


async def commands_are_right(store: Store, said: list[dict[str, Any]]) -> None:
    names = {key for one in said for key in one["commands"]}
    assert len(names) == 2 * ROUNDS * len(SESSIONS)
    for key in names:
        assert len({one["commands"][key] for one in said if key in one["commands"]}) == 1, key
    stored = await store.open_commands()
    assert {row.command_id for row in stored} == {command for one in said for command in one["commands"].values()}
    claims = [(command, who) for one, who in zip(said, NAMES, strict=True) for command in one["claim"]]
    assert sorted(claims) == sorted((row.command_id, row.claimed_by) for row in stored)


async def records_are_right(store: Store, said: list[dict[str, Any]]) -> None:
    for name in NAMES:
        found = await store.records(PROJECT, f"own-{name}", None, 10_000)
        assert [(row.epoch, row.n) for row in found] == [(e, n) for e in range(1, ROUNDS + 1) for n in range(20)]
    for name in SESSIONS:
        found = await store.records(PROJECT, name, None, 10_000)
        winners = {turn_id for one in said for turn_id in one["admit"] if turn_id.startswith(f"{name}-")}
        assert {row.turn_id for row in found} == winners
        assert len(found) == 2 * ROUNDS
    assert await store.quarantined(PROJECT, 10) == []


async def test_a_process_that_is_killed_while_it_writes_leaves_the_others_a_store(place: str, processes: list[Process]):
    store = await open_store(place)
    try:
        async with asyncio.timeout(SECONDS):
            for attempt in range(3):
                killed = await child("writing_child", place, f"k{attempt}-")
                processes.append(killed)
                said = [(await line(killed)).split() for _ in range(40)]
                killed.kill()
                await killed.wait()
                assert await store.admit(admission(f"t{attempt}", attempt + 1))
                ended_turns = [f"{name}-t{epoch}" for kind, name, epoch in said[1:] if kind == "end"]
                assert len(ended_turns) > 5
                for turn_id in ended_turns:
                    row = await store.turn(PROJECT, turn_id.split("-t")[0], turn_id)
                    assert row is not None
                    assert row.outcome == "completed"
    finally:
        await store.close()
