"""Commands of the store's twin in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from runner.rules.command import OPEN
from runner.store import rows
from runner.store.port import CommandRow
from runner.terms import CommandState


class MemoryCommands:
    """Commands by (project, id) in the order of their submission, and the keys that lead to them."""

    def __init__(self) -> None:
        self._commands: dict[tuple[str, str], rows.Parameters] = {}
        self._keys: dict[tuple[str, str, str], str] = {}

    def submit(self, row: CommandRow) -> CommandRow:
        """See ``Store.submit_command``."""
        found = self._repeated(row)
        if found is None:
            self._save(row)
            self._drop_oldest(row)
        if row.idempotency_key is not None:
            name = (found or row).command_id
            self._keys.setdefault((row.project, row.session_id, row.idempotency_key), name)
        return found or self.of(row.project, row.command_id) or row

    def claim(
        self, project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
    ) -> CommandRow | None:
        """See ``Store.claim_command``."""
        row = self.of(project, command_id)
        if row is None or row.state not in OPEN or row.deliveries >= max_deliveries:
            return None
        if row.state == CommandState.CLAIMED and (row.claimed_until or 0) > now:
            return None
        claimed = replace(
            row,
            state=CommandState.CLAIMED.value,
            claimed_by=replica_id,
            claimed_until=until,
            deliveries=row.deliveries + 1,
        )
        self._save(claimed)
        return claimed

    def settle(self, project: str, command_id: str, state: str, outcome: str | None, at: int) -> bool:
        """See ``Store.settle_command``."""
        row = self.of(project, command_id)
        waits = state == CommandState.APPLIED and outcome is None
        if row is None or row.finished_at is not None:
            return False
        if row.state not in OPEN and (waits or state != CommandState.APPLIED):
            return False
        finished = None if waits else at
        self._save(replace(row, state=state, outcome=outcome, finished_at=finished))
        return True

    def of_ending(self, settled: Iterable[CommandRow]) -> None:
        """What ``Ending.commands`` says."""
        for row in settled:
            stored = self.of(row.project, row.command_id)
            if stored is not None and stored.finished_at is None:
                turn_id = stored.turn_id if stored.turn_id is not None else row.turn_id
                ended = replace(stored, state=row.state, outcome=row.outcome, finished_at=row.finished_at)
                self._save(replace(ended, turn_id=turn_id))

    def of(self, project: str, command_id: str) -> CommandRow | None:
        """One command."""
        found = self._commands.get((project, command_id))
        return rows.command_row(found) if found else None

    def without_outcome(self, key: tuple[str, str] | None) -> list[CommandRow]:
        """See ``Store.open_commands``."""
        found = [row for row in self._all() if row.finished_at is None and key in (None, (row.project, row.session_id))]
        return sorted(found, key=lambda row: row.arrived_at)

    def delete(self, key: tuple[str, str]) -> None:
        """Forget a session's."""
        for row in [row for row in self._all() if (row.project, row.session_id) == key]:
            self._forget(row)

    def _repeated(self, row: CommandRow) -> CommandRow | None:
        known = self.of(row.project, row.command_id)
        if known is None and row.idempotency_key is not None:
            named = self._keys.get((row.project, row.session_id, row.idempotency_key))
            known = self.of(row.project, named) if named is not None else None
        if known is None and row.state in OPEN:
            same = (row.project, row.session_id, row.kind, row.turn_id)
            known = next(
                (
                    other
                    for other in self._all()
                    if other.state in OPEN and (other.project, other.session_id, other.kind, other.turn_id) == same
                ),
                None,
            )
        return known

    def _drop_oldest(self, newest: CommandRow) -> None:
        of = (newest.project, newest.session_id)
        settled = [row for row in self._all() if (row.project, row.session_id) == of and row.finished_at is not None]
        for row in settled[: -rows.COMMANDS_KEPT]:
            self._forget(row)

    def _forget(self, row: CommandRow) -> None:
        del self._commands[row.project, row.command_id]
        for key in [key for key, name in self._keys.items() if key[0] == row.project and name == row.command_id]:
            del self._keys[key]

    def _all(self) -> list[CommandRow]:
        return [rows.command_row(row) for row in self._commands.values()]

    def _save(self, row: CommandRow) -> None:
        self._commands[row.project, row.command_id] = rows.command_parameters(row)
