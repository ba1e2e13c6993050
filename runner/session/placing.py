"""Finds a runner for sessions that nobody holds; a plane runs none itself (DESIGN 3.1.10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from runner.errors import RunnerError
from runner.leases.port import ReplicaInfo
from runner.rules.placement import choose
from runner.session.owners import Elsewhere

NO_RUNNER = "No runner is connected."


class Placement:
    """Chooses among the runners that are announced.

    Args:
        others: announced replicas but this one, without those that are provably gone.
        serves: whether a replica, by its id, works for a project.
    """

    def __init__(self, others: Callable[[], Awaitable[list[ReplicaInfo]]], serves: Callable[[str, str], bool]) -> None:
        self._others = others
        self._serves = serves

    async def __call__(self, project: str, session_id: str, failed: Collection[str]) -> Elsewhere:
        """The runner for a session; the same one as long as it is there.

        Args:
            project: of the session.
            session_id: the session.
            failed: replicas that could not be reached.

        Raises:
            RunnerError: ``plane_unavailable`` (retryable) when no runner is left.
        """
        urls = {
            info.replica_id: info.advertise_url
            for info in await self._others()
            if info.advertise_url and self._serves(info.replica_id, project)
        }
        chosen = choose(project, session_id, urls.keys() - set(failed))
        if chosen is None:
            text = f"{NO_RUNNER} {len(failed)} could not be reached." if failed else NO_RUNNER
            raise RunnerError("plane_unavailable", text, retry_after=1)
        return Elsewhere(chosen, urls[chosen])
