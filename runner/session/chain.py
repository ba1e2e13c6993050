"""Paused chains: what is sent to a new agent, what is closed, and how one is read from the store (DESIGN 3.2, 3.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from runner.errors import RunnerError
from runner.interactions import desk
from runner.rules.interaction import Cause
from runner.rules.pool import Key
from runner.rules.unfinished import READ, unfinished
from runner.session.history import pages
from runner.session.prompts import Prompt
from runner.session.reconcile import WAITING
from runner.session.session import Paused, Session
from runner.store.port import InteractionRow, PromptRow, Store, TurnRow
from runner.terms import EventType, InteractionStatus, PromptState
from runner.turn.journal import Journal

CONTINUE: Final = (
    "The runner had to restart you while a tool call of yours, or a question, waited for the user. It was not carried "
    "out. Go on with the task from there. If you still need it, ask for exactly the same again: the user's answer "
    "is given then. Do not repeat what was finished before."
)
"""The one block that a cold chain goes on with (DESIGN 3.8); it tells no verdict."""
OPEN: Final = (InteractionStatus.PENDING, InteractionStatus.ANSWERED)


def continuation(prompt: Prompt | None, preface: str | None, *, loaded: bool) -> list[dict[str, Any]]:
    """What a new agent is sent: ``CONTINUE`` where it remembers, else what happened, the prompt again, ``CONTINUE``."""
    before = [] if loaded or prompt is None else prompt.content
    return [*text_block(preface), *before, *text_block(CONTINUE)]


def text_block(text: str | None) -> list[dict[str, Any]]:
    """A text as content blocks; none when there is no text."""
    return [{"type": "text", "text": text}] if text else []


def close_questions(journal: Journal, rows: Iterable[InteractionRow], cause: Cause) -> list[InteractionRow]:
    """Show that these questions are closed; the rows as they are from now on."""
    closed = desk.close_all(rows, cause)
    for row in closed:
        journal.event(EventType.INTERACTION_CLOSED, desk.closing(row))
    return closed


def give_back(journal: Journal, rows: Iterable[InteractionRow], why: str) -> list[InteractionRow]:
    """Show that these answers came to nothing; the rows, open again, as they are from now on (case F2)."""
    back = [desk.unclaimed(row, why) for row in rows]
    for row in back:
        data = {"kind": "answer_returned", "interaction_id": row.interaction_id, "message": why}
        journal.event(EventType.NOTICE, data)
    return back


def close_left(journal: Journal, rows: Iterable[InteractionRow], cause: Cause, now_ms: int) -> list[InteractionRow]:
    """The same at an ending; what nobody answered in time has expired, whatever ends the chain."""
    left = list(rows)
    due = [row for row in left if row.status == InteractionStatus.PENDING and now_ms >= row.expires_at]
    rest = [row for row in left if row not in due]
    return close_questions(journal, due, Cause.EXPIRED) + close_questions(journal, rest, cause)


def close_tools(journal: Journal, paused: Paused) -> None:
    """The agent is gone: the tool calls that it left open have failed."""
    left = dict(paused.tools)
    if paused.live is not None:
        left |= {name: tool.data for name, tool in paused.live.tools.items() if not tool.ended}
        paused.live.tools.clear()
    paused.tools.clear()
    for tool_call_id, tool in left.items():
        shown = {"tool_call_id": tool_call_id, "status": "failed"}
        journal.event(EventType.TOOL_CALL_UPDATE, shown, as_record=(EventType.TOOL_CALL, {**tool, "status": "failed"}))


def end_prompt(session: Session, journal: Journal, prompt: Prompt, state: PromptState) -> None:
    """A prompt ended outside of a turn of its own; durable with the next write of its session."""
    prompt.state, prompt.told = state, True
    journal.event(EventType.PROMPT_ENDED, {"prompt_id": prompt.prompt_id, "state": state.value})
    session.outbox.prompt(session.prompt_row(prompt, prompt.result.result() if prompt.result.done() else None))


def seat_error(verdict: str) -> RunnerError:
    """Why the chain failed, by the verdict of its seat."""
    code = "harness_exited" if verdict == "agent_exited" else "sandbox_lost"
    return RunnerError(code, f"The sandbox that waited for an answer is gone ({verdict}).")


def cold(
    session: Session,
    turn: TurnRow,
    prompt: PromptRow | None,
    interactions: Iterable[InteractionRow],
    tools: Mapping[str, dict[str, Any]] | None = None,
) -> Paused | None:
    """The chain behind a session's newest turn as nobody's agent holds it; None when it waits for nobody any more.

    Args:
        session: whose chain; it learns of the prompt.
        turn: its newest turn: paused, or lost before it had sent anything.
        prompt: the turn's prompt.
        interactions: the session's.
        tools: calls that the records leave open.
    """
    if turn.outcome not in WAITING or (prompt is not None and prompt.state != PromptState.ACTIVE):
        return None
    questions = {row.interaction_id: row for row in interactions if row.status in OPEN}
    if prompt is None and not questions:
        return None
    known = _prompt(session, prompt) if prompt is not None else None
    return Paused(turn.turn_id, known, None, questions, tools=dict(tools or {}), read=True)


def _prompt(session: Session, row: PromptRow) -> Prompt:
    known = session.prompts.get(row.prompt_id)
    if known is not None:
        return known
    result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    if row.result is not None:
        result.set_result(row.result)
    prompt = Prompt(
        prompt_id=row.prompt_id,
        digest=row.digest,
        content=row.content,
        created_at=row.created_at,
        position=-1,
        result=result,
        turn_id=row.turn_id,
    )
    prompt.ready.set()
    session.remember(prompt)
    return prompt


@dataclass(frozen=True, slots=True)
class Left:
    """What the store says of the chain that a session's newest turn may have left; read whole, then taken in one step.

    Attributes:
        turn: the newest turn, None when it has no ending.
        prompt: its prompt, where the chain may wait on.
        interactions: those of the session that are open.
        tools: calls that the records leave open.
    """

    turn: TurnRow | None = None
    prompt: PromptRow | None = None
    interactions: Sequence[InteractionRow] = ()
    tools: Mapping[str, dict[str, Any]] = field(default_factory=dict)


async def read(store: Store, key: Key, turn: TurnRow | None) -> Left:
    """Read what ``turn``, the session's newest, left.

    Raises:
        RunnerError: ``store_unavailable``.
    """
    if turn is None or turn.outcome is None:
        return Left()
    asked = await store.interactions(*key, InteractionStatus.PENDING)
    if turn.outcome not in WAITING:
        return Left(turn, None, asked)
    prompt = await store.prompt(*key, turn.prompt_id) if turn.prompt_id is not None else None
    if prompt is not None and prompt.state != PromptState.ACTIVE:
        return Left(turn, prompt, asked)
    asked = [*asked, *await store.interactions(*key, InteractionStatus.ANSWERED)]
    folded: list[tuple[str, dict[str, Any]]] = []
    # A turn that pauses, or is closed as lost, writes down each open call: nothing older is needed.
    async for rows in pages(store, key, (turn.epoch, 0)):
        folded += [(row.type, orjson.loads(row.data)) for row in rows if row.type in READ]
    asked.sort(key=lambda row: row.created_at)
    return Left(turn, prompt, asked, unfinished(folded).tools)


def taken(session: Session, left: Left) -> tuple[Paused | None, list[InteractionRow]]:
    """The session's cold chain, if one waits; and open questions that belong to no chain.

    Answered ones are spared: whoever claimed the answer may be on its way.
    """
    paused = None
    if left.turn is not None:
        paused = cold(session, left.turn, left.prompt, left.interactions, left.tools)
    held = paused.questions if paused is not None else {}
    pending = (row for row in left.interactions if row.status == InteractionStatus.PENDING)
    return paused, [row for row in pending if row.interaction_id not in held]
