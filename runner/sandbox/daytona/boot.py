"""From a started sandbox to a running agent: files, bridge, link."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from runner.acp.websocket import Address
from runner.clock import Clock
from runner.errors import RunnerError
from runner.rules.daytona import judge
from runner.sandbox.bridge_files import bridge_digest, bridge_files
from runner.sandbox.daytona.names import ROOT, root_of
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Found
from runner.sandbox.port import SandboxSpec
from runner.sandbox.remote import End, RemoteSandbox

BASE_ENV: Final[Mapping[str, str]] = {"LANG": "C.UTF-8", "TERM": "dumb"}
TOKEN_HEADER: Final = "X-Daytona-Preview-Token"
SKIP_WARNING: Final = "X-Daytona-Skip-Preview-Warning"
READY_SECONDS: Final = 20.0
log = logging.getLogger("runner.sandbox.daytona")


@dataclass(frozen=True, slots=True)
class Room:
    """What a look inside told: where session and bridge lie, and the environment that the image gives."""

    root: str
    bridge: str
    has_bridge: bool
    env: Mapping[str, str]


class Booter:
    """Starts agents in sandboxes that run.

    Args:
        service: the vendor.
        clock: of the deadlines.
        moved: paths of this machine, and where the same lies over there.
        python: the interpreter over there.
        baked: the directory of the image where a bridge may lie already; empty: it is always brought along.
        content: digest that an image of ``snapshot build`` should tell; another one is warned of.
        orphan_seconds: how long a bridge waits for its runner, and a runner for its bridge.
    """

    def __init__(
        self,
        service: DaytonaService,
        clock: Clock,
        moved: Mapping[str, str],
        *,
        python: str,
        baked: str,
        content: str,
        orphan_seconds: float,
    ) -> None:
        self._baked, self._content = baked, content
        self._service = service
        self._clock = clock
        self._moved = moved
        self._python = python
        self._orphan_seconds = orphan_seconds

    async def boot(self, found: Found, spec: SandboxSpec, end: End) -> RemoteSandbox:
        """Start the agent of ``spec`` in a sandbox that runs; the caller undoes it when this fails.

        Raises:
            CallFailed: the service refused or was not reached.
            RunnerError: ``harness_start_failed``, ``sandbox_start_failed``.
        """
        room = await self._look_inside(found, spec)
        secret = secrets.token_hex(32)
        secret_file = f"{room.root}/secret-{secrets.token_hex(8)}"
        await self._service.upload(found.id, self._files(spec, room, secret, secret_file), self._left(spec))
        words = [self._python, "-I", f"{room.bridge}/bridge.py", "--secret-file", secret_file]
        words += ["--host", "0.0.0.0", "--orphan-seconds", f"{self._orphan_seconds:g}"]
        session = f"acp-runner-{secrets.token_hex(8)}"
        private = [secret_file, *(f"{room.root}/home/{name}" for name in spec.home_files)]
        command = f"chmod 600 {shlex.join(private)} && exec {shlex.join(words)}"
        line = await self._service.launch(found.id, session, command, min(READY_SECONDS, self._left(spec)))
        try:
            port = int(json.loads(line)["port"])
        except (ValueError, KeyError, TypeError):
            raise RunnerError("sandbox_start_failed", f"The bridge said: {line[:200]}") from None
        sandbox = RemoteSandbox(
            found.name,
            f"{room.root}/workspace",
            Door(self._service, found, port).find,
            secret,
            resume_seconds=self._orphan_seconds,
            end=end,
        )
        argv = [self._placed(word, room.root) for word in spec.argv]
        given = {name: self._placed(value, room.root) for name, value in spec.env.items()}
        own = {"HOME": f"{room.root}/home", "TMPDIR": f"{room.root}/tmp"}
        try:
            await sandbox.begin(argv, {**BASE_ENV, **room.env, **given, **own}, self._left(spec))
        except BaseException:
            sandbox.transport.close()
            await sandbox.transport.aclose()
            raise
        return sandbox

    def _placed(self, text: str, root: str) -> str:
        """A word of a command or a variable's value, as it is over there."""
        for here, there in self._moved.items():
            if text == here or text.startswith(f"{here}/"):
                text = there + text[len(here) :]
        return text.replace(ROOT, root)

    def _left(self, spec: SandboxSpec) -> float:
        return max(1.0, spec.deadline - self._clock.monotonic()) if spec.deadline else READY_SECONDS

    async def _look_inside(self, found: Found, spec: SandboxSpec) -> Room:
        root = await root_of(self._service, found)
        bridges = [f"{place}/bridge-{bridge_digest()}" for place in (self._baked, root) if place]
        folders = [root, *(f"{root}/{name}" for name in ("workspace", "home", "tmp")), bridges[-1]]
        looks = [f"{{ test -f {shlex.quote(bridge)}/complete && echo {n}; }}" for n, bridge in enumerate(bridges)]
        record = shlex.quote(f"{self._baked or root}/content")
        told = f'"$PATH" "$DAYTONA_SANDBOX_ID" "$(cat {record} 2>/dev/null)"'
        command = f"mkdir -p -m 700 {shlex.join(folders)} && printf '%s\\n%s\\n%s\\n' {told}"
        command += f" && {{ {' || '.join(looks)} || echo none; }}"
        code, said = await self._service.execute(found.id, command, min(READY_SECONDS, self._left(spec)))
        lines = said.splitlines()
        if code != 0 or len(lines) < 4:
            raise RunnerError("sandbox_start_failed", f"The sandbox has no room for the agent: {said.strip()[-200:]}")
        env = {"PATH": lines[-4], "DAYTONA_SANDBOX_ID": lines[-3]}
        if self._content and lines[-2] not in ("", self._content):
            log.warning("sandbox %s: its snapshot is another version's: acp-runner snapshot build", found.name)
        there = int(lines[-1]) if lines[-1].isdecimal() else None
        bridge = bridges[-1 if there is None else there]
        return Room(root, bridge, there is not None, {name: value for name, value in env.items() if value})

    def _files(self, spec: SandboxSpec, room: Room, secret: str, secret_file: str) -> dict[str, bytes]:
        """By absolute path; the mark that the bridge is whole comes last."""
        files = {f"{room.root}/workspace/{name}": content for name, content in spec.workspace_files.items()}
        for name, content in spec.home_files.items():
            files[f"{room.root}/home/{name}"] = content.replace(ROOT.encode(), room.root.encode())
        files[secret_file] = secret.encode()
        if not room.has_bridge:
            files |= {f"{room.bridge}/{name}": content for name, content in bridge_files().items()}
            files[f"{room.bridge}/complete"] = b"yes"
        return files


