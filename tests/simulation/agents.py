"""Agents that follow a script drawn by chance: they answer, work, ask, fall silent, ignore a Stop, exit, are late."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

from runner.acp.memory import MemoryTransport
from runner.acp.transport import ExitInfo
from tests.session.fake_agent import permission_frame, text_frame, update_frame
from tests.simulation.chance import Chance

if TYPE_CHECKING:
    from tests.simulation.replicas import Node

SESSION: Final = "agent-session"
TOKEN: Final = re.compile(r"\[(\w+)\]")
ACTS: Final = (
    "say",
    "say",
    "think",
    "tool",
    "tool_done",
    "ask",
    "ask",
    "ask_two",
    "withdraw",
    "work",
    "long_work",
    "shut",
)
ANSWERS: Final = ("end_turn",) * 12 + (
    "refusal",
    "cancelled",
    "error",
    "empty",
    "exit",
    "silence",
    "silence",
    "late_words",
)
STOPPED: Final = ("cancelled",) * 8 + (
    "end_turn",
    "error",
    "null",
    "deaf",
    "deaf",
    "until_killed",
    "exit",
    "exit",
    "slow",
    "twice",
)


class SimAgent:
    """One agent process. ``ledger`` hears which prompts it got; frames travel with a latency but in order."""

    def __init__(self, node: Node, chance: Chance, pid: int) -> None:
        self.pid = pid
        self.transport = MemoryTransport(pid)
        self.tame = node.world.calmed
        self.gone = False
        self.open: dict[str, Any] | None = None
        self.heard: list[str] = []
        self._node = node
        self._chance = chance
        self._cancelled = asyncio.Event()
        self._killed = asyncio.Event()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._working: set[str] = set()
        self._count = 0
        self._sent_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spawn(self._read())

    # -- frames ------------------------------------------------------------------------------------------------------

    def send(self, *frames: dict[str, Any]) -> None:
        """Frames on their way; they arrive as callbacks of the replica."""
        if self.gone:
            return
        self._post(self._arrive, [{"jsonrpc": "2.0", **frame} for frame in frames])

    def _post(self, work: Any, *args: Any) -> None:
        self._sent_at = max(self._loop.time() + self._chance.seconds(0.0), self._sent_at + 1e-6)
        self._loop.call_at(self._sent_at, work, *args, context=self._node.context.copy())

    def _arrive(self, frames: list[dict[str, Any]]) -> None:
        if not self.transport.gone:
            self.transport.agent.send(*frames)

    def exit(self, code: int = 7) -> None:
        """The process is gone; what it wrote before still arrives."""
        if not self.gone:
            self.gone = True
            self._post(self.transport.agent.exit, ExitInfo(code=code))
            for task in self._tasks:
                task.cancel()

    def update(self, **update: Any) -> None:
        self.send(update_frame(**update))

    def tool(self, name: str, status: str) -> None:
        """Report a tool call."""
        kind = "tool_call_update" if name in self._working or status == "completed" else "tool_call"
        (self._working.add if status == "in_progress" else self._working.discard)(name)
        self.update(sessionUpdate=kind, toolCallId=name, title="work", status=status)

    # -- what it hears -----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self.gone and (frame := await self.transport.agent.read_frame()) is not None:
            await asyncio.sleep(0)
            self._frame(frame)
        self.exit(0)

    def _frame(self, frame: dict[str, Any]) -> None:
        method, number = frame.get("method"), frame.get("id")
        if method is None:
            reply = self._replies.pop(int(number or 0), None)
            if reply is not None and not reply.done():
                reply.set_result(frame)
        elif method == "session/prompt":
            self._prompted(frame)
        elif method == "session/cancel":
            self._cancelled.set()
        elif method == "initialize":
            capabilities = {"loadSession": self._node.world.loads}
            info = {"protocolVersion": 1, "agentInfo": {"name": "fake", "version": "1"}}
            self.send({"id": number, "result": {**info, "agentCapabilities": capabilities}})
        elif method == "session/new":
            if self._chance.often(self._node.world.hazard * 0.04) and not self.tame:
                self.exit(3)
            else:
                self.send({"id": number, "result": {"sessionId": SESSION}})
        elif method == "session/load":
            self.send(text_frame("what was"), {"id": number, "result": {}})
        elif number is not None:
            self.send({"id": number, "result": {}})

    def _prompted(self, frame: dict[str, Any]) -> None:
        token = TOKEN.findall(str(frame["params"]["prompt"]))
        self._node.world.ledger.frame(self, token[-1] if token else "", self.open is not None)
        self.open = frame
        self._cancelled.clear()
        self._spawn(self._turn(frame))

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        """A task of the agent's own process: it goes on when its replica is frozen or killed."""
        task = self._loop.create_task(work, name=f"agent {self.pid}", context=self._node.world.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- a turn ------------------------------------------------------------------------------------------------------

    async def _turn(self, frame: dict[str, Any]) -> None:
        script, stop = self._spawn(self._script()), self._spawn(self._cancelled.wait())
        await asyncio.wait({script, stop}, return_when=asyncio.FIRST_COMPLETED)
        if self._cancelled.is_set():
            script.cancel()
            await self._stopped(frame)
        else:
            stop.cancel()
            await self._answer(frame, script.result())

    async def _script(self) -> str:
        if not self.tame:
            for _ in range(int(self._chance.random.random() * 5)):
                if self.tame:
                    break
                await self._act(self._chance.pick(ACTS))
                await asyncio.sleep(self._chance.pick((0.0, 0.01, 0.05, 0.15, 0.5)))
        answer = "end_turn" if self.tame else self._chance.pick(ANSWERS)
        if answer not in ("empty", "exit", "silence"):
            self.send(text_frame("so "))
        if answer == "silence":
            await self._cancelled.wait()
            await asyncio.sleep(3600)
        return answer

    async def _act(self, act: str) -> None:
        self._count += 1
        name = f"{self.pid}-{self._count % 2}"
        match act:
            case "say":
                self.send(text_frame(f"w{self._count} "))
            case "think":
                self.update(sessionUpdate="agent_thought_chunk", content={"type": "text", "text": "hm"})
            case "tool" | "tool_done":
                self.tool(name, "in_progress" if act == "tool" else "completed")
            case "ask" | "ask_two":
                asked = [self._ask(name) for _ in range(2 if act == "ask_two" else 1)]
                await asyncio.wait(asked)
                self.tool(name, "completed")
            case "withdraw":
                asked = [self._ask(name)]
                await asyncio.sleep(self._chance.pick((0.01, 0.3, 2.0)))
                if not asked[0].done():
                    number, _ = self._replies.popitem()
                    self.send({"method": "$/cancel_request", "params": {"requestId": number}})
            case "shut":
                if self._chance.often(0.35):
                    # It no longer reads: from now on a write to it fails.
                    self.transport.stdin_closed = True
            case "work" | "long_work":
                await asyncio.sleep(self._chance.pick((0.2, 1.0, 3.0) if act == "work" else (6.0, 15.0, 26.0)))

    def _ask(self, tool: str) -> asyncio.Future[Any]:
        self._count += 1
        number = 1000 + self._count
        reply = self._replies[number] = self._loop.create_future()
        self.tool(tool, "in_progress")
        self.send(permission_frame(number, tool))
        return reply

    async def _answer(self, frame: dict[str, Any], kind: str) -> None:
        if self.open is not frame:
            return
        if kind == "exit":
            self.exit()
            return
        if kind == "error":
            answer: dict[str, Any] = {"error": {"code": -32603, "message": "model is down"}}
        elif kind == "null":
            answer = {"result": None}
        else:
            answer = {"result": {"stopReason": kind if kind in ("cancelled", "refusal") else "end_turn"}}
        self.open = None
        self.send({"id": frame["id"], **answer})
        if kind == "twice":
            self.send({"id": frame["id"], **answer})
        if kind == "late_words":
            await asyncio.sleep(self._chance.pick((0.0, 0.05, 1.0)))
            self.send(text_frame("and another thing"))

    async def _stopped(self, frame: dict[str, Any]) -> None:
        kind = "cancelled" if self.tame else self._chance.pick(STOPPED)
        if kind == "deaf":
            await asyncio.sleep(self._chance.pick((1.5, 4.0, 30.0)))
        elif kind == "until_killed":
            await self._killed.wait()
        elif kind == "slow":
            self.send(text_frame("just this "))
            await asyncio.sleep(self._chance.pick((0.2, 1.2, 2.5)))
        await self._answer(frame, "cancelled" if kind in ("deaf", "until_killed", "slow") else kind)

    def killed(self) -> None:
        """The turn's processes were killed: a tool that blocked the agent gives way."""
        self._killed.set()

    def behave(self) -> None:
        """From now on it does its work without ado, and finishes what it has open."""
        self.tame = True
        self._killed.set()
        if self.transport.stdin_closed:
            self.exit()
        for name in list(self._working):
            self.tool(name, "completed")
        if self.open is not None and not self._waits():
            self._spawn(self._finish(self.open))

    def _waits(self) -> bool:
        return any(not reply.done() for reply in self._replies.values())

    async def _finish(self, frame: dict[str, Any]) -> None:
        await asyncio.sleep(1.0)
        if self.open is frame:
            self.send(text_frame("fine "))
            await self._answer(frame, "end_turn")
