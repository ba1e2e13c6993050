"""What every turn of a replica uses, and the answer that a resumed turn carries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.clock import Clock
from runner.config import Settings
from runner.ids import Ids
from runner.leases.heartbeat import Heartbeats
from runner.metrics import Metrics
from runner.pool.pool import Pool
from runner.pool.spares import Spares
from runner.rules.reuse import Windows
from runner.rules.story import Stories
from runner.sandbox.port import SpareProvider
from runner.session.owners import Owners
from runner.session.provision import Provisioner
from runner.store.port import InteractionRow, Store
from runner.tasks import Tasks
from runner.turn.live import LiveSeat

if TYPE_CHECKING:
    from runner.session.session import Session


@dataclass(frozen=True, slots=True)
class Services:
    """What every turn of this replica uses."""

    replica_id: str
    clock: Clock
    ids: Ids
    store: Store
    beats: Heartbeats
    pool: Pool[LiveSeat]
    provisioner: Provisioner
    settings: Settings
    tasks: Tasks
    stories: Stories
    metrics: Metrics
    windows: Mapping[str, Windows]
    on_paused: Callable[[Session], None]
    owners: Owners
    reload: Callable[[Session], Awaitable[None]]
    """Reads a session again that was just granted to this replica; ``Registry.reload``."""
    spares: Spares[LiveSeat] | None = None
    """None where none are kept."""
    spare_providers: Mapping[str, SpareProvider] = field(default_factory=dict)
    """Those that can make them."""


@dataclass(frozen=True, slots=True)
class Answering:
    """A human's answer on its way to an agent: the answered row, and the answer as it was given, unmasked."""

    row: InteractionRow
    given: dict[str, Any]
