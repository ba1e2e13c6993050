"""Records that were refused together, each by itself: one takes no neighbour with it (cases G2, G8)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from runner.errors import RunnerError
from runner.store.port import Appended, RecordRow

log = logging.getLogger("runner.store")


async def one_by_one(
    records: Sequence[RecordRow],
    write: Callable[[Sequence[RecordRow]], Awaitable[Appended]],
    set_aside: Callable[[RecordRow], Awaitable[None]],
    refusals: Collection[str] = ("internal",),
) -> Appended:
    """Write records in their order.

    Args:
        records: of any number of sessions.
        write: ``Store.append`` or ``Store.write_batch``.
        set_aside: gets each record that is refused.
        refusals: codes that say that a record is at fault.

    Returns:
        What became of those that were not refused.

    Raises:
        RunnerError: what ``write`` raises otherwise; what came before is written.
    """
    done = Appended(0)
    for row in records:
        try:
            done += await write([row])
        except RunnerError as error:
            if error.code not in refusals:
                raise
            log.error("record %s (%s) of session %s was refused: %s", row.record_id, row.type, row.session_id, error)
            await set_aside(row)
    return done
