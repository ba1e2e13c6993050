"""Puts one replica together from the settings, and takes it apart again (DESIGN 5)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from runner import __version__
from runner.acp.answers import PROTOCOL_VERSION
from runner.assembly import gauges, lending, sandboxes, spares
from runner.assembly.choices import is_http
from runner.assembly.isolating import isolation_of
from runner.assembly.leftovers import end_leftovers, handed_in
from runner.assembly.recipes import recipes
from runner.clock import Clock, SystemClock
from runner.config import Settings
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.ids import Ids
from runner.leases.heartbeat import LAPSED, Heartbeats
from runner.leases.live import LiveBus
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import BeatAnswer, LeasePlane, ReplicaInfo
from runner.metrics import LEASES_LOST, Metrics
from runner.pool.pool import Pool
from runner.rules.pool import Book
from runner.rules.reuse import Windows
from runner.rules.story import Stories
from runner.sandbox.daytona.provider import DaytonaProvider
from runner.sandbox.isolation import NOTHING, Isolation
from runner.sandbox.port import Provider
from runner.sandbox.statelock import is_free, lock_of
from runner.session import counting
from runner.session.coordinator import Coordinator
from runner.session.keys import KeyBook
from runner.session.logins import Logins
from runner.session.mirror import Mirrors
from runner.session.missing_endings import MissingEndings
from runner.session.outlets import Outlets
from runner.session.owners import Owners
from runner.session.provision import Provisioner
from runner.session.registry import Registry
from runner.session.services import Services
from runner.session.session import Session
from runner.session.sweep import Job, Sweep
from runner.store.port import Store
from runner.store.retention import Retention
from runner.tasks import Tasks
from runner.turn.live import LiveSeat
from runner.turn.live_file import LiveFile

log = logging.getLogger("runner")
TEARDOWN_SECONDS: Final = 15.0
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class Replica:
    """The parts of one runner process below its HTTP server."""

    replica_id: str
    settings: Settings
    coordinator: Coordinator
    services: Services
    plane: LeasePlane
    providers: dict[str, Provider]
    live: LiveBus | None = None
    mirrors: Mirrors | None = None
    """What is followed here of other replicas, where a live bus is there."""
    live_file: LiveFile | None = None
    """What it showed and the store does not have yet."""

    def reachable_at(self, url: str) -> None:
        """Tell the others where this replica is reached, unless ``[server] advertise_url`` says so already."""
        owners = self.services.owners
        if owners.me.advertise_url is None:
            owners.me = replace(owners.me, advertise_url=url)
        if self.serves_sessions:
            self.services.beats.announce(owners.me)

    @property
    def serves_sessions(self) -> bool:
        """Whether others may send sessions here; a gateway, which has no seats, is no rival and is told to nobody."""
        return self.plane.shared and bool(self.providers)

    async def close(self) -> None:
        """Drain, tear every sandbox down, release leases; in this order, each bounded."""
        await self.coordinator.drain(self.settings.turn.drain_seconds)
        if self.mirrors is not None:
            await self.mirrors.close()
        if self.services.spares is not None:
            await self.services.spares.close()
        if not await self.services.pool.close(TEARDOWN_SECONDS):
            log.error("some sandboxes could not be proven gone")
        await self.services.tasks.close()
        if self.live_file is not None:
            self.live_file.close()
        await self.services.beats.close()
        try:
            async with asyncio.timeout(self.settings.leases.beat_timeout_seconds):
                await self.plane.release_replica(self.replica_id)
        except (RunnerError, TimeoutError) as error:
            log.warning("leases are left to run out: %s", error)
        for provider in self.providers.values():
            await provider.close()
        await self.plane.close()
        if self.live is not None:
            await self.live.close()
        await self.services.store.close()


async def build(
    settings: Settings,
    *,
    state_dir: Path,
    replica_id: str,
    store: Store,
    plane: LeasePlane | None = None,
    providers: dict[str, Provider] | None = None,
    clock: Clock | None = None,
    ids: Ids | None = None,
    proven_dead: Callable[[ReplicaInfo], bool] | None = None,
    live: LiveBus | None = None,
    live_dir: Path | None = None,
    isolation: Isolation | None = None,
    metrics: Metrics | None = None,
    keys: KeyBook | None = None,
) -> Replica:
    """A replica that is ready to admit turns.

    Without other replicas, what an earlier one left open in the store has got its ending; else ``Owners`` sees to it.

    Args:
        proven_dead: whether another replica is provably gone; None looks at lock files of this machine.
        live: what followers at other replicas see by; None: they ask this one over HTTP.
        live_dir: where what is shown survives a kill of the process; None: nowhere.
        isolation, keys: of local cells, and those that stay out of them; None: what the settings ask for, and no key.
        metrics: counts; those of the store, where somebody reads them.
    """
    clock, metrics = clock or SystemClock(), metrics or Metrics()
    plane = MemoryLeasePlane(clock, settings.leases.lease_seconds) if plane is None else plane
    if providers is None:
        isolation = isolation or await isolation_of(settings)
        providers = sandboxes.all_of(settings, state_dir, store, replica_id, clock, isolation, keys)
    lost = 0 if plane.shared else await end_leftovers(store, clock, live_dir)
    tasks, calls, stories = Tasks("sessions"), _Calls(metrics, lost), Stories(clock.now_ms)
    provisioner = _provisioner(settings, state_dir, providers, clock, tasks, keys)
    pool = Pool(_book(settings, stories), clock, calls.seat_removed, provisioner.logins.give_back, providers)
    file = LiveFile(live_dir, replica_id, clock.monotonic) if live_dir else None
    registry = Registry(store, clock, tasks, pool, settings, shared=plane.shared, on_stale=calls.stale, live_file=file)
    services = Services(
        replica_id=replica_id,
        clock=clock,
        ids=ids or Ids(),
        store=store,
        beats=_heartbeats(settings, plane, clock, calls, stories),
        pool=pool,
        provisioner=provisioner,
        settings=settings,
        tasks=tasks,
        stories=stories,
        metrics=metrics,
        windows={name: windows_of(settings, name) for name in providers},
        on_paused=calls.paused,
        owners=_owners(settings, state_dir, replica_id, plane, store, clock, registry, proven_dead, metrics),
        reload=registry.reload,
    )
    services = await spares.added(services)
    calls.join(services.owners, Coordinator(services, registry, lambda: facts(replica_id, provisioner, isolation)))
    replica = Replica(replica_id, settings, calls.coordinator, services, plane, providers, live, live_file=file)
    return await _take_part(replica, registry)


def _book(settings: Settings, stories: Stories) -> Book:
    return Book(settings.pool.max_seats, tell=stories.teller("pool"))


def _owners(
    settings: Settings,
    state_dir: Path,
    replica_id: str,
    plane: LeasePlane,
    store: Store,
    clock: Clock,
    registry: Registry,
    proven_dead: Callable[[ReplicaInfo], bool] | None,
    metrics: Metrics,
) -> Owners:
    return Owners(
        me_of(settings, state_dir, replica_id, clock),
        plane,
        store,
        clock,
        holds=registry.holds,
        proven_dead=proven_dead or proven_by_lock,
        hand_in=lambda dead: handed_in(dead, store, clock),
        lost_after_seconds=settings.records.lost_after_seconds,
        answer_seconds=settings.leases.beat_timeout_seconds,
        on_lost=lambda: counting.turns_lost(metrics, 1),
    )


def _join(replica: Replica, registry: Registry) -> None:
    """Take part in the live bus, both ways."""
    if replica.live is None:
        return
    services, server = replica.services, replica.settings.server
    replica.coordinator.outlets = Outlets(services, registry, replica.live)
    replica.mirrors = Mirrors(
        services.replica_id,
        replica.live,
        services.owners,
        services.store,
        services.clock,
        services.ids,
        ring_bytes=server.ring_bytes,
        buffer_bytes=server.reader_buffer_bytes,
    )
    replica.mirrors.start()


async def _take_part(replica: Replica, registry: Registry) -> Replica:
    """The replica, known to the others, and with what it does by itself started."""
    registry.tell = replica.services.stories.teller("interaction")
    _join(replica, registry)
    await lending.begin(replica.services.provisioner.logins, replica.services.pool, registry)
    gauges.read_replica(replica.services.metrics, replica.coordinator, registry, replica.services.pool)
    if replica.live_file is not None:
        gauges.read_live_file(replica.services.metrics, replica.live_file)
    services, commands = replica.services, replica.coordinator.commands
    expiry, revive = replica.coordinator.expiry, replica.coordinator.revive
    jobs: dict[str, Job] = {"commands": commands.sweep, "questions": expiry.expire_due, "queued prompts": revive}
    store, clock, days = services.store, services.clock, replica.settings.records.retention_days
    jobs["endings"] = MissingEndings(store, clock, services.owners, registry.written_here).sweep
    remote = replica.providers.get("daytona")
    if isinstance(remote, DaytonaProvider):
        jobs["remote sandboxes"] = sandboxes.Reaper(remote, store, clock, services.owners.elsewhere).sweep
        gauges.read_daytona(services.metrics, remote)
    if replica.plane.shared:
        jobs["lost turns"] = services.owners.sweep_lost
        if replica.serves_sessions:
            services.beats.announce(services.owners.me)
        services.tasks.spawn("watch replicas", services.owners.watch())
        services.tasks.spawn("watch commands", commands.watch())
        await replica.plane.listen(replica.replica_id, replica.coordinator.note)
    services.tasks.spawn("expire questions", expiry.run())
    services.tasks.spawn("queued prompts", _at_boot(revive))
    services.tasks.spawn("sweep", Sweep(replica.plane, replica.replica_id, jobs).run())
    if days > 0 and not is_http(replica.settings):
        # Of a plane's store it is the plane's own settings that say what goes; another lease, for others keep all.
        retention = Retention(store, clock, days)
        gauges.read_retention(services.metrics, retention)
        old: dict[str, Job] = {"retention": retention}
        services.tasks.spawn("retention", Sweep(replica.plane, replica.replica_id, old, lease="retention").run())
    if services.spares is not None:
        services.spares.stir()
    return replica


async def _at_boot(job: Job) -> None:
    """Once, before the first sweep; what fails is left to that."""
    try:
        await job()
    except RunnerError as error:
        log.warning("prompts that are queued are looked for again: %s", error.message)


class _Calls:
    """What the parts below tell the coordinator, which is made after them."""

    coordinator: Coordinator
    owners: Owners

    def __init__(self, metrics: Metrics, lost: int) -> None:
        self.metrics = metrics
        counting.turns_lost(metrics, lost)

    def join(self, owners: Owners, coordinator: Coordinator) -> None:
        self.owners, self.coordinator = owners, coordinator

    def has_rivals(self) -> bool:
        return self.owners.rivals

    def lease_lost(self, turn_id: str, answer: BeatAnswer) -> None:
        self.metrics.add(LEASES_LOST, "lapsed" if answer is LAPSED else "taken")
        self.coordinator.lease_lost(turn_id, answer)

    def commands_due(self, project: str, session_id: str, commands: tuple[dict[str, Any], ...]) -> None:
        self.coordinator.commands.due(project, session_id, commands)

    def seat_removed(self, live: LiveSeat, verdict: str) -> None:
        self.coordinator.seat_removed(live, verdict)

    def paused(self, session: Session) -> None:
        self.coordinator.paused(session)

    def stale(self, session: Session) -> None:
        self.coordinator.stale(session)


def _heartbeats(settings: Settings, plane: LeasePlane, clock: Clock, calls: _Calls, stories: Stories) -> Heartbeats:
    lease = settings.leases
    return Heartbeats(
        plane,
        clock,
        beat_seconds=lease.beat_seconds,
        beat_timeout_seconds=lease.beat_timeout_seconds,
        on_lost=calls.lease_lost,
        on_commands=calls.commands_due,
        rivals=calls.has_rivals,
        tell=stories.teller("lease"),
        metrics=calls.metrics,
    )


def me_of(settings: Settings, state_dir: Path, replica_id: str, clock: Clock) -> ReplicaInfo:
    """This replica as the others will know it."""
    return ReplicaInfo(
        replica_id,
        settings.server.advertise_url,
        BOOT_ID.read_text().strip(),
        str(lock_of(state_dir.absolute(), replica_id)),
        clock.now_ms(),
    )


def proven_by_lock(info: ReplicaInfo) -> bool:
    """Whether a replica of this boot of this machine has given its lock back, as the kernel does at its death."""
    return info.host == BOOT_ID.read_text().strip() and info.lock is not None and is_free(Path(info.lock))


def _provisioner(
    settings: Settings,
    state_dir: Path,
    providers: dict[str, Provider],
    clock: Clock,
    tasks: Tasks,
    keys: KeyBook | None,
) -> Provisioner:
    catalogue = Catalogue.build(settings.harness, state_dir, base_dir=settings.base_dir)
    return Provisioner(
        catalogue=catalogue,
        logins=Logins(catalogue, state_dir, clock, tasks, settings.logins.projects),
        providers=providers,
        recipes=recipes(settings),
        settings=settings,
        state_dir=state_dir,
        clock=clock,
        keys=keys,
    )


def windows_of(settings: Settings, provider: str) -> Windows:
    """How long seats of a provider stay warm, as the rules read it."""
    numbers = settings.pool.windows(provider)
    return Windows(numbers.idle_seconds, numbers.approval_seconds, numbers.stopped_seconds)


def facts(replica_id: str, provisioner: Provisioner, isolation: Isolation | None) -> dict[str, Any]:
    """What ``GET /health`` tells about this replica."""
    bounds = isolation or NOTHING
    catalogue = provisioner.catalogue
    harnesses = []
    for name in catalogue.names():
        spec, state = catalogue.get(name), catalogue.availability(name)
        harnesses.append(
            {
                "name": name,
                "title": spec.title,
                "available": state.available,
                "version": state.version,
                "reason": state.reason,
                "install_command": state.install_command,
                "key_vars": list(spec.key_vars),
                "logged_in": provisioner.logins.logged_in(name),
                "setting_vars": list(spec.setting_vars),
            }
        )
    return {
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "replica_id": replica_id,
        "harnesses": harnesses,
        "providers": provisioner.conditions(),
        "isolation": bounds.level,
        "isolation_why": bounds.why,
        "network": bounds.network,
        "limits": bounds.limits.view(),
    }
