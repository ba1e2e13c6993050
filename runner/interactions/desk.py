"""From an agent's question to an answer or a durable interaction; a human's answer to the wire (DESIGN 3.8)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from runner.acp.inbox import Asked, PermissionAsked
from runner.clock import rfc3339
from runner.errors import RunnerError
from runner.rules import elicitation, interaction, permission
from runner.rules.interaction import Cause
from runner.store.port import InteractionRow
from runner.terms import InteractionStatus

PERMISSION: Final = "permission"
ELICITATION: Final = "elicitation"
ANSWER: Final = (*interaction.VERDICT, "content", "idempotency_key")
FORM: Final = ("message", "mode", "schema", "url")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a question can be answered with: the agent's options, or its form (None: a URL has none)."""

    kind: str
    options: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None


def offer(item: Asked) -> Offer:
    """Of a question on the wire."""
    if isinstance(item, PermissionAsked):
        return Offer(PERMISSION, tuple(item.params["options"]))
    return Offer(ELICITATION, schema=item.params.get("requestedSchema"))


def stored_offer(row: InteractionRow) -> Offer:
    """Of a question whose agent is gone; one that asks again may offer something else."""
    shown = row.request.get("options", ())
    options = tuple({"optionId": o.get("option_id"), "name": o.get("name"), "kind": o.get("kind")} for o in shown)
    return Offer(row.kind, options, row.request.get("schema"))


def decide(policy: permission.Policy, item: Asked) -> permission.Reply | None:
    """The policy's answer to a question, None when a human must be asked.

    An ``allow`` that the agent offers no single use for is asked: nothing is granted for good on its own. A policy
    fills in no form: an elicitation is declined where everything is denied, else asked.
    """
    if not isinstance(item, PermissionAsked):
        return permission.Reply(elicitation.DECLINE) if policy.default == "deny" else None
    options = item.params["options"]
    decision = permission.decide(policy, item.params.get("toolCall") or {})
    if decision == "deny":
        return permission.deny(options)
    if decision == "allow":
        reply = permission.allow(options)
        return reply if reply.result is not None else None
    return None


def cancel(kind: str) -> permission.Reply:
    """What a question is answered with when its turn is stopped."""
    return permission.Reply(permission.CANCELLED if kind == PERMISSION else elicitation.CANCEL)


def refuse(of: Offer) -> permission.Reply:
    """What a question is answered with when nobody answered in time: never ``cancelled`` (case F7)."""
    return permission.deny(of.options) if of.kind == PERMISSION else permission.Reply(elicitation.DECLINE)


def reply(of: Offer, answer: Mapping[str, Any]) -> tuple[permission.Reply, bool]:
    """A human's answer as the agent reads it, and whether it is a denial.

    Raises:
        RunnerError: ``invalid_request`` when this question cannot be answered so.
    """
    if of.kind == ELICITATION:
        return _form_reply(of, answer)
    if answer.get("action") is not None:
        raise RunnerError("invalid_request", "action: a permission takes option_id or decision.", field="action")
    if answer.get("decision") == "deny":
        return permission.deny(of.options), True
    if answer.get("decision") == "allow":
        allowed = permission.allow(of.options)
        if allowed.result is None:
            raise RunnerError("invalid_request", f"{allowed.message} Choose an option_id.", field="decision")
        return allowed, False
    option_id = str(answer.get("option_id"))
    chosen = permission.choose(of.options, option_id)
    if chosen is None:
        offered = ", ".join(str(option.get("optionId")) for option in of.options) or "nothing; only deny is possible"
        raise RunnerError("invalid_request", f"option_id: the agent offered {offered}.", field="option_id")
    return chosen, permission.denies(of.options, option_id)


def stored_reply(row: InteractionRow, of: Offer) -> tuple[permission.Reply, bool]:
    """The answer of an earlier agent's question, given to the same question of a new one.

    Raises:
        RunnerError: ``invalid_request``: the new agent offers no such choice, or means something else by its id.
    """
    answer = row.answer or {}
    option_id = answer.get("option_id")
    if option_id is not None and _kinds(stored_offer(row), option_id) != _kinds(of, option_id):
        raise RunnerError("invalid_request", f"option_id: {option_id} is another option now.", field="option_id")
    return reply(of, answer)


def _kinds(of: Offer, option_id: str) -> list[Any]:
    return [option.get("kind") for option in of.options if option.get("optionId") == option_id]


def _form_reply(of: Offer, answer: Mapping[str, Any]) -> tuple[permission.Reply, bool]:
    action, content = answer.get("action"), answer.get("content")
    if action is None:
        raise RunnerError("invalid_request", "action: an elicitation takes accept, decline or cancel.", field="action")
    if action != "accept":
        return permission.Reply({"action": action}), action == "decline"
    if of.schema is None:
        if content:
            raise RunnerError("invalid_request", "content: a URL takes none.", field="content")
        return permission.Reply({"action": "accept"}), False
    problem = elicitation.content_problem(of.schema, content or {})
    if problem is not None:
        raise RunnerError("invalid_request", f"{problem}.", field=problem.partition(":")[0])
    return permission.Reply({"action": "accept", "content": dict(content or {})}), False


