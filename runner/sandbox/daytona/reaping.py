"""What carries the store's label and nobody holds: put to sleep, or deleted (DESIGN 3.10, cases C3, C8)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from runner.rules.daytona import ASLEEP, reap
from runner.sandbox.daytona.disks import Disks
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Found
from runner.sandbox.daytona.terms import PROJECT_LABEL, SESSION_LABEL, STORE_LABEL, Terms

log = logging.getLogger("runner.sandbox.daytona")

Asks = Callable[[str, str], Awaitable[bool]]
"""A question about a session: project, session."""


@dataclass(slots=True)
class Reaped:
    """What one look found: names that were asked to go, that are to be put to sleep, and deletions that hang."""

    deleted: list[str]
    left: list[str]
    stuck: int = 0


async def look(
    service: DaytonaService,
    terms: Terms,
    store_id: str,
    counts: Counter[str],
    disks: Disks,
    *,
    in_use: Callable[[str], bool],
    known: Asks,
    owned: Asks,
    forget: Callable[[str], Awaitable[None]],
) -> Reaped:
    """Look at all sandboxes of the store; a deletion that hangs is asked for again each time.

    A sleeping disk that an earlier runner left is taken over with what is left of its window.

    Args:
        in_use: whether this runner holds the sandbox of that name.
        known: whether the store has this session and it has not ended.
        owned: whether another runner that lives has it.
        forget: deletes the secrets of the sandbox of that name.

    Raises:
        CallFailed: the list was not to be had.
    """
    found_now = Reaped([], [])
    for found in await service.labelled({STORE_LABEL: store_id}):
        owner = found.labels.get(PROJECT_LABEL, ""), found.labels.get(SESSION_LABEL, "")
        held, wanted = in_use(found.name), await known(*owner)
        what = reap(
            known=wanted,
            in_use=held,
            owned=found.state == "started" and not held and await owned(*owner),
            state=found.state,
            age_seconds=found.age_seconds,
            silent_seconds=found.silent_seconds,
            orphan_seconds=terms.orphan_seconds,
        )
        if what == "keep":
            _take_over(disks, terms, found, owner, mine=wanted and not held)
        elif what == "sleep":
            found_now.left.append(found.name)
        else:
            counts["reaped" if what == "delete" else "stuck"] += 1
            found_now.stuck += what == "stuck"
            log.warning("sandbox %s (%s) is %s: deleting it", found.name, found.state, what)
            found_now.deleted.append(found.name)
            await _delete(service, found, forget)
    return found_now


def _take_over(disks: Disks, terms: Terms, found: Found, owner: tuple[str, str], *, mine: bool) -> None:
    if found.state not in ASLEEP:
        disks.drop(found.name)
    elif mine:
        disks.keep(found.name, *owner, terms.disk_seconds - found.silent_seconds)


async def _delete(service: DaytonaService, found: Found, forget: Callable[[str], Awaitable[None]]) -> None:
    try:
        await service.delete(found.id)
        await forget(found.name)
    except CallFailed as failed:
        log.info("sandbox %s was not deleted now: %s", found.name, failed)
