"""Files that are only remembered: the twin of a workspace."""

from __future__ import annotations

from runner.rules.files import (
    ALWAYS,
    Content,
    Entry,
    Listing,
    Precondition,
    Written,
    etag_of,
    file_names,
    folder_names,
    too_large,
)
from runner.sandbox.file_answers import error_of

ByNames = dict[tuple[str, ...], bytes]
"""Names of a path to the content of its file; folders are what its files need."""


class MemoryFiles:
    """See ``port.Files``; ``disk`` is shared with the sandboxes of its session."""

    def __init__(self, disk: ByNames) -> None:
        self._disk = disk

    async def read(self, path: str, most: int) -> Content:
        """See ``port.Files.read``."""
        names = file_names(path)
        if self._is_folder(names):
            raise error_of("invalid_request", "it is no regular file", path)
        data = self._disk.get(names)
        if data is None:
            raise error_of("not_found", "", path)
        if len(data) > most:
            raise too_large(path, most)
        return Content(data, etag_of(data), 0)

    async def write(self, path: str, data: bytes, condition: Precondition = ALWAYS) -> Written | None:
        """See ``port.Files.write``."""
        names = file_names(path)
        there = self._disk.get(names)
        if not condition.holds(None if there is None else etag_of(there)):
            return None
        if self._is_folder(names) or any(names[:n] in self._disk for n in range(1, len(names))):
            raise error_of("invalid_request", "a file and a folder of one name", path)
        self._disk[names] = data
        return Written(etag_of(data), len(data), there is None)

    async def list(self, path: str, after: bytes, limit: int) -> Listing:
        """See ``port.Files.list``."""
        names = folder_names(path)
        if names in self._disk:
            raise error_of("invalid_request", "it is no folder", path)
        if names and not self._is_folder(names):
            raise error_of("not_found", "", path)
        depth = len(names)
        found = {file[depth]: file for file in self._disk if file[:depth] == names}
        due = sorted(name.encode() for name in found if name.encode() > after)
        entries = [self._entry(name.decode(), found[name.decode()], depth) for name in due[:limit]]
        return Listing(entries, due[limit - 1] if len(due) > limit else None)

    def _entry(self, name: str, file: tuple[str, ...], depth: int) -> Entry:
        if len(file) > depth + 1:
            return Entry(name, "folder", None, 0)
        return Entry(name, "file", len(self._disk[file]), 0)

    def _is_folder(self, names: tuple[str, ...]) -> bool:
        return any(file[: len(names)] == names and len(file) > len(names) for file in self._disk)
