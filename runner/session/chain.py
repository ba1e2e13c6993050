"""What a paused chain leaves when nobody can answer its open prompt any more (DESIGN 3.2, Paused)."""

from __future__ import annotations

from runner.errors import RunnerError
from runner.interactions import desk
from runner.session.prompts import Prompt
from runner.session.session import Paused, Session
from runner.store.port import InteractionRow
from runner.terms import EventType, InteractionStatus, PromptState
from runner.turn.journal import Journal


def close_questions(journal: Journal, rows: list[InteractionRow], status: InteractionStatus) -> list[InteractionRow]:
    """Show that these questions are closed; the rows as they are from now on."""
    closed = [desk.closed(row, status) for row in rows]
    for row in closed:
        journal.event(EventType.INTERACTION_CLOSED, desk.closing(row))
    return closed


def close_lost(journal: Journal, paused: Paused) -> list[InteractionRow]:
    """The agent is gone: its questions expire, and its open tool calls have failed; the closed rows."""
    closed = close_questions(journal, list(paused.questions.values()), InteractionStatus.EXPIRED)
    for tool_call_id, tool in paused.live.tools.items():
        if not tool.ended:
            tool.merge({"status": "failed"})
            shown = {"tool_call_id": tool_call_id, "status": "failed"}
            journal.event(EventType.TOOL_CALL_UPDATE, shown, as_record=(EventType.TOOL_CALL, tool.data))
    paused.live.tools.clear()
    return closed


def end_prompt(session: Session, journal: Journal, prompt: Prompt, state: PromptState) -> None:
    """A prompt ended outside of a turn of its own; durable with the next write of its session."""
    prompt.state = state
    journal.event(EventType.PROMPT_ENDED, {"prompt_id": prompt.prompt_id, "state": state.value})
    session.outbox.prompt(session.prompt_row(prompt, prompt.result.result() if prompt.result.done() else None))


def seat_error(verdict: str) -> RunnerError:
    """Why the chain failed, by the verdict of its seat."""
    code = "harness_exited" if verdict == "agent_exited" else "sandbox_lost"
    return RunnerError(code, f"The sandbox that waited for an answer is gone ({verdict}).")
