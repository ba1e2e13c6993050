"""Which runner gets a session that nobody holds (DESIGN 3.1.10)."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256


def choose(project: str, session_id: str, replica_ids: Collection[str]) -> str | None:
    """The runner for a session: the same one as long as it is there, and sessions spread evenly over all.

    One that joins or leaves moves only the sessions that are, or were, its own (rendezvous hashing).

    Returns:
        None when there is no runner.
    """
    return max(replica_ids, key=lambda replica: (_weight(project, session_id, replica), replica), default=None)


def _weight(project: str, session_id: str, replica_id: str) -> bytes:
    return sha256(f"{project}/{session_id}/{replica_id}".encode()).digest()
