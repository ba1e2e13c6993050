"""Which sandbox providers the settings ask for, and who sees to what they left."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from runner.assembly.choices import SQLITE
from runner.assembly.snapshot_image import content_of
from runner.clock import Clock
from runner.config import Settings
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.resources import resource_path
from runner.sandbox.daytona.provider import DaytonaProvider
from runner.sandbox.daytona.service import INSTALL, CallFailed, DaytonaService, open_service
from runner.sandbox.daytona.terms import Terms
from runner.sandbox.isolation import Isolation
from runner.sandbox.local import LocalProvider
from runner.sandbox.port import Provider
from runner.session.keys import KeyBook
from runner.store.port import Store

API_URL: Final = "https://app.daytona.io/api"
TARGET: Final = "us"
AUTO_STOP_SECONDS: Final = 900.0
REAP_SECONDS: Final = 60.0
log = logging.getLogger("runner")


def all_of(
    settings: Settings,
    state_dir: Path,
    store: Store,
    replica_id: str,
    clock: Clock,
    isolation: Isolation,
    keys: KeyBook | None = None,
) -> dict[str, Provider]:
    """The local provider and those that the settings offer besides; its cells always reach the proxy of ``keys``."""
    local = LocalProvider(state_dir, store.store_id, replica_id, clock=clock, bounds=isolation)
    local.own_ports = lambda: (keys.port,) if keys is not None else ()
    local.secret_files = secret_files(settings)
    return {"local": local, **daytona(settings, state_dir, store.store_id, replica_id, clock)}


def secret_files(settings: Settings) -> tuple[Path, ...]:
    """Files that no agent may read, though they lie where a workspace may be: settings with a secret, and the store."""
    found = []
    if settings.file is not None and settings.redacted() != settings.model_dump(mode="json"):
        found.append(settings.file)
    if settings.store.url.startswith(SQLITE):
        path = settings.store.url.removeprefix(SQLITE)
        found += [Path(path + ending) for ending in ("", "-wal", "-shm", "-journal")]
    return tuple(found)


def connect(settings: Settings) -> Callable[[], Awaitable[DaytonaService]]:
    """What opens a client of the Daytona of the settings; nothing is asked of it yet.

    Raises:
        RunnerError: ``invalid_request``: there is no key; a missing package is told by the opening.
    """
    given = settings.daytona
    key = given.api_key.get_secret_value() if given.api_key is not None else ""
    if not key:
        text = "Daytona is not set up here: set [daytona] api_key or ACP_RUNNER_DAYTONA__API_KEY."
        raise RunnerError("invalid_request", text, field="daytona.api_key")

    async def opened() -> DaytonaService:
        return await open_service(given.api_url or API_URL, key, given.target or TARGET)

    return opened


def daytona(settings: Settings, state_dir: Path, store_id: str, replica_id: str, clock: Clock) -> dict[str, Provider]:
    """The Daytona provider where ``[daytona] api_key`` is set; its package is looked for, and imported at first use."""
    given = settings.daytona
    if given.api_key is None or not given.api_key.get_secret_value():
        return {}
    missing = INSTALL if find_spec("daytona") is None else None
    if missing:
        log.warning("[daytona] needs a package: %s", missing)
    opened = connect(settings)
    known = Catalogue.build(settings.harness, state_dir, base_dir=settings.base_dir)
    windows = settings.pool.windows("daytona")
    longest = max(windows.idle_seconds, windows.approval_seconds, windows.stopped_seconds, given.orphan_seconds)
    terms = Terms(
        snapshot=given.snapshot,
        snapshots=given.snapshots,
        root=given.root,
        content=content_of(given.root, known) if given.root else "",
        capacity=given.max_running,
        plain_secrets=given.plain_secrets,
        secret_hosts=tuple(given.secret_hosts),
        disk_seconds=windows.disk_seconds,
        orphan_seconds=given.orphan_seconds,
        auto_stop_seconds=max(AUTO_STOP_SECONDS, 2 * longest),
        python=given.python,
        moved=moved(state_dir, given.root, given.python),
    )
    provider = DaytonaProvider(opened, terms, store_id, replica_id, clock=clock, install_command=missing)
    return {"daytona": provider}


def moved(state_dir: Path, root: str, python: str) -> dict[str, str]:
    """Where the things of this machine that an agent's command names lie in a snapshot; nothing without a root."""
    if not root:
        return {}
    places = {
        str(state_dir / "harnesses"): f"{root}/harnesses",
        str(resource_path("sandboxes", "inside")): f"{root}/inside",
        sys.executable: python,
    }
    node = shutil.which("node")
    return places | ({node: "node"} if node else {})


class Reaper:
    """The sweep's job: each minute, what a provider has and the store does not know goes (DESIGN 3.10).

    Args:
        elsewhere: whether another replica that lives has a session (project, session).
    """

    def __init__(
        self,
        provider: DaytonaProvider,
        store: Store,
        clock: Clock,
        elsewhere: Callable[[str, str], Awaitable[object | None]],
    ) -> None:
        self._provider = provider
        self._store = store
        self._clock = clock
        self._elsewhere, provider.elsewhere = elsewhere, self._owned
        self._next = 0.0

    async def sweep(self) -> None:
        """Look, at most once a minute."""
        now = self._clock.monotonic()
        if now >= self._next:
            self._next = now + REAP_SECONDS
            try:
                await self._provider.reap(self._known, self._owned)
            except CallFailed as failed:
                log.warning("what Daytona has was not looked at: %s", failed)

    async def _known(self, project: str, session_id: str) -> bool:
        row = await self._store.session(project, session_id)
        return row is not None and row.ended_at is None

    async def _owned(self, project: str, session_id: str) -> bool:
        return await self._elsewhere(project, session_id) is not None
