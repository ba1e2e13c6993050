"""A record as the payload of an entry: one line of JSON for its members, then its ``data`` byte for byte."""

from __future__ import annotations

from itertools import product
from typing import Final

import orjson

from runner.store.port import RecordRow
from runner.store.stream.port import VERSION

_OPTIONAL: Final = ((str, type(None)), (str, type(None)))
TYPES: Final = frozenset((str, str, str, turn, prompt, int, int, str, int) for turn, prompt in product(*_OPTIONAL))
"""What the members of a payload may be: a record outside of a turn, or of a prompt, has None there."""


class Unreadable(ValueError):
    """A payload that is no record of ours."""


def encode(row: RecordRow) -> bytes:
    """The payload of a record.

    Raises:
        Unreadable: a text that is not valid Unicode.
    """
    members = (*row[:8], row.at)
    try:
        return orjson.dumps(members) + b"\n" + row.data
    except TypeError as error:
        raise Unreadable("a member that JSON does not know") from error


def decode(payload: bytes, version: str = VERSION) -> RecordRow:
    """The record of a payload.

    Raises:
        Unreadable: another version, or bytes that ``encode`` does not write.
    """
    head, mark, data = payload.partition(b"\n")
    if version != VERSION or not mark:
        raise Unreadable(f"version {version!r}")
    try:
        members = orjson.loads(head)
    except orjson.JSONDecodeError as error:
        raise Unreadable("no JSON") from error
    if not isinstance(members, list) or tuple(map(type, members)) not in TYPES:
        raise Unreadable("other members")
    return RecordRow._make((*members[:8], data, members[8]))


def session_of(payload: bytes) -> tuple[str, str] | None:
    """``(project, session_id)`` of a payload, None when nobody can say."""
    try:
        members = orjson.loads(payload.partition(b"\n")[0])
        project, session_id = members[0], members[1]
    except (orjson.JSONDecodeError, TypeError, IndexError, KeyError):
        return None
    return (project, session_id) if isinstance(project, str) and isinstance(session_id, str) else None
