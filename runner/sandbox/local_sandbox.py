"""One cell on this machine: an init, the agent that it owns, and the proof that both are gone (DESIGN 3.10)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runner.acp.stdio import StdioTransport
from runner.acp.transport import ExitInfo
from runner.errors import RunnerError
from runner.sandbox.census import kill_all
from runner.sandbox.cgroups import Cgroup
from runner.sandbox.control import ControlChannel
from runner.sandbox.egress import Egress
from runner.sandbox.init_calls import InitCalls, InitMark, Reply, answer, not_started
from runner.sandbox.init_process import InitProcess, Pipes
from runner.sandbox.isolation import NOTHING, Isolation
from runner.sandbox.namespace import Namespace
from runner.sandbox.port import Gone, Ran, Reaped
from runner.sandbox.teardown import Teardown
from runner.tasks import Tasks, shielded

REPLY_SECONDS: Final = 0.25
"""How much longer than its own bound an init may take to say how a kill went."""
LAST_SECONDS: Final = 1.0
"""How long an init that has done its work, or was killed, may take to be gone."""
_STDERR_BYTES: Final = 4096
_TICKS: Final = os.sysconf("SC_CLK_TCK")
log = logging.getLogger("runner.sandbox")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What holds one cell in.

    Attributes:
        isolation: level and limits.
        confine: the init's ``confine`` (Landlock paths, a bound on processes).
        group: its control group.
        egress: its way out, where that is a proxy.
    """

    isolation: Isolation = NOTHING
    confine: Mapping[str, Any] = field(default_factory=dict)
    group: Cgroup | None = None
    egress: Egress | None = None


class TickMark:
    """A mark that is the moment itself."""

    async def set(self, seconds: float) -> None:
        """See ``port.Mark.set``: it is set already."""