def denies(of: Offer, given: permission.Reply) -> bool:
    """Whether a policy's answer is a denial."""
    if of.kind == ELICITATION or given.result is None:
        return True
    return permission.denies(of.options, given.result["outcome"]["optionId"])


def binding(
    item: Asked, tool_call: Mapping[str, Any] | None, redact: Callable[[Any], Any], minted: Collection[str] = ()
) -> str:
    """The exact question that an answer covers (DESIGN 3.8), of what a human is shown of it.

    ``minted``: see ``rules.interaction.binding``.
    """
    if isinstance(item, PermissionAsked):
        return interaction.binding(redact(dict(tool_call or {})), minted)
    return interaction.form_binding(redact(_form(item.params)))


def question(
    item: Asked,
    tool_call: Mapping[str, Any] | None,
    *,
    project: str,
    session_id: str,
    turn_id: str,
    interaction_id: str,
    generation: int,
    redact: Callable[[Any], Any],
    now_ms: int,
    minted: Collection[str] = (),
) -> InteractionRow:
    """A new pending interaction.

    ``tool_call`` is the call as the agent last described it, the permission request included (case F5); ``redact``
    masks secrets; options are shown as ``{option_id, name, kind}``; ``generation`` is the agent's.
    """
    request: dict[str, Any] = {
        "tool_call": redact(dict(tool_call)) if tool_call is not None else None,
        "options": [],
        "generation": generation,
        "binding": binding(item, tool_call, redact, minted),
    }
    if isinstance(item, PermissionAsked):
        request["options"] = [
            {"option_id": o.get("optionId"), "name": o.get("name"), "kind": o.get("kind")}
            for o in redact(list(item.params["options"]))
        ]
    else:
        request |= redact(_form(item.params)) | {"elicitation_id": item.params.get("elicitationId")}
    kind = PERMISSION if isinstance(item, PermissionAsked) else ELICITATION
    return InteractionRow(
        project,
        session_id,
        interaction_id,
        turn_id,
        InteractionStatus.PENDING,
        kind,
        now_ms,
        now_ms + interaction.EXPIRY_MS,
        request,
    )


def _form(params: Mapping[str, Any]) -> dict[str, Any]:
    form = {"message": params.get("message"), "mode": params.get("mode")}
    if params.get("mode") == "url":
        return form | {"url": params.get("url")}
    return form | {"schema": params.get("requestedSchema")}


def view(row: InteractionRow) -> dict[str, Any]:
    """The interaction of DESIGN 4.1; ``last_error`` is why an answer came back, ``reason`` why it is closed."""
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
    if row.kind == ELICITATION:
        shown |= {name: row.request[name] for name in FORM if row.request.get(name) is not None}
    known = row.answer or {}
    answer = {name: known[name] for name in ANSWER if known.get(name) is not None}
    if answer:
        shown["answer"] = answer
    if known.get("reason") is not None:
        shown["last_error" if row.status == InteractionStatus.PENDING else "reason"] = known["reason"]
    return shown


def answered(row: InteractionRow, given: Mapping[str, Any], now_ms: int) -> InteractionRow:
    """The row with a human's answer, claimed now."""
    return replace(row, status=InteractionStatus.ANSWERED, answer={**given, "claimed_at": now_ms})


def consumed(row: InteractionRow) -> InteractionRow:
    """The row once its answer was handed to the agent."""
    return replace(row, status=InteractionStatus.CONSUMED)


def unclaimed(row: InteractionRow, why: str) -> InteractionRow:
    """The row as open as before, with the reason why its answer came to nothing (case F2)."""
    return replace(row, status=InteractionStatus.PENDING, answer={"reason": why})


def close(row: InteractionRow, cause: Cause) -> InteractionRow | None:
    """The row with the last status that ``cause`` gives it; None when it stays as it is."""
    last = interaction.last_status(InteractionStatus(row.status), cause)
    if last is None:
        return None
    return replace(row, status=last, answer={**(row.answer or {}), "reason": interaction.REASONS[cause]})


def close_all(rows: Iterable[InteractionRow], cause: Cause) -> list[InteractionRow]:
    """Those that ``cause`` closes, closed."""
    return [closed for row in rows if (closed := close(row, cause)) is not None]


def closing(row: InteractionRow) -> dict[str, Any]:
    """The data of ``interaction_closed``."""
    data: dict[str, Any] = {"interaction_id": row.interaction_id, "status": row.status}
    known = row.answer or {}
    if any(known.get(name) for name in interaction.VERDICT):
        data["decision"] = interaction.verdict(known)
    if row.status != InteractionStatus.CONSUMED and known.get("reason") is not None:
        data["reason"] = known["reason"]
    return data
