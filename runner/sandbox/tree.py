"""Files below one folder, reached by descriptors only, so that no link and no race leads out of it.

Only the standard library: the same text runs inside remote sandboxes, where it takes one request and says one line.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Json = dict[str, object]
MAX_LINKS = 40
MAX_OPEN = 200
CHUNK = 1024 * 1024
STAGED_SECONDS = 900.0
LAST_MS = 253_402_300_799_999
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe that takes a file's place must not block.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    """What was asked for is not done.

    ``code``: ``not_found``, ``invalid_request``, ``too_large``, ``mismatch``, ``forbidden``.
    """

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class Tree:
    """One folder with all below it.

    Args:
        root: descriptor of it; the caller closes it.
        paths: where it is, for links that name a place in it by its whole path.
        hidden: (device, inode) of folders that are not there for anybody.
        foreign: devices that are not there, e.g. that of ``/proc``.
    """

    def __init__(
        self,
        root: int,
        paths: tuple[str, ...],
        hidden: frozenset[tuple[int, int]] = frozenset(),
        foreign: frozenset[int] = frozenset(),
    ) -> None:
        self._root = root
        self._paths = tuple(path.rstrip("/") for path in paths)
        self._hidden = hidden
        self._foreign = foreign
        self._check(os.fstat(root))

    def read(self, parts: tuple[str, ...], most: int) -> tuple[bytes, os.stat_result]:
        """A file's content and facts.

        Raises:
            Refused: it is not there, no file, or larger than ``most``.
            OSError: the disk refuses.
        """
        with self._at(parts) as (fd, name, there):
            file = os.open(_a_file(name, there), _READ, dir_fd=fd)
        with open(file, "rb") as stream:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode):
                raise _no_file()
            data = stream.read(most + 1) if facts.st_size <= most else b""
        if facts.st_size > most or len(data) > most:
            raise Refused("too_large", "it is too large")
        return data, facts

    def write(
        self, parts: tuple[str, ...], data: bytes | str, holds: Callable[[str | None], bool] | None = None
    ) -> bool:
        """Put a file in place in one step: readers meet the old one or the new one, never half of one.

        What is replaced keeps its mode and owner; a new file or folder belongs to the owner of its folder.

        Args:
            parts: where; missing folders are made.
            data: the content, or the path of a file outside whose content is taken over, and which goes.
            holds: asked with the digest of the file that is there, None without one, whether to go on.

        Returns:
            Whether there was no such file before.

        Raises:
            Refused: ``mismatch``: ``holds`` said no; something else than a file is in the way.
            OSError: the disk refuses.
        """
        digest = self._digest(parts) if holds is not None else ""
        if holds is not None and not holds(digest):
            raise Refused("mismatch", "it is not the one that was expected")
        with self._at(parts, make=True) as (fd, name, there):
            if name is None or (there is not None and not stat.S_ISREG(there.st_mode)):
                raise _no_file()
            self._put(fd, name, data, there, only_new=digest is None)
        return there is None

    def _digest(self, parts: tuple[str, ...]) -> str | None:
        try:
            with self._at(parts) as (fd, name, there):
                file = os.open(_a_file(name, there), _READ, dir_fd=fd)
        except Refused as refused:
            if refused.code == "not_found":
                return None
            raise
        summed = hashlib.sha256()
        with open(file, "rb") as stream:
            while chunk := stream.read(CHUNK):
                summed.update(chunk)
        return summed.hexdigest()

    def _put(self, fd: int, name: str, data: bytes | str, there: os.stat_result | None, *, only_new: bool) -> None:
        beside = f".acp-runner-{secrets.token_hex(8)}"
        file = os.open(beside, _NEW, 0o666, dir_fd=fd)
        try:
            with open(file, "wb") as stream:
                if isinstance(data, bytes):
                    stream.write(data)
                else:
                    _take_over(data, file)
                stream.flush()
                _hand(file, there or os.fstat(fd))
                if there is not None:
                    os.fchmod(file, stat.S_IMODE(there.st_mode) & 0o777)
            if only_new:
                os.link(beside, name, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
                os.unlink(beside, dir_fd=fd)
            else:
                os.rename(beside, name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=fd)
            if isinstance(error, FileExistsError):
                raise Refused("mismatch", "it is there already") from error
            if isinstance(error, IsADirectoryError):
                raise _no_file() from error
            raise

    def listing(self, parts: tuple[str, ...], after: bytes, limit: int) -> tuple[list[Json], bytes | None]:
        """Up to ``limit`` entries behind the name ``after``, in the order of names' bytes; the last when more follow.

        Raises:
            Refused: it is not there, or no folder.
            OSError: the disk refuses.
        """
        with self._at(parts) as (fd, name, there):
            if name is not None and there is None:
                raise Refused("not_found", "it does not exist")
            if name is not None and there is not None and not stat.S_ISDIR(there.st_mode):
                raise Refused("invalid_request", "it is no folder")
            folder = os.open(name or ".", _FOLDER, dir_fd=fd)
        try:
            self._check(os.fstat(folder))
            with os.scandir(folder) as scan:
                names = (os.fsencode(entry.name) for entry in scan)
                found = heapq.nsmallest(limit + 1, (name for name in names if name > after))
            entries = [self._entry(folder, name) for name in found[:limit]]
        finally:
            os.close(folder)
        return [entry for entry in entries if entry is not None], found[limit - 1] if len(found) > limit else None

    def _entry(self, folder: int, name: bytes) -> Json | None:
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            link = stat.S_ISLNK(facts.st_mode)
            target = os.readlink(name, dir_fd=folder) if link else None
            self._check(facts)
        except (FileNotFoundError, Refused):
            return None
        file, inner = stat.S_ISREG(facts.st_mode), stat.S_ISDIR(facts.st_mode)
        return {
            "name": _shown(name),
            "kind": "file" if file else "folder" if inner else "link" if link else "other",
            "size": facts.st_size if file else None,
            "modified_at": changed(facts),
            "target": None if target is None else _shown(target),
        }

    @contextmanager
    def _at(
        self, parts: tuple[str, ...], *, make: bool = False
    ) -> Iterator[tuple[int, str | None, os.stat_result | None]]:
        """Descriptor of the folder, name in it, and facts of what is there, which is no link; no name: the folder."""
        fds = [os.dup(self._root)]
        try:
            yield self._walked(fds, list(reversed(parts)), make)
        finally:
            for fd in fds:
                os.close(fd)

    def _walked(self, fds: list[int], todo: list[str], make: bool) -> tuple[int, str | None, os.stat_result | None]:
        """The way down, with a descriptor for each folder on it: ``..`` of a link never leads above the root."""
        links = 0
        while todo:
            name = todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(fds) == 1:
                    raise _outside()
                os.close(fds.pop())
                continue
            there = _facts(fds[-1], name)
            last = all(part in ("", ".") for part in todo)
            if there is not None and stat.S_ISLNK(there.st_mode):
                links += 1
                if links > MAX_LINKS:
                    raise Refused("invalid_request", "too many links lead to each other")
                self._follow(fds, todo, os.readlink(name, dir_fd=fds[-1]))
            elif last:
                if there is not None:
                    self._check(there)
                return fds[-1], name, there
            else:
                self._enter(fds, name, there, make)
        return fds[-1], None, None

    def _follow(self, fds: list[int], todo: list[str], target: str) -> None:
        if target.startswith("/"):
            below = [path for path in self._paths if target == path or target.startswith(f"{path}/")]
            if not below:
                raise _outside()
            target = target[len(below[0]) :]
            while len(fds) > 1:
                os.close(fds.pop())
        todo.extend(reversed(target.split("/")))

    def _enter(self, fds: list[int], name: str, there: os.stat_result | None, make: bool) -> None:
        if len(fds) >= MAX_OPEN:
            raise Refused("invalid_request", "it lies too deep")
        above = os.fstat(fds[-1])
        if there is None:
            if not make:
                raise Refused("not_found", "it does not exist")
            with suppress(FileExistsError):
                os.mkdir(name, 0o777, dir_fd=fds[-1])
        elif not stat.S_ISDIR(there.st_mode):
            raise Refused("invalid_request" if make else "not_found", "a file is in its way")
        fds.append(os.open(name, _FOLDER, dir_fd=fds[-1]))
        self._check(os.fstat(fds[-1]))
        if there is None:
            _hand(fds[-1], above)

    def _check(self, facts: os.stat_result) -> None:
        if (facts.st_dev, facts.st_ino) in self._hidden or facts.st_dev in self._foreign:
            raise Refused("not_found", "it does not exist")


def changed(facts: os.stat_result) -> int:
    """Milliseconds since 1970, within the years that calendars of four digits have: anybody may set any time."""
    return max(0, min(facts.st_mtime_ns // 1_000_000, LAST_MS))


def _facts(fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _a_file(name: str | None, there: os.stat_result | None) -> str:
    if name is None or (there is not None and not stat.S_ISREG(there.st_mode)):
        raise _no_file()
    if there is None:
        raise Refused("not_found", "it does not exist")
    return name


def _take_over(source: str, file: int) -> None:
    taken = os.open(source, _READ)
    try:
        while os.sendfile(file, taken, None, CHUNK):
            pass
    finally:
        os.close(taken)
    os.unlink(source)


def _hand(fd: int, like: os.stat_result) -> None:
    """Give what was made to the owner of what it replaces or lies in; only root can, and only root needs to."""
    own = os.fstat(fd)
    if os.geteuid() == 0 and (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
        with suppress(PermissionError):
            os.fchown(fd, like.st_uid, like.st_gid)


def _shown(name: bytes | str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")


def _no_file() -> Refused:
    return Refused("invalid_request", "it is no regular file")


def _outside() -> Refused:
    return Refused("invalid_request", "a link leads out of the workspace")


def refusal(error: OSError) -> Refused | None:
    """What the disk's refusal says about the request; None: nothing, the disk itself is at fault."""
    if isinstance(error, PermissionError):
        return Refused("forbidden", "the system does not permit it")
    if isinstance(error, FileNotFoundError):
        return Refused("not_found", "it does not exist")
    if isinstance(error, NotADirectoryError | IsADirectoryError) or error.errno in (36, 40):
        # Its name is too long (36), or it was exchanged for a link meanwhile (40).
        return Refused("invalid_request", "its name is too long, or something else is in its way")
    return None


