"""Files of a workspace over there: one program of ours on the sandbox's own Python, and transfers beside it."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar

from runner.errors import RunnerError
from runner.rules.files import ALWAYS, Content, Listing, Precondition, Written, etag_of, file_names, folder_names
from runner.sandbox import tree
from runner.sandbox.daytona.lifecycle import RECIPE_LABEL
from runner.sandbox.daytona.programs import Said, ask, discard, place
from runner.sandbox.daytona.service import DaytonaService, Found
from runner.sandbox.daytona.visits import Visits
from runner.sandbox.file_answers import Mismatch, error_of, listing_of
from runner.sandbox.port import SandboxSpec

T = TypeVar("T")
Work = Callable[[DaytonaService, Found], Awaitable[T]]
INLINE_READ: Final = 128 * 1024
INLINE_WRITE: Final = 32 * 1024
"""Content up to this goes with the command, which is one argument of a shell: 128 KiB bound that."""
MOVE_SECONDS: Final = 60.0
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
        self.python = python

    def made_like(self, found: Found) -> None:
        """A sandbox that is made for these files is of the recipe of another one."""
        self._spec = replace(self._spec, recipe=found.labels.get(RECIPE_LABEL, self._spec.recipe))

    async def read(self, path: str, most: int) -> Content:
        """See ``port.Files.read``."""
        asked = {"op": "read", "path": file_names(path), "most": most, "inline": INLINE_READ}

        async def work(service: DaytonaService, found: Found) -> tuple[Said, bytes]:
            around = await place(service, found)
            said = await ask(service, found, self.python, tree, asked | around)
            if "error" in said or "data" in said:
                return said, base64.b64decode(said.get("data", ""))
            try:
                data = await service.download(found.id, around["staged"], MOVE_SECONDS)
            finally:
                await discard(service, found, around["staged"])
            if len(data) != said["size"]:
                raise RunnerError("sandbox_lost", f"{path[:200]!r} did not arrive whole.")
            return said, data

        told = await self.visit(work, make=False)
        said, data = told if told is not None else (_NOTHING, b"")
        _raise(said, path, most)
        return Content(data, etag_of(data), said["modified_at"])

    async def write(self, path: str, data: bytes, condition: Precondition = ALWAYS) -> Written | None:
        """See ``port.Files.write``; where there is no sandbox one is made."""
        asked: Said = {"op": "write", "path": file_names(path), **_condition(condition)}
        if small := len(data) <= INLINE_WRITE:
            asked["data"] = base64.b64encode(data).decode()

        async def work(service: DaytonaService, found: Found) -> Said:
            around = await place(service, found)
            if not small:
                await service.upload(found.id, {around["staged"]: data}, MOVE_SECONDS)
            said = await ask(service, found, self.python, tree, asked | around)
            if "error" in said and not small:
                await discard(service, found, around["staged"])
            return said

        said = await self.visit(work, make=True, repeat=not condition.asks)
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
            return await ask(service, found, self.python, tree, asked | await place(service, found))

        said = await self.visit(work, make=False)
        said = said if said is not None else _NOTHING
        if not names and said.get("error") == "not_found":
            return Listing(())
        _raise(said, path)
        return listing_of(said["entries"], base64.b64decode(said["last"]) if said["last"] is not None else None)

    async def visit(self, work: Work[T], *, make: bool, repeat: bool = True) -> T | None:
        """See ``visits.Visits.use``."""
        return await self._visits.use(self._spec, self._name, work, make=make, repeat=repeat)


def _condition(condition: Precondition) -> Said:
    def bare(etags: tuple[str, ...] | None) -> list[str] | None:
        return None if etags is None else [etag.strip('"') for etag in etags]

    return {"match": bare(condition.match), "none_match": bare(condition.none_match)}


def _raise(said: Said, path: str, most: int = 0) -> None:
    if "error" in said:
        raise error_of(said["error"], said["why"], path, most)
