"""Rows to write, short to say."""

from __future__ import annotations

from dataclasses import replace

from runner.ids import record_id
from runner.store.port import (
    Admission,
    CommandRow,
    Ending,
    InteractionRow,
    PromptRow,
    RecordRow,
    SessionRow,
    TurnRow,
)

PROJECT = "p"
AT = 7777
"""What the clock of a store under test says."""


def session(name: str = "s", at: int = 1000, **more) -> SessionRow:
    return SessionRow(**{"project": PROJECT, "session_id": name, "created_at": 1000, "updated_at": at, **more})


def turn(name: str = "t1", epoch: int = 1, in_session: str = "s", **more) -> TurnRow:
    values = {"replica_id": "r1", "prompt_id": "p1", "started_at": 1000, "project": PROJECT, **more}
    return TurnRow(session_id=in_session, turn_id=name, epoch=epoch, **values)


def prompt(name: str = "p1", state: str = "active", in_session: str = "s", **more) -> PromptRow:
    values = {"digest": "d1", "turn_id": "t1", "created_at": 1000, "project": PROJECT, **more}
    return PromptRow(session_id=in_session, prompt_id=name, state=state, **values)


def question(name: str = "i1", status: str = "pending", in_session: str = "s", **more) -> InteractionRow:
    values = {"turn_id": "t1", "kind": "permission", "created_at": 1000, "expires_at": 9000, "project": PROJECT, **more}
    return InteractionRow(session_id=in_session, interaction_id=name, status=status, **values)


def record(n: int, epoch: int = 1, in_session: str = "s", **more) -> RecordRow:
    values = {
        "record_id": record_id(in_session, f"t{epoch}", n),
        "turn_id": f"t{epoch}",
        "prompt_id": "p1",
        "type": "message",
        "data": b'{"text":"hello"}',
        "at": 1000 + n,
        "project": PROJECT,
        **more,
    }
    return RecordRow(session_id=in_session, epoch=epoch, n=n, **values)


def command(name: str = "c1", in_session: str = "s", **more) -> CommandRow:
    values = {"kind": "cancel", "state": "pending", "turn_id": "t1", "arrived_at": 1000, "project": PROJECT, **more}
    return CommandRow(session_id=in_session, command_id=name, **values)


def admission(name: str = "t1", epoch: int = 1, **more) -> Admission:
    return Admission(session(), turn(name, epoch), **more)


def ended(row: TurnRow, outcome: str = "completed", **more) -> TurnRow:
    return replace(
        row, **{"outcome": outcome, "stop_reason": "end_turn", "ended_at": 2000, "result": {"ok": 1}, **more}
    )


def ending(row: TurnRow, outcome: str = "completed", **more) -> Ending:
    return Ending(**{"session": session(row.session_id, 2000), "turn": ended(row, outcome), **more})