def answer(asked: Json) -> Json:
    """One request in a remote sandbox: ``{op, root, path, ...}``, a ``path`` as its names."""
    root, parts = str(asked["root"]), tuple(map(str, asked["path"]))  # type: ignore[call-overload]
    _sweep(os.path.dirname(root))
    if asked["op"] == "write":
        for folder in (os.path.dirname(root), root):
            os.makedirs(folder, 0o700, exist_ok=True)
    fd = os.open(root, _FOLDER)
    try:
        tree = Tree(fd, (root,))
        if asked["op"] == "list":
            entries, last = tree.listing(parts, base64.b64decode(str(asked["after"])), int(str(asked["limit"])))
            return {"entries": entries, "last": None if last is None else base64.b64encode(last).decode()}
        if asked["op"] == "read":
            return _read(tree, parts, asked)
        return {"created": tree.write(parts, _content(asked), _condition(asked))}
    finally:
        os.close(fd)


def _read(tree: Tree, parts: tuple[str, ...], asked: Json) -> Json:
    data, facts = tree.read(parts, int(str(asked["most"])))
    said: Json = {"modified_at": changed(facts), "size": len(data)}
    if len(data) <= int(str(asked["inline"])):
        return {**said, "data": base64.b64encode(data).decode()}
    staged = str(asked["staged"])
    file = os.open(staged, _NEW, 0o600)
    with open(file, "wb") as stream:
        stream.write(data)
    return said


