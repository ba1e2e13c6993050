"""Heads of requests to the proxy of a cell, and of the answers."""

from __future__ import annotations

import json

import pytest

from runner.rules.forwarding import BadHead, answer, refusal, request


def test_a_tunnel() -> None:
    asked = request(b"CONNECT api.example:443 HTTP/1.1\r\nHost: other.example\r\n\r\n")
    assert (asked.target.host, asked.target.port, asked.head) == ("api.example", 443, None)


@pytest.mark.parametrize(
    ("where", "line", "host"),
    [
        ("http://a.example/x?y=1", "/x?y=1", "a.example"),
        ("http://a.example", "/", "a.example"),
        ("http://a.example?q", "/?q", "a.example"),
        ("http://a.example/x#part", "/x", "a.example"),
        ("HTTP://A.example:8080/x", "/x", "a.example:8080"),
        ("http://[::1]:8080/x", "/x", "[::1]:8080"),
    ],
)
def test_a_plain_request_is_sent_to_its_target_under_its_name(where: str, line: str, host: str) -> None:
    ours = "Proxy-Authorization: x\r\nConnection: keep-alive"
    sent = f"GET {where} HTTP/1.1\r\nHost: elsewhere\r\nAccept: */*\r\n{ours}\r\n\r\n"
    asked = request(sent.encode())
    assert asked.head == f"GET {line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nAccept: */*\r\n\r\n".encode()


def test_a_switch_of_protocol_passes() -> None:
    asked = request(b"GET http://a.example/ HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
    assert asked.head is not None
    assert b"Connection: Upgrade\r\nUpgrade: websocket\r\n" in asked.head
    assert answer(b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n") == (
        b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        True,
    )


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET https://a.example/ HTTP/1.1\r\n\r\n",
        b"GET ftp://a.example/ HTTP/1.1\r\n\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
        b"GET http://user:pass@a.example/ HTTP/1.1\r\n\r\n",
        b"GET http://a.example/ HTTP/2.0\r\n\r\n",
        b"GET  http://a.example/ HTTP/1.1\r\n\r\n",
        b"G(T http://a.example/ HTTP/1.1\r\n\r\n",
        b"CONNECT a.example HTTP/1.1\r\n\r\n",
        b"CONNECT \xff.example:443 HTTP/1.1\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nA: 1\r\n folded\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nA : 1\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nA: 1\nB: 2\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\nHost: b\r\n\r\n",
    ],
)
def test_what_is_not_passed_on(head: bytes) -> None:
    with pytest.raises(BadHead):
        request(head)


def test_an_answer_ends_its_connection_and_an_interim_one_does_not() -> None:
    assert answer(b"HTTP/1.1 100 Continue\r\n\r\n") == (b"HTTP/1.1 100 Continue\r\n\r\n", False)
    head, last = answer(b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\nX: 1\r\n\r\n")
    assert (head, last) == (b"HTTP/1.1 200 OK\r\nX: 1\r\nConnection: close\r\n\r\n", True)
    for bad in (b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 20 OK\r\n\r\n"):
        with pytest.raises(BadHead):
            answer(bad)


def test_a_refusal_says_who_refused_and_why() -> None:
    head, _, body = refusal(403, "evil.example:443 is not in [local] allow_hosts").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert "allow_hosts" in json.loads(body)["error"]["message"]
