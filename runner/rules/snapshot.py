"""Snapshots of remote sandboxes: what is done about one of a name, and whether what is in it is what is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Step = Literal["build", "use", "activate", "wait", "discard", "fail", "stuck"]

PENDING_SECONDS: Final = 300.0
"""A build that has not begun after this long never does; seen for hours at the service."""
OLDEST_PYTHON: Final = (3, 10)

_BROKEN: Final = frozenset({"error", "build_failed"})


def snapshot_name(content: str) -> str:
    """The name of a snapshot of this content, so that the same is never built twice and another never taken for it."""
    return f"acp-runner-{content[:16]}"


def next_step(state: str | None, *, asked: bool, pending_seconds: float = 0.0) -> Step:
    """What brings a snapshot to where sandboxes can be made of it.

    Args:
        state: the service's word; None: there is none of this name. An unknown one is waited for.
        asked: its build was asked for by this call, so that a broken one is this build's end and not an earlier one's.
        pending_seconds: how long it has been ``pending`` without a break.
    """
    if state is None:
        return "wait" if asked else "build"
    if state == "active":
        return "use"
    if state == "inactive":
        return "activate"
    if state in _BROKEN:
        return "fail" if asked else "discard"
    if state == "pending" and pending_seconds >= PENDING_SECONDS:
        return "stuck"
    return "wait"


@dataclass(frozen=True, slots=True)
class ExpectedHarness:
    """One harness as this installation has it.

    Attributes:
        lock_digest: names its packages.
        patches: digest of its patches (``rules.patches``).
        packages: path to version, of those that belong on the sandbox's machine.
        files: digest of the installed files; None where there are none to compare with.
    """

    lock_digest: str
    patches: str
    packages: Mapping[str, str]
    files: str | None


@dataclass(frozen=True, slots=True)
class Expected:
    """What this installation would put into a snapshot.

    Attributes:
        content: digest of the image with all that it carries.
        bridge: digest of the bridge and the init.
        inside: digest of the programs for the inside, the demo agent among them.
        cpu: the processor that the agents' commands are made for, in npm's words.
    """

    content: str
    bridge: str
    inside: str
    cpu: str
    harnesses: Mapping[str, ExpectedHarness] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reported:
    """What ``sandboxes/inside/report.py`` found, read into words of this side.

    Attributes:
        told: its answer.
        cpu: the sandbox's processor in npm's words.
        patches: harness to digest of the patches that its manifest names.
    """

    told: Mapping[str, Any]
    cpu: str
    patches: Mapping[str, str]


def differences(expected: Expected, reported: Reported) -> list[str]:
    """One sentence for each thing that is not as it should be; empty when the snapshot matches."""
    told = reported.told
    found = list(_surroundings(told))
    if reported.cpu != expected.cpu:
        found.append(f"its processor is {reported.cpu}, but the agents' commands here are for {expected.cpu}")
    if expected.bridge not in told["bridges"]:
        found.append("the bridge and the init of this version are not in it")
    elif told["bridges"][expected.bridge] != expected.bridge:
        found.append("the files of the bridge have changed")
    if told["inside"] != expected.inside:
        found.append("the demo agent and the programs beside it are not those of this version")
    for name, harness in expected.harnesses.items():
        there = told["harnesses"].get(name)
        found += [f"{name}: {what}" for what in _harness(harness, there, reported.patches.get(name))]
    content = (told["record"] or {}).get("content")
    if content != expected.content and not found:
        found.append("it was built from another image than this version's")
    return found


def _surroundings(told: Mapping[str, Any]) -> list[str]:
    found = []
    version = tuple(int(part) for part in str(told["python"]).split(".")[:2] if part.isdecimal())
    if version < OLDEST_PYTHON:
        found.append(f"its Python is {told['python']}; the bridge needs {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    if not told["node"]:
        found.append("it has no node")
    if told["uid"] == 0:
        found.append("agents would run as root")
    if told["writable"]:
        found.append("agents could change their own programs")
    return found


def _harness(expected: ExpectedHarness, told: Mapping[str, Any] | None, patches: str | None) -> list[str]:
    manifest = (told or {}).get("manifest")
    if told is None or not manifest:
        return ["it is not in it"]
    if manifest.get("lock_digest") != expected.lock_digest:
        return ["its packages are of another version"]
    found = []
    if patches != expected.patches:
        found.append("its patches are others than here")
    for path, version in expected.packages.items():
        there = told["packages"].get(path)
        if there != version:
            found.append(f"{path} is {there or 'missing'}, not {version}")
    if expected.files is not None and told["files"] != expected.files:
        found.append("its files are others than those installed here")
    return found