def boot_ticks() -> int:
    """Now, in the clock ticks since boot in which the kernel tells when a process started."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


class LocalSandbox:
    """The runner's view of one cell. It exists from the moment its init was forked.

    Args:
        seat_id: names the cell in logs.
        marker: what its processes carry (``census.marker``).
        workspace: the agent's working directory.
        bounds: level, limits and the control group of the cell.
        child: the init, its end of the control channel, the runner's ends of the agent's stdio; all owned from here.
        on_gone: called once when the teardown is proven.
    """

    def __init__(
        self,
        seat_id: str,
        marker: str,
        workspace: str,
        bounds: Bounds,
        child: tuple[subprocess.Popen[bytes], socket.socket, Pipes],
        on_gone: Callable[[LocalSandbox], None],
    ) -> None:
        process, end, pipes = child
        self.seat_id = seat_id
        self.marker = marker
        self._workspace = workspace
        self._bounds = bounds
        self._namespace: Namespace | None = None
        self._too_much: str | None = None
        self._pipes: Pipes | None = pipes
        self._transport: StdioTransport | None = None
        self._exit: ExitInfo | None = None
        self._on_gone = on_gone
        self._tasks = Tasks(f"sandbox {seat_id}")
        self._teardown = Teardown(self._tasks, self._tear_down)
        self._settled_in = False
        self._turn = ("", 0)
        self._env: dict[str, str] = {}
        self._control = ControlChannel(end, self._event, self._ended)
        self._calls = InitCalls(self._control.request, REPLY_SECONDS)
        self._init = InitProcess(process, self._control.drain)

    @property
    def transport(self) -> StdioTransport:
        """The agent's stdio; there once the agent was started."""
        assert self._transport is not None
        return self._transport

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace."""
        return self._workspace

    @property
    def agent_pid(self) -> int | None:
        """Process id of the agent."""
        return self._transport.pid if self._transport is not None else None

    @property
    def init_pid(self) -> int:
        """Process id of the cell's init, as this machine numbers it."""
        return self._namespace.pid if self._namespace is not None else self._init.pid

    @property
    def isolation(self) -> str:
        """``cell``, ``landlock`` or ``none``."""
        return self._bounds.isolation.level

    @property
    def limits(self) -> Mapping[str, object]:
        """See ``port.Sandbox.limits``."""
        return self._bounds.isolation.limits.view()

    @property
    def memory_kills(self) -> int:
        """What the kernel killed in its control group."""
        return self._bounds.group.memory_kills() if self._bounds.group is not None else 0

    @property
    def network_env(self) -> Mapping[str, str]:
        """Variables that tell its programs of the proxy."""
        return self._bounds.egress.variables if self._bounds.egress is not None else {}

    @property
    def woken(self) -> bool:
        """Nothing sleeps here."""
        return False

    async def begin(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the agent in the workspace. The caller destroys the sandbox when this fails or is cancelled.

        Raises:
            RunnerError: ``harness_start_failed`` with the system's reason, ``sandbox_start_failed``.
        """
        self._env = dict(env)
        why = await self._bounds.egress.open(self._control) if self._bounds.egress is not None else ""
        if why:
            raise RunnerError("sandbox_start_failed", f"The cell has no way out: {why}{self._cause()}.")
        limits = self._bounds.isolation.limits
        memory = limits.memory_bytes if limits.memory_by == "init" else 0
        more = {"confine": dict(self._bounds.confine), "memory_bytes": memory}
        found = await self._control.request("spawn", argv=list(argv), env=dict(env), cwd=self._workspace, **more)
        if found is None:
            raise RunnerError("sandbox_start_failed", f"The cell's init ended at once{self._cause()}.")
        if not found.get("ok"):
            raise not_started(str(found.get("error")), argv)
        if self._teardown.begun or self._pipes is None:
            raise RunnerError("sandbox_start_failed", "The sandbox was destroyed while its agent was being started.")
        pipes, self._pipes = self._pipes, None
        pipes.close_errors()
        self._transport = StdioTransport(pipes.stdin, pipes.stdout, pipes.stderr, self._outside(int(found["pid"])))
        if self._exit is not None:
            self._transport.process_exited(self._exit)

    def _outside(self, pid: int) -> int | None:
        """The agent's process id on this machine, from the one that the init knows; None when it is gone already."""
        if self.isolation != "cell":
            return pid
        self._namespace = Namespace.below(self._init.pid)
        return self._namespace.outer_pid(pid) if self._namespace is not None else None

    def _cause(self) -> str:
        """What the init, the interpreter in its place, or the wrapper around it wrote to stderr."""
        if self._pipes is None:
            return ""
        source = self._pipes.stderr if self._pipes.errors is None else self._pipes.errors
        os.set_blocking(source, False)
        try:
            text = os.read(source, _STDERR_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            text = ""
        return f": {text.splitlines()[-1]}" if text else ""

    # -- turns -------------------------------------------------------------------------------------------------------

    def mark(self, turn_id: str) -> InitMark | TickMark:
        """See ``port.Sandbox.mark``; the request is written before this returns.

        The first turn begins behind a start that may have forked helpers in this very clock tick, so the init lists
        who is alive. Later turns begin behind an idle agent: the tick tells, and the init is not woken.
        """
        if self._settled_in:
            self._turn = (turn_id, boot_ticks())
            return TickMark()
        self._settled_in = True
        return self._calls.mark(turn_id)

    async def kill_turn(self, turn_id: str, seconds: float) -> Reaped:
        """See ``port.Sandbox.kill_turn``."""
        since = self._turn[1] if self._turn[0] == turn_id else 0
        return await self._calls.kill_turn(turn_id, seconds, since=since)

    async def run(self, name: str, argv: Sequence[str], heard: Callable[[bytes], None]) -> Ran:
        """See ``port.Sandbox.run``."""
        return await self._calls.run(name, argv, self._env, self._workspace, heard)

    # -- what the init says ------------------------------------------------------------------------------------------

    def _event(self, message: Reply) -> None:
        match message.get("event"):
            case "exited":
                self._agent_gone(self._how(message.get("code"), message.get("signal")))
            case "limit":
                self._too_much = f"its processes used {message.get('memory_bytes')} bytes of memory together"
            case "output":
                self._calls.output(message)
            case "fault":
                log.error("the init of sandbox %s failed: %s", self.seat_id, message.get("error"))
            case "ready":
                if not message.get("subreaper"):
                    log.warning("sandbox %s: this system lets orphans leave their cell", self.seat_id)

    def _how(self, code: int | None, number: int | None) -> ExitInfo:
        """How the agent ended; a kill for want of memory has its reason beside it."""
        limit, group = self._bounds.isolation.limits.memory_bytes, self._bounds.group
        if number == signal.SIGKILL and self._too_much is None and group is not None and group.memory_kills():
            self._too_much = "it ran out of memory"
        if number == signal.SIGKILL and self._too_much is not None:
            return ExitInfo(reason=f"killed: {self._too_much} ([local] memory_bytes = {limit})")
        return ExitInfo(code, number)

    def _ended(self) -> None:
        if not self._teardown.begun:
            log.warning("sandbox %s lost its init (pid %d)", self.seat_id, self._init.pid)
        self._agent_gone(ExitInfo(reason="the sandbox is gone", lost=True))

    def _agent_gone(self, info: ExitInfo) -> None:
        """The first report counts."""
        if self._exit is None:
            self._exit = info
            if self._transport is not None:
                self._transport.process_exited(info)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def destroy(self, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        """See ``port.Sandbox.destroy``."""
        return await self._teardown.done(grace_seconds, seconds)

    async def _tear_down(self, grace: float, seconds: float) -> Gone:
        try:
            gone = await self._by_init(grace, seconds) or await self._by_namespace()
            if gone is None:
                gone = await self._by_census(seconds)
        except BaseException:
            self._control.close()
            raise
        if self._bounds.egress is not None:
            await self._bounds.egress.close()
        if gone.proven:
            self._close()
            self._on_gone(self)
        return gone

    async def _by_init(self, grace: float, seconds: float) -> Gone | None:
        """The rule: the init kills all and the kernel tells it that no child is left; None when it cannot say so."""
        if self._transport is not None:
            self._transport.close_stdin()
        self._init.signal(signal.SIGCONT)
        if self._namespace is not None:
            self._namespace.signal(signal.SIGCONT)
        try:
            request = self._control.request("teardown", grace_seconds=grace, seconds=seconds)
            reply = await answer(request, max(grace, seconds) + REPLY_SECONDS)
        except TimeoutError:
            log.error("the init of sandbox %s does not answer", self.seat_id)
            return None
        if reply is None:
            # An init that was told to go by a signal leaves by itself, and its exit status is the proof.
            await self._init.wait(LAST_SECONDS)
            return Gone(True, "echild") if self._init.exit_code == 0 else None
        if reply.get("proof") == "echild":
            if not await self._init.wait(LAST_SECONDS):
                self._init.kill()
                await self._init.wait(LAST_SECONDS)
            return Gone(True, "echild")
        if not reply.get("ok"):
            return None
        return Gone(False, "", tuple(map(int, reply.get("survivors", ()))))

    async def _by_namespace(self) -> Gone | None:
        """Its init is killed: the kernel then kills the whole namespace, and its end is the proof (DESIGN 3.10)."""
        if self._namespace is None:
            return None
        self._namespace.signal(signal.SIGKILL)
        if not await self._init.wait(LAST_SECONDS):
            self._init.kill()
            await self._init.wait(LAST_SECONDS)
        return Gone(True, "init_gone") if await self._namespace.wait_gone(LAST_SECONDS) else None

    async def _by_census(self, seconds: float) -> Gone:
        """The last resort, when the init is gone or hangs: kill whoever carries the marker."""
        self._init.kill()
        init_gone = await self._init.wait(LAST_SECONDS)
        reaped = await shielded(asyncio.to_thread(kill_all, self.marker, seconds), seconds + LAST_SECONDS)
        survivors = reaped.survivors or (() if init_gone else (self._init.pid,))
        return Gone(not survivors, "" if survivors else "census", survivors)

    def _close(self) -> None:
        self._agent_gone(ExitInfo(reason="the sandbox was destroyed"))
        if self._transport is not None:
            self._transport.close()
        if self._pipes is not None:
            self._pipes.close()
            self._pipes = None
        self._control.close()
        if self._namespace is not None:
            self._namespace.close()
            self._namespace = None
        if self._bounds.group is not None:
            self._bounds.group.remove()
