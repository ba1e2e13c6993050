"""The fingerprint: the same facts give the same digests, and a secret's digest says nothing outside this process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rules.fingerprint import digest, facets, keyed_digest
from runner.rules.reuse import FACETS, changed_facet

KEY = b"k" * 32
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def made(**changed: Any) -> dict[str, str]:
    facts: dict[str, Any] = {
        "harness": "demo@1",
        "provider": "local",
        "recipe": "default",
        "isolation": "none",
        "env": {"MODE": "fast"},
        "secrets": {"API_KEY": "sk-marker-123"},
        "mcp_servers": [{"name": "m", "url": "http://x/?token=sk-marker-456"}],
        "workspace": {"path": None, "files": [{"path": "AGENTS.md", "content": "x"}]},
        "patches": "p1",
        "key": KEY,
    }
    return facets(**{**facts, **changed})


def test_every_facet_of_the_design_and_no_other():
    assert list(made()) == list(FACETS)


@pytest.mark.parametrize(
    ("facet", "value"),
    [
        ("harness", "demo@2"),
        ("provider", "daytona"),
        ("recipe", "large"),
        ("isolation", "cell"),
        ("env", {"MODE": "slow"}),
        ("env", {}),
        ("secrets", {"API_KEY": "sk-marker-124"}),
        ("secrets", {"API_KEY2": "sk-marker-123"}),
        ("mcp_servers", []),
        ("workspace", {"path": "/elsewhere", "files": None}),
        ("workspace", {"path": None, "files": [{"path": "AGENTS.md", "content": "y"}]}),
        ("patches", "p2"),
    ],
)
def test_one_change_is_one_changed_facet_case_c12(facet: str, value: Any):
    old, new = made(), made(**{facet: value})
    assert changed_facet(old, new) == facet
    assert {name for name in FACETS if old[name] != new[name]} == {facet}


def test_the_same_facts_fit_each_other_in_any_order():
    workspace = {"files": [{"content": "x", "path": "AGENTS.md"}], "path": None}
    assert made() == made(env={"MODE": "fast"}, workspace=workspace)


def test_the_order_of_servers_is_a_fact():
    assert made(mcp_servers=[1, 2])["mcp_servers"] != made(mcp_servers=[2, 1])["mcp_servers"]


def test_no_secret_can_be_read_or_guessed_from_its_digest():
    """What is stored or shown never holds a value, nor an unkeyed digest to try guesses against."""
    old = made()
    assert "marker" not in json.dumps(old)
    guess = {"API_KEY": "sk-marker-123"}
    assert old["secrets"] not in (digest(guess), keyed_digest(guess, b"another process"))
    other = made(key=b"another process")
    assert {name for name in FACETS if old[name] != other[name]} == {"secrets", "mcp_servers"}


def test_a_stored_digest_stays_what_it_was():
    """The digest of a prompt is stored: another one after an update would turn every retry into a conflict."""
    assert digest({"b": 1, "a": [None, "ü"]}) == "2704c362b8bf7b97e84c54235748cfaf"


@given(JSON, JSON)
def test_equal_json_and_equal_digests_are_the_same(one: Any, other: Any):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (digest(one) == digest(other)) == same
    assert (keyed_digest(one, KEY) == keyed_digest(other, KEY)) == same


@given(st.dictionaries(st.text(), JSON, max_size=5), st.randoms())
def test_key_order_does_not_matter(value: dict[str, Any], random: Any):
    shuffled = list(value.items())
    random.shuffle(shuffled)
    assert digest(value) == digest(dict(shuffled))
