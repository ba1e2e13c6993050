"""Rows as JSON: what goes in comes out, and every project in it is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.store.codec import decode_answer, decode_parameters, encode, projects
from runner.store.port import Admission, CommandRow, QuarantinedRow
from tests.store.rows import admission, ending, prompt, question, record, session, turn

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"]))
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="ascii"), max_size=5), inner, max_size=4)
    ),
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "project", "ä", ""]), TREES, max_size=3)


@given(OBJECTS, OBJECTS, OBJECTS)
def test_what_goes_in_comes_out(config: dict[str, Any], content: dict[str, Any], data: dict[str, Any]):
    text = orjson.dumps(data, option=orjson.OPT_INDENT_2)
    row = Admission(
        session(config=config, usage=content),
        replace(turn(), result=data),
        prompt(content=[content]),
        [question(request=config, answer=content)],
        [record(1, data=text), record(2, turn_id=None, prompt_id=None)],
    )
    back = decode_parameters("admit", encode({"admission": row}))
    assert back == {"admission": row}
    assert back["admission"].records[0].data == text
    assert projects("admit", back) == {"p"}
    assert decode_answer("records", encode(list(row.records))) == list(row.records)
    pages = [(7, QuarantinedRow(record(1), "why", 3))]
    assert decode_answer("quarantined", encode(pages)) == pages


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ("admit", {"admission": replace(admission(), session=session(project="q"))}),
        ("admit", {"admission": replace(admission(), turn=turn(project="q"))}),
        ("admit", {"admission": admission(prompt=prompt(project="q"))}),
        ("admit", {"admission": admission(interactions=[question(project="q")])}),
        ("admit", {"admission": admission(records=[record(1), record(2, project="q")])}),
        ("end", {"ending": ending(turn(), others=[prompt(), prompt(project="q")])}),
        ("end", {"ending": ending(turn(), commands=[CommandRow("q", "s", "c", "cancel", "applied", "t1", 1)])}),
        ("append", {"records": [record(1, project="q")], "interactions": [question()], "prompts": []}),
        ("append", {"records": [record(1)], "interactions": [question(project="q")], "prompts": []}),
        ("append", {"records": [record(1)], "interactions": [], "prompts": [prompt(project="q")]}),
        ("quarantine", {"records": [record(1), record(1, project="q")], "reason": "r", "at": 1}),
        ("submit_command", {"row": CommandRow("q", "s", "c", "cancel", "pending", "t1", 1)}),
        ("answer_interaction", {"row": question(project="q"), "expected_status": "pending"}),
        ("save_session", {"row": session(project="q")}),
        ("open_turns", {"key": ("q", "s")}),
        ("open_commands", {"key": ("q", "s")}),
        ("turn", {"project": "q", "session_id": "s", "turn_id": "t"}),
        ("settle_command", {"project": "q", "command_id": "c", "state": "applied", "outcome": None, "at": 1}),
    ],
)
def test_no_project_hides_in_a_call_case_j5(call: str, parameters: dict[str, Any]):
    """Case J5."""
    assert "q" in projects(call, decode_parameters(call, encode(parameters)))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"key":["p"]}', b'{"key":["p","s","t"]}', b'{"key":"ps"}']
)
def test_a_bad_call_is_refused(body: bytes):
    with pytest.raises(RunnerError) as caught:
        decode_parameters("open_turns", body)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("call", ["expired_records", "trim_feed", "count_expired", "ended_turns"])
def test_a_call_for_every_project_is_no_call_for_one(call: str) -> None:
    """Not even for one whose name reads like nobody's."""
    assert projects(call, {"project": None, "before_ms": 1, "limit": 1}) - {"None"}
