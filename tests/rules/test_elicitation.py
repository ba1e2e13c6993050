"""What an agent may ask for with a form or a URL, and what fills a form in (DESIGN 3.8)."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rules.elicitation import FORM_CHARS, MESSAGE_CHARS, URL_CHARS, content_problem, request_problem

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 2, "maxLength": 4},
        "mail": {"type": "string", "format": "email", "pattern": "(a+)+$"},
        "pick": {"type": "string", "enum": ["a", "b"]},
        "named": {"type": "string", "oneOf": [{"const": "x", "title": "X"}, {"const": "y", "title": "Y"}]},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "count": {"type": "integer", "minimum": 1},
        "sure": {"type": "boolean"},
        "many": {"type": "array", "items": {"type": "string", "enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 2},
        "tags": {"type": "array", "items": {"anyOf": [{"const": "t1", "title": "T1"}]}},
    },
    "required": ["text"],
}


@pytest.mark.parametrize(
    "content",
    [
        {"text": "ab"},
        {"text": "abcd", "pick": "b", "named": "y", "share": 0.5, "count": 3, "sure": False},
        {"text": "ab", "mail": "a" * 50 + "!", "many": ["a", "c"], "tags": ["t1"], "share": 1, "count": 2.0},
    ],
)
def test_what_fits(content: dict[str, Any]):
    assert content_problem(SCHEMA, content) is None


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({}, "text"),
        ({"text": None}, "text"),
        ({"text": 5}, "text"),
        ({"text": "a"}, "text"),
        ({"text": "abcde"}, "text"),
        ({"text": ["ab"]}, "text"),
        ({"text": "ab", "pick": "c"}, "pick"),
        ({"text": "ab", "named": "X"}, "named"),
        ({"text": "ab", "share": 1.5}, "share"),
        ({"text": "ab", "share": "1"}, "share"),
        ({"text": "ab", "share": True}, "share"),
        ({"text": "ab", "count": 1.5}, "count"),
        ({"text": "ab", "count": 0}, "count"),
        ({"text": "ab", "sure": 1}, "sure"),
        ({"text": "ab", "sure": None}, "sure"),
        ({"text": "ab", "many": "a"}, "many"),
        ({"text": "ab", "many": []}, "many"),
        ({"text": "ab", "many": ["a", "a"]}, "many"),
        ({"text": "ab", "many": ["a", "b", "c"]}, "many"),
        ({"text": "ab", "many": ["z"]}, "many"),
        ({"text": "ab", "tags": ["t2"]}, "tags"),
        ({"text": "ab", "other": 1}, "other"),
    ],
)
def test_what_does_not_fit_is_named(content: dict[str, Any], field: str):
    problem = content_problem(SCHEMA, content)
    assert problem is not None and problem.startswith(f"content.{field}: ")


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"properties": None, "required": None}])
def test_a_form_without_fields_takes_nothing(schema: dict[str, Any]):
    assert content_problem(schema, {}) is None
    assert content_problem(schema, {"a": 1}) == "content.a: unknown field"


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2, allow_nan=False)
    | st.sampled_from(["a", "ab", "b", "x", "y", "t1", "abcde"])
    | st.lists(st.sampled_from(["a", "b", "c", "t1", "z"]), max_size=4)
)
PLAIN = {name: each for name, each in SCHEMA["properties"].items() if name not in ("mail", "named", "tags")}
KNOWN: dict[str, Any] = {
    **SCHEMA,
    "properties": PLAIN | {"many": {**PLAIN["many"], "uniqueItems": True}},
    "additionalProperties": False,
}


@given(st.dictionaries(st.sampled_from([*PLAIN, "other"]), VALUES))
def test_it_is_the_judgement_of_json_schema(content: dict[str, Any]):
    valid = jsonschema.Draft202012Validator(KNOWN).is_valid(content)
    assert (content_problem(KNOWN, content) is None) == valid


def form(**members: Any) -> dict[str, Any]:
    given = {"mode": "form", "message": "Which?", "requestedSchema": SCHEMA}
    return {name: value for name, value in (given | members).items() if value is not None}


def url(**members: Any) -> dict[str, Any]:
    return form(
        **({"mode": "url", "url": "https://example.test/", "elicitationId": "e", "requestedSchema": None} | members)
    )


@pytest.mark.parametrize("params", [form(), url(), url(url="HTTP://x"), form(requestedSchema={})])
def test_a_request_that_can_be_shown(params: dict[str, Any]):
    assert request_problem(params) is None


@pytest.mark.parametrize(
    "params",
    [
        form(message=None),
        form(message="x" * (MESSAGE_CHARS + 1)),
        form(requestedSchema=None),
        form(requestedSchema=[]),
        form(requestedSchema={"x": "y" * FORM_CHARS}),
        form(requestedSchema={"properties": {"a": {"type": "null"}}}),
        form(requestedSchema={"properties": {"a": {}}}),
        form(requestedSchema={"required": [1]}),
        url(url=None),
        url(url="file:///etc/passwd"),
        url(url="https://" + "x" * URL_CHARS),
        url(elicitationId=7),
    ],
)
def test_a_request_that_cannot_is_refused_case_f15(params: dict[str, Any]):
    assert request_problem(params)
