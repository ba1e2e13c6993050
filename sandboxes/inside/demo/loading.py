"""How a conversation of an earlier process comes back, well or badly: ``/on-load`` of that conversation decides."""

from __future__ import annotations

import os

from demo import history
from demo.loop import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from demo.session import Session

MANNERS = ("well", "fail", "empty", "hang", "crash", "silent", "flood", "replay")
LATE = 3


class LoadFailed(Exception):
    """The load is answered with an error."""


def manner_of(session_id: str) -> tuple[str, int]:
    """What ``/on-load`` said last, and its number."""
    given = "well"
    for entry in history.entries(session_id):
        given = entry.get("on_load", given)
    name, _, count = given.partition(" ")
    return name, int(count or 0)


def reopen(session: Session, identity: Any, setup: dict[str, Any], loading: bool) -> dict[str, Any] | None:
    """Bring a conversation back; the answer of the request, None when it is not answered or was answered here."""
    manner, count = manner_of(session.id)
    if manner == "fail":
        raise LoadFailed("this conversation does not load, as asked")
    if manner == "crash":
        os.write(2, b"demo agent: crashing at a load, as asked\n")
        os._exit(1)
    if manner == "hang":
        return None
    session.silent = manner == "silent"
    if manner != "empty":
        session.recall()
    if manner != "empty" and (loading or manner == "replay"):
        session.replay()
    if manner != "flood":
        return setup
    for number in range(count):
        session.say(f"old {number} ")
    session.loop.send_message({"jsonrpc": "2.0", "id": identity, "result": setup})
    session.loop.start(_late(session))
    return None


def _late(session: Session) -> Generator[Wait]:
    """Chunks of the past that come behind the answer, as some agents send them."""
    for number in range(LATE):
        yield Wait(seconds=0.03)
        session.say(f"late {number} ")
