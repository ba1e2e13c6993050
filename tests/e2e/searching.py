"""Looks for a text wherever the processes of a cell have it: variables, command lines, memory, open files, folders."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.server import Server, alive

PIECE = 1 << 20
MOST_FILE_BYTES = 64 << 20


def places_of(server: Server, session: str, needle: str) -> list[str]:
    """Where the text is, as words for people; empty: nowhere. The processes are all of the server's cells."""
    wanted = needle.encode()
    pids = [info.pid for info in server.census()]
    assert pids, "nobody lives in a cell"
    found = [place for pid in pids for place in _of_living(pid, wanted)]
    folders = [server.workspace(session), server.state_dir / "homes" / "default" / session]
    return found + [str(path) for folder in folders for path in _files(folder) if wanted in path.read_bytes()]


def _of_living(pid: int, wanted: bytes) -> list[str]:
    try:
        return list(_of_process(pid, wanted))
    except (FileNotFoundError, ProcessLookupError):
        assert not alive(pid), f"process {pid} is not seen"
        return []


def _of_process(pid: int, wanted: bytes) -> Iterator[str]:
    base = Path(f"/proc/{pid}")
    for name in ("environ", "cmdline"):
        if wanted in (base / name).read_bytes():
            yield f"{base / name}"
    for link in (base / "fd").iterdir():
        if _is_small_file(link) and wanted in link.read_bytes():
            yield f"{link} = {os.readlink(link)}"
    for region in _regions(base):
        if _in_memory(base, region, wanted):
            yield f"{base}/mem {region}"


def _is_small_file(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= MOST_FILE_BYTES


def _regions(base: Path) -> list[tuple[int, int]]:
    """What a process can write to: a key that it was given later is nowhere else."""
    found = []
    for line in (base / "maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if rights.startswith("rw"):
            start, end = (int(word, 16) for word in span.split("-"))
            found.append((start, end))
    assert found, f"the memory of {base} is not seen"
    return found


def _in_memory(base: Path, region: tuple[int, int], wanted: bytes) -> bool:
    at, end = region
    kept = b""
    with (base / "mem").open("rb", buffering=0) as memory:
        while at < end:
            try:
                piece = os.pread(memory.fileno(), min(PIECE, end - at), at)
            except OSError:
                return False
            if wanted in kept + piece:
                return True
            kept, at = piece[-len(wanted) :], at + max(1, len(piece))
    return False


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path
