"""Puts one replica together from the settings, serves it, and takes it apart again (DESIGN 5)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import tomllib
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runner import __version__
from runner.acp.answers import PROTOCOL_VERSION
from runner.clock import Clock, SystemClock
from runner.config import Settings
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.ids import Ids
from runner.leases.heartbeat import Heartbeats
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import BeatAnswer, LeasePlane
from runner.pool.pool import Pool
from runner.resources import resource_path
from runner.rules.pool import Book
from runner.rules.reuse import Windows
from runner.sandbox.local import LocalProvider
from runner.sandbox.port import Provider
from runner.sandbox.statelock import StateLock, reap_leftovers
from runner.server.app import build_app, start_site, stop_site
from runner.server.auth import ALL_BUT_RUNNER, AccessToken, is_loopback
from runner.session.coordinator import Coordinator
from runner.session.provision import Provisioner
from runner.session.reconcile import reconcile
from runner.session.registry import Registry
from runner.session.services import Services
from runner.session.session import Session
from runner.store.port import Store
from runner.store.sqlite import SqliteStore
from runner.tasks import Tasks
from runner.turn.live import LiveSeat

log = logging.getLogger("runner")
ISOLATION: Final = "none"
TEARDOWN_SECONDS: Final = 15.0


@dataclass(slots=True)
class Replica:
    """The parts of one runner process below its HTTP server."""

    replica_id: str
    settings: Settings
    coordinator: Coordinator
    services: Services
    plane: LeasePlane
    providers: dict[str, Provider]

    async def close(self) -> None:
        """Drain, tear every sandbox down, release leases; in this order, each bounded."""
        await self.coordinator.drain(self.settings.turn.drain_seconds)
        if not await self.services.pool.close(TEARDOWN_SECONDS):
            log.error("some sandboxes could not be proven gone")
        await self.services.tasks.close()
        await self.services.beats.close()
        await self.plane.release_replica(self.replica_id)
        for provider in self.providers.values():
            await provider.close()
        await self.plane.close()
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
) -> Replica:
    """A replica that is ready to admit turns; what an earlier one left open in the store has got its ending."""
    clock = clock or SystemClock()
    ids = ids or Ids()
    lease = settings.leases
    if plane is None:
        plane = MemoryLeasePlane(clock, lease.lease_seconds)
    if providers is None:
        providers = {"local": LocalProvider(state_dir, store.store_id, replica_id, clock=clock)}
    await _end_leftovers(store, clock)
    tasks = Tasks("sessions")

    def lease_lost(turn_id: str, answer: BeatAnswer) -> None:
        coordinator.lease_lost(turn_id, answer)

    def seat_removed(live: LiveSeat, verdict: str) -> None:
        coordinator.seat_removed(live, verdict)

    def paused(session: Session) -> None:
        coordinator.paused(session)

    beats = Heartbeats(
        plane,
        clock,
        beat_seconds=lease.beat_seconds,
        beat_timeout_seconds=lease.beat_timeout_seconds,
        on_lost=lease_lost,
    )
    pool = Pool(Book(settings.pool.max_seats), clock, seat_removed)
    provisioner = _provisioner(settings, state_dir, providers, clock)
    services = Services(
        replica_id=replica_id,
        clock=clock,
        ids=ids,
        store=store,
        beats=beats,
        pool=pool,
        provisioner=provisioner,
        settings=settings,
        tasks=tasks,
        windows={name: windows_of(settings, name) for name in providers},
        on_paused=paused,
    )
    registry = Registry(store, clock, tasks, pool, settings)
    coordinator = Coordinator(services, registry, lambda: facts(replica_id, provisioner))
    return Replica(replica_id, settings, coordinator, services, plane, providers)


def _provisioner(settings: Settings, state_dir: Path, providers: dict[str, Provider], clock: Clock) -> Provisioner:
    return Provisioner(
        catalogue=Catalogue.build(settings.harness, state_dir, base_dir=settings.base_dir),
        providers=providers,
        recipes=recipes(),
        settings=settings,
        state_dir=state_dir,
        clock=clock,
    )


async def _end_leftovers(store: Store, clock: Clock) -> None:
    lost = await reconcile(store, clock)
    if lost:
        log.warning("%d turns of an earlier runner were ended as lost", lost)


def windows_of(settings: Settings, provider: str) -> Windows:
    """How long seats of a provider stay warm, as the rules read it."""
    numbers = settings.pool.windows(provider)
    return Windows(numbers.idle_seconds, numbers.approval_seconds, numbers.stopped_seconds)


def recipes() -> frozenset[str]:
    """Names of the recipes that a dispatch may ask for."""
    table = tomllib.loads(resource_path("sandboxes", "recipes.toml").read_text())
    return frozenset(table["recipe"])


def facts(replica_id: str, provisioner: Provisioner) -> dict[str, Any]:
    """What ``GET /health`` tells about this replica."""
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
                "setting_vars": list(spec.setting_vars),
            }
        )
    return {
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "replica_id": replica_id,
        "harnesses": harnesses,
        "providers": [{"name": name, "available": True} for name in provisioner.providers],
        "isolation": ISOLATION,
    }


def access_tokens(settings: Settings, state_dir: Path, host: str) -> tuple[list[AccessToken], bool]:
    """The configured tokens, or the state directory's own; the flag says whether it is the latter.

    Raises:
        RunnerError: ``invalid_request``: a bind beyond loopback without tokens, or a set-up that isolation ``none``
            must not serve (DESIGN 3.10).
    """
    listed = [
        AccessToken(token.token.get_secret_value(), token.project, frozenset(token.scopes))
        for token in settings.auth.tokens
    ]
    weak = len({token.project for token in listed}) > 1 or not is_loopback(host)
    if weak and not settings.local.allow_weak:
        raise RunnerError(
            "invalid_request",
            "More than one project, or a bind beyond loopback, needs isolation cell; sandboxes here have isolation "
            f"{ISOLATION}. Set [local] allow_weak = true to serve all the same.",
            field="local.allow_weak",
        )
    if listed:
        return listed, False
    if not is_loopback(host):
        raise RunnerError(
            "invalid_request", "Without [[auth.tokens]] the server only binds loopback.", field="server.host"
        )
    return [AccessToken(own_token(state_dir), "default", ALL_BUT_RUNNER)], True


def own_token(state_dir: Path) -> str:
    """The state directory's token, made at first start, mode 0600."""
    path = state_dir / "token"
    with suppress(FileNotFoundError):
        known = path.read_text().strip()
        if known:
            return known
    token = secrets.token_urlsafe(32)
    fresh = path.with_name(f".token.{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    fresh.replace(path)
    return token


async def serve(
    settings: Settings,
    *,
    state_dir: Path,
    host: str,
    port: int,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Run a server until SIGTERM or SIGINT; a second signal stops the drain short.

    ``on_ready`` gets the ready line's object once requests are served.

    Returns:
        The exit status, 0 after a drain.

    Raises:
        RunnerError: ``invalid_request`` (another serve has this state directory, settings), ``store_unavailable``.
        OSError: the address cannot be bound.
    """
    replica_id = Ids().mint("rep")
    async with AsyncExitStack() as stack:
        lock = StateLock.acquire(state_dir, replica_id)
        stack.callback(lock.release)
        tokens, own = access_tokens(settings, state_dir, host)
        store = await SqliteStore.open(state_dir / "store.sqlite3")
        reaped = reap_leftovers(state_dir, store.store_id)
        if reaped:
            log.warning("%d processes of an earlier runner were killed", reaped)
        log.warning("sandboxes have isolation %s: agents run with this user's rights", ISOLATION)
        replica = await build(settings, state_dir=state_dir, replica_id=replica_id, store=store)
        stack.push_async_callback(replica.close)
        stop = _stop_by_signals()
        site, url = await start_site(build_app(replica.coordinator, settings, tokens, bind_host=host), host, port)
        stack.push_async_callback(stop_site, site)
        stack.push_async_callback(replica.coordinator.drain, settings.turn.drain_seconds)
        stack.callback(_forget_url, state_dir)
        _note_url(state_dir, url)
        if own:
            log.info("token in %s", state_dir / "token")
        on_ready({"ready": True, "url": url, "replica_id": replica_id})
        await stop.wait()
        log.info("draining")
    return 0


def _stop_by_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _signalled, stop, number)
    return stop


def _signalled(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        log.warning("signal %d again: stopping without a drain", number)
        for task in asyncio.all_tasks():
            task.cancel()
    stop.set()


def _note_url(state_dir: Path, url: str) -> None:
    path = state_dir / "server.json"
    fresh = path.with_name(f".server.{os.getpid()}")
    fresh.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    fresh.replace(path)


def _forget_url(state_dir: Path) -> None:
    (state_dir / "server.json").unlink(missing_ok=True)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Logs go to stderr: stdout carries the ready line alone."""
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
