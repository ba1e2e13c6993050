"""What an entry that cannot be stored as it is leaves behind in quarantine."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

import orjson

from runner.ids import valid_id
from runner.store.port import RecordRow
from runner.store.rows import UNDELIVERABLE
from runner.store.stream.codec import session_of
from runner.store.stream.port import Entry, text_of

UNKNOWN: Final = "unknown"


def stand_in(entry: Entry, at: int) -> RecordRow:
    """A row that every table takes: its ``data`` holds the entry's payload as base64; the same for every delivery.

    An entry that does not say whose it is stands under the project ``unknown``, which no token has by default.
    """
    payload = entry.payload or b""
    project, session_id = session_of(payload) or (UNKNOWN, UNKNOWN)
    digest = hashlib.blake2b(payload, digest_size=12).hexdigest()
    data = {
        "entry": text_of(entry.entry_id),
        "version": entry.version.encode("ascii", "replace").decode(),
        "base64": base64.b64encode(payload).decode(),
    }
    return RecordRow(
        project if valid_id(project) else UNKNOWN,
        session_id if valid_id(session_id) else UNKNOWN,
        f"rec_{digest}",
        None,
        None,
        0,
        0,
        UNDELIVERABLE,
        orjson.dumps(data),
        at,
    )
