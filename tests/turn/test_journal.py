"""A turn's pen: cursors without gaps, records that supersede their frames, nothing secret (DESIGN 3.9, case K2)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.clock import rfc3339
from runner.ids import outside_of, record_id
from runner.redaction import MASK, Redactor
from runner.store.port import RecordRow
from runner.terms import EventType as E
from runner.turn import journal as module
from runner.turn.journal import Head, Journal
from runner.turn.log import SessionLog

KEY = "sk-live-12345"
NOW = 1_767_225_600_000


class StillClock:
    """A clock that shows what it is set to."""

    now = NOW

    def monotonic(self) -> float:
        return self.now / 1000

    def now_ms(self) -> int:
        return self.now


class Desk:
    """A journal and everything that it wrote."""

    def __init__(self, *, secrets: tuple[str, ...] = (), epoch: int = 3, turn_id: str | None = "t1") -> None:
        self.records: list[RecordRow] = []
        self.log = SessionLog(10**8, 10**8)
        self.clock = StillClock()
        self.head = Head(epoch, 0)
        self._reader = self.log.reader()
        self.journal = Journal(
            project="p",
            session_id="s",
            turn_id=turn_id,
            prompt_id="pr1",
            head=self.head,
            log=self.log,
            clock=self.clock,
            redactor=Redactor(secrets),
            collect=self.records.append,
        )

    def shown(self) -> list[dict[str, Any]]:
        """Events shown since the last look."""
        lines = b""
        while part := self._reader.take():
            lines += part
        return [json.loads(line) for line in lines.splitlines()]

    def rows(self) -> list[tuple[str, str, Any]]:
        return [(f"{row.epoch}.{row.n}", row.type, json.loads(row.data)) for row in self.records]


def brief(events: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    return [(event["cursor"], event["type"], event["data"]) for event in events]


def test_an_event_is_shown_and_recorded_under_one_cursor():
    desk = Desk()
    desk.journal.event(E.NOTICE, {"text": "hi"})
    [event] = desk.shown()
    assert event == {
        "kind": "event",
        "cursor": "3.1",
        "turn_id": "t1",
        "prompt_id": "pr1",
        "at": "2026-01-01T00:00:00.000Z",
        "type": "notice",
        "data": {"text": "hi"},
    }
    [row] = desk.records
    assert (row.project, row.session_id, row.turn_id, row.prompt_id) == ("p", "s", "t1", "pr1")
    assert (row.epoch, row.n, row.type, row.at) == (3, 1, "notice", NOW)
    assert row.record_id == record_id("s", "t1", 1)
    assert json.loads(row.data) == event["data"]


def test_a_frame_is_shown_and_never_recorded():
    desk = Desk()
    desk.journal.event(E.TOOL_CALL_UPDATE, {"tool_call_id": "a"}, durable=False)
    assert [event["cursor"] for event in desk.shown()] == ["3.1"]
    assert desk.records == []


def test_a_record_may_say_more_than_the_event_it_stands_for():
    desk = Desk(secrets=(KEY,))
    whole = (E.TOOL_CALL, {"tool_call_id": "a", "title": f"echo {KEY}"})
    desk.journal.event(E.TOOL_CALL_UPDATE, {"tool_call_id": "a"}, as_record=whole)
    assert brief(desk.shown()) == [("3.1", "tool_call_update", {"tool_call_id": "a"})]
    assert desk.rows() == [("3.1", "tool_call", {"tool_call_id": "a", "title": f"echo {MASK}"})]


def test_a_message_is_frames_and_then_one_record_that_supersedes_them():
    desk = Desk()
    assert desk.journal.texts("message", None, ["Hel", "lo"]) is True
    assert desk.journal.texts("message", None, [" you"]) is True
    assert desk.records == []
    desk.journal.close_block()
    assert brief(desk.shown()) == [
        ("3.1", "message_delta", {"message_id": "m3-1", "text": "Hel"}),
        ("3.2", "message_delta", {"message_id": "m3-1", "text": "lo"}),
        ("3.3", "message_delta", {"message_id": "m3-1", "text": " you"}),
        ("3.4", "message", {"message_id": "m3-1", "text": "Hello you", "supersedes_from": "3.1"}),
    ]
    assert desk.rows() == [("3.4", "message", {"message_id": "m3-1", "text": "Hello you", "supersedes_from": "3.1"})]
    assert desk.journal.text == "Hello you"


@pytest.mark.parametrize("chunks", [[], [""], ["", ""]])
def test_no_text_is_no_message(chunks: list[str]):
    desk = Desk()
    assert desk.journal.texts("message", "a", chunks) is False
    desk.journal.close_block()
    assert (desk.shown(), desk.records, desk.head.n) == ([], [], 0)


def test_a_block_ends_when_the_kind_the_message_or_the_subject_changes():
    desk = Desk()
    pen = desk.journal
    pen.texts("thought", None, ["hm"])
    pen.texts("message", None, ["a"])
    pen.texts("message", "id-1", ["b"])
    pen.texts("message", None, ["c"])
    pen.texts("message", "id-2", ["d"])
    pen.event(E.PLAN, {"entries": []})
    pen.texts("message", "id-2", ["e"])
    pen.close_block()
    pen.close_block()
    assert desk.rows() == [
        ("3.2", "thought", {"message_id": "m3-1", "text": "hm", "supersedes_from": "3.1"}),
        ("3.6", "message", {"message_id": "m3-2", "text": "abc", "supersedes_from": "3.3"}),
        ("3.8", "message", {"message_id": "id-2", "text": "d", "supersedes_from": "3.7"}),
        ("3.9", "plan", {"entries": []}),
        ("3.11", "message", {"message_id": "id-2", "text": "e", "supersedes_from": "3.10"}),
    ]
    assert pen.text == "abcde"
    assert [event["cursor"] for event in desk.shown()] == [f"3.{n}" for n in range(1, 12)]


def test_thoughts_are_no_part_of_the_answer():
    desk = Desk()
    desk.journal.texts("thought", None, ["hm"])
    desk.journal.texts("message", None, ["yes"])
    desk.journal.close_block()
    assert desk.journal.text == "yes"


def test_frames_of_one_batch_are_of_one_instant():
    desk = Desk()
    desk.journal.texts("message", None, ["a"])
    desk.clock.now += 1500
    desk.journal.texts("message", None, ["b", "c"])
    assert [event["at"] for event in desk.shown()] == [rfc3339(NOW), rfc3339(NOW + 1500), rfc3339(NOW + 1500)]


def test_a_secret_split_over_chunks_never_shows_case_k2():
    desk = Desk(secrets=(KEY,))
    desk.journal.texts("message", f"id-{KEY}", ["the key is sk-li", "ve-1"])
    assert "sk" not in json.dumps(desk.shown())
    desk.journal.texts("message", f"id-{KEY}", ["2345, done"])
    desk.journal.event(E.NOTICE, {KEY: [KEY]})
    whole = json.dumps(desk.shown()) + "".join(str(row.data) for row in desk.records) + desk.journal.text
    assert KEY not in whole
    assert "sk-li" not in whole
    assert desk.journal.text == f"the key is {MASK}, done"


def test_what_was_held_back_is_shown_before_the_block_ends():
    desk = Desk(secrets=(KEY,))
    desk.journal.texts("message", None, ["see sk-li"])
    desk.journal.event(E.PLAN, {"entries": []})
    assert [event["data"].get("text") for event in desk.shown()] == ["see ", "sk-li", "see sk-li", None]
    assert desk.journal.text == "see sk-li"


def test_text_that_is_wholly_held_back_counts_as_text_and_begins_at_its_first_frame():
    desk = Desk(secrets=(KEY,))
    assert desk.journal.texts("message", None, ["sk-live-"]) is True
    assert desk.shown() == []
    desk.journal.outside().event(E.SESSION_BUSY, {})
    desk.journal.texts("message", None, ["1 indeed"])
    desk.journal.close_block()
    assert brief(desk.shown())[1:] == [
        ("3.2", "message_delta", {"message_id": "m3-1", "text": "sk-live-1 indeed"}),
        ("3.3", "message", {"message_id": "m3-1", "text": "sk-live-1 indeed", "supersedes_from": "3.2"}),
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_CHARS", 10)
    monkeypatch.setattr(module, "TEXT_CHARS", 25)


@pytest.mark.usefixtures("small")
def test_a_block_is_bounded_and_goes_on_in_the_next():
    desk = Desk()
    for _ in range(3):
        desk.journal.texts("message", None, ["1234567"])
    desk.journal.close_block()
    assert [(row[1], row[2]["text"]) for row in desk.rows()] == [("message", "12345671234567"), ("message", "1234567")]
    assert desk.rows()[1][2]["supersedes_from"] == "3.4"
    assert desk.journal.text == "1234567" * 3
    assert not desk.journal.truncated


@pytest.mark.usefixtures("small")
def test_a_full_block_that_nothing_follows_leaves_no_empty_record():
    desk = Desk()
    desk.journal.texts("message", "id", ["1234567890"])
    desk.journal.close_block()
    assert [row[2]["text"] for row in desk.rows()] == ["1234567890"]


@pytest.mark.usefixtures("small")
def test_a_secret_across_the_border_of_two_blocks_never_shows_case_k2():
    desk = Desk(secrets=(KEY,))
    desk.journal.texts("message", None, ["1234567890 sk-live"])
    desk.journal.texts("message", None, ["-12345."])
    desk.journal.close_block()
    assert [row[2]["text"] for row in desk.rows()] == ["1234567890 ", f"{MASK}."]
    assert desk.journal.text == f"1234567890 {MASK}."


@pytest.mark.usefixtures("small")
def test_the_text_of_a_result_is_bounded_and_says_so():
    desk = Desk()
    for _ in range(4):
        desk.journal.texts("message", None, ["1234567890"])
    desk.journal.close_block()
    assert desk.journal.text == "1234567890123456789012345"
    assert desk.journal.truncated
    assert len(desk.rows()) == 4


def test_held_events_get_cursors_and_records_and_are_shown_once_released():
    desk = Desk()
    desk.journal.event(E.NOTICE, {"n": 1})
    desk.journal.hold()
    desk.journal.hold()
    desk.journal.event(E.NOTICE, {"n": 2})
    outside = desk.journal.outside()
    outside.event(E.SESSION_IDLE, {})
    desk.journal.event(E.NOTICE, {"n": 3})
    assert [event["cursor"] for event in desk.shown()] == ["3.1"]
    assert [row[0] for row in desk.rows()] == ["3.1", "3.2", "3.3", "3.4"]
    desk.journal.release()
    assert [event["cursor"] for event in desk.shown()] == ["3.2", "3.3", "3.4"]
    desk.journal.release()
    outside.event(E.SESSION_BUSY, {})
    desk.journal.event(E.NOTICE, {"n": 4})
    assert [event["cursor"] for event in desk.shown()] == ["3.5", "3.6"]


def test_what_did_not_become_durable_is_never_shown():
    desk = Desk()
    desk.journal.hold()
    desk.journal.event(E.NOTICE, {"n": 1})
    desk.journal.discard()
    desk.journal.release()
    desk.journal.event(E.NOTICE, {"n": 2})
    assert [event["data"] for event in desk.shown()] == [{"n": 2}]


def test_an_event_outside_of_turns_names_no_turn_and_has_an_id_of_its_own():
    desk = Desk()
    desk.journal.event(E.NOTICE, {})
    desk.journal.outside().event(E.SESSION_IDLE, {})
    event = desk.shown()[1]
    assert (event["turn_id"], event["prompt_id"], event["cursor"]) == (None, None, "3.2")
    row = desk.records[1]
    assert (row.turn_id, row.prompt_id, row.record_id) == (None, None, record_id("s", outside_of(3), 2))
    twin = Desk(turn_id="epoch3")
    twin.head.n = 1
    twin.journal.event(E.NOTICE, {})
    assert twin.records[0].record_id != row.record_id


WRITES = st.lists(
    st.tuples(
        st.sampled_from(["message", "thought", "event", "frame", "outside", "hold", "release"]),
        st.sampled_from([None, "a", "b"]),
        st.lists(st.sampled_from(["x", "", "yy", KEY, KEY[:5], KEY[5:], "ü"]), max_size=3),
    ),
    max_size=25,
)


@settings(max_examples=200)
@given(WRITES, st.booleans())
def test_whatever_is_written(writes: list[tuple[str, str | None, list[str]]], masks: bool):
    """Cursors are contiguous; every record is its event; a block's text is the exact concatenation of its frames."""
    desk = Desk(secrets=(KEY,) if masks else ())
    said = {"message": "", "thought": ""}
    for what, given_id, chunks in writes:
        if what in said:
            assert desk.journal.texts(what, given_id, chunks) is any(chunks)
            said[what] += "".join(chunks)
        elif what in ("hold", "release"):
            getattr(desk.journal, what)()
        else:
            pen = desk.journal.outside() if what == "outside" else desk.journal
            pen.event(E.NOTICE, {"texts": chunks}, durable=what != "frame")
    desk.journal.close_block()
    desk.journal.release()
    chunks_shown = [desk.log.chunk(position) for position in range(desk.log.start, desk.log.end)]
    for one in chunks_shown:
        assert one is not None
        assert [json.loads(line)["cursor"] for line in one.lines.splitlines()] == [
            f"{one.epoch}.{n}" for n in range(one.first, one.last + 1)
        ]
    shown = desk.shown()
    assert [event["cursor"] for event in shown] == [f"3.{n}" for n in range(1, desk.head.n + 1)]
    by_cursor = {event["cursor"]: event for event in shown}
    for cursor, type, data in desk.rows():
        assert (by_cursor[cursor]["type"], by_cursor[cursor]["data"]) == (type, data)
    for kind, raw in said.items():
        frames = [event for event in shown if event["type"] == f"{kind}_delta"]
        blocks = [event["data"] for event in shown if event["type"] == kind]
        assert "".join(event["data"]["text"] for event in frames) == "".join(block["text"] for block in blocks)
        assert [block["supersedes_from"] for block in blocks] == first_frames(shown, kind)
        assert masks or "".join(block["text"] for block in blocks) == raw
    if masks:
        assert KEY not in json.dumps(shown, ensure_ascii=False)


