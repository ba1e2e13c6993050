"""Finding a server: by the environment, else by the state directory; or starting one for a single call."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from runner.client import ApiError, Client, is_loopback_url
from runner.errors import RunnerError
from runner.resources import state_dir

READY_SECONDS: Final = 60.0
STOP_SECONDS: Final = 60.0
CLOSE_SECONDS: Final = 5.0
TAIL_BYTES: Final = 2000
OWN_LOG: Final = "prompt-server.log"


@dataclass(frozen=True, slots=True)
class Place:
    """A server that may answer."""

    url: str
    token: str | None = field(repr=False)

    def client(self) -> Client:
        """A client of it."""
        return Client(self.url, self.token)


def chosen_state_dir(named: Path | None, environ: Mapping[str, str]) -> Path:
    """``--state-dir``, else as the server finds it; absolute."""
    return named.expanduser().absolute() if named is not None else state_dir(environ)


def find(named: Path | None, environ: Mapping[str, str]) -> Place | None:
    """The server to ask, or None when none is known.

    ``--state-dir`` wins over ``ACP_RUNNER_URL``, which wins over the default state directory. The local token is
    never sent beyond loopback.
    """
    directory = chosen_state_dir(named, environ)
    url = environ.get("ACP_RUNNER_URL")
    if url and named is None:
        local = _token(directory) if is_loopback_url(url) else None
        return Place(url, environ.get("ACP_RUNNER_TOKEN") or local)
    try:
        told = json.loads((directory / "server.json").read_text(encoding="utf-8"))
        url, pid = str(told["url"]), int(told["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not _alive(pid):
        return None
    return Place(url, environ.get("ACP_RUNNER_TOKEN") or _token(directory))


def require(named: Path | None) -> Place:
    """The server to ask.

    Raises:
        ApiError: ``unreachable`` with the command that starts one.
    """
    place = find(named, os.environ)
    if place is None:
        directory = chosen_state_dir(named, os.environ)
        message = f"No server is running on {directory}. Start one with: acp-runner serve"
        raise ApiError("unreachable", 0, message)
    return place


async def answers(place: Place) -> bool:
    """Whether a server is there."""
    try:
        async with place.client() as client:
            await client.health()
    except ApiError as error:
        return error.code != "unreachable"
    return True


@asynccontextmanager
async def connected(
    named: Path | None, config: Path | None, environ: Mapping[str, str], waiting: Callable[[str], None]
) -> AsyncIterator[Client]:
    """A client of the server to ask; when none runs, of one that runs for the time of the context.

    Raises:
        RunnerError: as ``own_server``.
    """
    async with AsyncExitStack() as stack:
        place = find(named, environ)
        by_name = named is None and bool(environ.get("ACP_RUNNER_URL"))
        if place is None or not (by_name or await answers(place)):
            waiting("starting a server for this call")
            place = await stack.enter_async_context(own_server(chosen_state_dir(named, environ), config))
        yield await stack.enter_async_context(place.client())


@asynccontextmanager
async def own_server(directory: Path, config: Path | None) -> AsyncIterator[Place]:
    """A server on ``directory`` for the time of the context; it ends with this process, however that ends.

    Raises:
        RunnerError: ``internal`` with the end of its log when it does not become ready within 60 s.
    """
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = ["-m", "runner.cli.main", "serve", "--port", "0", "--state-dir", str(directory), "--with-parent"]
    argv += ["--config", str(config)] if config else []
    with (logs / OWN_LOG).open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        url = await _ready_url(process, logs / OWN_LOG)
        yield Place(url, _token(directory))
    finally:
        await _stopped(process)


async def _ready_url(process: asyncio.subprocess.Process, log: Path) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_SECONDS):
            ready = json.loads(await process.stdout.readline())
            return str(ready["url"])
    except (TimeoutError, ValueError, KeyError, TypeError):
        message = f"The server did not become ready: {_last_line(log)} (log: {log})"
        raise RunnerError("internal", message) from None


def _last_line(log: Path) -> str:
    tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
    return tail.splitlines()[-1] if tail else "it said nothing"


async def _stopped(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, which drains; SIGKILL when that takes too long."""
    for seconds, stop in ((STOP_SECONDS, process.terminate), (CLOSE_SECONDS, process.kill)):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()


def _token(directory: Path) -> str | None:
    try:
        return (directory / "token").read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
