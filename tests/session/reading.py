"""What a client makes of events: the conversation that it shows, whatever it saw live and whatever it read later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from runner.session.port import Reader, ReaderEnded
from tests.session.bed import Bed

Event = dict[str, Any]


def cursor(event: Event) -> tuple[int, int]:
    """Its cursor as numbers."""
    epoch, n = event["cursor"].split(".")
    return int(epoch), int(n)


def conversation(events: list[Event]) -> dict[str, Any]:
    """Blocks by their last word, tool calls merged, the rest in order: equal for live frames and stored records."""
    blocks: dict[tuple[int, int], tuple[str, str]] = {}
    tools: dict[str, dict[str, Any]] = {}
    rest: list[tuple[str, Any]] = []
    for event in events:
        kind, data = event["type"], event["data"]
        if kind in ("message_delta", "thought_delta"):
            blocks[cursor(event)] = (kind.removesuffix("_delta"), data["text"])
        elif kind in ("message", "thought"):
            epoch, n = map(int, data["supersedes_from"].split("."))
            for at in [at for at in blocks if (epoch, n) <= at < cursor(event)]:
                del blocks[at]
            blocks[cursor(event)] = (kind, data["text"])
        elif kind in ("tool_call", "tool_call_update"):
            tools.setdefault(data["tool_call_id"], {}).update(data)
        else:
            rest.append((kind, data))
    return {"blocks": [blocks[at] for at in sorted(blocks)], "tools": tools, "rest": rest}


def assert_contiguous(events: list[Event]) -> None:
    """Cursors count up by one within an epoch; epochs only grow, and each begins with 1 or where the reader began."""
    last = cursor(events[0])
    for event in events[1:]:
        epoch, n = cursor(event)
        assert (epoch, n) == (last[0], last[1] + 1) or (epoch > last[0] and n == 1), (last, event)
        last = (epoch, n)


def assert_ordered(events: list[Event]) -> None:
    """Cursors only grow: what is read later has no frames, but nothing twice and nothing out of its place."""
    cursors = list(map(cursor, events))
    assert cursors == sorted(set(cursors))


async def take(reader: Reader, count: int) -> list[Event]:
    """At least ``count`` events of a reader that stays open."""
    events: list[Event] = []
    while len(events) < count:
        lines = await reader.next(3600)
        assert lines is not None, f"silent after {len(events)} events"
        events += [json.loads(line) for line in lines.splitlines()]
    return events


async def rest_of(reader: Reader) -> list[Event]:
    """What a reader still delivers until it ends by itself; it is closed then."""
    events: list[Event] = []
    try:
        while True:
            lines = await reader.next(3600)
            assert lines is not None, "the reader is silent"
            events += [json.loads(line) for line in lines.splitlines()]
    except ReaderEnded:
        return events
    finally:
        reader.close()


async def ended(bed: Bed, prompt_id: str) -> AsyncIterator[None]:
    """Until the prompt has its result."""
    while (row := await bed.store.prompt("p", "s", prompt_id)) is None or row.state == "active":
        yield
        await asyncio.sleep(0.01)


def lease(bed: Bed, session_id: str = "s") -> Any:
    """The session's leases."""
    plane: Any = bed.replica.plane
    return plane.lease("p", session_id)


def presence(bed: Bed) -> int:
    """How many readers the session counts."""
    session = bed.sessions._registry.known(("p", "s"))
    return session.presence.count if session is not None else 0
