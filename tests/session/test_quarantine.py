"""What was set aside, as an operator reads it."""

from __future__ import annotations

import pytest

from runner.errors import RunnerError
from runner.session.port import Caller
from tests.session.bed import CALLER, Bed
from tests.store.rows import record

pytestmark = pytest.mark.virtual_time


async def test_the_quarantine_comes_in_pages(bed: Bed):
    rows = [record(n, project=CALLER.project) for n in range(3)]
    await bed.store.quarantine(rows, "turn_ended", 1_000)
    first = await bed.sessions.quarantine(CALLER, 2, None)
    rest = await bed.sessions.quarantine(CALLER, 2, first["next_cursor"])
    assert rest["next_cursor"] is None
    items = [*first["items"], *rest["items"]]
    assert [item["record_id"] for item in items] == [row.record_id for row in rows]
    assert items[0] == {
        "record_id": rows[0].record_id,
        "session_id": "s",
        "turn_id": "t1",
        "prompt_id": "p1",
        "cursor": "1.0",
        "type": "message",
        "data": {"text": "hello"},
        "at": "1970-01-01T00:00:01.000Z",
        "reason": "turn_ended",
        "set_aside_at": "1970-01-01T00:00:01.000Z",
    }
    other = await bed.sessions.quarantine(Caller("elsewhere", CALLER.scopes), 2, None)
    assert other == {"items": [], "next_cursor": None}


@pytest.mark.parametrize("cursor", ["x", "-1", "", "٣", "9" * 19])
async def test_a_cursor_of_another_list_is_refused(bed: Bed, cursor: str):
    with pytest.raises(RunnerError) as caught:
        await bed.sessions.quarantine(CALLER, 2, cursor)
    assert caught.value.code == "invalid_request"
