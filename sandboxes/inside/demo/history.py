"""Conversations on disk, under the private home, so that a new process can load or resume them."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _folder() -> str:
    return os.path.join(os.environ.get("HOME", "/tmp"), ".demo-agent")


def _path(session_id: str) -> str:
    return os.path.join(_folder(), session_id + ".jsonl")


def known(session_id: str) -> bool:
    """Whether the conversation can be loaded; an id that is not a plain name never can."""
    return session_id.isalnum() and os.path.exists(_path(session_id))


class Journal:
    """The file of one conversation, opened at its first entry; what is appended survives a kill of the agent."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._fd = -1

    def append(self, entry: dict[str, Any]) -> None:
        """Keep one entry; a home that cannot be written only costs the memory of a restart."""
        line = json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"
        try:
            if self._fd < 0:
                os.makedirs(_folder(), 0o700, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(_path(self._session_id), flags, 0o600)
            os.write(self._fd, line)
        except OSError as error:
            os.write(2, f"demo agent: history not kept: {error}\n".encode())

    def close(self) -> None:
        """Let the file go; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def entries(session_id: str) -> list[dict[str, Any]]:
    """All entries that were written whole."""
    found = []
    with open(_path(session_id), encoding="utf-8") as file:
        for line in file:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def listing() -> list[dict[str, Any]]:
    """``{sessionId, cwd, title}`` of every conversation, the newest first."""
    try:
        names = [entry for entry in os.scandir(_folder()) if entry.name.endswith(".jsonl")]
    except OSError:
        return []
    names.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    found = []
    for name in names:
        kept = entries(name.name[: -len(".jsonl")])
        cwd = next((entry["cwd"] for entry in kept if "cwd" in entry), "/")
        title = next((entry["user"][:60] for entry in kept if entry.get("user")), None)
        found.append({"sessionId": name.name[: -len(".jsonl")], "cwd": cwd, "title": title})
    return found
