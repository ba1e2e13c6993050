"""Files of workspaces: which sandbox's, whether now, and one write at a time (DESIGN 4, ``files``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from runner.clock import rfc3339
from runner.errors import RunnerError
from runner.rules.files import MAX_FILE_BYTES, Content, Entry, Precondition, Written, decode_cursor, encode_cursor
from runner.rules.pool import Key
from runner.sandbox.port import Files, Provider
from runner.session.port import Caller
from runner.session.registry import Registry
from runner.session.services import Services
from runner.session.session import Session

AT_ONCE: Final = 8
"""How many files of one provider are read or written at the same time: so many are in memory."""


class SessionFiles:
    """See ``session.port.Files``."""

    def __init__(self, services: Services, registry: Registry) -> None:
        self._services = services
        self._registry = registry
        self._writing: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        self._room: dict[str, asyncio.Semaphore] = {}

    async def read(self, caller: Caller, session_id: str, path: str) -> Content:
        """See ``session.port.Files.read``."""
        session = await self._registry.existing((caller.project, session_id))
        provider, files = self._of(session, caller)
        async with self._turn_at(provider):
            return await files().read(path, MAX_FILE_BYTES)

    async def write(
        self, caller: Caller, session_id: str, path: str, data: bytes, condition: Precondition
    ) -> Written | None:
        """See ``session.port.Files.write``."""
        session = await self._registry.existing((caller.project, session_id))
        provider, files = self._of(session, caller)
        lock = self._writing.setdefault(session.key, asyncio.Lock())
        session.written_to += 1
        try:
            async with lock, self._turn_at(provider):
                written = await files().write(path, data, condition)
        finally:
            session.written_to -= 1
        if session.ended_at is not None:
            # Its workspace may have been removed before this made it again.
            await provider.remove(*session.place(provider.name))
            raise RunnerError("session_ended", f"Session {session_id} has ended.")
        return written

    async def list(self, caller: Caller, session_id: str, path: str, limit: int, cursor: str | None) -> dict[str, Any]:
        """See ``session.port.Files.list``."""
        after = decode_cursor(cursor)
        session = await self._registry.existing((caller.project, session_id))
        provider, files = self._of(session, caller)
        async with self._turn_at(provider):
            found = await files().list(path, after, limit)
        folder = "/".join(part for part in path.split("/") if part not in ("", "."))
        return {
            "path": folder,
            "items": [_view(folder, entry) for entry in found.entries],
            "next_cursor": encode_cursor(found.after) if found.after is not None else None,
        }

    def _turn_at(self, provider: Provider) -> asyncio.Semaphore:
        return self._room.setdefault(provider.name, asyncio.Semaphore(AT_ONCE))

    def _of(self, session: Session, caller: Caller) -> tuple[Provider, Callable[[], Files]]:
        """The session's provider, and its files, asked for when their turn comes: a start may have begun meanwhile."""
        effective = session.effective
        provider = self._services.provisioner.providers.get(effective.provider)
        if provider is None:
            raise RunnerError("invalid_request", f"The provider {effective.provider} is not set up here.")
        path = Path(effective.workspace_path) if effective.workspace_path is not None else None
        if path is not None:
            path = self._services.provisioner.check_path(path, caller)

        def files() -> Files:
            if session.ended_at is not None:
                raise RunnerError("session_ended", f"Session {session.session_id} has ended.")
            if session.taken and self._services.pool.live(session.key) is None:
                text = "The session's sandbox is being started. Try again."
                raise RunnerError("session_starting", text, retry_after=1)
            return provider.files(*session.place(provider.name), path, effective.recipe)

        return provider, files


def _view(folder: str, entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "path": f"{folder}/{entry.name}" if folder else entry.name,
        "type": entry.kind,
        "size": entry.size,
        "modified_at": rfc3339(entry.modified_at),
        **({"target": entry.target} if entry.target is not None else {}),
    }
