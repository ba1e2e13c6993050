"""What a killed replica had shown of one epoch of a session, as the records that the store lacks (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from runner.terms import TERMINAL_TOOL_STATUSES, EventType

BLOCKS: Final = {EventType.MESSAGE_DELTA: EventType.MESSAGE, EventType.THOUGHT_DELTA: EventType.THOUGHT}
TOOLS: Final = frozenset({EventType.TOOL_CALL, EventType.TOOL_CALL_UPDATE})
SETTLED: Final = TERMINAL_TOOL_STATUSES | {"deferred"}


class Shown(NamedTuple):
    """One event of the epoch, as it was shown or as it is stored.

    ``at`` in milliseconds since 1970; ``durable``: it is a record, not a frame.
    """

    n: int
    turn_id: str | None
    prompt_id: str | None
    type: str
    data: Mapping[str, Any]
    at: int
    durable: bool


class Block(NamedTuple):
    """A message or thought that is a record: it stands for its frames from ``first`` on."""

    first: int
    n: int
    type: str
    message_id: str

    @classmethod
    def of(cls, item: Shown) -> Block | None:
        """The block that an event is, if any."""
        first = str(item.data.get("supersedes_from")).partition(".")[2]
        if item.type not in BLOCKS.values() or not first.isdecimal():
            return None
        return cls(int(first), item.n, item.type, item.data["message_id"])

    def supersedes(self, frame: Shown) -> bool:
        """Whether a frame is a part of it."""
        mine = (BLOCKS[EventType(frame.type)], frame.data["message_id"]) == (self.type, self.message_id)
        return mine and self.first <= frame.n < self.n


@dataclass(slots=True)
class Stored:
    """What the store has of the epoch, and of tool calls that earlier ones left open.

    Attributes:
        numbers: of its records.
        blocks: its messages and thoughts.
        settled: number of the last record of a tool call that says how it ended, or that it waits, by its id.
        tools: what earlier epochs say of open calls, by id.
    """

    numbers: set[int] = field(default_factory=set)
    blocks: list[Block] = field(default_factory=list)
    settled: dict[str, int] = field(default_factory=dict)
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def take(self, item: Shown) -> None:
        """Add a record."""
        self.numbers.add(item.n)
        block = Block.of(item)
        if block is not None:
            self.blocks.append(block)
        elif item.type in TOOLS and item.data.get("status") in SETTLED:
            self.settled[item.data["tool_call_id"]] = item.n


@dataclass(slots=True)
class _Run:
    """Frames of one block, of which nothing lies in between that is not known."""

    first: Shown
    last: Shown
    parts: list[str]


class Recovered:
    """Folds what was shown, in the order in which it was.

    A record stays what it is. Frames that no block supersedes become one: as if it had been closed at the kill, behind
    everything of the epoch. A tool call that was shown and has no ending failed: it gets its one record likewise.
    """

    def __init__(self, epoch: int, stored: Stored) -> None:
        self.epoch = epoch
        self._stored = stored
        self._records: dict[int, Shown] = {}
        self._runs: list[_Run] = []
        self._tools: dict[str, tuple[dict[str, Any], Shown]] = {}
        self._last = 0
        self._at = 0

    def take(self, item: Shown) -> None:
        """Add an event; numbers only grow."""
        before, self._last, self._at = self._last, item.n, item.at
        block = Block.of(item)
        if item.type in BLOCKS:
            self._frame(item, before)
        elif item.type in TOOLS:
            self._tool(item)
        elif block is not None:
            self._runs = [run for run in self._runs if not (block.supersedes(run.first) and block.supersedes(run.last))]
        if item.durable and item.n not in self._stored.numbers:
            self._records[item.n] = item

    def _frame(self, item: Shown, before: int) -> None:
        if any(block.supersedes(item) for block in self._stored.blocks):
            return
        run = self._runs[-1] if self._runs else None
        whole = all(n in self._stored.numbers for n in range(before + 1, item.n))
        if run is not None and whole and _same_block(run.last, item):
            run.last = item
            run.parts.append(item.data["text"])
        else:
            self._runs.append(_Run(item, item, [item.data["text"]]))

    def _tool(self, item: Shown) -> None:
        name = item.data["tool_call_id"]
        if item.durable:
            if item.data.get("status") in SETTLED:
                self._tools.pop(name, None)
        elif item.n > self._stored.settled.get(name, 0):
            self._tools[name] = ({**self._known(item, name), **item.data}, item)

    def _known(self, item: Shown, name: str) -> Mapping[str, Any]:
        """What was told of a call before; a new one may have the id of one that ended."""
        if item.type == EventType.TOOL_CALL:
            return {}
        return self._tools[name][0] if name in self._tools else self._stored.tools.get(name, {})

    def rows(self) -> list[Shown]:
        """What the store lacks, by number; each of these is a record, and the same at every call and every try."""
        last = max([self._last, *self._stored.numbers], default=0)
        made: list[Shown] = []
        for run in self._runs:
            data = {
                "message_id": run.last.data["message_id"],
                "text": "".join(run.parts),
                "supersedes_from": f"{self.epoch}.{run.first.n}",
            }
            made.append(self._made(last + len(made) + 1, run.last, BLOCKS[EventType(run.last.type)], data))
        for tool, frame in self._tools.values():
            made.append(self._made(last + len(made) + 1, frame, EventType.TOOL_CALL, {**tool, "status": "failed"}))
        return [*self._records.values(), *made]

    def _made(self, n: int, of: Shown, type: str, data: Mapping[str, Any]) -> Shown:
        return Shown(n, of.turn_id, of.prompt_id, type, data, self._at, True)


def _same_block(one: Shown, other: Shown) -> bool:
    mine = (one.type, one.turn_id, one.prompt_id, one.data["message_id"])
    return mine == (other.type, other.turn_id, other.prompt_id, other.data["message_id"])
