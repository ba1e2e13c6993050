"""A workspace as one archive, and back: for copies from one remote sandbox into another.

Only the standard library: the text runs inside remote sandboxes, where it takes one request and says one line.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import stat
import sys
import tarfile
import time

Json = dict[str, object]
MAX_DEPTH = 64
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe that takes a file's place must not block.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TooMuch(Exception):
    """There is more than a copy may have, or it takes too long."""


class Packer:
    """Puts a folder into an archive; no link is followed, sockets, pipes and devices are left out.

    Args:
        archive: open for writing.
        entries, size: how many files, folders and links, and how many bytes of content, it may have.
        seconds: how long it may take.
    """

    def __init__(self, archive: tarfile.TarFile, entries: int, size: int, seconds: float) -> None:
        self._archive = archive
        self._entries = entries
        self._size = size
        self._until = time.monotonic() + seconds

    def folder(self, fd: int, path: str, depth: int = MAX_DEPTH) -> None:
        """Put in all that is below the folder behind ``fd``.

        Raises:
            TooMuch: beyond the bounds.
            OSError: the disk refuses.
        """
        for name in os.listdir(fd):
            self._entries -= 1
            if self._entries < 0 or depth == 0 or time.monotonic() > self._until:
                raise TooMuch
            try:
                self._entry(fd, name, f"{path}{name}", depth)
            except FileNotFoundError:
                continue  # it went meanwhile

    def _entry(self, fd: int, name: str, path: str, depth: int) -> None:
        facts = os.stat(name, dir_fd=fd, follow_symlinks=False)
        info = tarfile.TarInfo(path)
        info.mode, info.mtime = stat.S_IMODE(facts.st_mode) & 0o777, int(facts.st_mtime)
        if stat.S_ISLNK(facts.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=fd)
            self._archive.addfile(info)
        elif stat.S_ISDIR(facts.st_mode):
            inner = os.open(name, _FOLDER, dir_fd=fd)
            try:
                info.type = tarfile.DIRTYPE
                self._archive.addfile(info)
                self.folder(inner, f"{path}/", depth - 1)
            finally:
                os.close(inner)
        elif stat.S_ISREG(facts.st_mode):
            self._file(os.open(name, _READ, dir_fd=fd), info)

    def _file(self, file: int, info: tarfile.TarInfo) -> None:
        with open(file, "rb") as stream:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode):
                return
            info.size = facts.st_size
            self._size -= info.size
            if self._size < 0:
                raise TooMuch
            self._archive.addfile(info, _Whole(stream, info.size))


class _Whole:
    """So many bytes of a file, whatever happens to it meanwhile: an archive says sizes first."""

    def __init__(self, stream: object, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, count: int = -1) -> bytes:
        count = self._left if count < 0 else min(count, self._left)
        data: bytes = self._stream.read(count)  # type: ignore[attr-defined]
        data += bytes(count - len(data))
        self._left -= count
        return data


def unpack(archive: tarfile.TarFile, root: str) -> None:
    """Make ``root``, which is not there, of an archive.

    Links come last: nothing is ever written through one, whatever the archive says.

    Raises:
        OSError: the disk refuses.
    """
    os.mkdir(root, 0o700)
    links, folders = [], []
    for info in archive:
        parts = info.name.split("/")
        if not info.name or ".." in parts or info.name.startswith("/"):
            continue
        path = os.path.join(root, *parts)
        if info.issym():
            links.append((path, info.linkname))
        elif info.isdir():
            os.mkdir(path, 0o700)
            folders.append((path, info.mode))
        elif info.isreg():
            source = archive.extractfile(info)
            with open(path, "xb") as target:
                if source is not None:
                    shutil.copyfileobj(source, target, 1024 * 1024)
            os.chmod(path, info.mode & 0o777)
            os.utime(path, (info.mtime, info.mtime))
    for path, target_of in links:
        os.symlink(target_of, path)
    for path, mode in reversed(folders):
        os.chmod(path, mode & 0o777 | 0o700)


def answer(asked: Json) -> Json:
    """One request in a remote sandbox: ``{op, root, staged, ...}``."""
    root, staged = str(asked["root"]), str(asked["staged"])
    if asked["op"] == "pack":
        return _pack(root, staged, asked)
    if os.path.isdir(root) and os.listdir(root):
        return {"kept": True}
    beside = f"{os.path.dirname(root)}/fork-{secrets.token_hex(8)}"
    try:
        with tarfile.open(staged, "r:gz") as archive:
            unpack(archive, beside)
        os.rename(beside, root)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return {"kept": False}


def _pack(root: str, staged: str, asked: Json) -> Json:
    try:
        fd = os.open(root, _FOLDER)
    except FileNotFoundError:
        return {"size": None}
    try:
        with open(staged, "xb") as stream:
            with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as archive:
                bounds = int(str(asked["entries"])), int(str(asked["size"])), float(str(asked["seconds"]))
                Packer(archive, *bounds).folder(fd, "")
            size = stream.tell()
        if size > int(str(asked["most"])):
            raise TooMuch
    except TooMuch:
        os.unlink(staged)
        return {"error": "too_large"}
    finally:
        os.close(fd)
    return {"size": size}


def main(request: str) -> None:
    """Take a request, base64 of JSON, and say one line of JSON."""
    try:
        said = answer(json.loads(base64.b64decode(request)))
    except (OSError, tarfile.TarError, EOFError) as error:
        said = {"error": "internal", "why": str(error)}
    sys.stdout.write(f"{json.dumps(said)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
