"""From a permission request to an answer or a durable question (DESIGN 3.8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runner.clock import rfc3339
from runner.rules import permission
from runner.rules.interaction import EXPIRY_MS
from runner.store.port import InteractionRow
from runner.terms import InteractionStatus


def decide(policy: permission.Policy, params: dict[str, Any]) -> permission.Reply | None:
    """The policy's answer to ``session/request_permission``, None when a human must be asked.

    An ``allow`` that the agent offers no single use for is asked: nothing is granted for good on its own.
    """
    options = params["options"]
    decision = permission.decide(policy, params.get("toolCall") or {})
    if decision == "deny":
        return permission.deny(options)
    if decision == "allow":
        reply = permission.allow(options)
        return reply if reply.result is not None else None
    return None


def question(
    *,
    project: str,
    session_id: str,
    turn_id: str,
    interaction_id: str,
    generation: int,
    tool_call: dict[str, Any],
    options: list[dict[str, Any]],
    now_ms: int,
) -> InteractionRow:
    """A new pending interaction; ``options`` are shown as ``{option_id, name, kind}``."""
    shown = [
        {"option_id": option.get("optionId"), "name": option.get("name"), "kind": option.get("kind")}
        for option in options
    ]
    return InteractionRow(
        project,
        session_id,
        interaction_id,
        turn_id,
        InteractionStatus.PENDING,
        "permission",
        now_ms,
        now_ms + EXPIRY_MS,
        {"tool_call": tool_call, "options": shown, "generation": generation},
    )


def view(row: InteractionRow) -> dict[str, Any]:
    """The interaction of DESIGN 4.1."""
    shown: dict[str, Any] = {
        "interaction_id": row.interaction_id,
        "session_id": row.session_id,
        "turn_id": row.turn_id,
        "status": row.status,
        "kind": row.kind,
        "tool_call": row.request.get("tool_call"),
        "options": row.request.get("options", []),
        "created_at": rfc3339(row.created_at),
        "expires_at": rfc3339(row.expires_at),
    }
    if row.answer is not None:
        shown["answer"] = row.answer
    return shown


def closed(row: InteractionRow, status: InteractionStatus, answer: dict[str, Any] | None = None) -> InteractionRow:
    """The row with its last status."""
    return replace(row, status=status, answer=answer if answer is not None else row.answer)


def closing(row: InteractionRow) -> dict[str, Any]:
    """The data of ``interaction_closed``."""
    data: dict[str, Any] = {"interaction_id": row.interaction_id, "status": row.status}
    if row.answer is not None:
        data["decision"] = row.answer.get("decision") or row.answer.get("option_id")
    return data
