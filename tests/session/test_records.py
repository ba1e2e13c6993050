"""The durable transcript, page by page."""

from __future__ import annotations

import pytest

from tests.session.bed import CALLER, Bed
from tests.session.reading import cursor

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
async def test_pages_are_the_whole_in_order_once(bed: Bed, limit: int) -> None:
    await bed.turn()
    await bed.turn(prompt="again", nth=2)
    whole = (await bed.sessions.records(CALLER, "s", None, 1000))["items"]
    found, after = [], None
    while True:
        page = await bed.sessions.records(CALLER, "s", after, limit)
        assert len(page["items"]) <= limit
        found += page["items"]
        after = page["next_cursor"]
        if after is None:
            break
        assert after == page["items"][-1]["cursor"]
    assert found == whole
    assert list(map(cursor, found)) == sorted(set(map(cursor, found)))


async def test_a_last_page_that_is_full_has_no_next_one(bed: Bed) -> None:
    await bed.turn()
    whole = (await bed.sessions.records(CALLER, "s", None, 1000))["items"]
    page = await bed.sessions.records(CALLER, "s", None, len(whole))
    assert (page["items"], page["next_cursor"]) == (whole, None)
    behind = await bed.sessions.records(CALLER, "s", whole[-1]["cursor"], 5)
    assert behind == {"items": [], "next_cursor": None}


async def test_a_page_may_begin_behind_a_frame_or_above_the_head(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    await (await bed.agent()).finish(text="hello")
    await handle.result()
    events = await bed.history()
    frame = next(event for event in events if event["type"] == "message_delta")
    page = await bed.sessions.records(CALLER, "s", frame["cursor"], 1)
    assert page["items"][0]["type"] == "message"
    assert (await bed.sessions.records(CALLER, "s", "99.1", 1))["items"] == []