def first_frames(shown: list[dict[str, Any]], kind: str) -> list[str]:
    """The cursor of the first frame behind each block's predecessor."""
    firsts: list[str] = []
    fresh = True
    for event in shown:
        if event["type"] == f"{kind}_delta" and fresh:
            firsts.append(event["cursor"])
            fresh = False
        fresh = fresh or event["type"] == kind
    return firsts


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        (["a\ud83d", "\ude00b"], ["a", "😀b"]),
        (["\ud83d", "\ude00"], ["😀"]),
        (["\ud83d", "", "\ude00"], ["😀"]),
        (["\ud83d", "\ud83d", "\ude00"], ["\ufffd", "😀"]),
        (["\ud83d", "x"], ["\ufffdx"]),
        (["\ude00x"], ["\ufffdx"]),
        (["x\ud83d"], ["x", "\ufffd"]),
        (["😀", "é", "a", "a"], ["😀", "é", "a", "a"]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("secrets", [(), (KEY,)])
def test_a_character_torn_in_two_is_whole_again(chunks: list[str], shown: list[str], at_once: bool, secrets: Any):
    desk = Desk(secrets=secrets)
    for batch in [chunks] if at_once else [[chunk] for chunk in chunks]:
        assert desk.journal.texts("message", None, batch) is (batch != [""])
    desk.journal.close_block()
    events = desk.shown()
    assert [event["data"]["text"] for event in events[:-1]] == shown
    assert events[-1]["data"]["text"] == "".join(shown) == desk.journal.text == desk.rows()[0][2]["text"]


def test_a_secret_with_a_torn_character_never_shows():
    desk = Desk(secrets=("geheim😀nis",))
    desk.journal.texts("message", None, ["das geheim\ud83d"])
    desk.journal.texts("message", None, ["\ude00nis da"])
    desk.journal.close_block()
    assert desk.rows()[0][2]["text"] == f"das {MASK} da"


@pytest.mark.usefixtures("small")
def test_a_torn_character_across_the_border_of_two_blocks():
    desk = Desk()
    desk.journal.texts("message", None, ["1234567890\ud83d"])
    desk.journal.texts("message", None, ["\ude00"])
    desk.journal.close_block()
    assert [row[2]["text"] for row in desk.rows()] == ["1234567890", "😀"]


@pytest.mark.parametrize("secrets", [(), (KEY,)])
def test_a_chunk_that_is_too_large_is_several_frames_and_blocks_and_nothing_of_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, secrets: Any
):
    monkeypatch.setattr(module, "FRAME_CHARS", 4)
    monkeypatch.setattr(module, "BLOCK_CHARS", 8)
    desk = Desk(secrets=secrets)
    text = "".join(chr(ord("a") + n % 26) for n in range(21))
    desk.journal.texts("message", None, ["xy", text, "", "z"])
    desk.journal.close_block()
    events = desk.shown()
    frames = [event["data"]["text"] for event in events if event["type"] == "message_delta"]
    assert "".join(frames) == f"xy{text}z" == desk.journal.text
    assert max(map(len, frames)) == 4
    blocks = [row[2]["text"] for row in desk.rows()]
    assert "".join(blocks) == f"xy{text}z"
    assert max(map(len, blocks)) < 12
    assert [event["cursor"] for event in events] == [f"3.{n}" for n in range(1, len(events) + 1)]


