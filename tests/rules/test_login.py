"""Who may refresh a login, and which copy counts (case K4)."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from runner.rules.login import LAST_MS, MAX_BYTES, MAX_DEPTH, Form, judge, read, wanted, without_refresh

FORM = Form("auth.json", ("t.access", "t.refresh", "key"), "t.refresh", "t.access")
NUMBERED = Form("auth.json", ("access", "refresh"), "refresh", "expires")


def content(access: str = "access-1", refresh: str | None = "refresh-1", **more: Any) -> bytes:
    return json.dumps({"t": {"access": access, "refresh": refresh}, **more}).encode()


def jwt(claims: object) -> str:
    return f"h.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.s"


def digest(data: bytes) -> str:
    found = read(FORM, data)
    assert found is not None
    return found.digest


LENT = content()
REFRESHED = content("access-2", "refresh-2")
ANEW = content("access-9", "refresh-9")


@pytest.mark.parametrize(
    ("kept", "found", "verdict"),
    [
        (LENT, LENT, "same"),
        (LENT, REFRESHED, "adopt"),
        (LENT, content("access-2", ""), "keep"),
        (LENT, content("access-2", None), "keep"),
        (LENT, b'{"t": {"access": "acc', "keep"),
        (LENT, b"{}", "keep"),
        (LENT, None, "keep"),
        (ANEW, REFRESHED, "conflict"),
        (ANEW, LENT, "conflict"),
        (ANEW, None, "conflict"),
        (None, REFRESHED, "conflict"),
        # Adopted, and the runner killed before it noted so.
        (REFRESHED, REFRESHED, "same"),
    ],
)
def test_which_copy_counts_case_k4(kept: bytes | None, found: bytes | None, verdict: str) -> None:
    assert judge(FORM, digest(LENT), kept, found) == verdict


def test_who_may_not_refresh_has_all_but_the_refresh_token_case_k4() -> None:
    data = json.loads(without_refresh(FORM, content(key=None, more=[1])))
    assert data == {"t": {"access": "access-1", "refresh": ""}, "key": None, "more": [1]}
    found = read(FORM, without_refresh(FORM, content()))
    assert found is not None
    assert (found.rotates, found.secrets) == (False, ("access-1",))


@pytest.mark.parametrize("data", [b'{"key": "k"}', b'{"t": 3}', b"[]", b"\xff", b'{"t": {"refresh": ""}}'])
def test_what_has_no_refresh_token_stays_as_it_is(data: bytes) -> None:
    assert without_refresh(FORM, data) == data


@pytest.mark.parametrize(
    "data", [None, b"", b"{}", b"[]", b'{"key": ""}', b'{"key": 7}', b'{"t": "x"}', b" " * (MAX_BYTES + 1), b"[" * 5000]
)
def test_what_is_no_login(data: bytes | None) -> None:
    assert read(FORM, data) is None


def nested(levels: int) -> bytes:
    """A login with a refresh token, ``levels`` deep."""
    return content().removesuffix(b"}") + b', "more": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_what_an_agent_nested_too_deep_to_be_written_again_is_no_login_case_k4() -> None:
    assert json.loads(without_refresh(FORM, nested(MAX_DEPTH)))["t"]["refresh"] == ""
    for levels in (MAX_DEPTH + 1, 900, 5000):
        assert judge(FORM, digest(LENT), LENT, nested(levels)) == "keep"
        assert without_refresh(FORM, nested(levels)) == nested(levels)


def test_a_key_in_the_file_never_expires_and_is_nobodys_to_refresh() -> None:
    found = read(FORM, b'{"key": "sk-1"}')
    assert found is not None
    assert (found.rotates, found.expires_ms, found.secrets) == (False, None, ("sk-1",))
    assert not found.expired(10**15)


@pytest.mark.parametrize(
    ("expires", "instant"),
    [
        (1_800_000_000, 1_800_000_000_000),
        (1_800_000_000_123, 1_800_000_000_123),
        (1_800_000_000.5, 1_800_000_000_500),
        (jwt({"exp": 1_800_000_000}), 1_800_000_000_000),
        (jwt({}), None),
        (jwt([]), None),
        ("a.?.c", None),
        ("never", None),
        (True, None),
        (None, None),
        # An agent may write any number, and JSON as Python reads it has these.
        (float("nan"), None),
        (float("inf"), LAST_MS),
        (1e307, LAST_MS),
        (10**400, LAST_MS),
        (float("-inf"), 0),
        (jwt({"exp": float("nan")}), None),
        (jwt({"exp": float("inf")}), LAST_MS),
    ],
)
def test_when_it_expires(expires: object, instant: int | None) -> None:
    found = read(NUMBERED, json.dumps({"access": "a", "expires": expires}).encode())
    assert found is not None
    assert found.expires_ms == instant


def test_expired_with_a_margin_case_n1() -> None:
    found = read(NUMBERED, b'{"access": "a", "expires": 1800000000}')
    assert found is not None
    assert [found.expired(now, 60_000) for now in (1_799_999_939_999, 1_799_999_940_000)] == [False, True]


def test_a_key_of_its_own_comes_first() -> None:
    assert wanted(("A", "B"), {"C"})
    assert not wanted(("A", "B"), {"C", "B"})
    assert wanted((), {"C"})
