"""From the wire to a question, from an answer to the wire, and what a client is shown (DESIGN 3.8, 4.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runner.acp.inbox import Asked, ElicitationAsked, PermissionAsked
from runner.errors import RunnerError
from runner.interactions import desk
from runner.redaction import Redactor
from runner.rules.interaction import EXPIRY_MS, REASONS, Cause
from runner.rules.permission import Policy, Reply, Rule
from runner.store.port import InteractionRow
from runner.terms import InteractionStatus as S

OPTIONS = [
    {"optionId": "once", "name": "Once", "kind": "allow_once"},
    {"optionId": "always", "name": "Always", "kind": "allow_always"},
    {"optionId": "no", "name": "No", "kind": "reject_once"},
]
CALL = {"tool_call_id": "t", "kind": "execute", "title": "run", "raw_input": {"command": "rm x"}}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FILLED = {"action": "accept", "content": {"name": "x"}}
NOW = 1_700_000_000_000


def permission(options: list[dict[str, Any]] | None = None, **call: Any) -> PermissionAsked:
    tool_call = {"toolCallId": "t", "kind": "execute", "rawInput": {"command": "rm x"}, **call}
    return PermissionAsked(1, {"toolCall": tool_call, "options": OPTIONS if options is None else options})


def form(**members: Any) -> ElicitationAsked:
    return ElicitationAsked(1, {"mode": "form", "message": "Which?", "requestedSchema": SCHEMA, **members})


def url() -> ElicitationAsked:
    return ElicitationAsked(1, {"mode": "url", "message": "Open", "url": "https://x.test/", "elicitationId": "e"})


def row(item: Asked, call: dict[str, Any] | None = None, secrets: tuple[str, ...] = ()) -> InteractionRow:
    return desk.question(
        item,
        call,
        project="p",
        session_id="s",
        turn_id="t",
        interaction_id="i",
        generation=3,
        redact=Redactor(secrets).tree,
        now_ms=NOW,
    )


def chosen(option_id: str) -> Reply:
    return Reply({"outcome": {"outcome": "selected", "optionId": option_id}})


@pytest.mark.parametrize(
    ("policy", "item", "reply"),
    [
        (Policy(), permission(), None),
        (Policy("allow"), permission(), chosen("once")),
        (Policy("allow"), permission(OPTIONS[1:]), None),
        (Policy("allow"), permission([]), None),
        (Policy("deny"), permission(), chosen("no")),
        (Policy("allow_reads"), permission(), None),
        (Policy("allow_reads"), permission(kind="read"), chosen("once")),
        (Policy("ask", (Rule("execute", "allow", "rm *"),)), permission(), chosen("once")),
        (Policy("deny", (Rule("execute", "ask", "rm *"),)), permission(), None),
        (Policy(), form(), None),
        (Policy("allow"), form(), None),
        (Policy("ask", (Rule("*", "allow"),)), url(), None),
        (Policy("deny"), form(), Reply({"action": "decline"})),
        (Policy("deny"), url(), Reply({"action": "decline"})),
    ],
)
def test_what_a_policy_answers(policy: Policy, item: Asked, reply: Reply | None):
    assert desk.decide(policy, item) == reply
    if reply is not None:
        assert desk.denies(desk.offer(item), reply) == (policy.default == "deny" and reply != chosen("once"))


def test_a_denial_without_a_reject_option_is_an_error_case_f7():
    reply = desk.decide(Policy("deny"), permission(OPTIONS[:2]))
    assert reply is not None
    assert reply.result is None
    assert desk.denies(desk.offer(permission(OPTIONS[:2])), reply)


@pytest.mark.parametrize(
    ("item", "answer", "reply", "denied"),
    [
        (permission(), {"decision": "allow"}, chosen("once"), False),
        (permission(), {"decision": "deny"}, chosen("no"), True),
        (permission(), {"option_id": "always"}, chosen("always"), False),
        (permission(), {"option_id": "no"}, chosen("no"), True),
        (
            form(),
            {"action": "accept", "content": {"name": "x"}},
            Reply({"action": "accept", "content": {"name": "x"}}),
            False,
        ),
        (form(), {"action": "decline"}, Reply({"action": "decline"}), True),
        (form(), {"action": "cancel"}, Reply({"action": "cancel"}), False),
        (url(), {"action": "accept"}, Reply({"action": "accept"}), False),
    ],
)
def test_what_an_answer_says_on_the_wire(item: Asked, answer: dict[str, Any], reply: Reply, denied: bool):
    assert desk.reply(desk.offer(item), answer) == (reply, denied)


@pytest.mark.parametrize(
    ("item", "answer", "field"),
    [
        (permission(), {"option_id": "other"}, "option_id"),
        (permission([]), {"option_id": "once"}, "option_id"),
        (permission([]), {"decision": "allow"}, "decision"),
        (permission(OPTIONS[1:]), {"decision": "allow"}, "decision"),
        (permission(), {"action": "accept"}, "action"),
        (form(), {"decision": "allow"}, "action"),
        (form(), {"action": "accept"}, "content.name"),
        (form(), {"action": "accept", "content": {"name": 1}}, "content.name"),
        (url(), {"action": "accept", "content": {"name": "x"}}, "content"),
    ],
)
def test_an_answer_that_does_not_fit_names_its_field(item: Asked, answer: dict[str, Any], field: str):
    with pytest.raises(RunnerError) as caught:
        desk.reply(desk.offer(item), answer)
    assert (caught.value.code, caught.value.extra["field"]) == ("invalid_request", field)


@pytest.mark.parametrize(
    ("item", "cancelled", "refused"),
    [
        (permission(), Reply({"outcome": {"outcome": "cancelled"}}), chosen("no")),
        (form(), Reply({"action": "cancel"}), Reply({"action": "decline"})),
    ],
)
def test_a_stop_cancels_and_time_refuses_case_f7(item: Asked, cancelled: Reply, refused: Reply):
    of = desk.offer(item)
    assert desk.cancel(of.kind) == cancelled
    assert desk.refuse(of) == refused


# What a new agent may be given of an earlier one's answer.


def test_a_stored_answer_fits_the_same_choice_only():
    stored = replace(row(permission(), CALL), status=S.ANSWERED, answer={"option_id": "once"})
    assert desk.stored_reply(stored, desk.offer(permission())) == (chosen("once"), False)
    for options in (OPTIONS[1:], [{"optionId": "once", "kind": "allow_always"}], [{"optionId": "once"}]):
        with pytest.raises(RunnerError):
            desk.stored_reply(stored, desk.offer(permission(options)))
    by_decision = replace(stored, answer={"decision": "deny"})
    other = [{"optionId": "stop", "kind": "reject_always"}]
    assert desk.stored_reply(by_decision, desk.offer(permission(other))) == (chosen("stop"), True)


@pytest.mark.parametrize("item", [permission(), form(), url()])
def test_what_is_stored_offers_what_was_asked(item: Asked):
    of = desk.stored_offer(row(item, CALL))
    asked = desk.offer(item)
    assert (of.kind, of.schema) == (asked.kind, asked.schema)
    assert [option["optionId"] for option in of.options] == [option["optionId"] for option in asked.options]


def test_secrets_are_masked_and_do_not_change_what_is_the_same():
    call = {**CALL, "raw_input": {"command": "curl -H hunter2-secret"}}
    made = row(permission(), call, ("hunter2-secret",))
    assert "hunter2" not in repr(made)
    assert made.request["binding"] == row(permission(), call, ("hunter2-secret",)).request["binding"]
    assert made.request["binding"] != row(permission(), CALL).request["binding"]


# What a client is shown.


def test_a_permission_as_it_is_shown():
    view = desk.view(row(permission(), CALL))
    assert view == {
        "interaction_id": "i",
        "session_id": "s",
        "turn_id": "t",
        "status": "pending",
        "kind": "permission",
        "tool_call": CALL,
        "options": [{"option_id": o["optionId"], "name": o["name"], "kind": o["kind"]} for o in OPTIONS],
        "created_at": "2023-11-14T22:13:20.000Z",
        "expires_at": "2023-11-21T22:13:20.000Z",
    }
    assert row(permission(), CALL).expires_at - NOW == EXPIRY_MS


def test_a_form_and_a_url_as_they_are_shown():
    shown = desk.view(row(form()))
    assert (shown["message"], shown["mode"], shown["schema"]) == ("Which?", "form", SCHEMA)
    assert (shown["tool_call"], shown["options"], "url" in shown) == (None, [], False)
    shown = desk.view(row(url(), CALL))
    assert (shown["mode"], shown["url"], "schema" in shown) == ("url", "https://x.test/", False)
    assert shown["tool_call"] == CALL


def test_an_answer_and_its_failure_are_shown_apart_case_f2():
    asked = row(permission(), CALL)
    given = desk.answered(asked, {"decision": "allow", "idempotency_key": "k"}, NOW)
    assert (given.status, desk.view(given)["answer"]) == (S.ANSWERED, {"decision": "allow", "idempotency_key": "k"})
    back = desk.unclaimed(given, "No room.")
    shown = desk.view(back)
    assert (shown["status"], shown["last_error"], "answer" in shown, "reason" in shown) == (
        "pending",
        "No room.",
        False,
        False,
    )
    assert desk.closing(desk.consumed(given)) == {"interaction_id": "i", "status": "consumed", "decision": "allow"}


@pytest.mark.parametrize("cause", list(Cause))
def test_what_is_closed_says_why(cause: Cause):
    asked = row(permission(), CALL)
    closed = desk.close(asked, cause)
    assert closed is not None
    assert desk.view(closed)["reason"] == desk.closing(closed)["reason"] == REASONS[cause]
    assert "decision" not in desk.closing(closed), "nobody decided it (case F8)"
    assert desk.close(closed, cause) is None
    assert desk.close_all([asked, closed], cause) == [closed]
