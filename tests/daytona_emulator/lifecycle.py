"""The sandboxes of the service and how they change state."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.daytona_emulator.box import Box
from tests.daytona_emulator.clock import MovableClock
from tests.daytona_emulator.problems import Problem, changing, not_found
from tests.daytona_emulator.processes import Processes

ACTIVITY_SECONDS = 45.0
RECOVERY_GUARD_SECONDS = 60.0
DEAD_DAEMON_SECONDS = 150.0
UPGRADE = "To increase concurrency limits, upgrade your organization's Tier by visiting the dashboard."


@dataclass(slots=True)
class Limits:
    """Of the organization; None is no limit.

    ``box_*`` is per sandbox. ``status``: of a refusal, 400 or (some servers) 403. ``queue``: a new one waits for a
    runner.
    """

    cpu: int | None = None
    memory: int | None = None
    disk: int | None = None
    box_cpu: int = 4
    box_memory: int = 8
    box_disk: int = 10
    runners: bool = True
    queue: bool = False
    status: int = 400
    suspended: str = ""


Changed = Callable[[Box, str, str], None]
"""Told of a sandbox, its old and its new state."""


class Boxes:
    """All sandboxes.

    Args:
        root: directory of their disks.
        step: real seconds that each state of a change takes.
        changed: told of every change of a state; an old state of ``""`` is a creation.
        halted: awaited when a sandbox no longer runs: connections and toolbox state go.
    """

    def __init__(
        self,
        root: Path,
        clock: MovableClock,
        processes: Processes,
        step: float,
        changed: Changed,
        halted: Callable[[Box], Awaitable[None]],
    ) -> None:
        self._root = root
        self._clock = clock
        self._processes = processes
        self.step = step
        self.limits = Limits()
        self._changed = changed
        self._halted = halted
        self._boxes: dict[str, Box] = {}
        self._baked: dict[str, dict[str, bytes]] = {}

    # -- reads

    def all(self) -> list[Box]:
        """Oldest first, without those that were destroyed and can still be read."""
        return [box for box in self._boxes.values() if box.state != "destroyed"]

    def find(self, wanted: str) -> Box:
        """By id or name; a deleted one's name is free at once."""
        box = self._boxes.get(wanted) or next((box for box in self.all() if box.name == wanted), None)
        if box is None:
            raise not_found(wanted)
        return box

    def bake(self, snapshot: str, files: dict[str, bytes]) -> None:
        """Files that every sandbox of a snapshot has in its home from the start; executable."""
        self._baked[snapshot] = dict(files)

    # -- what a client asks for

    def create(self, box: Box) -> Box:
        """Admit it and begin its start."""
        if any(other.name == box.name for other in self.all()):
            raise Problem(409, f"Sandbox with name {box.name} already exists")
        self._admit(box)
        self._boxes[box.id] = box
        box.updated_at = box.last_activity = self._clock.now()
        box.state = "pending_build" if box.dockerfile else "creating"
        self._changed(box, "", box.state)
        box.queued = self.limits.queue
        if not box.queued:
            self._build_up(box)
        return box

    def make(self, name: str, **fields: Any) -> Box:
        """A sandbox that does not exist yet."""
        now = self._clock.now()
        box = Box(name=name, root=self._root, created_at=now, **fields)
        box.root = self._root / box.id
        return box

    def start(self, box: Box) -> None:
        self._refuse_change(box)
        if box.state == "started":
            return
        if box.state not in ("stopped", "archived"):
            raise Problem(400, "Sandbox is not in valid state")
        self._admit(box)
        box.desired = "started"
        self.rotate(box)
        stages = ["restoring", "starting"] if box.state == "archived" else ["starting"]
        self._begin(box, self._bring_up(box, stages))

    def stop(self, box: Box) -> None:
        self._refuse_change(box)
        if box.state != "started":
            raise Problem(400, "Sandbox is not in a stoppable state")
        box.desired = "destroyed" if box.auto_delete == 0 else "stopped"
        self._begin(box, self._bring_down(box))

    def archive(self, box: Box) -> None:
        self._refuse_change(box)
        if box.auto_delete == 0:
            raise Problem(400, "Ephemeral sandboxes cannot be archived")
        if box.state != "stopped":
            raise Problem(400, "Sandbox is not stopped")
        box.desired = "archived"
        self._set(box, "archiving")
        self._begin(box, self._archive(box))

    def recover(self, box: Box) -> None:
        if box.state != "error" or not box.recoverable:
            raise Problem(400, "Sandbox is not in a recoverable error state")
        if self._clock.now() - box.recovered_at < RECOVERY_GUARD_SECONDS:
            raise Problem(409, "Sandbox recovery has been attempted recently. Please try again later.")
        box.recovered_at = self._clock.now()
        box.error_reason = box.recoverable = None
        box.desired = "started"
        self._set(box, "starting")
        self._begin(box, self._bring_up(box, []))

    def delete(self, box: Box) -> None:
        if box.state == "destroying" or box.desired == "destroyed":
            return
        if not box.settled:
            raise changing()
        box.desired = "destroyed"
        box.name = f"DESTROYED_{box.name}_{int(self._clock.now() * 1000)}"
        self._begin(box, self._destroy(box))

    def refresh(self, box: Box) -> None:
        """Somebody used it; the service takes note of that once in a while only."""
        now = self._clock.now()
        if not box.traits.deaf and now - box.noted_at >= ACTIVITY_SECONDS:
            box.last_activity = box.noted_at = now

    def rotate(self, box: Box) -> None:
        """The preview token is another from now on."""
        box.token = secrets.token_hex(16)

    # -- what happens to it by itself

    async def vanish(self, box: Box) -> None:
        """Gone without a word: its processes, its disk and its record."""
        self._still(box)
        self._boxes.pop(box.id, None)
        await self._clean(box, disk=True)

    async def kill_daemon(self, box: Box) -> None:
        """Memory ran out inside: everything is dead, the API still says ``started``."""
        box.traits.daemon_dead = True
        box.broken_at = self._clock.now()
        await self._clean(box)

    async def lose_container(self, box: Box) -> None:
        """The runner lost it: the API still says ``started``."""
        box.traits.container_gone = True
        await self._clean(box)

    async def fail(self, box: Box, reason: str, recoverable: bool) -> None:
        """It ends up in ``error``."""
        self._still(box)
        await self._clean(box)
        box.error_reason, box.recoverable = reason, recoverable
        self._set(box, "error")

    async def sweep(self) -> None:
        """The service's cron: auto-stop, auto-archive, auto-delete, time to live."""
        now = self._clock.now()
        for box in self.all():
            if box.queued:
                self._sweep_queued(box, now)
        begun = [box.change for box in self.all() if self._sweep_one(box, now) and not box.traits.stuck_delete]
        # What time began is done when the sweep returns: a moved clock leaves nothing in flight.
        if waiting := [change for change in begun if change is not None]:
            await asyncio.wait(waiting)

    async def close(self) -> None:
        """End every change and every process; the disks go."""
        for box in self.all():
            self._still(box)
        for box in self.all():
            await self._clean(box, disk=True)
        self._boxes.clear()

    # -- inside

    def _build_up(self, box: Box) -> None:
        stages = ["building_snapshot", "creating"] if box.dockerfile else ["pulling_snapshot"]
        self._begin(box, self._bring_up(box, [*stages, "starting"], fresh=True))

    def _sweep_queued(self, box: Box, now: float) -> None:
        """A runner is free, or the wait is over."""
        if not self.limits.queue:
            self._build_up(box)
        elif box.queue_timeout and now - box.created_at >= box.queue_timeout * 60:
            box.queued, box.queue_timed_out_at, box.desired = False, now, "destroyed"
            self._set(box, "destroyed")

    def _sweep_one(self, box: Box, now: float) -> bool:
        """Begin what is due; whether something was."""
        if not box.settled or box.desired == "destroyed" or box.state in ("error", "build_failed"):
            return False
        idle = now - box.last_activity
        stopped = now - box.stopped_at
        if box.ttl and now - box.created_at >= box.ttl * 60:
            self.delete(box)
        elif box.state == "started" and box.traits.daemon_dead and now - box.broken_at >= DEAD_DAEMON_SECONDS:
            box.desired = "stopped"
            self._begin(box, self._bring_down(box))
        elif box.state == "started" and box.auto_stop and idle >= box.auto_stop * 60:
            self.stop(box)
        elif box.state == "stopped" and 0 <= box.auto_delete * 60 <= stopped:
            self.delete(box)
        elif box.state == "stopped" and box.auto_archive and stopped >= box.auto_archive * 60:
            self.archive(box)
        else:
            return False
        return True

    def _admit(self, box: Box) -> None:
        limits = self.limits
        if limits.suspended:
            raise Problem(403, f"Organization is suspended: {limits.suspended}")
        asked = (("CPU", box.cpu, limits.box_cpu, ""), ("Memory", box.memory, limits.box_memory, "GB"))
        for what, wanted, most, unit in (*asked, ("Disk", box.disk, limits.box_disk, "GB")):
            if wanted > most:
                text = f"{what} request {wanted}{unit} exceeds maximum allowed per sandbox ({most}{unit})."
                raise Problem(limits.status, text)
        # A stopped sandbox has given back processor and memory, an archived one its disk as well.
        others = [other for other in self.all() if other is not box]
        running = [other for other in others if other.state not in ("stopped", "archived")]
        kept = [other for other in others if other.state != "archived"]
        totals = (
            ("CPU", sum(other.cpu for other in running) + box.cpu, limits.cpu, ""),
            ("memory", sum(other.memory for other in running) + box.memory, limits.memory, "GiB"),
            ("disk", sum(other.disk for other in kept) + box.disk, limits.disk, "GiB"),
        )
        for what, total, most_of_all, unit in totals:
            if most_of_all is not None and total > most_of_all:
                text = f"Total {what} limit exceeded. Maximum allowed: {most_of_all}{unit}."
                raise Problem(limits.status, f"{text}\n{UPGRADE}")
        if not limits.runners:
            raise Problem(400, "No available runners")

    def _refuse_change(self, box: Box) -> None:
        if box.state in ("error", "build_failed"):
            raise Problem(400, "Sandbox is in an errored state")
        if box.desired == "destroyed" or not box.settled:
            raise changing()

    def _begin(self, box: Box, work: Any) -> None:
        self._still(box)
        box.change = asyncio.get_running_loop().create_task(work, name=f"daytona-emulator-{box.id[:8]}")

    def _still(self, box: Box) -> None:
        """Whatever it was about to become, it does not."""
        box.queued = False
        if box.change is not None:
            box.change.cancel()

    def _set(self, box: Box, state: str) -> None:
        old, box.state = box.state, state
        box.updated_at = self._clock.now()
        self._changed(box, old, state)

    async def _archive(self, box: Box) -> None:
        await asyncio.sleep(self.step)
        self._set(box, "archived")

    async def _bring_up(self, box: Box, stages: list[str], fresh: bool = False) -> None:
        for stage in stages:
            await asyncio.sleep(self.step)
            self._set(box, stage)
            if stage == "building_snapshot":
                box.build_log += [f"Step 1/1 : {line}\n" for line in box.dockerfile.splitlines()]
        await asyncio.sleep(self.step)
        if box.traits.fails_start:
            reason, box.traits.fails_start = box.traits.fails_start, ""
            await self.fail_in_change(box, reason)
            return
        for path in (box.home, box.run, box.root / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        for name, data in self._baked.get(box.snapshot, {}).items() if fresh else ():
            path = box.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755)
        box.traits.daemon_dead = box.traits.container_gone = False
        box.last_activity = self._clock.now()
        self._set(box, "started")

    async def fail_in_change(self, box: Box, reason: str) -> None:
        """``error`` as the end of a change of its own; recoverable."""
        await self._clean(box)
        box.error_reason, box.recoverable = reason, True
        self._set(box, "error")

    async def _bring_down(self, box: Box) -> None:
        await asyncio.sleep(self.step)
        self._set(box, "stopping")
        await self._clean(box)
        await asyncio.sleep(self.step)
        box.stopped_at = self._clock.now()
        self._set(box, "stopped")
        if box.auto_delete == 0:
            await self._destroy(box)

    async def _destroy(self, box: Box) -> None:
        self._set(box, "destroying")
        await self._clean(box)
        while box.traits.stuck_delete:
            await asyncio.sleep(self.step or 0.01)
        await asyncio.sleep(self.step)
        await self._clean(box, disk=True)
        self._set(box, "destroyed")
        self._boxes.pop(box.id, None)

    async def _clean(self, box: Box, disk: bool = False) -> None:
        await self._halted(box)
        await self._processes.kill(box)
        shutil.rmtree(box.run, ignore_errors=True)
        if disk:
            shutil.rmtree(box.root, ignore_errors=True)
