"""Files of a workspace over there: one program of ours on the sandbox's own Python, and transfers beside it."""

from __future__ import annotations

import base64
import functools
import json
import secrets
import shlex
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import runner.sandbox.tree
from runner.errors import RunnerError
from runner.rules.files import ALWAYS, Content, Listing, Precondition, Written, etag_of, file_names, folder_names
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Found
from runner.sandbox.daytona.visits import Visits
from runner.sandbox.local_files import Mismatch, error_of, listing_of
from runner.sandbox.port import SandboxSpec

INLINE_READ: Final = 128 * 1024
INLINE_WRITE: Final = 32 * 1024
"""Content up to this goes with the command, which is one argument of a shell: 128 KiB bound that."""
CALL_SECONDS: Final = 30.0
MOVE_SECONDS: Final = 60.0
Said = dict[str, Any]
_NOTHING: Final[Said] = {"error": "not_found", "why": "there is no sandbox"}


class DaytonaFiles:
    """See ``port.Files``.

    A sandbox that sleeps is woken, and stays awake for a while (``visits.LINGER_SECONDS``).

    Args:
        visits: of the provider.
        spec: names the session.
        name: of its sandbox.
        python: the interpreter over there.
    """

    def __init__(self, visits: Visits, spec: SandboxSpec, name: str, python: str) -> None:
        self._visits = visits
        self._spec = spec
        self._name = name
        self._python = python

    async def read(self, path: str, most: int) -> Content:
        """See ``port.Files.read``."""
        asked = {"op": "read", "path": file_names(path), "most": most, "inline": INLINE_READ}

        async def work(service: DaytonaService, found: Found) -> tuple[Said, bytes]:
            place = await self._place(service, found)
            said = await self._ask(service, found, asked | place)
            if "error" in said or "data" in said:
                return said, base64.b64decode(said.get("data", ""))
            try:
                data = await service.download(found.id, place["staged"], MOVE_SECONDS)
            finally:
                await _discard(service, found, place["staged"])
            if len(data) != said["size"]:
                raise RunnerError("sandbox_lost", f"{path[:200]!r} did not arrive whole.")
            return said, data

        told = await self._visits.use(self._spec, self._name, work, make=False)
        said, data = told if told is not None else (_NOTHING, b"")
        _raise(said, path, most)
        return Content(data, etag_of(data), said["modified_at"])

    async def write(self, path: str, data: bytes, condition: Precondition = ALWAYS) -> Written | None:
        """See ``port.Files.write``; where there is no sandbox one is made."""
        asked: Said = {"op": "write", "path": file_names(path), **_condition(condition)}
        small = len(data) <= INLINE_WRITE

        async def work(service: DaytonaService, found: Found) -> Said:
            place = await self._place(service, found)
            if small:
                return await self._ask(service, found, asked | place | {"data": base64.b64encode(data).decode()})
            await service.upload(found.id, {place["staged"]: data}, MOVE_SECONDS)
            said = await self._ask(service, found, asked | place)
            if "error" in said:
                await _discard(service, found, place["staged"])
            return said

        said = await self._visits.use(self._spec, self._name, work, make=True, repeat=not condition.asks)
        assert said is not None
        try:
            _raise(said, path)
        except Mismatch:
            return None
        return Written(etag_of(data), len(data), said["created"])

    async def list(self, path: str, after: bytes, limit: int) -> Listing:
        """See ``port.Files.list``."""
        names = folder_names(path)
        asked = {"op": "list", "path": names, "after": base64.b64encode(after).decode(), "limit": limit}

        async def work(service: DaytonaService, found: Found) -> Said:
            return await self._ask(service, found, asked | await self._place(service, found))

        said = await self._visits.use(self._spec, self._name, work, make=False)
        said = said if said is not None else _NOTHING
        if not names and said.get("error") == "not_found":
            return Listing(())
        _raise(said, path)
        return listing_of(said["entries"], base64.b64decode(said["last"]) if said["last"] is not None else None)

    async def _place(self, service: DaytonaService, found: Found) -> dict[str, str]:
        root = f"{(await service.home(found.id)).rstrip('/')}/acp-runner"
        return {"root": f"{root}/workspace", "staged": f"{root}/staged-{secrets.token_hex(8)}"}

    async def _ask(self, service: DaytonaService, found: Found, asked: Mapping[str, Any]) -> Said:
        request = base64.b64encode(json.dumps(asked).encode()).decode()
        words = [self._python, "-I", "-c", program(), request]
        code, said = await service.execute(found.id, shlex.join(words), CALL_SECONDS)
        line = next((line for line in reversed(said.splitlines()) if line.startswith("{")), "")
        try:
            answer = json.loads(line) if code == 0 else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RunnerError("sandbox_lost", f"The sandbox did not tell of its files: {said.strip()[-200:]}")
        return answer


@functools.cache
def program() -> str:
    """The text of ``runner.sandbox.tree`` as one argument of an interpreter."""
    packed = base64.b64encode(zlib.compress(Path(runner.sandbox.tree.__file__).read_bytes(), 9)).decode()
    return f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"


async def _discard(service: DaytonaService, found: Found, path: str) -> None:
    """What stays is swept by a later request."""
    with suppress(CallFailed):
        await service.discard(found.id, path)


def _condition(condition: Precondition) -> Said:
    def bare(etags: tuple[str, ...] | None) -> list[str] | None:
        return None if etags is None else [etag.strip('"') for etag in etags]

    return {"match": bare(condition.match), "none_match": bare(condition.none_match)}


def _raise(said: Said, path: str, most: int = 0) -> None:
    if "error" in said:
        raise error_of(said["error"], said["why"], path, most)
