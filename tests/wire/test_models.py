from __future__ import annotations

from typing import Any

import orjson
import pytest

from runner.errors import RunnerError
from runner.rules.permission import Rule
from runner.wire.models import MAX_DEPTH, SecretRef, parse_answer, parse_cancel, parse_dispatch


def dispatch(**fields: Any) -> Any:
    return parse_dispatch(orjson.dumps({"prompt": "x", **fields}))


def test_text_becomes_one_block() -> None:
    request = dispatch()
    assert request.blocks() == [{"type": "text", "text": "x"}]
    assert request.on_busy == "reject"


def test_blocks_stay_as_they_are() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "data": "", "mimeType": "image/png"}, {"type": "new"}]
    assert dispatch(prompt=blocks).blocks() == blocks


def test_the_whole_body_of_the_contract_is_accepted() -> None:
    request = dispatch(
        prompt_id="p",
        turn_id="t",
        harness="demo",
        model=None,
        mode="plan",
        config_options={"effort": "high", "fast": True},
        sandbox={"provider": "local", "recipe": "default"},
        workspace={"files": [{"path": "a/AGENTS.md", "content": "é"}, {"path": "b", "base64": "AAE="}], "path": "/srv"},
        mcp_servers=[{"name": "m", "command": "x", "args": [], "env": []}, {"name": "h", "type": "http", "url": "u"}],
        env={"A": "1"},
        secrets={"KEY": "value-1", "OTHER": {"ref": "NAME"}},
        secrets_expire_at="2026-11-29T16:09:53.123Z",
        permissions={"default": "deny", "rules": [{"tool": "execute", "match": "npm *", "decision": "allow"}]},
        on_busy="reject",
        queue_mode="coalesce",
        context_only=False,
        keep_on_disconnect=True,
        limits={"total_seconds": None, "idle_seconds": 5},
    )
    assert [file.data() for file in request.workspace.files] == ["é".encode(), b"\x00\x01"]
    assert request.secrets == {"KEY": "value-1", "OTHER": SecretRef(ref="NAME")}
    assert request.permissions.policy().rules == (Rule("execute", "allow", "npm *"),)
    assert request.secrets_expire_ms == 1795968593123
    assert "value-1" not in repr(request)


def test_what_was_left_out_is_told_from_null() -> None:
    request = dispatch(model=None, limits={"idle_seconds": None})
    assert request.given("model")
    assert not request.given("mode")
    assert request.limits.given("idle_seconds")
    assert not request.limits.given("total_seconds")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [{"type": "text"}]}, "prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"session": "s"}, "session"),
        ({"limits": {"idle": 3}}, "limits.idle"),
        ({"limits": {"idle_seconds": 0}}, "limits.idle_seconds"),
        ({"limits": {"idle_seconds": "5"}}, "limits.idle_seconds"),
        ({"prompt_id": "a b"}, "prompt_id"),
        ({"turn_id": "x" * 129}, "turn_id"),
        ({"harness": "a/b"}, "harness"),
        ({"model": ""}, "model"),
        ({"config_options": {"a": 1}}, "config_options"),
        ({"sandbox": {"provider": "moon"}}, "sandbox.provider"),
        ({"sandbox": None}, "sandbox"),
        ({"workspace": {"files": [{"path": "../a", "content": ""}]}}, "workspace.files.0.path"),
        ({"workspace": {"files": [{"path": "/a", "content": ""}]}}, "workspace.files.0.path"),
        ({"workspace": {"files": [{"path": "a"}]}}, "workspace.files.0"),
        ({"workspace": {"files": [{"path": "a", "content": "", "base64": ""}]}}, "workspace.files.0"),
        ({"workspace": {"files": [{"path": "a", "base64": "!"}]}}, "workspace.files.0"),
        ({"workspace": {"files": [{"path": "a", "content": ""}, {"path": "a", "content": ""}]}}, "workspace"),
        ({"workspace": {"path": "relative"}}, "workspace.path"),
        ({"workspace": {"path": "/a/../b"}}, "workspace.path"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"mcp_servers": [{"name": "x", "type": "carrier-pigeon", "command": "x"}]}, "mcp_servers"),
        ({"env": {"A=B": "1"}}, "env"),
        ({"env": {"A": 1}}, "env"),
        ({"env": {"A": "\0"}}, "env"),
        ({"env": {f"A{n}": "" for n in range(257)}}, "env"),
        ({"secrets": {"A": {"ref": ""}}}, "secrets"),
        ({"secrets": {"A": {"ref": "B", "more": 1}}}, "secrets"),
        ({"secrets_expire_at": "2026-11-29T16:09:53"}, "secrets_expire_at"),
        ({"permissions": {"default": "perhaps"}}, "permissions.default"),
        ({"permissions": {"rules": [{"tool": "x"}]}}, "permissions.rules.0.decision"),
        ({"keep_on_disconnect": "yes"}, "keep_on_disconnect"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RunnerError) as caught:
        dispatch(**fields)
    assert caught.value.code == "invalid_request"
    assert caught.value.extra["field"] == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b'{"prompt":NaN}', b'{"prompt":"\\ud800"}', b'{"prompt":"\xff"}', b"[" * 5000],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RunnerError) as caught:
        parse_dispatch(body)
    assert caught.value.extra["field"] == "body"


