"""Sandboxes on their way to sleep or away that no seat holds any more; one task for each name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from runner.rules.daytona import disk_over
from runner.sandbox.daytona.service import CallFailed, DaytonaService
from runner.tasks import Tasks

PAUSE_SECONDS: Final = 15.0
log = logging.getLogger("runner.sandbox.daytona")


class Down(Protocol):
    """Brings a sandbox down; what is known of it then, None when that was not reached."""

    async def __call__(self, name: str, *, away: bool) -> str | None:
        """``away``: nothing stays; else the disk does."""
        ...


class Leaving:
    """Goes on until it is done.

    Args:
        tasks: of the provider.
        service: the vendor.
        down: see ``Down``.
        forget: deletes the secrets of the sandbox of that name.
        held: whether a seat holds the sandbox of that name.
    """

    def __init__(
        self,
        tasks: Tasks,
        service: Callable[[], Awaitable[DaytonaService]],
        down: Down,
        forget: Callable[[str], Awaitable[None]],
        held: Callable[[str], bool],
    ) -> None:
        self._tasks, self._service, self._down, self._forget, self._held = tasks, service, down, forget, held
        self._going: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._going

    async def wait(self, name: str, seconds: float) -> None:
        """Until the sandbox is where it goes, at most so long: a newcomer of its name would go along."""
        going = self._going.get(name)
        if going is not None:
            await asyncio.wait({going}, timeout=seconds)

    def away(self, name: str, *, disk_seconds: float | None = None) -> None:
        """Delete it; with ``disk_seconds`` only a disk that nobody used for so long."""
        self._begin(name, lambda: self._away(name, disk_seconds))

    def to_sleep(self, name: str) -> None:
        """Stop what a dead runner left; its disk stays."""
        self._begin(name, lambda: self._to_sleep(name))

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        known = self._going.get(name)

        async def one_after_the_other() -> None:
            if known is not None:
                await asyncio.wait({known})
            try:
                await work()
            finally:
                if self._going.get(name) is task:
                    del self._going[name]

        task = self._going[name] = self._tasks.spawn(f"remove {name}", one_after_the_other())

    async def _to_sleep(self, name: str) -> None:
        if not self._held(name):
            await self._down(name, away=False)

    async def _away(self, name: str, disk_seconds: float | None) -> None:
        while disk_seconds is None or await self._over(name, disk_seconds):
            if await self._down(name, away=True) is not None:
                await self._forget(name)
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _over(self, name: str, disk_seconds: float) -> bool:
        while not self._held(name):
            try:
                found = await (await self._service()).get(name)
            except CallFailed as failed:
                log.info("disk %s was not looked at: %s", name, failed)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            over = found is not None and disk_over(found.state, found.silent_seconds, disk_seconds)
            return over and not self._held(name)
        return False
