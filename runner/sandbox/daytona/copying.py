"""Copies a workspace from one remote sandbox into another, by way of this machine: no disk over there is shared."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.sandbox import archive
from runner.sandbox.copying import COPY_BYTES, COPY_ENTRIES, COPY_SECONDS
from runner.sandbox.daytona.files import DaytonaFiles
from runner.sandbox.daytona.programs import Said, ask, discard, place
from runner.sandbox.daytona.service import DaytonaService, Found
from runner.sandbox.port import Copied

ARCHIVE_BYTES: Final = 256 * 1024 * 1024
"""The largest archive that is carried."""
WHOLE_SECONDS: Final = 100.0


async def copy_workspace(source: DaytonaFiles, target: DaytonaFiles) -> Copied:
    """See ``port.Provider.copy_workspace``; a target that has something in it stays as it is.

    Raises:
        RunnerError: ``runner_at_capacity``, ``session_starting``, ``sandbox_lost``, ``sandbox_start_failed``;
            ``internal``: a disk refuses.
    """
    with tempfile.TemporaryDirectory(prefix="acp-runner-copy-", ignore_cleanup_errors=True) as folder:
        carried = Path(folder) / "workspace.tar.gz"

        async def pack(service: DaytonaService, found: Found) -> Said:
            target.made_like(found)
            return await _pack(source, service, found, carried)

        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                packed = await source.visit(pack, make=False)
                if packed is None or "error" in packed or packed["size"] is None:
                    return _nothing(packed)
                told = await target.visit(lambda service, found: _unpack(target, service, found, carried), make=True)
        except TimeoutError:
            return "too_large"
        except OSError as error:
            raise RunnerError("internal", f"The workspace was not copied: {error}.") from error
    if told is None or "error" in told:
        raise RunnerError("internal", f"The workspace was not copied: {(told or {}).get('why')}.")
    return "copied"


def _nothing(packed: Said | None) -> Copied:
    if packed is None or "error" not in packed:
        return "none"
    if packed["error"] == "too_large":
        return "too_large"
    raise RunnerError("internal", f"The workspace was not copied: {packed.get('why')}.")


async def _pack(files: DaytonaFiles, service: DaytonaService, found: Found, carried: Path) -> Said:
    bounds = {"entries": COPY_ENTRIES, "size": COPY_BYTES, "seconds": COPY_SECONDS, "most": ARCHIVE_BYTES}
    around = await place(service, found)
    said: Said = {}
    try:
        asked = {"op": "pack", **bounds, **around}
        said = await ask(service, found, files.python, archive, asked, COPY_SECONDS)
        if said.get("size") is None:
            return said
        await service.fetch(found.id, around["staged"], carried, COPY_SECONDS)
    finally:
        if "error" not in said:
            await discard(service, found, around["staged"])
    arrived = await asyncio.to_thread(os.path.getsize, carried)
    if arrived != said["size"]:
        raise RunnerError("sandbox_lost", f"{arrived} of {said['size']} bytes of the workspace arrived.")
    return said


async def _unpack(files: DaytonaFiles, service: DaytonaService, found: Found, carried: Path) -> Said:
    asked = {"op": "unpack", **await place(service, found)}
    try:
        await service.upload(found.id, {asked["staged"]: carried}, COPY_SECONDS)
        return await ask(service, found, files.python, archive, asked, COPY_SECONDS)
    finally:
        await discard(service, found, asked["staged"])
