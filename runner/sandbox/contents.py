"""What files are, by digest. Standard library only: the same file runs in the image of a remote sandbox."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)
_NPM_RECORD = ".package-lock.json"
"""Npm's own note of what it did differs between its versions."""


def zipped(package: Path) -> bytes:
    """The Python files of ``websockets`` that a bridge needs, as a zip that Python imports from."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package.parent).as_posix()
            if "/legacy/" not in name and "/sync/" not in name:
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def bundle_digest(files: Mapping[str, bytes]) -> str:
    """Names a set of files by what they hold, 12 hex digits; a zip by its members, for compressors differ."""
    summed = hashlib.sha256()
    for name, content in sorted(files.items()):
        if name.endswith(".zip"):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                members = {member: archive.read(member) for member in archive.namelist()}
            content = bundle_digest(members).encode()
        summed.update(f"{name}:{len(content)}:".encode() + content)
    return summed.hexdigest()[:12]


def files_of(folder: Path) -> dict[str, bytes]:
    """Relative path to content of every regular file of a bridge's folder but its mark of completeness."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if name != "complete" and "__pycache__" not in path.parts and not path.is_symlink()
    }


def tree_digest(folder: Path) -> str:
    """Names the files below a folder: their paths, contents, targets and whether they can be executed.

    What Python and npm write for themselves is left out.
    """
    summed = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            summed.update(f"{name}>{os.readlink(path)}\n".encode())
        elif path.is_file() and "__pycache__" not in path.parts and path.name != _NPM_RECORD:
            with path.open("rb") as file:
                content = _digest(file)
            executable = bool(path.stat().st_mode & 0o100)
            summed.update(f"{name}:{content}:{executable}\n".encode())
    return summed.hexdigest()[:32]


def _digest(file: io.BufferedReader) -> str:
    """As ``hashlib.file_digest``, which an older Python over there lacks."""
    summed = hashlib.sha256()
    while block := file.read(1 << 20):
        summed.update(block)
    return summed.hexdigest()
