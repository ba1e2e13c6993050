"""Runs a worker of the record stream until it is told to stop; retention, once (DESIGN 3.9, 5)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

from runner.assembly import gauges
from runner.assembly.choices import STORE_FILE, is_http, open_database, open_stream
from runner.assembly.serving import access_tokens, stop_by_signals
from runner.clock import SystemClock
from runner.config import Settings
from runner.errors import RunnerError
from runner.ids import valid_id
from runner.metrics import Metrics
from runner.sandbox.statelock import hold
from runner.server.app import start_site, stop_site
from runner.server.exposition import build_exposition
from runner.store.port import Store
from runner.store.retention import Retention, run_once
from runner.store.sqlite import SqliteStore
from runner.store.stream.worker import Worker
from runner.tasks import Tasks

log = logging.getLogger("runner")
LOOPBACK: Final = "127.0.0.1"
WORKER_SECONDS: Final = 5.0
"""No turn waits for a worker: a large batch may take its time."""
STORE_SECONDS: Final = 2.0


def default_name(state_dir: Path) -> str:
    """A worker's name: the same whenever it starts on this host with this state directory."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]
    return f"{host}-{hashlib.blake2b(os.fsencode(state_dir), digest_size=4).hexdigest()}"


async def work(
    settings: Settings,
    *,
    state_dir: Path,
    name: str | None,
    reclaim: bool,
    on_ready: Callable[[dict[str, Any]], None],
    host: str = LOOPBACK,
    port: int | None = None,
) -> int:
    """Move records from ``[records] stream`` to ``[store] url`` until SIGTERM or SIGINT; then finish what is in hand.

    Args:
        settings: with a stream and a shared store.
        state_dir: holds the lock of the worker's name; a server may serve it meanwhile.
        name: of the consumer, as an id; None: ``default_name``.
        reclaim: take over what other workers hold for too long.
        on_ready: gets the ready line's object once it is at work.
        host, port: where ``GET /metrics`` is served; port 0 chooses one, None: it is not served.

    Returns:
        The exit status, 0.

    Raises:
        RunnerError: ``invalid_request``: the name is taken or no id, settings. A store that is away is waited for.
        OSError: the address cannot be bound.
    """
    name, records, metrics = name or default_name(state_dir), settings.records, Metrics()
    if not valid_id(name):
        raise RunnerError("invalid_request", "A worker's name must match [A-Za-z0-9_-]{1,128}.", field="name")
    async with AsyncExitStack() as stack:
        stack.callback(os.close, _lock(state_dir, name))
        stream = open_stream(settings, WORKER_SECONDS)
        stack.push_async_callback(stream.close)
        stop = stop_by_signals()
        store = await _opened(settings, metrics, stop)
        if store is None:
            return 0
        stack.push_async_callback(store.close)
        worker = Worker(
            stream,
            store,
            SystemClock(),
            name,
            max_deliveries=records.max_deliveries,
            reclaim_idle_seconds=records.reclaim_idle_seconds if reclaim else None,
        )
        gauges.read_worker(metrics, worker)
        tasks = Tasks("worker")
        stack.push_async_callback(tasks.close)
        if records.retention_days > 0:
            _keep_to_days(tasks, store, records.retention_days, metrics)
        served = {} if port is None else await _serve_metrics(stack, settings, state_dir, metrics, host, port)
        working = asyncio.create_task(worker.run(), name="worker")
        on_ready({"ready": True, "worker": name, **served})
        await stop.wait()
        await _finish(worker, name, working)
    return 0


async def _finish(worker: Worker, name: str, working: asyncio.Task[None]) -> None:
    log.info("worker %s finishes what is in hand", name)
    worker.stop()
    await working
    log.info("worker %s: %s", name, worker.counts)


async def _opened(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> Store | None:
    """The store, as soon as it is there; None when it is time to stop before. Said once: whoever supervises sees it."""
    told = False
    while not stop.is_set():
        try:
            store = await open_database(settings, metrics=metrics)
            if told:
                log.warning("records go on")
            return store
        except RunnerError as error:
            if error.code != "store_unavailable":
                raise
            if not told:
                log.error("records wait: %s", error.message)
            told = True
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), STORE_SECONDS)
    return None


def _keep_to_days(tasks: Tasks, store: Store, days: int, metrics: Metrics) -> None:
    retention = Retention(store, SystemClock(), days)
    gauges.read_retention(metrics, retention)
    tasks.spawn("retention", retention.run())


async def _serve_metrics(
    stack: AsyncExitStack, settings: Settings, state_dir: Path, metrics: Metrics, host: str, port: int
) -> dict[str, Any]:
    tokens = access_tokens(settings, state_dir, host)
    app = build_exposition(metrics, tokens, bind_host=host, hosts=settings.server.allowed_hosts)
    site, url = await start_site(app, host, port)
    stack.push_async_callback(stop_site, site)
    return {"url": url}


async def retain(settings: Settings, *, state_dir: Path, dry_run: bool) -> dict[str, Any]:
    """Delete once what is older than ``[records] retention_days``, beside whoever uses the store; what that was.

    Raises:
        RunnerError: ``invalid_request``: the store is a plane's, or there is none; ``store_unavailable``.
    """
    store = await _own_store(settings, state_dir)
    try:
        done = await run_once(store, SystemClock(), settings.records.retention_days, dry_run)
    finally:
        await store.close()
    return done.as_json()


async def _own_store(settings: Settings, state_dir: Path) -> Store:
    if settings.store.url:
        return await open_database(settings)
    if is_http(settings):
        raise RunnerError("invalid_request", "The store is the plane's: run this on the plane's machine.", field="url")
    path = state_dir / STORE_FILE
    if not path.exists():
        raise RunnerError("invalid_request", f"There is no store in {state_dir}.", field="state_dir")
    return await SqliteStore.open(path)


def _lock(state_dir: Path, name: str) -> int:
    """Of the name: two workers of one name would deliver each other's entries again."""
    path = state_dir / "workers" / f"{name}.lock"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = hold(path)
    except OSError as error:
        raise RunnerError("invalid_request", f"The state directory {state_dir} cannot be used: {error}.") from error
    if lock is None:
        text = f"Another worker {name} runs on {state_dir}; give this one a --name of its own."
        raise RunnerError("invalid_request", text, field="name")
    return lock
