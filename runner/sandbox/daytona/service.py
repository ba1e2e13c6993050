"""A Daytona as the provider sees it: plain values in and out, every failure a ``CallFailed``.

The SDK costs 85 MB and more than a second, so it is imported with the first service, never with this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from runner.errors import RunnerError
from runner.rules.daytona import Call, Failure, trouble
from runner.sandbox.daytona.snapshots import Snapshots, word

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

T = TypeVar("T")
log = logging.getLogger("runner.sandbox.daytona")
READ_SECONDS: Final = 15.0
POLL_SECONDS: Final = 0.05
INSTALL: Final = "pip install 'acp-runner[daytona]'"


async def open_service(api_url: str, api_key: str, target: str) -> DaytonaService:
    """Import the SDK in a thread, for it takes more than a second, and make the client.

    Raises:
        RunnerError: ``invalid_request``: the package is missing. ``sandbox_start_failed``: it makes no client of this.
    """
    await asyncio.to_thread(_load)
    try:
        return DaytonaService(api_url, api_key, target)
    except Exception as error:
        raise RunnerError("sandbox_start_failed", f"There is no client of Daytona: {error}") from error


def _load() -> ModuleType:
    try:
        sdk = import_module("daytona")
        _ = sdk.AsyncDaytona
    except ImportError:
        raise RunnerError("invalid_request", f"The Daytona provider needs a package: {INSTALL}") from None
    return sdk


class CallFailed(Exception):
    """A call to the service failed; ``failure`` is for ``rules.daytona.judge``."""

    def __init__(self, call: Call, failure: Failure) -> None:
        super().__init__(failure.message or f"{failure.kind} {failure.status or ''}".strip())
        self.call: Call = call
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Plan:
    """What a new sandbox is made with; intervals in minutes, none of them 0.

    Attributes:
        name, labels: chosen before the call, so that a lost answer loses nothing.
        secrets: variable to the name of a stored secret.
    """

    name: str
    labels: Mapping[str, str]
    snapshot: str
    auto_stop: int
    auto_delete: int
    ttl: int
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """A sandbox as the service shows it; ages in seconds."""

    id: str
    name: str
    state: str
    desired: str
    recoverable: bool
    labels: Mapping[str, str]
    age_seconds: float
    silent_seconds: float
    reason: str


class DaytonaService:
    """One client for the life of the runner: the SDK's objects die with theirs.

    Args:
        api_url, api_key, target: all given, for what is missing the SDK reads from ``.env`` in the working directory.

    Attributes:
        snapshots: the calls about snapshots.
        trouble: why nothing is to be had from the service, as its last answer showed; None when all is well.
    """

    def __init__(self, api_url: str, api_key: str, target: str) -> None:
        self._sdk = _load()
        config = self._sdk.DaytonaConfig(api_url=api_url, api_key=api_key, target=target)
        self._client: AsyncDaytona = self._sdk.AsyncDaytona(config)
        self._boxes: dict[str, AsyncSandbox] = {}
        self.snapshots = Snapshots(self._sdk, self._client, self._call)
        self.trouble: str | None = None

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()  # type: ignore[no-untyped-call]

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    async def get(self, name: str) -> Found | None:
        """The sandbox of this name or id; None when there is none."""
        try:
            return self._found(await self._call("read", self._client.get(name, request_timeout=READ_SECONDS)))
        except CallFailed as error:
            if error.failure.status == 404:
                return None
            raise

    async def labelled(self, labels: Mapping[str, str]) -> list[Found]:
        """Every sandbox with these labels."""
        query = self._sdk.ListSandboxesQuery(labels=dict(labels))

        async def pages() -> list[Found]:
            return [self._found(box) async for box in self._client.list(query, request_timeout=READ_SECONDS)]

        return await self._call("read", pages())

    async def create(self, plan: Plan, seconds: float) -> Found:
        """Create and wait until it is started."""
        params = self._sdk.CreateSandboxFromSnapshotParams(
            name=plan.name,
            labels=dict(plan.labels),
            snapshot=plan.snapshot or None,
            public=False,
            auto_stop_interval=plan.auto_stop,
            auto_delete_interval=plan.auto_delete,
            ttl_minutes=plan.ttl,
            secrets=dict(plan.secrets) or None,
        )
        return self._found(await self._call("create", self._client.create(params, timeout=seconds)))

    async def start(self, identity: str, seconds: float) -> None:
        """Start a sleeping one and wait."""
        await self._on(identity, "start", lambda box: box.start(timeout=seconds))

    async def recover(self, identity: str, seconds: float) -> None:
        """Let the service repair an errored one and wait."""
        await self._on(identity, "start", lambda box: box.recover(timeout=seconds))

    async def stop(self, identity: str, seconds: float) -> None:
        """Stop and wait; the disk stays."""
        await self._on(identity, "stop", lambda box: box.stop(timeout=seconds))

    async def delete(self, identity: str) -> None:
        """Ask for the deletion; who needs to know looks afterwards."""
        await self._on(identity, "delete", lambda box: box.delete(timeout=READ_SECONDS))
        self._boxes.pop(identity, None)

    async def refresh_activity(self, identity: str) -> None:
        """Tell the service that it is used."""
        await self._on(identity, "read", lambda box: box.refresh_activity(request_timeout=READ_SECONDS))

    # -- inside ------------------------------------------------------------------------------------------------------

    async def home(self, identity: str) -> str:
        """The user's home over there."""
        return str(await self._on(identity, "read", lambda box: box.get_user_home_dir()))

    async def preview(self, identity: str, port: int) -> tuple[str, str]:
        """URL and token by which a port is reached; the URL is opaque."""
        link = await self._on(identity, "read", lambda box: box.get_preview_link(port, request_timeout=READ_SECONDS))
        return str(link.url), str(link.token)

    async def upload(self, identity: str, files: Mapping[str, bytes | Path], seconds: float) -> None:
        """Write files by absolute path, also those of this machine; what is there is replaced: it may be done twice."""
        given = {path: content if isinstance(content, bytes) else str(content) for path, content in files.items()}
        uploads = [self._sdk.FileUpload(source=content, destination=path) for path, content in given.items()]
        await self._on(identity, "read", lambda box: box.fs.upload_files(uploads, timeout=max(1, int(seconds))))

    async def download(self, identity: str, path: str, seconds: float) -> bytes:
        """A file by its absolute path, whole."""
        return bytes(await self._on(identity, "read", lambda box: box.fs.download_file(path, max(1, int(seconds)))))

    async def fetch(self, identity: str, path: str, to: Path, seconds: float) -> None:
        """As ``download``, into a file of this machine."""
        await self._on(identity, "read", lambda box: box.fs.download_file(path, str(to), max(1, int(seconds))))

    async def discard(self, identity: str, path: str) -> None:
        """Delete a file."""
        await self._on(identity, "read", lambda box: box.fs.delete_file(path, request_timeout=READ_SECONDS))

    async def execute(self, identity: str, command: str, seconds: float) -> tuple[int, str]:
        """Run a shell command to its end: exit code, and stdout with stderr."""
        done = await self._on(identity, "exec", lambda box: box.process.exec(command, timeout=max(1, int(seconds))))
        return int(done.exit_code), str(done.result)

    async def launch(self, identity: str, session: str, command: str, seconds: float) -> str:
        """Start a command that goes on, and wait for its first line on stdout.

        Raises:
            CallFailed: ``timeout`` with what it said on stderr, when there is none in time.
        """
        request = self._sdk.SessionExecuteRequest(command=command, run_async=True)
        await self._on(identity, "exec", lambda box: box.process.create_session(session))
        begun = await self._on(identity, "exec", lambda box: box.process.execute_session_command(session, request))
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            logs = await self._on(
                identity, "read", lambda box: box.process.get_session_command_logs(session, begun.cmd_id)
            )
            line, end, _ = (logs.stdout or "").partition("\n")
            if end:
                return line
            if asyncio.get_running_loop().time() >= deadline:
                said = (logs.stderr or logs.output or "").strip()[-500:]
                raise CallFailed("exec", Failure("timeout", message=f"it did not come up: {said}"))
            await asyncio.sleep(POLL_SECONDS)

    # -- secrets -----------------------------------------------------------------------------------------------------

    async def keep_secret(self, name: str, value: str, hosts: list[str]) -> str:
        """Store a secret, or its new value, that may go to ``hosts`` only; the placeholder that stands for it."""
        for known, identity in await self._secrets(name):
            if known == name:
                change = self._sdk.UpdateSecretParams(value=value, hosts=hosts)
                return str((await self._call("read", self._client.secret.update(identity, change))).placeholder)
        params = self._sdk.CreateSecretParams(name=name, value=value, hosts=hosts)
        return str((await self._call("create", self._client.secret.create(params))).placeholder)

    async def attach_secrets(self, identity: str, stored: Mapping[str, str]) -> None:
        """A sandbox has exactly these: variable to name."""
        await self._on(identity, "read", lambda box: box.update_secrets(dict(stored)))

    async def drop_secrets(self, beginning: str) -> None:
        """Delete every secret whose name begins so."""
        for name, identity in await self._secrets(beginning):
            if name.startswith(beginning):
                await self._call("delete", self._client.secret.delete(identity))

    async def _secrets(self, part: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        cursor: str | None = None
        while True:
            page = await self._call("read", self._client.secret.list(cursor=cursor, name=part))
            found += [(secret.name, secret.id) for secret in page.items]
            cursor = page.next_cursor
            if not cursor:
                return found

    # -- the border --------------------------------------------------------------------------------------------------

    async def _on(self, identity: str, call: Call, use: Callable[[AsyncSandbox], Awaitable[T]]) -> T:
        box = self._boxes.get(identity)
        if box is None:
            self._found(box := await self._call("read", self._client.get(identity, request_timeout=READ_SECONDS)))
        return await self._call(call, use(box))

    async def _call(self, call: Call, work: Awaitable[T]) -> T:
        try:
            result = await work
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                raise
            self.trouble = trouble(failure)
            raise CallFailed(call, failure) from error
        self.trouble = None
        return result

    def _found(self, box: AsyncSandbox) -> Found:
        self._boxes[box.id] = box
        return Found(
            id=box.id,
            name=box.name,
            state=word(box.state),
            desired=word(box.desired_state),
            recoverable=bool(box.recoverable),
            labels=dict(box.labels),
            age_seconds=_since(box.created_at),
            silent_seconds=_since(box.updated_at),
            reason=box.error_reason or "",
        )


async def quiet(look: Awaitable[Found | None]) -> Found | None:
    """What a look shows; None where it fails."""
    try:
        return await look
    except CallFailed as failed:
        log.info("a look at a sandbox failed: %s", failed)
        return None


def failure_of(error: Exception) -> Failure | None:
    """The vendor's exception in our words; None when it is not the service's doing."""
    names = {kind.__name__ for kind in type(error).__mro__}
    message = str(getattr(error, "message", "") or error)
    status = getattr(error, "status_code", None) or getattr(error, "status", None)
    if "DaytonaQueueTimeoutError" in names:
        return Failure("queue", message=message)
    if "DaytonaSpotEvictedError" in names:
        return Failure("spot", message=message)
    if "DaytonaConnectionError" in names or "ClientError" in names or isinstance(error, OSError):
        return Failure("connection", message=message)
    if "DaytonaTimeoutError" in names and status is None:
        return Failure("timeout", message=message)
    if "DaytonaError" in names or "ApiException" in names:
        code, source = getattr(error, "code", None), getattr(error, "source", None)
        after = _retry_after(getattr(error, "headers", None) or {})
        return Failure("http", status if isinstance(status, int) else None, code, source, message, after)
    return None


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    for name, value in headers.items():
        if name.lower().startswith("retry-after"):
            try:
                return float(value)
            except (TypeError, ValueError):
                continue
    return None


def _since(instant: str | None) -> float:
    if not instant:
        return 0.0
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(instant)).total_seconds())
    except (TypeError, ValueError):
        return 0.0
