"""Permission policies, and the option that says a decision (DESIGN 3.8, 4.1)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rules.permission import (
    CANCELLED,
    DENY_ERROR,
    READ_KINDS,
    Policy,
    Reply,
    Rule,
    allow,
    choose,
    decide,
    denies,
    deny,
    subjects,
)

KINDS = ["allow_once", "allow_always", "reject_once", "reject_always"]


def call(kind: str | None = "execute", **fields: Any) -> dict[str, Any]:
    return {"toolCallId": "t1", **({"kind": kind} if kind else {}), **fields}


def run(command: Any) -> dict[str, Any]:
    return call("execute", rawInput={"command": command})


def options(*kinds: str) -> list[dict[str, Any]]:
    return [{"optionId": f"id-{kind}", "kind": kind, "name": kind} for kind in kinds]


def selected(option_id: str) -> Reply:
    return Reply({"outcome": {"outcome": "selected", "optionId": option_id}})


@pytest.mark.parametrize(
    ("tool_call", "found"),
    [
        (run("npm test"), ["npm test"]),
        (run(["bash", "-lc", "npm test"]), ["bash -lc npm test"]),
        (call(rawInput={"cmd": "ls"}), ["ls"]),
        (call("edit", rawInput={"path": "a", "new_path": "b"}), ["a", "b"]),
        (call("edit", rawInput={"filePath": "a", "newText": "b"}), ["a"]),
        (call("edit", rawInput={"paths": ["a", "b c"]}), ["a", "b c"]),
        (call("edit", rawInput={"file_path": "a"}, locations=[{"path": "/w/a"}, {"line": 1}]), ["a", "/w/a"]),
        (call("edit", content=[{"type": "diff", "path": "/etc/hosts"}, {"type": "content"}]), ["/etc/hosts"]),
        (call("fetch", rawInput={"url": "http://x/"}), ["http://x/"]),
        (call(title="Run it"), ["Run it"]),
        (call(title="Run it", rawInput={"command": "ls"}), ["ls"]),
        (call(), []),
        (call(title="Run it", rawInput={"command": []}), ["Run it"]),
        (call(title=7, rawInput="ls", locations=5, content=True), []),
        (call(rawInput={"command": 7, "path": None, "url": {}}, locations=["x", None]), []),
    ],
)
def test_what_a_rule_looks_at(tool_call: dict[str, Any], found: list[str]):
    assert subjects(tool_call) == found


NPM = Policy("ask", (Rule("execute", "allow", "npm *"),))


def test_the_first_rule_that_matches_decides():
    policy = Policy("ask", (Rule("execute", "deny", "npm publish*"), *NPM.rules, Rule("*", "deny")))
    assert decide(policy, run("npm publish")) == "deny"
    assert decide(policy, run("npm test")) == "allow"
    assert decide(policy, run("make")) == "deny"
    assert decide(policy, call("read")) == "deny"


def test_a_rule_is_for_its_kind_of_tool():
    assert decide(NPM, call("edit", rawInput={"command": "npm test"})) == "ask"
    assert decide(Policy("deny", (Rule("other", "allow"),)), call(None, title="x")) == "allow"
    assert decide(Policy("deny", (Rule("other", "allow"),)), {"kind": 5}) == "allow"


@pytest.mark.parametrize("default", ["ask", "allow", "deny"])
def test_without_a_rule_the_default_decides(default: Any):
    assert decide(Policy(default), run("make")) == default


@pytest.mark.parametrize(
    "kind", ["read", "search", "fetch", "think", "edit", "delete", "move", "execute", "other", None]
)
def test_allow_reads(kind: str | None):
    assert decide(Policy("allow_reads"), call(kind)) == ("allow" if kind in READ_KINDS else "ask")


def test_a_rule_stands_before_allow_reads():
    assert decide(Policy("allow_reads", (Rule("read", "deny", "*.env"),)), call("read", rawInput={"path": ".env"})) == (
        "deny"
    )


SOURCES = Rule("edit", "allow", "src/*")


@pytest.mark.parametrize(
    "tool_call",
    [
        call("edit", rawInput={"path": "src/a"}, locations=[{"path": "/etc/passwd"}]),
        call("edit", rawInput={"paths": ["src/a", "/etc/passwd"]}),
        call("edit", rawInput={"path": "src/a", "new_path": "/etc/passwd"}),
        call("edit", rawInput={"path": "src/a"}, content=[{"type": "diff", "path": "/etc/passwd"}]),
        call("edit", title="src/a /etc/passwd", rawInput={"path": "/etc/passwd"}),
        call("edit"),
    ],
)
def test_an_allow_rule_must_match_every_subject(tool_call: dict[str, Any]):
    assert decide(Policy("ask", (SOURCES,)), tool_call) == "ask"


def test_a_deny_or_ask_rule_matches_when_any_subject_does():
    both = call("edit", rawInput={"path": "src/a", "new_path": "/etc/passwd"})
    assert decide(Policy("allow", (Rule("edit", "deny", "/etc/*"),)), both) == "deny"
    assert decide(Policy("allow", (Rule("*", "ask", "/etc/*"),)), both) == "ask"


def test_a_glob_is_matched_to_the_letter_and_as_a_whole():
    assert decide(NPM, run("NPM test")) == "ask"
    assert decide(NPM, run("sudo npm test")) == "ask"
    assert decide(Policy("ask", (Rule("execute", "allow", "npm test"),)), run("npm test; rm -rf /")) == "ask"


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["allow_always", "allow_once"], "allow_once"),
        (["allow_always"], None),
        (["reject_once"], None),
        ([], None),
    ],
)
def test_allow_is_only_ever_once(offered: list[str], chosen: str | None):
    reply = allow(options(*offered))
    assert reply == (selected(f"id-{chosen}") if chosen else Reply(None, reply.message))
    assert reply.result is not None or reply.message


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["allow_once", "reject_always", "reject_once"], "reject_once"),
        (["allow_once", "reject_always"], "reject_always"),
        (["allow_once", "allow_always"], None),
        (["whatever"], None),
        ([], None),
    ],
)
def test_deny_is_a_reject_option_or_an_error_case_f7(offered: list[str], chosen: str | None):
    reply = deny(options(*offered))
    assert reply == (selected(f"id-{chosen}") if chosen else Reply(None, reply.message))
    assert reply.result is not None or reply.message
    assert DENY_ERROR == -32000


OPTIONS = st.lists(
    st.fixed_dictionaries(
        {"kind": st.sampled_from([*KINDS, "allow", "", None])},
        optional={"optionId": st.sampled_from(["a", "b", "c", 5, None])},
    ),
    max_size=6,
)


@given(OPTIONS)
def test_a_refusal_never_maps_to_an_allow_option_nor_to_cancelled_case_f7(offered: list[dict[str, Any]]):
    reply = deny(offered)
    assert reply != Reply(CANCELLED)
    if reply.result is not None:
        option_id = reply.result["outcome"]["optionId"]
        kinds = [str(option["kind"]) for option in offered if option.get("optionId") == option_id]
        assert kinds
        assert not [kind for kind in kinds if kind.startswith("allow")]
        assert reply.result["outcome"]["outcome"] == "selected"


@given(OPTIONS)
def test_an_allowance_never_maps_to_anything_but_allow_once(offered: list[dict[str, Any]]):
    reply = allow(offered)
    if reply.result is not None:
        assert {"kind": "allow_once", "optionId": reply.result["outcome"]["optionId"]} in offered


def test_a_choice_is_one_of_those_offered():
    offered = options("allow_once", "reject_once")
    assert choose(offered, "id-allow_once") == selected("id-allow_once")
    assert choose(offered, "id-nonsense") is None
    assert choose([], "id-allow_once") is None


def test_what_counts_as_a_denial():
    offered = [
        *options(*KINDS),
        {"optionId": "both", "kind": "reject_once"},
        {"optionId": "both", "kind": "allow_once"},
    ]
    assert [kind for kind in KINDS if denies(offered, f"id-{kind}")] == ["reject_once", "reject_always"]
    assert not denies(offered, "id-nonsense")
    assert not denies(offered, "both")
