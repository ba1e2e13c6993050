"""Which keys stay outside of a sandbox, and whom each may be shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from runner.rules.credentials import (
    HostPattern,
    KeyRoute,
    Proxied,
    Refusal,
    Upstream,
    cell_variables,
    host_pattern,
    plan,
    upstream_of,
)

OPENAI = KeyRoute("openai", {"OPENAI_API_KEY": "bearer"}, ("OPENAI_BASE_URL",), "https://api.openai.com/v1")
ANTHROPIC = KeyRoute(
    "anthropic",
    {"ANTHROPIC_API_KEY": "x-api-key", "ANTHROPIC_AUTH_TOKEN": "bearer"},
    ("ANTHROPIC_BASE_URL", "OLD_BASE_URL"),
    "https://api.anthropic.com",
)
KEY = {"OPENAI_API_KEY": "sk-of-the-test"}
OWN = "OPENAI_BASE_URL"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://api.openai.com/v1", Upstream("https", "api.openai.com", 443, "/v1")),
        ("https://API.openai.com/v1//", Upstream("https", "api.openai.com", 443, "/v1")),
        (" http://127.0.0.1:8000 ", Upstream("http", "127.0.0.1", 8000)),
        ("http://[::1]:8000/v1", Upstream("http", "[::1]", 8000, "/v1")),
        ("https://model_1.internal:8443/a/b", Upstream("https", "model_1.internal", 8443, "/a/b")),
        ("https://user:pw@api.openai.com/v1", None),
        ("https://api.openai.com@evil.example/v1", None),
        ("https://api.openai.com\\@evil.example", None),
        ("https://evil.example#api.openai.com", None),
        ("https://api.openai.com/v1?next=x", None),
        ("https://api.openai.com/v1/../../x", None),
        ("https://api.openai.com/%2e%2e/x", None),
        ("https://api.openai.com./v1", None),
        ("https://api.openai.com:0/v1", None),
        ("https://api.openai.com:99999/v1", None),
        ("https://аpi.openai.com/v1", None),
        ("https://a b/v1", None),
        ("https://a\n.example", None),
        ("file:///etc/passwd", None),
        ("api.openai.com", None),
        ("", None),
    ],
)
def test_a_base_url_is_read_strictly_or_not_at_all(text: str, expected: Upstream | None) -> None:
    """What is judged is what is asked: the URL is put together again from its parts (case J3)."""
    assert upstream_of(text) == expected


def test_a_url_below_a_base_url() -> None:
    base = Upstream("https", "api.openai.com", 443, "/v1")
    assert base.url("/responses", "a=1&b=%20") == "https://api.openai.com/v1/responses?a=1&b=%20"
    assert base.url("") == "https://api.openai.com/v1"
    assert Upstream("http", "h", 81).url("/x") == "http://h:81/x"


@pytest.mark.parametrize(
    ("pattern", "url", "allowed"),
    [
        ("gateway.example", "https://gateway.example/v1", True),
        ("gateway.example", "https://gateway.example:8443/v1", True),
        ("gateway.example", "http://gateway.example/v1", False),
        ("gateway.example", "https://gateway.example.evil/v1", False),
        ("gateway.example", "https://a.gateway.example/v1", False),
        ("GATEWAY.example:443", "https://gateway.example", True),
        ("gateway.example:443", "https://gateway.example:8443", False),
        ("http://gateway.lan:4000", "http://gateway.lan:4000", True),
        ("http://gateway.lan:4000", "https://gateway.lan:4000", False),
        ("*.example", "https://a.b.example", True),
        ("*.example", "https://example", False),
        ("*.example", "https://badexample", False),
        ("127.0.0.1", "http://127.0.0.1:8000", True),
        ("127.0.0.1", "http://2130706433:8000", False),
        ("localhost:8000", "http://localhost:8000/v1", True),
        ("[::1]", "http://[::1]:8000", True),
    ],
)
def test_a_host_of_the_operators_list(pattern: str, url: str, allowed: bool) -> None:
    upstream = upstream_of(url)
    assert upstream is not None
    assert host_pattern(pattern).allows(upstream) is allowed


@pytest.mark.parametrize("text", ["", "*", "a/b", "https://", "a:0", "a:70000", "u@a", "ftp://a", "a b", "*.*.a"])
def test_what_is_no_host_pattern(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        host_pattern(text)


def planned(routes: Any = OPENAI, **given: Any) -> list[Proxied] | Refusal:
    asked: dict[str, Any] = {"own": {}, "given": {}, "referred": (), "hosts": ()} | given
    return plan([routes], **asked)


DEFAULT = "https://api.openai.com/v1"
ELSEWHERE = {OWN: "https://elsewhere.example/v1"}


@pytest.mark.parametrize(
    ("case", "upstream"),
    [
        ({"given": KEY}, DEFAULT),
        ({"own": KEY}, DEFAULT),
        ({"given": KEY, "referred": ["OPENAI_API_KEY"]}, DEFAULT),
        ({"own": KEY | ELSEWHERE}, "https://elsewhere.example/v1"),
        ({"own": ELSEWHERE, "given": KEY}, "https://elsewhere.example/v1"),
        ({"own": ELSEWHERE, "given": KEY | {OWN: DEFAULT}}, DEFAULT),
        ({"own": KEY | ELSEWHERE, "given": {OWN: "https://elsewhere.example/v2"}}, "https://elsewhere.example/v2"),
        ({"own": KEY, "given": {OWN: "https://api.openai.com/other"}}, "https://api.openai.com/other"),
        ({"own": KEY, "given": {OWN: ""}}, DEFAULT),
        ({"own": KEY, "given": ELSEWHERE, "hosts": [HostPattern("elsewhere.example")]}, ELSEWHERE[OWN]),
        ({"given": KEY | ELSEWHERE, "hosts": [HostPattern("elsewhere.example")]}, ELSEWHERE[OWN]),
    ],
)
def test_where_a_key_goes(case: Mapping[str, Any], upstream: str) -> None:
    found = planned(**case)
    assert isinstance(found, list)
    assert [(one.variable, one.key, one.upstream.url("")) for one in found] == [
        ("OPENAI_API_KEY", "sk-of-the-test", upstream)
    ]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"given": ELSEWHERE},
        {"given": {"OPENAI_API_KEY": ""}},
        {"own": KEY, "given": {"OPENAI_API_KEY": ""}},
        {"given": KEY | ELSEWHERE},
        {"given": KEY | {OWN: "http://169.254.169.254/latest"}},
        {"given": KEY | {OWN: "nonsense"}},
        {"given": KEY | {OWN: "http://api.openai.com/v1"}},
    ],
)
def test_nothing_stays_outside_without_a_key_or_with_a_callers_own_choice(case: Mapping[str, Any]) -> None:
    """The runner itself asks no address that a caller names; the caller's key enters the cell with it."""
    assert planned(**case) == []