def _content(asked: Json) -> bytes | str:
    return str(asked["staged"]) if asked.get("data") is None else base64.b64decode(str(asked["data"]))


def _condition(asked: Json) -> Callable[[str | None], bool] | None:
    match, none = asked.get("match"), asked.get("none_match")
    if match is None and none is None:
        return None

    def holds(digest: str | None) -> bool:
        def among(known: object) -> bool:
            return digest is not None and isinstance(known, list) and ("*" in known or digest[:32] in known)

        return (match is None or among(match)) and (none is None or not among(none))

    return holds


def _sweep(folder: str) -> None:
    """Remove what requests left that were cut off half-way."""
    with suppress(OSError), os.scandir(folder) as scan:
        for entry in scan:
            if (
                entry.name.startswith("staged-")
                and time.time() - entry.stat(follow_symlinks=False).st_mtime > STAGED_SECONDS
            ):
                os.unlink(entry.path)


def main(request: str) -> None:
    """Take a request, base64 of JSON, and say one line of JSON."""
    try:
        said = answer(json.loads(base64.b64decode(request)))
    except Refused as error:
        said = {"error": error.code, "why": str(error)}
    except OSError as error:
        found = refusal(error)
        said = {"error": found.code if found else "internal", "why": str(found or error)}
    sys.stdout.write(f"{json.dumps(said)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
