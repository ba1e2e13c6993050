"""Copies a workspace into another session's: below directory descriptors, so that no symlink is ever followed."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EEXIST, ENOTEMPTY
from pathlib import Path
from typing import Final

from runner.rules.files import MAX_DEPTH
from runner.sandbox.workspace import open_directory, open_existing

COPY_ENTRIES: Final = 100_000
COPY_BYTES: Final = 1024 * 1024 * 1024
COPY_SECONDS: Final = 60.0
CHUNK: Final = 1024 * 1024
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO that takes a file's place meanwhile must not block the copy.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TooMuch(Exception):
    """There is more than a copy may have, or it takes too long."""


@dataclass(slots=True)
class Budget:
    """What a copy may still take; ``until`` is on the scale of ``time.monotonic``."""

    until: float
    entries: int = COPY_ENTRIES
    size: int = COPY_BYTES

    def entry(self) -> None:
        """One more file, folder or link. Raises ``TooMuch``."""
        self.entries -= 1
        self._check()

    def bytes(self, count: int) -> None:
        """So many more bytes. Raises ``TooMuch``."""
        self.size -= count
        self._check()

    def _check(self) -> None:
        if self.entries < 0 or self.size < 0 or time.monotonic() > self.until:
            raise TooMuch


def copy_tree(base: Path, source: Sequence[str], target: Sequence[str], budget: Budget) -> bool:
    """Copy ``base/source…`` to ``base/target…``, all or nothing; symlinks as they are, no sockets, pipes, devices.

    Files that change meanwhile are copied as they are met. False when there is no source; a target that has something
    in it stays as it is.

    Raises:
        TooMuch: beyond the budget.
        OSError: a part on the way is a symlink, or the disk refuses.
    """
    *folders, name = target
    try:
        inside = open_existing(base, source)
    except FileNotFoundError:
        return False
    try:
        above = open_directory(base, folders)
        try:
            _copied(inside, above, name, budget)
        finally:
            os.close(above)
    finally:
        os.close(inside)
    return True


def _copied(inside: int, above: int, name: str, budget: Budget) -> None:
    """Copy beside and rename, so that a start never meets half a workspace."""
    beside = f".fork-{secrets.token_hex(8)}"
    os.mkdir(beside, 0o700, dir_fd=above)
    try:
        fresh = os.open(beside, _DIRECTORY, dir_fd=above)
        try:
            _copy_folder(inside, fresh, budget, MAX_DEPTH)
        finally:
            os.close(fresh)
        os.rename(beside, name, src_dir_fd=above, dst_dir_fd=above)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True, dir_fd=above)
        if isinstance(error, OSError) and error.errno in (EEXIST, ENOTEMPTY):
            return
        raise


def _copy_folder(source: int, target: int, budget: Budget, depth: int) -> None:
    if depth == 0:
        raise TooMuch
    for name in os.listdir(source):
        budget.entry()
        try:
            _copy_entry(source, target, name, budget, depth)
        except FileNotFoundError:
            continue  # it went meanwhile


def _copy_entry(source: int, target: int, name: str, budget: Budget, depth: int) -> None:
    there = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISLNK(there.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif stat.S_ISDIR(there.st_mode):
        inner = os.open(name, _DIRECTORY, dir_fd=source)
        try:
            os.mkdir(name, 0o700, dir_fd=target)
            fresh = os.open(name, _DIRECTORY, dir_fd=target)
            try:
                _copy_folder(inner, fresh, budget, depth - 1)
                os.fchmod(fresh, stat.S_IMODE(there.st_mode) | 0o700)
            finally:
                os.close(fresh)
        finally:
            os.close(inner)
    elif stat.S_ISREG(there.st_mode):
        _copy_file(source, target, name, budget)


def _copy_file(source: int, target: int, name: str, budget: Budget) -> None:
    read = os.open(name, _READ, dir_fd=source)
    try:
        there = os.fstat(read)
        if not stat.S_ISREG(there.st_mode):
            return
        write = os.open(name, _NEW, 0o600, dir_fd=target)
        try:
            while count := os.sendfile(write, read, None, CHUNK):
                budget.bytes(count)
            os.fchmod(write, stat.S_IMODE(there.st_mode) & 0o777)
            os.utime(write, ns=(there.st_atime_ns, there.st_mtime_ns))
        finally:
            os.close(write)
    finally:
        os.close(read)