@pytest.mark.parametrize(
    "case",
    [
        {"own": KEY, "given": ELSEWHERE},
        {"given": KEY | ELSEWHERE, "referred": ["OPENAI_API_KEY"]},
        {"own": KEY, "given": {OWN: "nonsense"}},
        {"own": KEY, "given": {OWN: "http://api.openai.com/v1"}},
        {"own": KEY, "given": {OWN: "https://api.openai.com:8443/v1"}},
        {"own": KEY, "given": {OWN: "https://api.openai.com@evil.example/v1"}},
        {"own": KEY, "given": ELSEWHERE, "hosts": [HostPattern("another.example")]},
        {"own": KEY, "given": ELSEWHERE, "referred": [OWN]},
        {"own": KEY | {OWN: "nonsense"}},
    ],
)
def test_an_operators_key_goes_nowhere_else(case: Mapping[str, Any]) -> None:
    found = planned(**case)
    assert isinstance(found, Refusal)
    assert found.variable == OWN
    assert "OPENAI_API_KEY" in found.message
    assert "sk-of-the-test" not in found.message


def test_one_operators_key_among_a_callers_is_enough_to_refuse() -> None:
    given = {"ANTHROPIC_API_KEY": "callers", "OLD_BASE_URL": "https://elsewhere.example"}
    found = planned(ANTHROPIC, own={"ANTHROPIC_AUTH_TOKEN": "operators"}, given=given)
    assert isinstance(found, Refusal)
    assert found.variable == "OLD_BASE_URL"


def test_each_key_of_a_route_has_its_own_way_to_travel() -> None:
    found = planned(ANTHROPIC, given={"ANTHROPIC_API_KEY": "one", "ANTHROPIC_AUTH_TOKEN": " two\n"})
    assert isinstance(found, list)
    assert [(one.key, one.header) for one in found] == [("one", "x-api-key"), ("two", "bearer")]


def test_a_key_that_is_no_header_value_is_refused_without_being_told() -> None:
    found = planned(given={"OPENAI_API_KEY": "sk-of\r\nthe-test"})
    assert isinstance(found, Refusal)
    assert found.variable == "OPENAI_API_KEY"
    assert "sk-of" not in found.message


def test_a_key_is_not_shown_by_accident() -> None:
    found = planned(given=KEY)
    assert "sk-of-the-test" not in repr(found)


def test_what_a_cell_gets_instead() -> None:
    found = planned(ANTHROPIC, given={"ANTHROPIC_API_KEY": "one"})
    assert isinstance(found, list)
    assert cell_variables([(found[0], "token")], 4711, {}) == {
        "ANTHROPIC_API_KEY": "token",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:4711/anthropic",
        "OLD_BASE_URL": "http://127.0.0.1:4711/anthropic",
    }
    proxied = cell_variables([(found[0], "token")], 4711, {"http_proxy": "http://p:3128", "NO_PROXY": "a.example"})
    assert (proxied["NO_PROXY"], proxied["no_proxy"]) == ("a.example,127.0.0.1", "127.0.0.1")
    assert cell_variables([], 4711, {"http_proxy": "http://p:3128"}) == {}
