"""Hostile turns in one cell, and an independent look at who is left; also a program, to be run as another user.

``python -m tests.sandbox.hostile_run STATE_DIR LEVEL TURNS`` prints one JSON object of what was found.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from runner.sandbox.local_sandbox import boot_ticks
from tests.sandbox import bed
from tests.sandbox.bed import SECONDS, Talk, spec, until

KINDS = ("plain", "setsid", "nohup", "daemon", "pair", "deaf", "stopped", "loop")
REAP_SECONDS = 1.0


async def hostile_turns(state_dir: Path, level: str, turns: int, **limits: Any) -> dict[str, Any]:
    """Each turn starts one process of each kind and is cancelled; behind the last, all kinds run at the teardown."""
    store_id = f"store_{secrets.token_hex(8)}"
    provider = bed.local(state_dir, store_id, level=level, **limits)
    found: dict[str, Any] = {"uid": os.geteuid(), "level": level, "left": [], "strangers": [], "kills": []}
    try:
        sandbox = await provider.start(spec())
        talk = Talk(sandbox)
        await talk.line()
        pong = await talk.say("helper")
        # Only root may read the environment of a cell's init.
        before = {*bed.carriers(store_id), *namespace_of(sandbox.agent_pid)}
        for number in range(turns):
            turn = f"turn_{number}"
            await sandbox.mark(turn).set(SECONDS)
            await _next_tick()
            for kind in KINDS:
                await talk.say(kind)
            started = time.monotonic()
            reaped = await sandbox.kill_turn(turn, REAP_SECONDS)
            found["kills"].append(time.monotonic() - started)
            found["left"] += [*reaped.survivors, *(set(bed.carriers(store_id)) - before)]
            found["strangers"] += set(namespace_of(sandbox.agent_pid)) - before
            found["answers"] = await talk.say("ping") == pong and found.get("answers", True)
        for kind in KINDS:
            await talk.say(kind)
        namespace = os.readlink(f"/proc/{sandbox.agent_pid}/ns/pid") if level == "cell" else ""
        started = time.monotonic()
        gone = await sandbox.destroy(0.0)
        found["teardown"] = time.monotonic() - started
        found["proof"] = gone.proof
        found["survivors"] = [*gone.survivors, *bed.carriers(store_id), *inhabitants(namespace)]
    finally:
        await provider.close()
    return found


async def _next_tick() -> None:
    now = boot_ticks()
    await until(lambda: boot_ticks() > now, "the next clock tick")


def namespace_of(agent: int | None) -> list[int]:
    """Everybody in the pid namespace of a cell's agent, seen from outside; of the runner's own: nobody."""
    namespace = os.readlink(f"/proc/{agent}/ns/pid")
    return inhabitants(namespace) if namespace != os.readlink("/proc/self/ns/pid") else []


def inhabitants(namespace: str) -> list[int]:
    """Live processes in a pid namespace."""
    found = []
    for entry in Path("/proc").iterdir() if namespace else ():
        try:
            inside = entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace
        except OSError:
            continue
        if inside and bed.state(int(entry.name)) not in "ZX":
            found.append(int(entry.name))
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(hostile_turns(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))))
