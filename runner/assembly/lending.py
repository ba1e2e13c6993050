"""Joins the logins of a replica with its pool and its sessions."""

from __future__ import annotations

from collections.abc import Iterable

from runner.pool.pool import Pool
from runner.rules.pool import Key
from runner.session.logins import Logins
from runner.session.registry import Registry
from runner.turn.live import LiveSeat

RELEASE_SECONDS = 5.0


async def begin(logins: Logins, pool: Pool[LiveSeat], registry: Registry) -> None:
    """Take back what sandboxes of an earlier process still had, and lend from now on."""

    async def release(key: Key, seat_id: str) -> None:
        live = pool.warm(key)
        if live is not None and live.seat.seat_id == seat_id:
            pool.dismiss(live, "credentials_expiring")
            await pool.teardowns_of(key, RELEASE_SECONDS)

    def masked(key: Key, values: Iterable[str]) -> None:
        session = registry.known(key)
        if session is not None:
            session.learn_secrets(values)

    logins.release, logins.on_secrets = release, masked
    await logins.recover()
