"""Whatever happens in whatever order: the SDK sees its own errors only, and everything can be deleted in the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from daytona import AsyncDaytona, AsyncSandbox, CreateSandboxFromSnapshotParams, SessionExecuteRequest
from daytona.common.errors import DaytonaConflictError, DaytonaError

from tests.daytona_emulator.problems import Problem
from tests.daytona_emulator.scenarios import play
from tests.daytona_emulator.server import DaytonaEmulator

ROUNDS = 40
OF_A_SANDBOX = ("auto_stop", "vanished", "daemon_dead", "container_gone", "errored", "start_fails", "stuck_delete")
OF_ALL = ("rate_limit", "server_error", "dropped", "create_dies_polling", "create_answer_lost", "queue", "quota")


async def session(box: AsyncSandbox) -> None:
    with contextlib.suppress(DaytonaConflictError):
        await box.process.create_session("s")
    command = "(setsid sleep 300 &) ; echo x"
    await box.process.execute_session_command("s", SessionExecuteRequest(command=command, run_async=True))


async def bounded(work: Callable[[], Awaitable[object]]) -> None:
    """A call that may fail as the SDK fails, or wait for what never comes."""
    with contextlib.suppress(DaytonaError, TimeoutError):
        await asyncio.wait_for(work(), 1.0)


@pytest.mark.parametrize("seed", range(3))
async def test_forty_rounds(emulator: DaytonaEmulator, sdk: AsyncDaytona, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(ROUNDS):
        boxes = emulator.boxes.all()
        if boxes and chance.random() < 0.5:
            wanted = {"sandbox": chance.choice(boxes).id, "recoverable": True}
            with contextlib.suppress(Problem):
                await play(emulator, chance.choice(OF_A_SANDBOX), wanted)
        else:
            await play(emulator, chance.choice([*OF_ALL, "restored", "restored"]), {"times": 1})
        if chance.random() < 0.2:
            await emulator.advance(chance.choice([60, 16 * 60, 120 * 60]))
        names = [box.name for box in emulator.boxes.all() if not box.name.startswith("DESTROYED")]
        if not names or chance.random() < 0.3:
            asked = CreateSandboxFromSnapshotParams(name=f"n{number}", auto_delete_interval=90)
            await bounded(partial(sdk.create, asked))
            continue
        with contextlib.suppress(DaytonaError):
            box = await sdk.get(chance.choice(names))
            acts: list[Callable[[], Awaitable[object]]]
            acts = [box.start, box.stop, box.archive, box.recover, box.delete, box.refresh_activity]
            acts += [
                partial(session, box),
                partial(box.process.exec, "sleep 300 &"),
                partial(box.fs.upload_file, b"", "x"),
            ]
            await bounded(chance.choice(acts))

    await play(emulator, "restored", {})
    for left in emulator.boxes.all():
        left.traits.stuck_delete = False
    deadline = asyncio.get_running_loop().time() + 20
    while remaining := emulator.boxes.all():
        assert asyncio.get_running_loop().time() < deadline, [(left.name, left.state) for left in remaining]
        for left in remaining:
            with contextlib.suppress(Problem):
                emulator.boxes.delete(left)
        await asyncio.sleep(0.05)
    assert emulator.processes.alive() == []
