"""Files of a workspace over HTTP: which paths are taken, their types, preconditions and pages (DESIGN 4, ``files``)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Literal

from runner.errors import RunnerError

MAX_PATH: Final = 1024
MAX_DEPTH: Final = 64
MAX_FILE_BYTES: Final = 32 * 1024 * 1024
"""The largest file that is read or written."""
ANY: Final = "*"
OCTETS: Final = "application/octet-stream"

Kind = Literal["file", "folder", "link", "other"]
"""``other``: a socket, a pipe or a device, which is shown and never opened."""

_ETAG: Final = re.compile(r'(?:W/)?"[!#-~\x80-\xff]*"')
_TEXTS: Final = {
    "text/css": "css",
    "text/csv": "csv",
    "text/html": "htm html",
    "text/javascript": "cjs js mjs",
    "text/markdown": "markdown md",
    "text/plain": "c cc cfg conf cpp cs diff env go h hpp ini java kt lock log lua patch php pl ps1 py pyi rb rs rst "
    "scala sh sql swift tex text toml ts tsx txt vue yaml yml zig",
    "text/tab-separated-values": "tsv",
    "text/xml": "xml",
}
_OTHERS: Final = {
    "application/gzip": "gz tgz",
    "application/json": "ipynb json map",
    "application/pdf": "pdf",
    "application/wasm": "wasm",
    "application/x-ndjson": "jsonl ndjson",
    "application/x-tar": "tar",
    "application/zip": "zip",
    "audio/mpeg": "mp3",
    "font/woff2": "woff2",
    "image/gif": "gif",
    "image/jpeg": "jpeg jpg",
    "image/png": "png",
    "image/svg+xml": "svg",
    "image/webp": "webp",
    "image/x-icon": "ico",
    "video/mp4": "mp4",
}
TYPES: Final = {ending: kind for kind, endings in (_TEXTS | _OTHERS).items() for ending in endings.split()}
"""Ending of a name to its type: one table, so that no file of the machine changes an answer."""


@dataclass(frozen=True, slots=True)
class Content:
    """A file as it was read: all of it, what tells this content from another, and its change in ms since 1970."""

    data: bytes
    etag: str
    modified_at: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing; ``size`` in bytes, of files only; ``target``: what a link says, of links only."""

    name: str
    kind: Kind
    size: int | None
    modified_at: int
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of one folder in the order of its names' bytes; ``after``: the last name of it when there are more."""

    entries: Sequence[Entry]
    after: bytes | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    etag: str
    size: int
    created: bool


@dataclass(frozen=True, slots=True)
class Precondition:
    """What must hold of the file that is there (RFC 9110, 13.1); None: nothing is asked.

    Attributes:
        match: ``*``, or etags of which it must have one.
        none_match: ``*`` (there must be none), or etags of which it may have none.
    """

    match: tuple[str, ...] | None = None
    none_match: tuple[str, ...] | None = None

    def holds(self, etag: str | None) -> bool:
        """Whether a file with this etag may be replaced; None: there is none."""
        if self.match is not None and not _among(etag, self.match):
            return False
        return self.none_match is None or not _among(etag, self.none_match)

    def admits(self, digest: str | None) -> bool:
        """As ``holds``, of a SHA-256 in hexadecimal."""
        return self.holds(None if digest is None else _quoted(digest))

    @property
    def asks(self) -> bool:
        """Whether it depends on what is there."""
        return self.match is not None or self.none_match is not None


ALWAYS: Final = Precondition()


def _among(etag: str | None, known: Sequence[str]) -> bool:
    return etag is not None and (ANY in known or etag in known)


def etag_of(data: bytes) -> str:
    """A strong validator: the same content has the same one, wherever and whenever it lies."""
    return _quoted(sha256(data).hexdigest())


def _quoted(digest: str) -> str:
    return f'"{digest[:32]}"'


def etags(header: str | None, name: str) -> tuple[str, ...] | None:
    """The etags of an ``If-Match`` or ``If-None-Match``; None without one.

    Raises:
        RunnerError: ``invalid_request`` naming the header.
    """
    if header is None:
        return None
    if header.strip() == ANY:
        return (ANY,)
    found = tuple(part.strip() for part in header.split(","))
    if not all(_ETAG.fullmatch(part) for part in found):
        raise RunnerError("invalid_request", f"{name}: must be * or a list of quoted etags.", field=name)
    return tuple(part.removeprefix("W/") if name == "If-None-Match" else part for part in found)


def names_of(path: str) -> tuple[str, ...] | str:
    """The names of a relative path that stays below its root, or why there are none."""
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or ".." in parts or not parts or path.endswith("/") or "\0" in path:
        return "it must be a relative path of a file, without “..”"
    if len(path.encode("utf-8", "surrogatepass")) > MAX_PATH or len(parts) > MAX_DEPTH:
        return f"it is longer than {MAX_PATH} bytes or deeper than {MAX_DEPTH} folders"
    return parts


def file_names(path: str) -> tuple[str, ...]:
    """The names of a file's path.

    Raises:
        RunnerError: ``invalid_request``.
    """
    found = names_of(path)
    if isinstance(found, str):
        raise RunnerError("invalid_request", f"path: {path[:100]!r} was refused: {found}.", field="path")
    return found


def folder_names(path: str) -> tuple[str, ...]:
    """The names of a folder's path; none for the workspace itself.

    Raises:
        RunnerError: ``invalid_request``.
    """
    inner = path.rstrip("/") if path.strip("/") else ""
    return () if inner in ("", ".") and not path.startswith("/") else file_names(inner or path)


def encode_cursor(name: bytes) -> str:
    """Where a page ended, for the client."""
    return base64.urlsafe_b64encode(name).decode("ascii").rstrip("=")


def decode_cursor(text: str | None) -> bytes:
    """Where the page begins: behind this name.

    Raises:
        RunnerError: ``invalid_request``: it is not one of ours.
    """
    if text is None:
        return b""
    try:
        name = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        name = b""
    if not name or encode_cursor(name) != text:
        raise RunnerError("invalid_request", "cursor: is not from a listing.", field="cursor")
    return name


def content_type(name: str, data: bytes) -> str:
    """What a file is, by the ending of its name; text that is UTF-8 says so."""
    _, dot, ending = name.rpartition(".")
    kind = TYPES.get(ending.lower(), OCTETS) if dot else OCTETS
    if not kind.startswith("text/"):
        return kind
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return kind
    return f"{kind}; charset=utf-8"


def too_large(path: str, most: int) -> RunnerError:
    """The refusal of a file that is larger than ``most`` bytes."""
    return RunnerError("too_large", f"{path[:200]!r} is larger than {most} bytes.")
