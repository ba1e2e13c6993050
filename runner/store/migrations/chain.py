"""What leads from one schema version to another, as statements for any driver.

Alembic keeps the order of the revisions and writes their SQL without a connection; whoever has one executes it, all
steps in one transaction. So neither database needs an engine, and both keep the driver that the store uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory

from runner.errors import RunnerError
from runner.store.sql.dialect import Dialect
from runner.store.sql.schema import identity, marks


@dataclass(frozen=True, slots=True)
class Step:
    """One revision, forth or back.

    Attributes:
        text: what it does, for people.
        statements: in their order; the last ones note the version.
        loses: what the step loses, and a query that yields a row while there is something of it.
    """

    text: str
    statements: Sequence[str]
    loses: Sequence[tuple[str, str]] = ()


def head() -> int:
    """The newest version of the chain."""
    return int(_directory().get_current_head() or 0)


def steps(dialect: Dialect, start: int, target: int, mint: Callable[[str], str]) -> list[Step]:
    """The steps from a version to another, none when they are the same; ``mint("store")`` names a new store.

    Raises:
        RunnerError: ``invalid_request``: the chain does not know one of the versions.
    """
    revisions = _revisions()
    for version in (start, target):
        if not 0 <= version <= len(revisions):
            text = f"There is no schema version {version}; this acp-runner knows 0 to {len(revisions)}."
            raise RunnerError("invalid_request", text, field="to")
    if target < start:
        return [_step(dialect, revisions[version - 1], version, version - 1) for version in range(start, target, -1)]
    made = [_step(dialect, revisions[version], version, version + 1) for version in range(start, target)]
    if start == 0 and made:
        made[0] = Step(made[0].text, [*made[0].statements, identity(mint("store"))])
    return made


def would_lose(step: Step, what: str) -> RunnerError:
    """A way back that is not gone without leave."""
    text = f"{step.text}: this would lose {what}; --discard allows it, and any other loss on the way."
    return RunnerError("invalid_request", text, field="discard")


def script(planned: Sequence[Step]) -> str:
    """The steps as one SQL script in a transaction, for somebody who executes it by hand."""
    lines = ["BEGIN;"]
    for step in planned:
        lines += ["", f"-- {step.text}", *(f"{statement};" for statement in step.statements)]
    return "\n".join([*lines, "", "COMMIT;", ""])


def _step(dialect: Dialect, revision: Script, before: int, after: int) -> Step:
    forth = after > before
    module: Any = revision.module
    written = list(_written(dialect, module.upgrade if forth else module.downgrade))
    title = revision.doc.rstrip(".")
    return Step(
        f"{before:04} -> {after:04}: {title if forth else f'back before: {title}'}",
        [*written, *marks(dialect, before, after)],
        () if forth else module.LOSES,
    )


class _Sheet:
    """Where Alembic writes each statement, with its terminator, instead of executing it."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text.strip().removesuffix(";"))

    def flush(self) -> None:
        """Nothing waits."""


def _written(dialect: Dialect, change: Callable[[], None]) -> Iterator[str]:
    sheet = _Sheet()
    context = MigrationContext.configure(dialect_name=dialect, opts={"as_sql": True, "output_buffer": sheet})
    with Operations.context(context):
        change()
    yield from sheet.written


def _revisions() -> list[Script]:
    return list(_directory().walk_revisions())[::-1]


def _directory() -> ScriptDirectory:
    return ScriptDirectory(str(Path(__file__).parent))
