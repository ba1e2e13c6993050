"""What a replica that is gone left in its state directory, and the endings of its turns (DESIGN 3.9)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from runner.assembly.choices import hand_in_spool
from runner.clock import Clock
from runner.leases.port import ReplicaInfo
from runner.sandbox.statelock import state_dir_of
from runner.session.reconcile import reconcile
from runner.session.recovery import recovered
from runner.store.port import Store
from runner.turn.live_file import left_by

log = logging.getLogger("runner")
LIVE: Final = "live"
"""Folder of a state directory: what its replicas showed."""


@asynccontextmanager
async def handed_in(dead: ReplicaInfo, store: Store, clock: Clock) -> AsyncIterator[None]:
    """Give the store what a dead replica of this machine had accepted, then what it had shown.

    Inside the context its turns get their endings; what it had shown is kept until they have.

    Raises:
        RunnerError: ``store_unavailable``.
    """
    await hand_in_spool(dead, store, clock)
    if dead.lock is None:
        yield
        return
    async with recovered(state_dir_of(Path(dead.lock)) / LIVE, dead.replica_id, store, clock):
        yield


async def end_leftovers(store: Store, clock: Clock, live_dir: Path | None) -> int:
    """End every turn that has no ending, behind what its replica had shown of it; nobody else uses the store.

    How many turns those were.

    Raises:
        RunnerError: ``store_unavailable``.
    """
    async with AsyncExitStack() as stack:
        for replica_id in left_by(live_dir) if live_dir is not None else ():
            assert live_dir is not None
            await stack.enter_async_context(recovered(live_dir, replica_id, store, clock))
        lost = await reconcile(store, clock)
    if lost:
        log.warning("%d turns of an earlier runner were ended as lost", lost)
    return lost
