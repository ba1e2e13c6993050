"""The calls to a cell's init and what its answers mean, whatever carries them (a socket, a bridge)."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from runner.errors import RunnerError
from runner.sandbox.port import OUTPUT_BYTES, Ran, Reaped

Reply = dict[str, Any]
GONE: Final = "its init is gone"
UNREADABLE: Final = (KeyError, TypeError, ValueError)


class Request(Protocol):
    """Sends a request at once; a future of its reply, of None when the carrier ends first, never of an exception."""

    def __call__(self, op: str, **members: Any) -> asyncio.Future[Reply | None]: ...


class Replies:
    """Requests that wait for their replies, which are matched by id."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Reply | None]] = {}
        self._last_id = 0

    def asked(self, op: str, members: Mapping[str, Any]) -> tuple[bytes, asyncio.Future[Reply | None]]:
        """A new request: its JSON without a line end, and the future of its reply."""
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._last_id += 1
        self._waiting[self._last_id] = future
        line = json.dumps({"id": self._last_id, "op": op, **members}, separators=(",", ":"))
        return line.encode("ascii"), future

    def take(self, message: Reply) -> None:
        """A reply came; one to no request is dropped."""
        identity = message.get("id")
        future = self._waiting.pop(identity, None) if isinstance(identity, int) else None
        if future is not None and not future.done():
            future.set_result(message)

    def end(self) -> None:
        """No more replies come: who waits gets None."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)


def message_of(line: bytes) -> Reply | None:
    """What an init said; None when it is nothing that an init says."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


async def answer(reply: asyncio.Future[Reply | None], seconds: float) -> Reply | None:
    """Wait at most ``seconds`` for a reply without cancelling it.

    Raises:
        TimeoutError: no reply in time.
    """
    if not reply.done():
        await asyncio.wait({reply}, timeout=seconds)
    if not reply.done():
        raise TimeoutError
    return reply.result()


class InitMark:
    """A mark whose request is on its way; ``extra``: seconds that the carrier may add."""

    def __init__(self, calls: InitCalls, reply: asyncio.Future[Reply | None], extra: float) -> None:
        self._calls = calls
        self._reply = reply
        self._extra = extra

    async def set(self, seconds: float) -> None:
        """See ``port.Mark.set``."""
        await self._calls.good(self._reply, seconds + self._extra, "take the mark")


class InitCalls:
    """The calls that a sandbox makes while its agent runs.

    Args:
        request: sends them.
        reply_seconds: how much longer than its own bound an init may take to say how a kill went.

    Attributes:
        why: why there are no replies any more, once there are none.
    """

    def __init__(self, request: Request, reply_seconds: float) -> None:
        self._request = request
        self._reply_seconds = reply_seconds
        self._heard: dict[str, Callable[[bytes], None]] = {}
        self.why = GONE

    def mark(self, turn_id: str, *, extra: float = 0.0) -> InitMark:
        """See ``port.Sandbox.mark``; the request is written before this returns."""
        return InitMark(self, self._request("mark", turn=turn_id), extra)

    async def kill_turn(self, turn_id: str, seconds: float, **more: int) -> Reaped:
        """See ``port.Sandbox.kill_turn``; ``more``: further members of the request."""
        request = self._request("kill_turn", turn=turn_id, seconds=seconds, **more)
        found = await self.good(request, seconds + self._reply_seconds, "answer")
        try:
            return Reaped(int(found["killed"]), tuple(map(int, found["survivors"])))
        except UNREADABLE:
            raise lost("what it says of a kill cannot be read") from None

    async def run(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, heard: Callable[[bytes], None]
    ) -> Ran:
        """See ``port.Sandbox.run``."""
        self._heard[name] = heard
        try:
            reply = await self._request("run", run=name, argv=list(argv), env=dict(env), cwd=cwd, limit=OUTPUT_BYTES)
        finally:
            del self._heard[name]
        found = self._good(reply)
        try:
            return Ran(_number(found["code"]), _number(found["signal"]), bool(found["truncated"]))
        except UNREADABLE:
            raise lost("what it says of a command cannot be read") from None

    def output(self, message: Reply) -> None:
        """A command said something."""
        heard = self._heard.get(str(message.get("run")))
        if heard is not None:
            heard(base64.b64decode(str(message.get("data"))))

    async def good(self, request: asyncio.Future[Reply | None], seconds: float, what: str) -> Reply:
        """The reply to ``request`` (to do ``what``).

        Raises:
            RunnerError: ``sandbox_lost``: there is none within ``seconds``, or it says that it failed.
        """
        try:
            return self._good(await answer(request, seconds))
        except TimeoutError:
            raise lost(f"it did not {what} within {seconds:g} s") from None

    def _good(self, reply: Reply | None) -> Reply:
        if reply is None:
            raise lost(self.why)
        if not reply.get("ok"):
            raise lost(str(reply.get("error")))
        return reply


def _number(told: Any) -> int | None:
    return None if told is None else int(told)


def lost(why: str) -> RunnerError:
    """``sandbox_lost``; ``why`` goes into a sentence."""
    return RunnerError("sandbox_lost", f"The sandbox was lost: {why}.")


def not_started(error: str, argv: Sequence[str]) -> RunnerError:
    """Why an init did not start ``argv``: ``cwd: …``, ``confine: …`` are the place's fault, all else the command's."""
    if error.startswith("confine: "):
        return RunnerError("sandbox_start_failed", f"The agent cannot be confined: {error[9:]}.")
    if error.startswith("cwd: "):
        return RunnerError("sandbox_start_failed", f"The agent cannot run in its workspace: {error[5:]}.")
    program = argv[0] if argv else ""
    return RunnerError("harness_start_failed", f"{program} could not be started: {error.removeprefix('exec: ')}.")
