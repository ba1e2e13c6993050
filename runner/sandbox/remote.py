"""One cell behind a bridge: its agent, its turns and commands, and what is known of its end (DESIGN 3.10)."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from runner.acp.remote import RemoteTransport
from runner.acp.transport import ExitInfo
from runner.acp.websocket import Find
from runner.errors import RunnerError
from runner.sandbox.control import Reply, answer
from runner.sandbox.port import OUTPUT_BYTES, Gone, Ran, Reaped
from runner.tasks import Tasks, shielded

REPLY_SECONDS: Final = 5.0
"""How much longer than its own bound a bridge may take to say how a kill went: the network's share."""
LAST_SECONDS: Final = 2.0
END_SECONDS: Final = 30.0
log = logging.getLogger("runner.sandbox.remote")

End = Callable[[Gone | None], Awaitable[Gone]]
"""What becomes of the place behind the teardown of its cell, given what the init said (None: nothing)."""


class RemoteMark:
    """A mark whose request is on its way."""

    def __init__(self, reply: asyncio.Future[Reply | None]) -> None:
        self._reply = reply

    async def set(self, seconds: float) -> None:
        """See ``port.Mark.set``."""
        try:
            reply = await answer(self._reply, seconds + REPLY_SECONDS)
        except TimeoutError:
            raise _lost(f"it did not take the mark within {seconds + REPLY_SECONDS:g} s") from None
        _good(reply)


