"""A runner reduced to what the locks and the leftovers are about: ``STATE_DIR STORE_ID REPLICA_ID``.

Takes the lock, starts one cell, tells ``agent_pid init_pid`` and serves until it is killed or its stdin ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.sandbox.local import LocalProvider
from runner.sandbox.port import SandboxSpec
from runner.sandbox.statelock import StateLock

DEAF = (
    "trap '' TERM HUP; setsid nohup sh -c 'while :; do sleep 0.05; done' >/dev/null 2>&1 & while :; do sleep 0.05; done"
)


async def main(state_dir: Path, store_id: str, replica_id: str) -> None:
    try:
        lock = StateLock.acquire(state_dir, replica_id)
    except RunnerError as error:
        print(error.code, error.message, flush=True)
        return
    provider = LocalProvider(state_dir, store_id, replica_id, clock=SystemClock())
    argv = ("sh", "-c", DEAF)
    sandbox = await provider.start(SandboxSpec("default", f"of_{replica_id}", f"seat_{replica_id}", argv, {}))
    print(sandbox.agent_pid, sandbox.init_pid, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await provider.close()
    lock.release()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
