"""``acp-runner serve`` over a sink: records and frames go nowhere. What durability costs is the difference to this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.cli.main import main
from runner.store.port import Appended, Ending, InteractionRow, PromptRow, RecordRow
from runner.store.sqlite import SqliteStore
from runner.turn.live_file import Pen

END = SqliteStore.end


async def append(
    store: SqliteStore,
    records: Sequence[RecordRow],
    interactions: Sequence[InteractionRow] = (),
    prompts: Sequence[PromptRow] = (),
) -> Appended:
    """Every record counts, and none is kept."""
    return Appended(len(records))


async def end(store: SqliteStore, ending: Ending) -> bool:
    """The turn ends, without its records."""
    return await END(store, replace(ending, records=()))


def write(pen: Pen, *shown: object) -> None:
    """Nothing."""


if __name__ == "__main__":
    for target, name, sink in ((SqliteStore, "append", append), (SqliteStore, "end", end), (Pen, "write", write)):
        setattr(target, name, sink)
    main()
