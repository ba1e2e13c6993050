"""What every provider must keep, checked through the port alone: for ``doctor`` and for the tests (DESIGN 3.10)."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from runner.acp.transport import ExitInfo
from runner.errors import RunnerError
from runner.resources import resource_path
from runner.sandbox.census import MARKER, scan
from runner.sandbox.port import Provider, Sandbox, SandboxSpec

PROJECT: Final = "selfcheck"
STEP_SECONDS: Final = 20.0
START_SECONDS: Final = 120.0
KILL_SECONDS: Final = 2.0
ALLOWED: Final = frozenset({"PATH", "HOME", "TMPDIR", "LANG", "TERM", MARKER, "SELFCHECK"})
OF_INIT: Final = frozenset({"PATH", "LANG", "PWD", MARKER})
OF_SERVICE: Final = frozenset({"DAYTONA_SANDBOX_ID"})
_GIVEN: Final = "given/probe.txt"
_PRIVATE: Final = ".config/probe.txt"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold: whether it did, and what was found."""

    name: str
    ok: bool
    detail: str = ""


class _Probe:
    """Talks to ``sandboxes/inside/probe.py`` over a sandbox's transport."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._transport = sandbox.transport
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._unread = b""
        self.stderr = b""
        self.exits: list[ExitInfo] = []
        self._transport.connect(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._lines.put_nowait(line)

    def stderr_received(self, data: bytes) -> None:
        self.stderr = (self.stderr + data)[-1000:]

    def eof_received(self) -> None:
        self._lines.put_nowait(None)

    def exited(self, info: ExitInfo) -> None:
        self.exits.append(info)

    def writable(self) -> None:
        """Requests are small."""

    async def ask(self, do: str, **members: Any) -> dict[str, Any]:
        """One request, one answer."""
        self._transport.send(json.dumps({"do": do, **members}).encode() + b"\n")
        async with asyncio.timeout(STEP_SECONDS):
            line = await self._lines.get()
        if line is None:
            raise EOFError(self.stderr.decode("utf-8", "replace").strip() or "the probe ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Run:
    """One self-check under way; each step adds its checks."""

    def __init__(self, provider: Provider, added: Collection[str]) -> None:
        self.provider = provider
        self.local = provider.name == "local"
        self.allowed = (ALLOWED if self.local else ALLOWED - {MARKER} | OF_SERVICE) | {*added}
        self.session = f"check-{secrets.token_hex(6)}"
        self.checks: list[Check] = []
        self._marker = ""

    def add(self, name: str, ok: bool, detail: Any = "") -> None:
        self.checks.append(Check(name, bool(ok), str(detail)))

    def spec(self, seat: str, **changes: Any) -> SandboxSpec:
        source = resource_path("sandboxes", "inside", "probe.py").read_bytes()
        members: dict[str, Any] = {
            "argv": (sys.executable if self.local else "python3", "-I", "-S", "probe.py"),
            "env": {"SELFCHECK": "1"},
            "home_files": {_PRIVATE: b"private"},
            "workspace_files": {"probe.py": source, _GIVEN: b"given"},
            "deadline": asyncio.get_running_loop().time() + START_SECONDS,
        }
        return SandboxSpec(PROJECT, self.session, f"{self.session}-{seat}", **{**members, **changes})

    async def refusals(self) -> None:
        """Starts that must fail, each for its own reason."""
        away: Mapping[str, bytes] = {"../outside.txt": b""}
        await self._refused("a file that leaves the workspace", "invalid_request", workspace_files=away)
        await self._refused("a command that is not there", "harness_start_failed", argv=("/nonexistent/agent",))
        await self._refused("a deadline that has passed", "sandbox_start_failed", deadline=0.001)

    async def _refused(self, what: str, code: str, **changes: Any) -> None:
        try:
            sandbox = await self.provider.start(self.spec("refused", **changes))
        except RunnerError as error:
            self.add(f"refuses {what}", error.code == code, f"{error.code}: {error.message}")
        else:
            await sandbox.destroy(0.0)
            self.add(f"refuses {what}", False, "it started")

    async def inside(self) -> None:
        """One sandbox from start to proof."""
        sandbox = await self.provider.start(self.spec("main"))
        try:
            probe = _Probe(sandbox)
            await self._look(sandbox, probe)
            await self._walls(sandbox, probe)
            await probe.ask("helper")
            await self._turn(sandbox, probe, "first turn")
            await self._turn(sandbox, probe, "later turn")
            await probe.ask("hostile")
        finally:
            await self._end(sandbox, probe)

    async def _look(self, sandbox: Sandbox, probe: _Probe) -> None:
        seen = await probe.ask("look", files=[_GIVEN, f"~/{_PRIVATE}"], workspace=sandbox.workspace)
        environ = seen["environ"]
        self._marker = environ.get(MARKER, "")
        names = set(seen["names"] or environ)
        other = sorted(names ^ self.allowed)
        self.add("the agent's environment is the allow-list", not other, other or "exact")
        parent = set(seen["parent_names"] or ())
        beyond = sorted(parent - OF_INIT if self.local else parent - OF_INIT - OF_SERVICE)
        self.add("its parent's environment holds nothing else", not beyond, beyond or "exact")
        self.add("only standard streams are open", set(seen["descriptors"]) == {0, 1, 2}, seen["descriptors"])
        self.add("it works in the workspace", seen["in_workspace"], seen["cwd"])
        for what in ("home", "tmp"):
            path, mode, writable = seen[what]
            inside = writable and mode == 0o700 and path != os.environ.get("HOME")
            self.add(f"{what} is private", inside, f"{path} {mode or 0:o}")
        files = seen["files"]
        self.add("given files are there", (files[_GIVEN] or [""])[0] == "given", files[_GIVEN])
        self.add("home files are private", files[f"~/{_PRIVATE}"] == ["private", 0o600], files[f"~/{_PRIVATE}"])
        told = await probe.ask("write", path="written.txt", text="written")
        self.add("the workspace can be written", told["read"] == "written")

    async def _walls(self, sandbox: Sandbox, probe: _Probe) -> None:
        """What an isolated sandbox on this machine must not get at: its neighbour, the runner, the system."""
        if not self.local or sandbox.isolation not in ("cell", "landlock"):
            return
        mine, other = (self.provider.paths(PROJECT, name, None) for name in (self.session, f"{self.session}-other"))
        neighbour = await self.provider.start(replace(self.spec("other"), session_id=f"{self.session}-other"))
        runners = mine.workspace.parents[2] / f".{self.session}"
        try:
            runners.write_text("of the runner")
            files = [other.workspace / _GIVEN, other.home / _PRIVATE, runners, f"/proc/{os.getpid()}/environ"]
            if sandbox.isolation == "landlock":
                files.append(f"/proc/{neighbour.agent_pid}/environ")
            told = await probe.ask(
                "reach",
                read=[str(path) for path in (*files, "/etc/shadow")],
                list=[str(path) for path in (other.workspace, other.home, other.home.parent)],
                write=["/", "/usr", "/etc", "/usr/local/bin"],
                signal=[os.getpid(), neighbour.agent_pid] if sandbox.isolation == "landlock" else [],
            )
        finally:
            runners.unlink(missing_ok=True)
            await neighbour.destroy(0.0)
            await self.provider.remove(PROJECT, f"{self.session}-other")
        reached = [*told["read"], *told["list"]]
        self.add("a neighbour's and the runner's files and environment are out of reach", not reached, reached)
        self.add("nothing but its own can be written", not told["write"], told["write"])
        self.add("nobody outside can be signalled", not told["signal"], told["signal"])
        if sandbox.isolation == "cell":
            self.add("it has no capabilities", int(told["capabilities"], 16) == 0, told["capabilities"])
            self.add("it sees its own processes alone", told["init"] == 1 and len(told["pids"]) <= 4, told["pids"])

    async def _turn(self, sandbox: Sandbox, probe: _Probe, turn: str) -> None:
        await sandbox.mark(turn).set(STEP_SECONDS)
        before = (await probe.ask("look"))["pid"]
        pids = (await probe.ask("hostile"))["pids"]
        reaped = await sandbox.kill_turn(turn, KILL_SECONDS)
        enough = reaped.killed >= len(pids) and not reaped.survivors
        self.add(f"{turn}: its processes are killed", enough, f"{reaped.killed}, survivors {reaped.survivors}")
        left = (await probe.ask("alive", pids=pids))["left"]
        self.add(f"{turn}: none is left", len(pids) == 5 and not left, f"{len(pids)} started, left: {left}")
        pong = (await probe.ask("ping"))["answer"]
        self.add(f"{turn}: the agent's helper lives", pong == "pong", pong)
        after = (await probe.ask("look"))["pid"]
        self.add(f"{turn}: the agent lives", before == after, f"pid {before}, then {after}")

    async def _end(self, sandbox: Sandbox, probe: _Probe) -> None:
        gone = await sandbox.destroy(0.2, 5.0)
        self.add("the teardown is proven", gone.proven, gone.proof or f"survivors {gone.survivors}")
        self.add("a second teardown says the same", await sandbox.destroy() == gone)
        await asyncio.sleep(0)
        self.add("the agent's end was told once", len(probe.exits) == 1, "; ".join(map(str, probe.exits)))
        if self.local and self._marker:
            left = scan(self._marker)
            self.add("the census is zero", not left, [info.command for info in left] or "nobody")

    async def cleaned(self) -> None:
        """Nothing of the session stays."""
        await self.provider.remove(PROJECT, self.session)
        if self.local:
            paths = self.provider.paths(PROJECT, self.session, None)
            left = [str(path) for path in (paths.workspace, paths.home, paths.tmp) if path.exists()]
            self.add("workspace and home can be removed", not left, left or "removed")


async def check(provider: Provider, added: Collection[str] = ()) -> list[Check]:
    """Run every check against a provider; takes about a second on this machine.

    Args:
        provider: what is checked.
        added: names of variables that its settings give every agent.

    Returns:
        What was checked, in order. A step that could not be carried out is a failed check with its reason; later
        steps that need no sandbox still run. Nothing is left behind unless a check says so.
    """
    run = _Run(provider, added)
    for name, step in (("refusals", run.refusals), ("inside", run.inside), ("clean-up", run.cleaned)):
        try:
            await step()
        except RunnerError as error:
            run.add(name, False, f"{error.code}: {error.message}")
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            run.add(name, False, f"{type(error).__name__}: {error}")
    return run.checks
