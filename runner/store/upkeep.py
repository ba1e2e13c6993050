"""Writes of sweeps, as steps (``writes.py``): sessions with a history, retention, missing endings (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Sequence

from runner.rules.late import late
from runner.store import rows
from runner.store.port import RecordKey, RecordRow, SessionRow
from runner.store.writes import INSERT_RECORD, Ask, AskAll, Run, Steps, Work, standing


def creating(row: SessionRow, records: Sequence[RecordRow]) -> Work[bool]:
    """``Store.create_session``: the session decides, its records follow; what they tell is no news for the feed."""

    def work() -> Steps[bool]:
        if not (yield Run("create_session", [rows.session_parameters(row)])):
            return False
        if records:
            yield Run(INSERT_RECORD, list(records))
            yield Run("delete_feed", [(row.project, row.session_id)])
        return True

    return work


def pruning(keys: Sequence[RecordKey]) -> Work[int]:
    """``Store.delete_records``: what is there, with the marks that say how far their histories are gone."""

    def work() -> Steps[int]:
        gone: list[rows.Parameters] = []
        marks: dict[tuple[str, str], tuple[int, int]] = {}
        distinct = sorted(set(keys))
        places = yield AskAll("record_place", distinct)
        for key, found in zip(distinct, places, strict=True):
            for session_id, epoch, n in found:
                gone.append(key)
                of = (key.project, session_id)
                marks[of] = max((epoch, n), marks.get(of, (0, 0)))
        if gone:
            newest = [(*of, *cursor) for of, cursor in sorted(marks.items())]
            for statement, parameters in (("delete_record", gone), ("mark_pruned", newest), ("move_head", newest)):
                yield Run(statement, parameters)
        return len(gone)

    return work


def trimming_feed(project: str | None, before_ms: int, limit: int) -> Work[int]:
    """``Store.trim_feed``: what goes, with the floors that say how far the feeds are gone."""

    def work() -> Steps[int]:
        gone: list[rows.Parameters] = yield Ask("expired_feed", (project, before_ms, limit))
        floors: dict[str, tuple[int, int]] = {}
        for of, *position in gone:
            floors[of] = max((position[0], position[1]), floors.get(of, (0, 0)))
        if gone:
            yield Run("raise_feed_floor", [(of, *floor) for of, floor in sorted(floors.items())])
            yield Run("delete_feed_item", sorted(gone))
        return len(gone)

    return work


def forgetting(keys: Sequence[RecordKey]) -> Work[int]:
    """``Store.delete_quarantined``."""

    def work() -> Steps[int]:
        wanted = sorted(set(keys))
        known = yield AskAll("aside_exists", wanted)
        gone: list[rows.Parameters] = [key for key, found in zip(wanted, known, strict=True) if found]
        if gone:
            yield Run("delete_aside", gone)
        return len(gone)

    return work


def telling(record: RecordRow) -> Work[bool]:
    """``Store.add_ending``: only where the turn is over and nothing says so."""

    def work() -> Steps[bool]:
        newest, head, turn, _ = yield from standing(record.project, record.session_id, record.turn_id)
        if turn is None or not turn.ended or late(None, record.epoch, None, newest, head) is not None:
            return False
        if (yield Ask("turn_told", (record.project, record.turn_id))):
            return False
        yield Run(INSERT_RECORD, [record])
        yield Run("move_head", [(record.project, record.session_id, record.epoch, record.n)])
        return True

    return work
