"""What of a model request and its answer is passed on."""

from __future__ import annotations

import pytest

from runner.rules.passing_on import asked, is_own_host, place_of, presented, problem, told


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("/openai/responses", ("openai", "/responses", "")),
        ("/anthropic/v1/messages?beta=true&a=%20", ("anthropic", "/v1/messages", "beta=true&a=%20")),
        ("/openai", ("openai", "", "")),
        ("/openai/", ("openai", "/", "")),
        ("/openai/models/a%20b:c", ("openai", "/models/a%20b:c", "")),
        ("/", None),
        ("//openai/x", None),
        ("/openai//x", None),
        ("/openai/../other", None),
        ("/openai/%2e%2E/other", None),
        ("/openai/.%2e/other", None),
        ("/openai/./x", None),
        ("/openai/..;/other", None),
        ("/openai/%2e.%3Bx=1/other", None),
        ("/openai/a;x=1/b", ("openai", "/a;x=1/b", "")),
        ("/openai/a%2f..%2fb", None),
        ("/openai/a%5Cb", None),
        ("/openai/a\\b", None),
        ("/openai/a%00b", None),
        ("/openai/a#b", None),
        ("/openai/a b", None),
        ("/openai/ä", None),
        ("http://evil.example/openai/x", None),
        ("*", None),
        ("evil.example:443", None),
    ],
)
def test_a_target_is_below_a_route_or_nowhere(target: str, place: tuple[str, str, str] | None) -> None:
    assert place_of(target) == place


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1:4711", True), ("localhost", True), ("[::1]:1", True), ("evil.example", False), ("", False)],
)
def test_the_host_that_was_meant(host: str, own: bool) -> None:
    assert is_own_host(host) is own


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ([("X-Api-Key", " t ")], {"x-api-key": "t"}),
        ([("authorization", "bearer  t")], {"bearer": "t"}),
        ([("Authorization", "Bearer a"), ("x-api-key", "b")], {"bearer": "a", "x-api-key": "b"}),
        ([("Authorization", "Bearer a"), ("Authorization", "Bearer b")], {"bearer": "a"}),
        ([("Authorization", "Basic dTpw")], {}),
        ([("Cookie", "token=t")], {}),
        ([], {}),
    ],
)
def test_what_a_request_shows(headers: list[tuple[str, str]], shown: dict[str, str]) -> None:
    assert presented(headers) == shown


def test_the_key_takes_the_place_of_the_token_and_nothing_of_the_connection_goes_on() -> None:
    given = [
        ("Host", "127.0.0.1:1"),
        ("Authorization", "Bearer token"),
        ("X-Api-Key", "token"),
        ("X-Copy", "my token"),
        ("X-HTTP-Method-Override", "DELETE"),
        ("X-Original-URL", "/admin"),
        ("Connection", "close, X-Hop"),
        ("X-Hop", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "3"),
        ("Accept-Encoding", "gzip, br"),
        ("Cookie", "a=b"),
        ("X-Forwarded-For", "10.0.0.1"),
        ("Proxy-Authorization", "Basic x"),
        ("anthropic-version", "2023-06-01"),
        ("Content-Type", "application/json"),
    ]
    assert asked(given, ["token"], {"x-api-key": "real"}) == [
        ("anthropic-version", "2023-06-01"),
        ("Content-Type", "application/json"),
        ("Accept-Encoding", "identity"),
        ("x-api-key", "real"),
    ]
    assert asked([], ["token"], {"bearer": "real"})[-1] == ("Authorization", "Bearer real")


def test_of_the_answer_goes_back_what_belongs_to_it() -> None:
    given = [
        ("Content-Type", "text/event-stream"),
        ("Set-Cookie", "a=b"),
        ("Content-Length", "3"),
        ("Content-Encoding", "gzip"),
        ("Connection", "keep-alive"),
        ("Location", "https://evil.example"),
        ("Retry-After", "3"),
        ("request-id", "r"),
    ]
    assert told(given) == [("Content-Type", "text/event-stream"), ("Retry-After", "3"), ("request-id", "r")]


def test_an_error_reads_as_one_of_either_family() -> None:
    assert problem("api_error", "code", "text") == {
        "type": "error",
        "error": {"type": "api_error", "code": "code", "message": "text"},
    }
