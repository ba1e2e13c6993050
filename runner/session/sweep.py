"""The sweep: what nobody else sees to is seen to by one replica at a time (DESIGN 3.7, 3.9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from runner.errors import RunnerError
from runner.leases.port import LeasePlane
from runner.rules.command import SWEEP_SECONDS
from runner.session.outage import Outage

log = logging.getLogger("runner.session")
LEASE: Final = "sweep"
LEASE_SECONDS: Final = 15.0
ALONE_SECONDS: Final = 60.0
JOB_SECONDS: Final = 30.0

Job = Callable[[], Awaitable[object]]


class Sweep:
    """Runs its jobs every 5 s under one named lease; alone, where only a boot leaves something behind, each minute.

    Args:
        plane: gives the lease that one replica has at a time.
        replica_id: this one.
        jobs: by name; one that fails, or takes longer than 30 s, keeps none of the others from its turn.
        lease: its name; sweeps of other jobs have another one.
    """

    def __init__(self, plane: LeasePlane, replica_id: str, jobs: Mapping[str, Job], *, lease: str = LEASE) -> None:
        self._plane = plane
        self._replica_id = replica_id
        self._jobs = dict(jobs)
        self._outages = {name: Outage(f"the sweep of {name}") for name in jobs}
        self._lease = lease

    async def run(self) -> None:
        """Sweep for ever, first after 5 s; cancelling it ends it."""
        await asyncio.sleep(SWEEP_SECONDS)
        while True:
            await self.round()
            await asyncio.sleep(SWEEP_SECONDS if self._plane.shared else ALONE_SECONDS)

    async def round(self) -> bool:
        """One sweep, now; False when it is another replica's, or nobody can say whose it is."""
        try:
            mine = await self._plane.take_lease(self._lease, self._replica_id, LEASE_SECONDS)
        except RunnerError as error:
            log.debug("no sweep: %s", error.message)
            return False
        except Exception:
            log.exception("nobody can say whose sweep it is")
            return False
        if mine:
            for name, job in self._jobs.items():
                await self._do(name, job)
        return mine

    async def _do(self, name: str, job: Job) -> None:
        try:
            async with asyncio.timeout(JOB_SECONDS):
                await job()
        except RunnerError as error:
            self._outages[name].met(error.message)
        except TimeoutError:
            self._outages[name].met(f"it took more than {JOB_SECONDS:g} s")
        except Exception:
            log.exception("the sweep of %s failed", name)
        else:
            self._outages[name].over()
