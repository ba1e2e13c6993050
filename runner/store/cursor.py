"""Steps of a write on a cursor of SQLite; everything here runs to its end or raises."""

from __future__ import annotations

import sqlite3
from typing import Any

from runner.errors import RunnerError
from runner.store.faults import translated
from runner.store.rows import Parameters
from runner.store.sql import PLACED, Placed
from runner.store.writes import Ask, AskAll, Attempt, Run, Step, T, Work


def perform(work: Work[T], cursor: sqlite3.Cursor) -> T:
    """Do what a write does; the transaction is the caller's."""
    steps = work()
    answer: Any = None
    try:
        while True:
            step = steps.send(answer)
            answer = _run(cursor, step) if type(step) is Run else _other(cursor, step)
    except StopIteration as done:
        value: T = done.value
        return value


def _run(cursor: sqlite3.Cursor, step: Run | Attempt) -> int:
    name, parameters = step
    statement = PLACED[name]
    if len(parameters) == 1:
        return cursor.execute(statement.text, statement.place(parameters[0])).rowcount
    return cursor.executemany(statement.text, statement.place_all(parameters)).rowcount


def _other(cursor: sqlite3.Cursor, step: Step) -> Any:
    if isinstance(step, Attempt):
        return _attempt(cursor, step)
    if isinstance(step, Ask):
        return _ask(cursor, PLACED[step.statement], step.parameters)
    assert isinstance(step, AskAll)
    return [_ask(cursor, PLACED[step.statement], parameters) for parameters in step.each]


def _ask(cursor: sqlite3.Cursor, statement: Placed, parameters: Parameters) -> list[Any]:
    return cursor.execute(statement.text, statement.place(parameters)).fetchall()


def _attempt(cursor: sqlite3.Cursor, step: Run | Attempt) -> RunnerError | None:
    """SQLite takes back no more than the row that it refuses."""
    try:
        _run(cursor, step)
    except Exception as error:
        failure = translated(error)
        if failure.code == "store_unavailable":
            raise
        return failure
    return None