class Door:
    """Finds the bridge again: behind a drop the sandbox may be gone, or its link another one."""

    def __init__(self, service: DaytonaService, found: Found, port: int) -> None:
        self._service = service
        self._found = found
        self._port = port
        self._asked = 0

    async def find(self, refused: bool) -> Address:
        """See ``websocket.Find``."""
        self._asked += 1
        try:
            if self._asked > 1:
                await self._alive()
            url, token = await self._service.preview(self._found.id, self._port)
        except CallFailed as failed:
            if judge(failed.call, failed.failure).action in ("gone", "fail"):
                raise RunnerError("sandbox_lost", f"the sandbox is gone: {failed}") from failed
            raise ConnectionError(str(failed)) from failed
        parts = urlsplit(url)
        scheme = {"https": "wss", "http": "ws"}.get(parts.scheme, parts.scheme)
        return Address(urlunsplit(parts._replace(scheme=scheme)), {TOKEN_HEADER: token, SKIP_WARNING: "true"})

    async def _alive(self) -> None:
        now = await self._service.get(self._found.id)
        if now is None or now.state not in ("started", "unknown"):
            state = now.state if now is not None else "gone"
            raise RunnerError("sandbox_lost", f"the sandbox is {state}")


async def keep_active(service: DaytonaService, identity: str, seconds: float, failed: Callable[[], None]) -> None:
    """Refresh a sandbox's activity for ever; running processes do not count as activity over there."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await service.refresh_activity(identity)
        except CallFailed as error:
            failed()
            log.info("activity of sandbox %s was not refreshed: %s", identity, error)
