"""What a kill leaves of an epoch: records as they were, frames as blocks, calls as failed (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rules.recovered import Recovered, Shown, Stored
from tests.normal_form import Final, normal_form

EPOCH = 3


def delta(n: int, text: str, message_id: str = "m", type: str = "message_delta", **other: Any) -> Shown:
    return shown(n, type, {"message_id": message_id, "text": text}, durable=False, **other)


def block(n: int, text: str, first: int, message_id: str = "m", type: str = "message") -> Shown:
    return shown(n, type, {"message_id": message_id, "text": text, "supersedes_from": f"{EPOCH}.{first}"})


def tool(n: int, status: str | None, *, call: str = "c", durable: bool = False, **fields: Any) -> Shown:
    said = {"tool_call_id": call, **fields} | ({} if status is None else {"status": status})
    return shown(n, "tool_call" if durable or "title" in fields else "tool_call_update", said, durable=durable)


def shown(n: int, type: str, data: dict[str, Any] | None = None, *, durable: bool = True, **other: Any) -> Shown:
    return Shown(n, other.get("turn", "t"), other.get("prompt", "p"), type, data or {}, 1000 + n, durable)


def recovered(
    items: Sequence[Shown], stored: Sequence[Shown] = (), tools: dict[str, dict[str, Any]] | None = None
) -> list[Shown]:
    known = Stored(tools=tools or {})
    for item in stored:
        known.take(item)
    fold = Recovered(EPOCH, known)
    for item in items:
        fold.take(item)
    rows = fold.rows()
    assert rows == fold.rows(), "the same at every call"
    return rows


def brief(rows: Sequence[Shown]) -> list[tuple[Any, ...]]:
    return [(row.n, row.type, row.data.get("text", row.data.get("status"))) for row in rows]


ADMITTED = shown(1, "turn_admitted")
SAID = [delta(2, "a"), delta(3, "b")]


@pytest.mark.parametrize(
    ("items", "stored", "expected"),
    [
        pytest.param([], [ADMITTED], [], id="nothing was shown"),
        pytest.param([ADMITTED], [ADMITTED], [], id="the store has it"),
        pytest.param([ADMITTED], [], [(1, "turn_admitted", None)], id="a record stays what it is"),
        pytest.param(SAID, [ADMITTED], [(4, "message", "ab")], id="frames become a block behind everything"),
        pytest.param([*SAID, block(4, "ab", 2)], [ADMITTED], [(4, "message", "ab")], id="a shown block"),
        pytest.param([*SAID, block(4, "ab", 2)], [ADMITTED, block(4, "ab", 2)], [], id="a stored block"),
        pytest.param(SAID, [ADMITTED, block(4, "ab", 2)], [], id="a block that only the store has"),
        pytest.param(
            [*SAID, block(4, "ab", 2), delta(5, "c")], [ADMITTED], [(4, "message", "ab"), (6, "message", "c")],
            id="the block behind a block of the same message",
        ),
        pytest.param(
            [delta(2, "a"), shown(3, "notice", turn=None), delta(4, "b")], [ADMITTED],
            [(3, "notice", None), (5, "message", "ab")], id="something outside of turns in between",
        ),
        pytest.param(
            [delta(2, "a"), delta(4, "b")], [ADMITTED, shown(3, "notice", turn=None)], [(5, "message", "ab")],
            id="the same, and only the store has it",
        ),
        pytest.param(
            [delta(2, "a"), delta(4, "c")], [ADMITTED], [(5, "message", "a"), (6, "message", "c")],
            id="a hole is no concatenation",
        ),
        pytest.param(
            [delta(2, "hm", type="thought_delta"), block(3, "hm", 2, type="thought"), delta(4, "a")], [],
            [(3, "thought", "hm"), (5, "message", "a")], id="thoughts likewise",
        ),
        pytest.param(
            SAID, [ADMITTED, shown(9, "session_idle", turn=None)], [(10, "message", "ab")],
            id="behind what the store has",
        ),
    ],
)  # fmt: skip
def test_text(items: list[Shown], stored: list[Shown], expected: list[tuple[Any, ...]]) -> None:
    rows = recovered(items, stored)
    assert brief(rows) == expected
    assert all(row.durable for row in rows)
    assert recovered(items, [*stored, *rows]) == [], "doing it again changes nothing"


OPEN = [tool(2, "pending", title="ls"), tool(3, "in_progress", out=1)]
FAILED = {"tool_call_id": "c", "title": "ls", "status": "failed", "out": 1}


@pytest.mark.parametrize(
    ("items", "stored", "tools", "expected"),
    [
        pytest.param(OPEN, [], {}, [(4, FAILED)], id="shown and never ended"),
        pytest.param([*OPEN, tool(4, "completed", durable=True)], [], {}, [(4, None)], id="ended"),
        pytest.param(OPEN, [tool(4, "completed", durable=True)], {}, [], id="ended, and only the store knows"),
        pytest.param([*OPEN, tool(4, "deferred", durable=True)], [], {}, [(4, None)], id="deferred: it waits"),
        pytest.param(
            [tool(2, "in_progress", out=1)], [], {"c": {"tool_call_id": "c", "title": "ls", "status": "deferred"}},
            [(3, FAILED)], id="deferred by an earlier turn, gone on with",
        ),
        pytest.param([], [], {"c": {"tool_call_id": "c", "status": "deferred"}}, [], id="deferred, still waits"),
        pytest.param(
            [tool(1, "failed", durable=True, title="old", out=0), *OPEN],
            [tool(1, "failed", durable=True, title="old", out=0)], {}, [(4, FAILED)], id="an id that is used again",
        ),
        pytest.param(
            [*OPEN, tool(4, "completed", durable=True), tool(5, None, durable=True, out=2)], [], {},
            [(4, None), (5, None)], id="what is said behind an ending",
        ),
    ],
)  # fmt: skip
def test_tool_calls(
    items: list[Shown], stored: list[Shown], tools: dict[str, Any], expected: list[tuple[int, Any]]
) -> None:
    rows = recovered(items, stored, tools)
    assert [row.n for row in rows] == [n for n, _ in expected]
    assert all(row.data == data for row, (_, data) in zip(rows, expected, strict=True) if data is not None)
    assert recovered(items, [*stored, *rows], tools) == []


def test_a_made_record_has_the_ids_of_its_frames_and_the_last_instant() -> None:
    [notice, made] = recovered([delta(2, "a", turn="t7", prompt="p7"), shown(3, "notice", turn=None, prompt=None)])
    assert (made.turn_id, made.prompt_id, made.at, made.n) == ("t7", "p7", notice.at, 4)
    assert made.data == {"message_id": "m", "text": "a", "supersedes_from": "3.2"}


@st.composite
def turns(draw: st.DrawFn) -> list[Shown]:
    """A turn as a journal shows it, cut anywhere."""
    items: list[Shown] = [ADMITTED]
    opened: tuple[int, str, str, list[str]] | None = None
    calls: dict[str, bool] = {}
    for step in range(draw(st.integers(0, 12))):
        what = draw(st.sampled_from(["message", "thought", "notice", "tool", "outside"]))
        n = items[-1].n + 1
        if what == "outside":
            items.append(shown(n, "notice", turn=None))
            continue
        if opened is not None and what != opened[1]:
            first, kind, message_id, texts = opened
            items.append(block(n, "".join(texts), first, message_id, kind))
            opened, n = None, n + 1
        if what in ("message", "thought"):
            opened = opened or (n, what, f"m{step}", [])
            text = draw(st.text(min_size=1, max_size=3))
            opened[3].append(text)
            items.append(delta(n, text, opened[2], f"{what}_delta"))
        elif what == "tool":
            call = draw(st.sampled_from(["c1", "c2"]))
            ends = draw(st.booleans()) and not calls.get(call, False)
            first_of = call not in calls
            said = {"tool_call_id": call, "status": "completed" if ends else "in_progress"} | (
                {"title": call} if first_of else {}
            )
            if calls.get(call):
                said.pop("status")
            record = {"tool_call_id": call, "title": call, **said}
            calls[call] = calls.get(call, False) or ends
            kind = "tool_call" if first_of or ends else "tool_call_update"
            items.append(shown(n, kind, record if ends else said, durable=calls[call]))
        else:
            items.append(shown(n, "notice", {"step": step}))
    return items[: draw(st.integers(0, len(items)))]


@given(turns(), st.data())
def test_what_is_recovered_is_what_was_shown(items: list[Shown], data: st.DataObject) -> None:
    """Whatever the store had at the kill: a prefix of the records, or any of them."""
    stored = [item for item in items if item.durable and data.draw(st.booleans())]
    rows = recovered(items, stored)
    assert len({row.n for row in (*rows, *stored)}) == len(rows) + len(stored)
    seen = [_failed(item) for item in normal_form([_event(item) for item in items])]
    assert normal_form([_event(item) for item in (*stored, *rows)]) == seen
    assert recovered(items, [*stored, *rows]) == []


def _event(item: Shown) -> dict[str, Any]:
    return {"cursor": f"{EPOCH}.{item.n}", "turn_id": item.turn_id, "type": item.type, "data": dict(item.data)}


def _failed(item: Final) -> Final:
    """A call that was open at the kill has failed."""
    if item.type == "tool_call" and item.data["status"] not in ("completed", "deferred"):
        return item._replace(data={**item.data, "status": "failed"})
    return item
