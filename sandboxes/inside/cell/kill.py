"""Kills that are proven: one turn's processes while the agent lives, or the whole cell (DESIGN 3.3.7, 3.10).

A job is stepped by the control loop between its waits, so that a teardown is never behind a kill that hangs.
"""

from __future__ import annotations

import os
import signal

from cell.processes import ZOMBIE, Entry, boot_ticks, descendants, of_turn, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cell.processes import Identity

CLEAN_SCANS = 3
_DRAIN = 20_000


class Children:
    """Reaps everything that ends up under the init; remembers how the agent ended.

    Attributes:
        agent: (pid, start) of the running agent, or None.
        agent_status: the agent's wait status once it was reaped, until ``take_status``.
        watched: the wait status of these pids once they were reaped, None until then.
    """

    def __init__(self) -> None:
        self.agent: Identity | None = None
        self.agent_status: tuple[int, int] | None = None
        self.watched: dict[int, int | None] = {}

    def drain(self) -> bool:
        """Reap all that is ready; False when no child is left at all (ECHILD)."""
        for _ in range(_DRAIN):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if self.agent is not None and pid == self.agent[0]:
                self.agent = None
                self.agent_status = (pid, status)
            elif pid in self.watched:
                self.watched[pid] = status
        return True


def kill_everybody() -> None:
    """As process 1 of a namespace: one call that reaches every process in it, also one that is just being forked."""
    if os.getpid() == 1:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _slay(targets: list[Entry]) -> None:
    """Stop all first, so that none can replace another while they are killed one by one."""
    for entry in targets:
        send(entry, signal.SIGSTOP)
    for entry in targets:
        send(entry, signal.SIGKILL)


class TurnKill:
    """Kill what a turn started; over after three scans without a trace of it, or at the deadline.

    Not the turn's: the identities in ``kept``, whatever started before the clock tick ``since``, and what a kept
    process other than the agent starts once the kill is under way (a job of an earlier turn that keeps forking).
    """

    def __init__(
        self,
        children: Children,
        kept: set[Identity],
        since: int,
        deadline: float,
        spare_agent: bool,
        keep: tuple[str, ...],
        helpers: tuple[str, ...],
    ) -> None:
        self._children = children
        self._kept = kept
        self._since = since
        self._deadline = deadline
        self._spare_agent = spare_agent
        self._patterns = (keep, helpers)
        self._hit: set[Identity] = set()
        self._zombies: set[Identity] = set()
        self._clean = 0
        self._began = boot_ticks()
        self.busy = False

    def step(self, now: float) -> dict[str, object] | None:
        """Scan once and kill what it shows.

        Returns:
            ``{killed, survivors}`` when it is over, else None; ``busy`` says that killed processes still have to die.
        """
        self._children.drain()
        entries = descendants(os.getpid())
        agent = self._children.agent if self._spare_agent else None
        kept = self._kept | {(entry.pid, entry.start) for entry in entries if entry.start < self._since}
        if not self._spare_agent and self._children.agent is not None:
            kept.discard(self._children.agent)
        jobs = {pid for pid, start in kept if (pid, start) != self._children.agent}
        found = of_turn(entries, kept, agent, *self._patterns)
        targets = [entry for entry in found if entry.start <= self._began or entry.parent not in jobs]
        zombies = {(entry.pid, entry.start) for entry in entries if entry.state == ZOMBIE}
        # A process that just died may have handed a child to a parent that this scan had already read.
        self._clean = self._clean + 1 if not targets and zombies <= self._zombies else 0
        self._zombies = zombies
        if self._clean >= CLEAN_SCANS or now >= self._deadline:
            return {"killed": len(self._hit), "survivors": [entry.pid for entry in targets]}
        self.busy = bool(targets)
        self._hit.update((entry.pid, entry.start) for entry in targets)
        _slay(targets)
        return None


class Teardown:
    """A grace for the agent, then kill all until the kernel says that no child is left."""

    def __init__(self, children: Children, grace_until: float, deadline: float) -> None:
        self._children = children
        self._grace_until = grace_until
        self._deadline = deadline
        self._hit: set[Identity] = set()

    def hurry(self) -> None:
        """No grace any more: the runner is gone or asked again."""
        self._grace_until = 0.0

    def step(self, now: float) -> dict[str, object] | None:
        """Kill once more; ``{proof, killed, survivors}`` when nobody is left or the deadline passed."""
        if not self._children.drain():
            return {"proof": "echild", "killed": len(self._hit), "survivors": []}
        if self._children.agent is not None and now < self._grace_until:
            return None
        targets = [entry for entry in descendants(os.getpid()) if entry.state != ZOMBIE]
        self._hit.update((entry.pid, entry.start) for entry in targets)
        kill_everybody()
        _slay(targets)
        if now >= self._deadline and targets:
            return {"proof": None, "killed": len(self._hit), "survivors": [entry.pid for entry in targets]}
        return None
