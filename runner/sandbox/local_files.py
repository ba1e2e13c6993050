"""Files of workspaces on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from runner.errors import RunnerError
from runner.rules.files import ALWAYS, Content, Listing, Precondition, Written, etag_of, file_names, folder_names
from runner.sandbox.file_answers import Mismatch, error_of, listing_of
from runner.sandbox.tree import Refused, Tree, changed, refusal
from runner.sandbox.workspace import identities, open_directory, open_existing

T = TypeVar("T")
FILES_SECONDS: Final = 60.0
_KERNEL: Final = ("/dev", "/proc", "/sys")


class LocalFiles:
    """See ``port.Files``.

    Args:
        state_dir: of the runner: nothing of it but the session's own workspace is shown, wherever a workspace lies.
        workspace: absolute, and real where it is not ``own``: what was judged is what is opened.
        own: the workspace is the session's own, below ``state_dir``, and made when something is written into it.
        secret: files that are not there either.
    """

    def __init__(self, state_dir: Path, workspace: Path, *, own: bool, secret: Sequence[Path] = ()) -> None:
        self._state_dir = state_dir
        self._workspace = workspace
        self._own = own
        self._secret = secret

    async def read(self, path: str, most: int) -> Content:
        """See ``port.Files.read``."""
        names = file_names(path)

        def work() -> Content:
            with self._tree() as tree:
                data, facts = tree.read(names, most)
            return Content(data, etag_of(data), changed(facts))

        return await _done(work, path, most)

    async def write(self, path: str, data: bytes, condition: Precondition = ALWAYS) -> Written | None:
        """See ``port.Files.write``."""
        names = file_names(path)

        def work() -> bool:
            with self._tree(make=True) as tree:
                return tree.write(names, data, condition.admits if condition.asks else None)

        try:
            return Written(etag_of(data), len(data), await _done(work, path))
        except Mismatch:
            return None

    async def list(self, path: str, after: bytes, limit: int) -> Listing:
        """See ``port.Files.list``."""
        names = folder_names(path)

        def work() -> Listing:
            try:
                with self._tree() as tree:
                    return listing_of(*tree.listing(names, after, limit))
            except FileNotFoundError:
                if names:
                    raise
                return Listing(())

        return await _done(work, path)

    @contextmanager
    def _tree(self, *, make: bool = False) -> Iterator[Tree]:
        fd = self._open(make)
        try:
            yield Tree(fd, self._paths(), identities(self._state_dir, *self._secret), _foreign())
        finally:
            os.close(fd)

    def _open(self, make: bool) -> int:
        if not self._own:
            return open_existing(Path("/"), self._workspace.parts[1:])
        inner = self._workspace.relative_to(self._state_dir).parts
        if make:
            self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            return open_directory(self._state_dir, inner)
        return open_existing(self._state_dir, inner)

    def _paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((str(self._workspace), os.path.realpath(self._workspace))))


async def _done(work: Callable[[], T], path: str, most: int = 0) -> T:
    """``work`` in a thread, for a disk may be slow, and what went wrong in the port's words."""
    try:
        async with asyncio.timeout(FILES_SECONDS):
            return await asyncio.to_thread(work)
    except Refused as refused:
        raise error_of(refused.code, str(refused), path, most) from None
    except TimeoutError:
        raise RunnerError("internal", f"The disk did not answer within {FILES_SECONDS:g} s.") from None
    except OSError as error:
        found = refusal(error)
        if found is None:
            raise RunnerError("internal", f"The disk refused {path[:200]!r}: {error.strerror}.") from error
        raise error_of(found.code, str(found), path) from None


def _foreign() -> frozenset[int]:
    """The kernel's own file systems: what they show is the runner's, not the workspace's."""
    own = os.stat("/").st_dev
    found = set()
    for path in _KERNEL:
        try:
            found.add(os.stat(path).st_dev)
        except OSError:
            continue
    return frozenset(found - {own})
