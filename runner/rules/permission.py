"""Permission requests: the policy's decision, and the option that says it (DESIGN 3.8, 4.1 ``permissions``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

Decision = Literal["allow", "deny", "ask"]
READ_KINDS: Final = frozenset({"read", "search", "fetch", "think"})
DENY_ERROR: Final = -32000
CANCELLED: Final[dict[str, Any]] = {"outcome": {"outcome": "cancelled"}}


@dataclass(frozen=True, slots=True)
class Rule:
    """``tool``: a tool kind or ``*``; ``match``: a glob on the call's subject (its command, path or title)."""

    tool: str
    decision: Decision
    match: str = "*"


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules in order, the first that matches decides; else ``default``."""

    default: Literal["ask", "allow", "deny", "allow_reads"] = "ask"
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What to answer: a result, or (``result`` None) a JSON-RPC error −32000 with ``message``."""

    result: dict[str, Any] | None
    message: str = ""


def subjects(tool_call: Mapping[str, Any]) -> list[str]:
    """The strings of a tool call that a rule's glob is matched against: command, every path, URL, query, else title."""
    found: list[str] = []
    raw = tool_call.get("rawInput")
    for name, value in raw.items() if isinstance(raw, Mapping) else ():
        if name in ("command", "cmd") and isinstance(value, list):
            found += [" ".join(map(str, value))] if value else []
        elif name in ("command", "cmd", "url", "query", "files") or str(name).lower().endswith(("path", "paths")):
            found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
    for name in ("locations", "content"):
        items = tool_call.get(name)
        for item in items if isinstance(items, list) else ():
            if isinstance(item, Mapping) and isinstance(item.get("path"), str):
                found.append(item["path"])
    title = tool_call.get("title")
    if not found and isinstance(title, str):
        found.append(title)
    return found


def decide(policy: Policy, tool_call: Mapping[str, Any]) -> Decision:
    """The policy's decision for one request.

    An ``allow`` rule must match every subject of the call, so that a second path cannot ride along; ``deny`` and
    ``ask`` rules match when any subject does.
    """
    kind = tool_call.get("kind") if isinstance(tool_call.get("kind"), str) else "other"
    known = subjects(tool_call)
    for rule in policy.rules:
        if rule.tool not in ("*", kind):
            continue
        hits = [fnmatchcase(subject, rule.match) for subject in known]
        if rule.match == "*" or (hits and (all(hits) if rule.decision == "allow" else any(hits))):
            return rule.decision
    if policy.default == "allow_reads":
        return "allow" if kind in READ_KINDS else "ask"
    return policy.default


def allow(options: Sequence[Mapping[str, Any]]) -> Reply:
    """Allow once; ``allow_always`` is never chosen for a client that did not choose it."""
    return _by_kind(options, "allow_once") or Reply(None, "The agent offered no way to allow this once.")


def deny(options: Sequence[Mapping[str, Any]]) -> Reply:
    """Deny by a reject option, else by an error; never by ``cancelled`` and never by an allow option (case F7)."""
    allowing = [option.get("optionId") for option in options if str(option.get("kind")).startswith("allow")]
    safe = [option for option in options if option.get("optionId") not in allowing]
    return (
        _by_kind(safe, "reject_once")
        or _by_kind(safe, "reject_always")
        or Reply(None, "Permission denied; the agent offered no option to reject.")
    )


def choose(options: Sequence[Mapping[str, Any]], option_id: str) -> Reply | None:
    """Choose one option by its id; None when the agent did not offer it."""
    if any(option.get("optionId") == option_id for option in options):
        return Reply({"outcome": {"outcome": "selected", "optionId": option_id}})
    return None


def denies(options: Sequence[Mapping[str, Any]], option_id: str) -> bool:
    """Whether the chosen option is a refusal."""
    kinds = [option.get("kind") for option in options if option.get("optionId") == option_id]
    return bool(kinds) and all(str(kind).startswith("reject") for kind in kinds)


def _by_kind(options: Sequence[Mapping[str, Any]], kind: str) -> Reply | None:
    for option in options:
        if option.get("kind") == kind and isinstance(option.get("optionId"), str):
            return Reply({"outcome": {"outcome": "selected", "optionId": option["optionId"]}})
    return None
