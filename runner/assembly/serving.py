"""Serves a replica over HTTP until it is told to stop (DESIGN 5)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

from runner.assembly import keys
from runner.assembly.choices import Spooling, is_http, open_live, open_plane, open_store
from runner.assembly.isolating import isolation_of, require, tell
from runner.assembly.leftovers import LIVE
from runner.assembly.replica import Replica, build
from runner.clock import SystemClock
from runner.config import Settings
from runner.errors import RunnerError
from runner.ids import Ids
from runner.leases.heartbeat import LAPSED
from runner.leases.port import ReplicaInfo
from runner.metrics import Metrics
from runner.sandbox.isolation import Isolation
from runner.sandbox.statelock import StateLock, lock_of, reap_leftovers
from runner.server.app import Application, build_app, start_site, stop_site
from runner.server.auth import ALL_BUT_RUNNER, AccessToken, is_loopback
from runner.server.gateway import build_gateway
from runner.turn.live_file import left_by

log = logging.getLogger("runner")
BURY_SECONDS: Final = 5.0


def access_tokens(
    settings: Settings, state_dir: Path, host: str, isolation: Isolation | None = None
) -> list[AccessToken]:
    """The configured tokens, or the state directory's own.

    ``isolation``: of the cells here; None for a server that runs no agent (a plane, a worker).

    Raises:
        RunnerError: ``invalid_request``: a bind beyond loopback without tokens, or a set-up that this isolation
            must not serve (DESIGN 3.10).
    """
    listed = [
        AccessToken(token.token.get_secret_value(), token.project, frozenset(token.scopes))
        for token in settings.auth.tokens
    ]
    projects = len({token.project for token in listed})
    if isolation is not None:
        require(settings, isolation, projects=projects, beyond_loopback=not is_loopback(host))
    if listed:
        return listed
    if not is_loopback(host):
        raise RunnerError(
            "invalid_request", "Without [[auth.tokens]] the server only binds loopback.", field="server.host"
        )
    log.info("token in %s", state_dir / "token")
    return [AccessToken(own_token(state_dir), "default", ALL_BUT_RUNNER)]


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
    gateway: bool = False,
) -> int:
    """Run a server until SIGTERM or SIGINT; a second signal stops the drain short.

    ``on_ready`` gets the ready line's object once requests are served. ``gateway``: this is a plane: it has no seats,
    serves the coordination routes, and passes requests on to the runners that use it.

    Returns:
        The exit status, 0 after a drain.

    Raises:
        RunnerError: ``invalid_request`` (another serve has this state directory, settings), ``store_unavailable``.
        OSError: the address cannot be bound.
    """
    replica_id, clock, metrics = Ids().mint("rep"), SystemClock(), Metrics()
    async with AsyncExitStack() as stack:
        lock = StateLock.acquire(state_dir, replica_id)
        stack.callback(lock.release)
        isolation = None if gateway else await isolation_of(settings)
        tokens = access_tokens(settings, state_dir, host, isolation)
        replicas: list[Replica] = []
        store = await open_store(settings, state_dir, clock, _spooling(replicas), metrics, gateway=gateway)
        plane = open_plane(settings, clock, store, gateway=gateway)
        reaped, dead = reap_leftovers(state_dir, store.store_id)
        _warn(settings, isolation, reaped)
        replica = await build(
            settings,
            state_dir=state_dir,
            replica_id=replica_id,
            store=store,
            plane=plane,
            clock=clock,
            providers={} if gateway else None,
            live=None if gateway else open_live(settings),
            live_dir=None if gateway else state_dir / LIVE,
            isolation=isolation,
            metrics=metrics,
            keys=None if gateway else await keys.opened(settings, metrics, stack),
        )
        replicas.append(replica)
        stack.push_async_callback(replica.close)
        await _bury_own(replica, state_dir, dead)
        stop = stop_by_signals()
        site, url = await start_site(_app(replica, settings, tokens, host, gateway=gateway), host, port)
        stack.push_async_callback(stop_site, site)
        stack.push_async_callback(replica.coordinator.drain, settings.turn.drain_seconds)
        stack.callback(_forget_url, state_dir)
        replica.reachable_at(url)
        _note_url(state_dir, url)
        on_ready({"ready": True, "url": url, "replica_id": replica_id})
        await stop.wait()
        log.info("draining")
    return 0


def _spooling(replicas: list[Replica]) -> Spooling:
    """What a replica says about its turns; there is none yet while its store is opened."""

    def may_spool(project: str, session_id: str, turn_id: str) -> bool:
        return bool(replicas) and replicas[0].services.beats.holds(project, session_id, turn_id)

    def granted(project: str, session_id: str, turn_id: str) -> bool | None:
        return replicas[0].services.beats.fenced(project, session_id, turn_id) if replicas else True

    def on_rejected(project: str, session_id: str, turn_id: str) -> None:
        if replicas:
            replicas[0].coordinator.lease_lost(turn_id, LAPSED)

    return Spooling(may_spool, granted, on_rejected)


def _app(replica: Replica, settings: Settings, tokens: list[AccessToken], host: str, *, gateway: bool) -> Application:
    sessions, services = replica.coordinator, replica.services
    if not gateway:
        return build_app(
            sessions,
            settings,
            tokens,
            owners=services.owners,
            bind_host=host,
            mirrors=replica.mirrors,
            metrics=services.metrics,
        )
    return build_gateway(
        sessions,
        settings,
        tokens,
        owners=services.owners,
        plane=replica.plane,
        store=services.store,
        clock=services.clock,
        bind_host=host,
        metrics=services.metrics,
    )


async def _bury_own(replica: Replica, state_dir: Path, dead: list[str]) -> None:
    """What earlier replicas of this directory held is free at once, and their turns have their ending (case M1).

    Where that does not work now, it is tried again in the background: nobody else has what they showed.
    """
    if not replica.plane.shared:
        return
    left = dict.fromkeys([*dead, *left_by(state_dir / LIVE)])
    left.pop(replica.replica_id, None)
    for replica_id in await _buried(replica, state_dir, left):
        replica.services.tasks.spawn(f"bury {replica_id}", _bury_later(replica, state_dir, replica_id))


async def _buried(replica: Replica, state_dir: Path, left: Iterable[str]) -> list[str]:
    """Take over from each; those with whom that did not work."""
    failed = []
    for replica_id in left:
        try:
            await replica.services.owners.bury(ReplicaInfo(replica_id, lock=str(lock_of(state_dir, replica_id))))
        except RunnerError as error:
            log.warning("replica %s is not taken over yet: %s", replica_id, error)
            failed.append(replica_id)
    return failed


async def _bury_later(replica: Replica, state_dir: Path, replica_id: str) -> None:
    failed = [replica_id]
    while failed:
        await asyncio.sleep(BURY_SECONDS)
        failed = await _buried(replica, state_dir, failed)


def _warn(settings: Settings, isolation: Isolation | None, reaped: int) -> None:
    if reaped:
        log.warning("%d processes of an earlier runner were killed", reaped)
    if isolation is not None:
        tell(isolation)
    if settings.leases.url and not is_http(settings) and not settings.store.url:
        log.warning("[store] url is empty: other replicas of [leases] url do not see what is stored here")


def stop_by_signals() -> asyncio.Event:
    """Set by SIGTERM or SIGINT; a second one cancels every task."""
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


def log_to_stderr() -> None:
    """Logs go to stderr: stdout carries the ready line alone."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
