"""What a plane knows of its runners: which projects each replica serves, and the lines that its notes take."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from runner.clock import Clock
from runner.errors import RunnerError
from runner.leases.port import LeasePlane, Note
from runner.server.context import CALLER, CONTEXT
from runner.store.port import Store
from runner.wire.codec import to_json

log = logging.getLogger("runner.server")

REPLICAS_KEPT: Final = 10_000
NOTES_WAITING: Final = 1000


@dataclass(slots=True, eq=False)
class Line:
    """One WebSocket of a runner; ``notes`` are on their way to it."""

    replica_id: str
    projects: frozenset[str]
    task: asyncio.Task[Any]
    notes: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(NOTES_WAITING))

    def put(self, note: Note) -> None:
        """Queue a note of one of the runner's projects; a runner that does not read is cut: its beats tell it all."""
        if note.get("project") not in self.projects:
            return
        try:
            self.notes.put_nowait(to_json(dict(note)))
        except asyncio.QueueFull:
            log.warning("replica %s does not read its notes; its line is cut", self.replica_id)
            self.task.cancel()


class Runners:
    """Replicas and the projects that they announced themselves for.

    A replica belongs to the projects that announced it: no other token may speak in its name, or the requests of its
    sessions, with their tokens, would go where that token's holder wants. One plane process knows what was announced to
    it; the longest silent replicas are forgotten past ``REPLICAS_KEPT``.
    """

    def __init__(self, plane: LeasePlane) -> None:
        self._plane = plane
        self._projects: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._lines: dict[str, list[Line]] = {}
        self._heard: set[str] = set()
        self._joining = asyncio.Lock()

    def may_speak(self, replica_id: str, projects: Iterable[str]) -> bool:
        """Whether tokens of these projects may act for a replica."""
        return self._projects.get(replica_id, frozenset()) <= set(projects)

    def may_see(self, replica_id: str, project: str) -> bool:
        """Whether a replica is none of other projects only."""
        known = self._projects.get(replica_id)
        return known is None or project in known

    def bind(self, replica_id: str, projects: frozenset[str]) -> None:
        """Note whose replica it is.

        Raises:
            RunnerError: ``forbidden``: it belongs to a project that is not among these.
        """
        if not self.may_speak(replica_id, projects):
            raise RunnerError("forbidden", f"Replica {replica_id} belongs to another project.")
        self._projects[replica_id] = projects
        self._projects.move_to_end(replica_id)
        if len(self._projects) > REPLICAS_KEPT:
            _ = self._projects.popitem(last=False)

    async def join(self, line: Line) -> None:
        """Have the plane's notes for a replica take this line until ``leave``.

        Raises:
            RunnerError: ``plane_unavailable``.
        """
        async with self._joining:
            if line.replica_id not in self._heard:
                await self._plane.listen(line.replica_id, lambda note: self._spread(line.replica_id, note))
                self._heard.add(line.replica_id)
        self._lines.setdefault(line.replica_id, []).append(line)

    def leave(self, line: Line) -> None:
        """Take a line away."""
        lines = self._lines[line.replica_id]
        lines.remove(line)
        if not lines:
            del self._lines[line.replica_id]

    def _spread(self, replica_id: str, note: Note) -> None:
        for line in list(self._lines.get(replica_id, ())):
            line.put(note)


@dataclass(slots=True)
class Coordination:
    """The plane's parts, shared by the coordination handlers."""

    plane: LeasePlane
    store: Store
    clock: Clock
    runners: Runners


COORDINATION: Final = web.AppKey("coordination", Coordination)


def projects_of(request: web.Request, tokens: Iterable[str]) -> frozenset[str]:
    """The caller's project, and those of its further tokens.

    Raises:
        RunnerError: ``forbidden``: a token is unknown or lacks the scope ``runner``.
    """
    gate = request.app[CONTEXT].gate
    found = {request[CALLER].project}
    for token in tokens:
        caller = gate.caller(f"Bearer {token}")
        if caller is None or "runner" not in caller.scopes:
            raise RunnerError(
                "forbidden", "tokens: one of them is unknown or lacks the scope 'runner'.", field="tokens"
            )
        found.add(caller.project)
    return frozenset(found)
