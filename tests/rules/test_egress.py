"""Where a cell behind the proxy may connect to (case J3)."""

from __future__ import annotations

import ipaddress

import pytest

from runner.rules.egress import AllowList, BadEntry, entry, public, target

LIST = [
    "api.openai.com",
    "*.packages.example",
    "git.example:9418",
    "10.1.0.0/16",
    "127.0.0.1:8000",
    "[::1]:8001",
    "fd00::7",
]
ALLOWED = AllowList.of(LIST)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("api.openai.com:443", True),
        ("API.OpenAI.com.:443", True),
        ("api.openai.com:80", True),
        ("api.openai.com:22", False),
        ("evil-api.openai.com:443", False),
        ("api.openai.com.evil.org:443", False),
        ("registry.packages.example:443", True),
        ("a.b.packages.example:443", True),
        ("packages.example:443", False),
        ("evilpackages.example:443", False),
        ("git.example:9418", True),
        ("git.example:443", False),
        ("localhost:8000", False),
        ("10.1.2.3:443", True),
        ("10.1.2.3:22", False),
        ("10.2.0.1:443", False),
        ("127.0.0.1:8000", True),
        ("127.0.0.1:8765", False),
        ("[::1]:8001", True),
        ("[::1]:8000", False),
        ("[::ffff:127.0.0.1]:8000", True),
        ("[::ffff:10.1.2.3]:443", True),
        ("[::ffff:169.254.169.254]:80", False),
        ("[64:ff9b::a9fe:a9fe]:80", False),
        ("[2002:7f00:1::]:80", False),
        ("[fd00::7]:443", True),
        ("[fd00::8]:443", False),
        ("169.254.169.254:80", False),
        ("8.8.8.8:443", False),
        ("0.0.0.0:8000", False),
    ],
)
def test_targets_case_j3(text: str, allowed: bool) -> None:
    assert (ALLOWED.refusal(target(text)) is None) is allowed


@pytest.mark.parametrize(
    "text",
    [
        "2130706433:80",
        "0x7f000001:80",
        "0x7f.1:80",
        "127.1:80",
        "0177.0.0.1:80",
        "127.0.0.0x1:80",
        "user@api.openai.com:443",
        "api.openai.com:443@evil.org:443",
        "api.openai.com",
        "api.openai.com:",
        "api.openai.com:0",
        "api.openai.com:65536",
        "api.openai.com:+443",
        "api openai.com:443",
        "api..openai.com:443",
        "ａpi.openai.com:443",
        "::1:80",
        "[::1",
        "[::1]x:80",
        "[fe80::1%eth0]:80",
        ":443",
        "%00:80",
        "a" * 64 + ".org:443",
    ],
)
def test_spellings_that_are_read_in_different_ways_are_no_targets_case_j3(text: str) -> None:
    with pytest.raises(BadEntry):
        target(text)


@pytest.mark.parametrize(
    ("asked", "resolved", "allowed"),
    [
        ("api.openai.com:443", "104.18.0.1", True),
        ("api.openai.com:443", "2606:4700::1", True),
        ("api.openai.com:443", "169.254.169.254", False),
        ("api.openai.com:443", "127.0.0.1", False),
        ("api.openai.com:443", "192.168.1.1", False),
        ("api.openai.com:443", "::ffff:127.0.0.1", False),
        ("api.openai.com:443", "64:ff9b::7f00:1", False),
        ("api.openai.com:443", "fe80::1", False),
        ("api.openai.com:443", "224.0.0.1", False),
        ("api.openai.com:443", "100.64.0.1", False),
        ("api.openai.com:443", "0.0.0.0", False),
        # A network that is listed by its addresses is what its names may lead to.
        ("api.openai.com:443", "10.1.2.3", True),
    ],
)
def test_a_name_opens_its_public_addresses_only_case_j3(asked: str, resolved: str, allowed: bool) -> None:
    assert ALLOWED.address_allowed(target(asked), ipaddress.ip_address(resolved)) is allowed


@pytest.mark.parametrize(
    "text", ["", "*.", "a.*", "**", "https://x.org", "x.org/path", "x.org:", "1.2.3", "10.0.0.0/99"]
)
def test_what_is_no_entry(text: str) -> None:
    with pytest.raises(BadEntry):
        entry(text)


def test_everything_public() -> None:
    everything = AllowList.of(["*"])
    assert everything.refusal(target("anything.example:443")) is None
    assert everything.refusal(target("anything.example:25")) is not None
    assert everything.refusal(target("8.8.8.8:443")) is not None
    assert not everything.address_allowed(target("x.example:443"), ipaddress.ip_address("10.0.0.1"))


def test_loopback_ports_are_those_that_are_named() -> None:
    assert AllowList.of(
        ["127.0.0.1:8000", "127.0.0.0/8:9000", "127.0.0.1", "localhost:1", "10.0.0.1:5"]
    ).loopback_ports() == (
        8000,
        9000,
    )


def test_a_host_header_has_the_port_where_it_is_not_the_usual_one() -> None:
    authorities = [target(text).authority for text in ("X.org:80", "x.org:81", "[::1]:80", "[::1]:81")]
    assert authorities == ["x.org", "x.org:81", "[::1]", "[::1]:81"]


def test_public_addresses() -> None:
    assert public(ipaddress.ip_address("1.1.1.1"))
    assert not public(ipaddress.ip_address("255.255.255.255"))
