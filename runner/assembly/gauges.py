"""What ``GET /metrics`` reads from the live objects of a replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from runner import __version__, metrics
from runner.metrics import Metrics, Sample, samples
from runner.pool.pool import Pool
from runner.sandbox.daytona.provider import DaytonaProvider
from runner.session.coordinator import Coordinator
from runner.session.registry import Registry
from runner.store.retention import Retention
from runner.store.spool import SpooledStore
from runner.store.stream.pipelined import PipelinedStore
from runner.store.stream.worker import Worker
from runner.terms import SeatState
from runner.turn.live import LiveSeat
from runner.turn.live_file import LiveFile

TEARING_DOWN = "tearing_down"


def read_replica(counts: Metrics, coordinator: Coordinator, registry: Registry, pool: Pool[LiveSeat]) -> None:
    """Turns, sessions, queued prompts, seats."""

    def now() -> Iterable[Sample]:
        sessions = registry.all()
        yield Sample(metrics.INFO, 1, (__version__,))
        yield Sample(metrics.DRAINING, coordinator.draining)
        yield Sample(metrics.TURNS_RUNNING, coordinator.running)
        yield Sample(metrics.TURNS_MAX, coordinator.max_turns)
        yield Sample(metrics.SESSIONS, len(sessions))
        yield Sample(metrics.PROMPTS_QUEUED, sum(len(session.queue.rules.queue) for session in sessions))
        yield Sample(metrics.SEATS_MAX, pool.book.max_seats)
        yield Sample(metrics.TEARDOWNS_UNPROVEN, pool.unproven)
        states = Counter(seat.state for seat in pool.book.seats.values())
        shown = (SeatState.BUSY, SeatState.IDLE, SeatState.AWAITING_APPROVAL, SeatState.SPARE)
        yield from samples(metrics.SEATS, [(state.value, states[state]) for state in shown])
        yield Sample(metrics.SEATS, len(pool.asleep), (SeatState.ASLEEP.value,))
        yield Sample(metrics.SEATS, len(pool.book.tearing), (TEARING_DOWN,))

    counts.read_by(now)


def read_daytona(counts: Metrics, provider: DaytonaProvider) -> None:
    """What the remote provider has, and what it went through."""

    def now() -> Iterable[Sample]:
        condition = provider.condition()
        states = {"running": condition.running, "asleep": condition.asleep, "stuck": provider.stuck}
        yield from samples(metrics.DAYTONA_SANDBOXES, states.items())
        yield Sample(metrics.DAYTONA_MAX, provider.capacity or 0)
        yield Sample(metrics.DAYTONA_AVAILABLE, condition.available)
        yield from samples(metrics.DAYTONA_CHANGES, provider.counts.items())
        for (call, action), count in provider.failures.items():
            yield Sample(metrics.DAYTONA_FAILURES, count, (call, action))

    counts.read_by(now)


def read_live_file(counts: Metrics, file: LiveFile) -> None:
    """What survives a kill, and what would not."""
    counts.read_by(
        lambda: [
            Sample(metrics.LIVE_FILE_BYTES, file.bytes),
            Sample(metrics.LIVE_FILE_UNWRITTEN, file.unwritten),
            Sample(metrics.LIVE_FILE_FAILING, file.failing is not None),
        ]
    )


def read_spool(counts: Metrics, store: SpooledStore) -> None:
    """What waits for the store on disk."""
    counts.read_by(lambda: [Sample(metrics.SPOOL_WRITES, store.waiting), Sample(metrics.SPOOL_BYTES, store.bytes)])


def read_stream(counts: Metrics, store: PipelinedStore) -> None:
    """What is on its way by the record stream."""
    counts.read_by(
        lambda: [
            Sample(metrics.STREAM_UNCONFIRMED, store.unconfirmed),
            Sample(metrics.STREAM_UNCONFIRMED_BYTES, store.unconfirmed_bytes),
            Sample(metrics.STREAM_PUBLISHED, store.sent.published),
            Sample(metrics.STREAM_REPUBLISHED, store.sent.republished),
            Sample(metrics.STREAM_BYPASSED, store.sent.bypassed),
            Sample(metrics.STREAM_CIRCUIT_OPEN, store.away),
            Sample(metrics.STREAM_FULL, store.full),
        ]
    )


def read_worker(counts: Metrics, worker: Worker) -> None:
    """What a worker of the record stream did."""

    def now() -> Iterable[Sample]:
        done = asdict(worker.counts)
        yield Sample(metrics.INFO, 1, (__version__,))
        yield Sample(metrics.WORKER_OUTAGES, done.pop("outages"))
        yield Sample(metrics.WORKER_GROUPS, done.pop("groups_made"))
        yield from samples(metrics.WORKER_ENTRIES, done.items())

    counts.read_by(now)


def read_retention(counts: Metrics, retention: Retention) -> None:
    """What retention deleted."""
    counts.read_by(lambda: samples(metrics.RETENTION_DELETED, retention.deleted.items()))
