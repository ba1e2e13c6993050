"""``[local] allow_hosts``: read when the settings are."""

from __future__ import annotations

import json

import pytest

from runner.config import load_settings
from runner.errors import RunnerError


def settings(network: str, *hosts: str) -> list[str]:
    own = {"ACP_RUNNER_LOCAL__NETWORK": network, "ACP_RUNNER_LOCAL__ALLOW_HOSTS": json.dumps(hosts)}
    return load_settings(None, own).local.allow_hosts


def test_hosts_of_the_proxy() -> None:
    assert settings("proxy", "*.packages.example", "10.0.0.0/8") == ["*.packages.example", "10.0.0.0/8"]
    assert settings("proxy") == settings("shared") == []


@pytest.mark.parametrize(
    ("network", "hosts", "why"),
    [
        ("shared", ("a.example",), "allow_hosts needs network = proxy"),
        ("none", ("a.example",), "allow_hosts needs network = proxy"),
        ("proxy", ("https://a.example",), "is no"),
        ("proxy", ("a.example", "127.1"), "a spelling that is not understood"),
        ("proxy", tuple(f"127.0.0.1:{port}" for port in range(1, 100)), "at most 64 ports"),
    ],
)
def test_what_would_not_do_what_it_says_is_refused(network: str, hosts: tuple[str, ...], why: str) -> None:
    with pytest.raises(RunnerError, match=why) as refused:
        settings(network, *hosts)
    assert str(refused.value.extra.get("field", "")).startswith("local")
