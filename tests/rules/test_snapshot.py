"""Snapshots: what is done about one of a name, and what counts as the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runner.rules.snapshot import (
    PENDING_SECONDS,
    Expected,
    ExpectedHarness,
    Reported,
    differences,
    next_step,
    snapshot_name,
)

HARNESS = ExpectedHarness("lock", "patches", {"node_modules/a": "1.0.0"}, "files")
EXPECTED = Expected("content", "bridge", "inside", "x64", {"claude": HARNESS})
TOLD: dict[str, Any] = {
    "python": "3.12.1",
    "node": "v24.0.0",
    "uid": 1000,
    "writable": False,
    "record": {"content": "content"},
    "bridges": {"bridge": "bridge", "older": "older"},
    "inside": "inside",
    "harnesses": {
        "claude": {
            "manifest": {"lock_digest": "lock"},
            "packages": {"node_modules/a": "1.0.0", "node_modules/a/node_modules/b": "2"},
            "files": "files",
        },
        "another": {"manifest": None, "packages": {}, "files": ""},
    },
}


@pytest.mark.parametrize(
    ("state", "asked", "pending", "step"),
    [
        (None, False, 0.0, "build"),
        (None, True, 0.0, "wait"),
        ("active", False, 0.0, "use"),
        ("active", True, 0.0, "use"),
        ("inactive", False, 0.0, "activate"),
        ("inactive", True, 0.0, "activate"),
        ("error", False, 0.0, "discard"),
        ("build_failed", False, 0.0, "discard"),
        ("error", True, 0.0, "fail"),
        ("build_failed", True, 0.0, "fail"),
        ("pending", True, PENDING_SECONDS - 1, "wait"),
        ("pending", False, PENDING_SECONDS, "stuck"),
        ("pulling", True, 0.0, "wait"),
        ("building", True, 0.0, "wait"),
        ("snapshotting", True, 0.0, "wait"),
        ("removing", False, 0.0, "wait"),
        ("a word of tomorrow", False, 0.0, "wait"),
    ],
)
def test_the_next_step(state: str | None, asked: bool, pending: float, step: str) -> None:
    assert next_step(state, asked=asked, pending_seconds=pending) == step


def told(**changes: Any) -> Reported:
    return Reported({**TOLD, **changes}, "x64", {"claude": "patches"})


def claude(**changes: Any) -> Reported:
    return told(harnesses={"claude": {**TOLD["harnesses"]["claude"], **changes}})


def test_the_same_has_no_differences() -> None:
    assert differences(EXPECTED, told()) == []


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        (told(python="3.9.2"), "Python is 3.9.2"),
        (told(node=None), "no node"),
        (told(uid=0), "as root"),
        (told(writable=True), "change their own programs"),
        (replace(told(), cpu="arm64"), "arm64"),
        (told(bridges={"older": "older"}), "are not in it"),
        (told(bridges={"bridge": "other"}), "bridge have changed"),
        (told(inside=None), "demo agent"),
        (told(harnesses={}), "claude: it is not in it"),
        (claude(manifest=None), "claude: it is not in it"),
        (claude(manifest={"lock_digest": "older"}), "another version"),
        (claude(packages={}), "node_modules/a is missing, not 1.0.0"),
        (claude(packages={"node_modules/a": "2"}), "node_modules/a is 2, not 1.0.0"),
        (claude(files="other"), "files are others"),
        (replace(told(), patches={"claude": "other"}), "patches are others"),
        (replace(told(), patches={}), "patches are others"),
        (told(record=None), "another image"),
        (told(record={"content": "other"}), "another image"),
    ],
)
def test_each_difference_is_told_alone(reported: Reported, words: str) -> None:
    (found,) = differences(EXPECTED, reported)
    assert words in found


def test_without_an_installation_here_only_the_pins_are_compared() -> None:
    pins = replace(EXPECTED, harnesses={"claude": replace(HARNESS, files=None)})
    assert differences(pins, claude(files="other")) == []


def test_another_content_has_another_name() -> None:
    assert snapshot_name("a" * 32) == "acp-runner-" + "a" * 16
    assert snapshot_name("a" * 32) != snapshot_name("b" * 32)
