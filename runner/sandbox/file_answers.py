"""What a tree of files told or refused, here or over there, in the port's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.errors import RunnerError
from runner.rules.files import Entry, Listing, too_large


class Mismatch(Exception):
    """The condition does not hold."""


def error_of(code: str, why: str, path: str, most: int = 0) -> RunnerError | Mismatch:
    """What a tree refused, here or over there."""
    if code == "mismatch":
        return Mismatch()
    if code == "too_large":
        return too_large(path, most)
    if code == "not_found":
        return RunnerError(code, f"There is no {path[:200]!r} in the workspace.")
    if code in ("forbidden", "invalid_request"):
        return RunnerError(code, f"path: {path[:200]!r} was refused: {why}.", field="path")
    return RunnerError("internal", f"The disk refused {path[:200]!r}: {why}.")


def listing_of(entries: Sequence[Mapping[str, Any]], after: bytes | None) -> Listing:
    """A page from what a tree told, here or over there."""
    found = [Entry(item["name"], item["kind"], item["size"], item["modified_at"], item["target"]) for item in entries]
    return Listing(found, after)