def test_depth_is_bounded() -> None:
    def nested(levels: int) -> bytes:
        return b'{"prompt":[{"type":"x","data":' + b"[" * levels + b"]" * levels + b"}]}"

    parse_dispatch(nested(MAX_DEPTH - 3))
    with pytest.raises(RunnerError, match="deeper than 64"):
        parse_dispatch(nested(MAX_DEPTH - 2))


def test_many_brackets_are_not_depth() -> None:
    text = "[" * 200
    assert parse_dispatch(orjson.dumps({"prompt": [{"type": "text", "text": text}]})).blocks()[0]["text"] == text


def test_a_secret_value_is_not_in_the_refusal() -> None:
    with pytest.raises(RunnerError) as caught:
        dispatch(secrets={"KEY": "sk-very-secret", "B": 1})
    assert "sk-very" not in str(caught.value)
    with pytest.raises(RunnerError) as caught:
        dispatch(secrets="sk-very-secret")
    assert "sk-very" not in str(caught.value)


def test_cancel_bodies() -> None:
    assert parse_cancel(b"").wait_seconds == 0
    request = parse_cancel(b'{"expected_execution_id":"t","idempotency_key":"k","wait_seconds":600,"queue":"keep"}')
    assert request.expected_execution_id == "t"
    for body in (b'{"wait_seconds":601}', b'{"wait_seconds":-1}', b'{"queue":"burn"}', b'{"expected_execution_id":""}'):
        with pytest.raises(RunnerError):
            parse_cancel(body)


def test_an_answer_is_exactly_one() -> None:
    assert parse_answer(b'{"option_id":"yes"}').option_id == "yes"
    assert parse_answer(b'{"decision":"deny","idempotency_key":"k"}').decision == "deny"
    form = parse_answer(b'{"action":"accept","content":{"a":"x","b":1,"c":2.5,"d":true,"e":["x","y"]}}')
    assert form.content == {"a": "x", "b": 1, "c": 2.5, "d": True, "e": ["x", "y"]}
    assert (form.action, parse_answer(b'{"action":"cancel"}').content) == ("accept", None)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"option_id":"a","decision":"allow"}',
        b'{"decision":"maybe"}',
        b'{"option_id":""}',
        b'{"action":"accept","decision":"allow"}',
        b'{"action":"maybe"}',
        b'{"action":"decline","content":{}}',
        b'{"decision":"allow","content":{}}',
        b'{"action":"accept","content":{"a":{"b":1}}}',
        b'{"action":"accept","content":{"a":[1]}}',
        b'{"action":"accept","content":[]}',
    ],
)
def test_an_answer_that_is_none(body: bytes) -> None:
    with pytest.raises(RunnerError) as caught:
        parse_answer(body)
    assert caught.value.code == "invalid_request"
