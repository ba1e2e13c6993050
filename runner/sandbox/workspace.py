"""Directories and files of a session, confined: nothing here ever follows a symlink out (DESIGN 3.11)."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EBUSY, EISDIR, ELOOP, ENOTDIR
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.ids import valid_id
from runner.rules.files import names_of
from runner.sandbox.mounts import mounted_below

Identity = tuple[int, int]
"""Device and inode."""
MAX_FILES: Final = 10_000
MAX_BYTES: Final = 64 * 1024 * 1024
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IN_THE_WAY: Final = (EISDIR, ELOOP, ENOTDIR)
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_of(path: str) -> tuple[str, ...]:
    """The names of a relative path that stays below its root.

    Raises:
        RunnerError: ``invalid_request`` for an absolute path, ``..``, an empty one, or one that is too long.
    """
    found = names_of(path)
    if isinstance(found, str):
        raise _refused(path[:100], found)
    return found


def check_ids(*ids: str) -> None:
    """Refuse what is no id of a project or session, for directories and names are made of them.

    Raises:
        RunnerError: ``invalid_request``.
    """
    if not all(map(valid_id, ids)):
        raise RunnerError("invalid_request", "A project or session id may hold letters, digits, “_” and “-” only.")


def check_files(files: Mapping[str, bytes]) -> None:
    """Refuse what cannot be written, before anything is.

    Raises:
        RunnerError: ``invalid_request`` naming the path, or ``too_large``.
    """
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_BYTES:
        raise RunnerError("too_large", f"More than {MAX_FILES} files or {MAX_BYTES} bytes of given files.")
    for path in files:
        parts_of(path)


def identities(*paths: Path) -> frozenset[Identity]:
    """What tells these files and folders from all others, by whatever path they are met; missing ones are left out."""
    found = set()
    for path in paths:
        with suppress(OSError):
            found.add(_identity(os.stat(path)))
    return frozenset(found)


def _identity(facts: os.stat_result) -> Identity:
    return facts.st_dev, facts.st_ino


def open_directory(base: Path, parts: Sequence[str]) -> int:
    """Open ``base/parts…``, making what is missing; the caller closes the descriptor.

    Raises:
        OSError: a part is a symlink or no directory, or cannot be made.
    """
    return _descend(base, parts, 0o700)


def open_existing(base: Path, parts: Sequence[str]) -> int:
    """Open ``base/parts…``; the caller closes the descriptor.

    Raises:
        OSError: a part is missing, a symlink or no directory.
    """
    return _descend(base, parts, None)


class _Hidden(Exception):
    """The way leads to what is not to be met."""


def _descend(base: Path, parts: Sequence[str], mode: int | None, hidden: frozenset[Identity] = frozenset()) -> int:
    """Go down from ``base`` one name at a time; what is missing is made unless ``mode`` is None."""
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            try:
                inner = os.open(part, _DIRECTORY, dir_fd=fd)
            except FileNotFoundError:
                if mode is None:
                    raise
                _make(part, mode, fd)
                inner = os.open(part, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
        if hidden and _identity(os.fstat(fd)) in hidden:
            os.close(fd)
            raise _Hidden
    return fd


def _make(name: str, mode: int, fd: int) -> None:
    try:
        os.mkdir(name, mode, dir_fd=fd)
    except FileExistsError:
        pass


def write_given(root: Path, files: Mapping[str, bytes], hidden: frozenset[Identity] = frozenset()) -> None:
    """Write given files into a workspace; folders are made, an existing file keeps its mode, symlinks are refused.

    Args:
        root: the workspace.
        files: content by path.
        hidden: files and folders in it that are nobody's to write to.

    Raises:
        RunnerError: ``invalid_request`` naming a path that leaves the workspace, goes through a symlink, meets a
            folder or what is hidden; files before it are written.
        OSError: the disk refuses.
    """
    check_files(files)
    for path, content in files.items():
        *folders, name = parts_of(path)
        try:
            fd = _descend(root, folders, 0o777, hidden)
            try:
                _replace(fd, name, content, 0o666, hidden)
            finally:
                os.close(fd)
        except _Hidden:
            raise _refused(path, "it is the runner's own") from None
        except OSError as error:
            if error.errno in _IN_THE_WAY:
                raise _refused(path, "a symlink, or a file and a folder of one name, is in its way") from error
            raise


def write_private(root: Path, files: Mapping[str, bytes]) -> None:
    """Write files of a private home with mode 0600; a symlink of that name is replaced, never followed.

    Raises:
        RunnerError: ``invalid_request`` for a path that leaves the home.
        OSError: a folder is a symlink, or the disk refuses.
    """
    check_files(files)
    for path, content in files.items():
        *folders, name = parts_of(path)
        fd = open_directory(root, folders)
        try:
            _put(fd, name, content, 0o600, exactly=True)
        finally:
            os.close(fd)


def read_private(root: Path, path: str, most: int) -> bytes | None:
    """A file of a private home, no more than one byte beyond ``most``; None: there is none that belongs to the home."""
    *folders, name = parts_of(path)
    try:
        fd = _descend(root, folders, None)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
        with open(file, "rb") as stream:
            return stream.read(most + 1) if stat.S_ISREG(os.fstat(file).st_mode) else None
    except OSError:
        return None


def remove_private(root: Path, path: str) -> None:
    """Delete a file of a private home; what cannot be deleted stays."""
    *folders, name = parts_of(path)
    try:
        fd = _descend(root, folders, None)
        try:
            os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
    except OSError:
        pass


def _replace(fd: int, name: str, content: bytes, mode: int, hidden: frozenset[Identity]) -> None:
    try:
        there = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        _put(fd, name, content, mode, exactly=False)
        return
    if _identity(there) in hidden:
        raise _Hidden
    if not stat.S_ISREG(there.st_mode):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), name)
    _put(fd, name, content, stat.S_IMODE(there.st_mode), exactly=True)


def _put(fd: int, name: str, content: bytes, mode: int, *, exactly: bool) -> None:
    """Write beside and rename, so that neither a reader nor a hard link ever meets half a file."""
    beside = f".acp-runner-{secrets.token_hex(8)}"
    file = os.open(beside, _NEW, mode, dir_fd=fd)
    try:
        with open(file, "wb") as stream:
            if exactly:
                os.fchmod(file, mode)
            stream.write(content)
        os.rename(beside, name, src_dir_fd=fd, dst_dir_fd=fd)
    except BaseException:
        os.unlink(beside, dir_fd=fd)
        raise


def remove_tree(base: Path, parts: Sequence[str]) -> None:
    """Delete ``base/parts…`` with all below it; a missing one is fine, a symlink on the way or at its end is not.

    Raises:
        OSError: something could not be deleted; EBUSY and nothing was, for what is mounted there is another's.
    """
    *folders, name = parts
    mounted = mounted_below(base.resolve().joinpath(*parts))
    if mounted:
        raise OSError(EBUSY, "something is mounted there", mounted[0])
    try:
        fd = _descend(base, folders, None)
    except FileNotFoundError:
        return
    try:
        shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
        if _exists(name, fd):
            _unlock(base.joinpath(*parts))
            shutil.rmtree(name, dir_fd=fd)
    finally:
        os.close(fd)


def _exists(name: str, fd: int) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _unlock(top: Path) -> None:
    """Make every folder writable again: tool caches are often read-only, which keeps them from being deleted."""
    if top.is_symlink():
        return
    os.chmod(top, 0o700)
    for folder, names, _ in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)


def _refused(path: str, why: str) -> RunnerError:
    return RunnerError("invalid_request", f"The workspace file {path!r} was refused: {why}.", field="workspace.files")