class RemoteSandbox:
    """The runner's view of one agent behind a bridge.

    Args:
        name: of the place, in logs.
        workspace: the agent's working directory, as it is over there.
        find, secret: of the bridge (``BridgeConnection``).
        resume_seconds: how long the link may be without a connection.
        end: puts the place to sleep, or away.
    """

    def __init__(self, name: str, workspace: str, find: Find, secret: str, *, resume_seconds: float, end: End) -> None:
        self.name = name
        self._woken = False
        self._workspace = workspace
        self._end = end
        self._tasks = Tasks(f"sandbox {name}")
        self._waiting: dict[int, asyncio.Future[Reply | None]] = {}
        self._last_id = 0
        self._heard: dict[str, Callable[[bytes], None]] = {}
        self._env: dict[str, str] = {}
        self._teardown: asyncio.Task[Gone] | None = None
        self._gone: Gone | None = None
        self._why = "its init is gone"
        self._transport = RemoteTransport(
            find, secret, resume_seconds=resume_seconds, on_control=self._said, on_over=self._over
        )

    @property
    def transport(self) -> RemoteTransport:
        """The agent's stdio."""
        return self._transport

    @property
    def workspace(self) -> str:
        """Absolute path over there."""
        return self._workspace

    @property
    def agent_pid(self) -> int | None:
        """None: it is another machine's."""
        return None

    @property
    def isolation(self) -> str:
        """A machine of its own."""
        return "remote"

    @property
    def woken(self) -> bool:
        """See ``port.Sandbox.woken``."""
        return self._woken

    @property
    def limits(self) -> Mapping[str, object]:
        """The service's own, which it does not tell."""
        return {}

    def was_asleep(self) -> None:
        """The place was started from its sleep, with the session's disk."""
        self._woken = True

    async def begin(self, argv: Sequence[str], env: Mapping[str, str], seconds: float) -> None:
        """Reach the bridge and start the agent. The caller destroys the sandbox when this fails or is cancelled.

        Raises:
            RunnerError: ``harness_start_failed`` with the system's reason, ``sandbox_start_failed``.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._transport.open(seconds)
                self._env = dict(env)
                request = self._request("spawn", argv=list(argv), env=self._env, cwd=self._workspace)
                found = await request
        except TimeoutError:
            raise RunnerError("sandbox_start_failed", "The bridge did not start the agent in time.") from None
        except RunnerError as error:
            raise RunnerError("sandbox_start_failed", str(error)) from error
        if found is None:
            raise RunnerError("sandbox_start_failed", f"The cell ended at once: {self._why}.")
        if not found.get("ok"):
            raise _not_started(str(found.get("error")), argv[0] if argv else "")

    # -- turns -------------------------------------------------------------------------------------------------------

    def mark(self, turn_id: str) -> RemoteMark:
        """See ``port.Sandbox.mark``: control frames go in order with each other, ahead of the prompt."""
        return RemoteMark(self._request("mark", turn=turn_id))

    async def kill_turn(self, turn_id: str, seconds: float) -> Reaped:
        """See ``port.Sandbox.kill_turn``; the network may add ``REPLY_SECONDS``."""
        try:
            reply = await answer(self._request("kill_turn", turn=turn_id, seconds=seconds), seconds + REPLY_SECONDS)
        except TimeoutError:
            raise _lost(f"it did not answer within {seconds + REPLY_SECONDS:g} s") from None
        found = _good(reply, self._why)
        return Reaped(int(found["killed"]), tuple(map(int, found["survivors"])))

    async def run(self, name: str, argv: Sequence[str], heard: Callable[[bytes], None]) -> Ran:
        """See ``port.Sandbox.run``."""
        self._heard[name] = heard
        try:
            reply = await self._request(
                "run", run=name, argv=list(argv), env=self._env, cwd=self._workspace, limit=OUTPUT_BYTES
            )
        finally:
            del self._heard[name]
        found = _good(reply, self._why)
        return Ran(found["code"], found["signal"], bool(found["truncated"]))

    # -- the init ----------------------------------------------------------------------------------------------------

    def _request(self, op: str, **members: Any) -> asyncio.Future[Reply | None]:
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        if self._transport.over:
            future.set_result(None)
            return future
        self._last_id += 1
        self._waiting[self._last_id] = future
        line = json.dumps({"id": self._last_id, "op": op, **members}, separators=(",", ":"))
        self._transport.control(line.encode("ascii"))
        return future

    def _said(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            log.error("the init of sandbox %s said what no init says", self.name)
            return
        match message.get("event"):
            case None:
                future = self._waiting.pop(message.get("id", 0), None)
                if future is not None and not future.done():
                    future.set_result(message)
            case "exited":
                self._transport.process_exited(ExitInfo(message.get("code"), message.get("signal")))
            case "output":
                heard = self._heard.get(str(message.get("run")))
                if heard is not None:
                    heard(base64.b64decode(str(message.get("data"))))
            case "fault":
                log.error("the init of sandbox %s failed: %s", self.name, message.get("error"))

    def _over(self, code: int | None, why: str) -> None:
        self._why = why
        if self._teardown is None:
            log.warning("sandbox %s was lost: %s", self.name, why)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)
        self._transport.process_exited(ExitInfo(reason="the sandbox is gone", lost=True))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def destroy(self, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        """See ``port.Sandbox.destroy``; callers at the same time share one teardown, whoever of them is cancelled."""
        if self._gone is not None:
            return self._gone
        if self._teardown is None or self._teardown.done():
            self._teardown = self._tasks.spawn("teardown", self._tear_down(grace_seconds, seconds))
        await asyncio.wait({self._teardown})
        return self._teardown.result()

    async def _tear_down(self, grace: float, seconds: float) -> Gone:
        said = await self._by_init(grace, seconds)
        self._transport.process_exited(ExitInfo(reason="the sandbox was destroyed"))
        self._transport.close()
        await self._transport.aclose()
        gone = await shielded(_ended(self._end, said), END_SECONDS)
        if gone.proven:
            self._gone = gone
        return gone

    async def _by_init(self, grace: float, seconds: float) -> Gone | None:
        """Let the init kill all; None when it cannot say that nobody is left."""
        if self._transport.over:
            return None
        self._transport.close_stdin()
        try:
            request = self._request("teardown", grace_seconds=grace, seconds=seconds)
            reply = await answer(request, max(grace, seconds) + LAST_SECONDS)
        except TimeoutError:
            return None
        if reply is not None and reply.get("proof") == "echild":
            return Gone(True, "echild")
        return None


async def _ended(end: End, said: Gone | None) -> Gone:
    return await end(said)


def _good(reply: Reply | None, why: str = "its init is gone") -> Reply:
    if reply is None:
        raise _lost(why)
    if not reply.get("ok"):
        raise _lost(str(reply.get("error")))
    return reply


def _lost(why: str) -> RunnerError:
    return RunnerError("sandbox_lost", f"The sandbox was lost: {why}.")


def _not_started(error: str, program: str) -> RunnerError:
    """``cwd: …`` is the place's fault, everything else the command's."""
    if error.startswith("cwd: "):
        return RunnerError("sandbox_start_failed", f"The agent cannot run in its workspace: {error[5:]}.")
    return RunnerError("harness_start_failed", f"{program} could not be started: {error.removeprefix('exec: ')}.")