def test_a_nul_anywhere_in_an_event_is_one_character_that_every_store_takes():
    desk = Desk()
    record = (E.TOOL_CALL, {"tool_call_id": "a", "raw_output": {"k\0": ["v\0", "\\u0000"]}})
    desk.journal.event(E.TOOL_CALL_UPDATE, {"tool_call_id": "a", "content": ["\0"]}, as_record=record)
    assert brief(desk.shown())[0][2] == {"tool_call_id": "a", "content": ["\ufffd"]}
    assert desk.rows()[0][2] == {"tool_call_id": "a", "raw_output": {"k\ufffd": ["v\ufffd", "\\u0000"]}}


def test_an_event_that_is_too_large_is_cut_and_says_so_but_never_what_a_client_sent():
    desk = Desk()
    desk.journal.event(E.PLAN, {"entries": [{"content": "x" * 1000}] * 2000})
    desk.journal.event(E.USER_MESSAGE, {"content": [{"type": "text", "text": "x" * 2_000_000}]})
    plan, message = desk.shown()
    assert len(desk.records[0].data) < 1_200_000
    assert plan["data"] == desk.rows()[0][2]
    assert plan["data"]["truncated"] is True
    assert plan["data"]["bytes"] > 2_000_000
    assert len(message["data"]["content"][0]["text"]) == 2_000_000


def test_a_message_id_of_the_agents_own_is_short():
    desk = Desk()
    desk.journal.texts("message", "i" * 100_000, ["a", "b"])
    desk.journal.texts("message", "i" * 100_000 + "j", ["c"])
    desk.journal.close_block()
    assert [row[2]["text"] for row in desk.rows()] == ["ab", "c"]
    assert len({row[2]["message_id"] for row in desk.rows()}) == 2
    assert max(len(row[2]["message_id"]) for row in desk.rows()) == 200
