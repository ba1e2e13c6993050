"""One cell behind a bridge: its agent, its turns and commands, and what is known of its end (DESIGN 3.10)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from runner.acp.remote import RemoteTransport
from runner.acp.transport import ExitInfo
from runner.acp.websocket import Find
from runner.errors import RunnerError
from runner.sandbox.init_calls import InitCalls, InitMark, Replies, Reply, answer, message_of, not_started
from runner.sandbox.port import Gone, Ran, Reaped
from runner.sandbox.teardown import Teardown
from runner.tasks import Tasks, shielded

REPLY_SECONDS: Final = 5.0
"""How much longer than its own bound a bridge may take to say how a kill went: the network's share."""
LAST_SECONDS: Final = 2.0
END_SECONDS: Final = 30.0
log = logging.getLogger("runner.sandbox.remote")

End = Callable[[Gone | None], Awaitable[Gone]]
"""What becomes of the place behind the teardown of its cell, given what the init said (None: nothing)."""


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
        self._replies = Replies()
        self._calls = InitCalls(self._request, REPLY_SECONDS)
        self._env: dict[str, str] = {}
        self._teardown = Teardown(self._tasks, self._tear_down)
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
    def memory_kills(self) -> int:
        """Its kernel tells nobody here."""
        return 0

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
            raise RunnerError("sandbox_start_failed", f"The cell ended at once: {self._calls.why}.")
        if not found.get("ok"):
            raise not_started(str(found.get("error")), argv)

    # -- turns -------------------------------------------------------------------------------------------------------

    def mark(self, turn_id: str) -> InitMark:
        """See ``port.Sandbox.mark``: control frames go in order with each other, ahead of the prompt."""
        return self._calls.mark(turn_id, extra=REPLY_SECONDS)

    async def kill_turn(self, turn_id: str, seconds: float) -> Reaped:
        """See ``port.Sandbox.kill_turn``; the network may add ``REPLY_SECONDS``."""
        return await self._calls.kill_turn(turn_id, seconds)

    async def run(self, name: str, argv: Sequence[str], heard: Callable[[bytes], None]) -> Ran:
        """See ``port.Sandbox.run``."""
        return await self._calls.run(name, argv, self._env, self._workspace, heard)

    # -- the init ----------------------------------------------------------------------------------------------------

    def _request(self, op: str, **members: Any) -> asyncio.Future[Reply | None]:
        line, future = self._replies.asked(op, members)
        if self._transport.over:
            self._replies.end()
        else:
            self._transport.control(line)
        return future

    def _said(self, line: bytes) -> None:
        message = message_of(line)
        if message is None:
            log.error("the init of sandbox %s said what no init says", self.name)
            return
        match message.get("event"):
            case None:
                self._replies.take(message)
            case "exited":
                self._transport.process_exited(ExitInfo(message.get("code"), message.get("signal")))
            case "output":
                self._calls.output(message)
            case "fault":
                log.error("the init of sandbox %s failed: %s", self.name, message.get("error"))

    def _over(self, code: int | None, why: str) -> None:
        self._calls.why = why
        if not self._teardown.begun:
            log.warning("sandbox %s was lost: %s", self.name, why)
        self._replies.end()
        self._transport.process_exited(ExitInfo(reason="the sandbox is gone", lost=True))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def destroy(self, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        """See ``port.Sandbox.destroy``."""
        return await self._teardown.done(grace_seconds, seconds)

    async def _tear_down(self, grace: float, seconds: float) -> Gone:
        said = await self._by_init(grace, seconds)
        self._transport.process_exited(ExitInfo(reason="the sandbox was destroyed"))
        self._transport.close()
        await self._transport.aclose()
        return await shielded(_ended(self._end, said), END_SECONDS)

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
