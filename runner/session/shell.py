"""A command in a session's sandbox: a turn without the model (DESIGN 4; PROMPT-ABORT.md, shell)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, Final

from runner.errors import RunnerError
from runner.rules import turn as rules
from runner.sandbox.port import Ran
from runner.session.issued import Issued
from runner.session.prompts import content_digest
from runner.session.run import TurnRun
from runner.session.services import Services
from runner.session.session import Session
from runner.store.port import PromptRow
from runner.terms import EventType, Outcome, PromptState, StopReason, TurnPhase
from runner.turn.driver import Driver
from runner.turn.live import LiveSeat

log = logging.getLogger("runner.session")
KILL_SECONDS: Final = 5.0
REAP_SECONDS: Final = 1.0
TOLD_CHARS: Final = 64 * 1024
"""How much of an output the agent is told: its end."""
TITLE_CHARS: Final = 200
STATUS: Final = {True: "cancelled", False: "failed"}


class ShellRun(TurnRun):
    """A turn that runs one command beside the agent; what it says is told to the agent with the next prompt.

    It has no prompt and no frame. Its end is proven like that of any turn: the command's whole group is reaped before
    the ending, and whoever survives costs the sandbox.
    """

    def __init__(self, services: Services, session: Session, command: str, seconds: float) -> None:
        super().__init__(services, session, turn_id=services.ids.mint("turn"), prompt=None, effective=session.effective)
        self._command = command
        self._seconds = seconds
        self._stopped = asyncio.Event()
        self._heard: list[bytes] = []
        self._ran: Ran | None = None
        self._timed_out = False
        self._output = ""

    def stop(self, reason: StopReason, error: RunnerError | None = None, command: Issued | None = None) -> bool:
        """See ``TurnRun.stop``: the command's whole group is killed."""
        marked = super().stop(reason, error, command)
        if marked:
            self._stopped.set()
        return marked

    def reply(self) -> dict[str, Any]:
        """What its caller gets, once it has ended."""
        end = self.ended.result()
        reply: dict[str, Any] = {
            "turn_id": self.turn_id,
            "exit_code": self._exit_code,
            "output": self._output,
            "truncated": self._ran is not None and self._ran.truncated,
        }
        if end.error is not None:
            reply["error"] = end.error.as_event()
        return reply | {name: True for name in ("aborted", "timed_out") if getattr(self, f"_{name}")}

    @property
    def _aborted(self) -> bool:
        return self.machine.stop is not None

    @property
    def _exit_code(self) -> int | None:
        """As a shell would say it; None where we killed it, or it never ran."""
        if self._ran is None or self._aborted or self._timed_out:
            return None
        return self._ran.code if self._ran.code is not None else 128 + (self._ran.signal or 0)

    # -- the turn ----------------------------------------------------------------------------------------------------

    async def _driven(self, live: LiveSeat, earlier: Driver | None) -> rules.End:
        turn = self._turn
        turn.times.ready = turn.services.clock.monotonic()
        turn.environment("ready")
        self._show(begins=True)
        try:
            survivors = await self._until_gone(live)
        except RunnerError as error:
            turn.unsure = True
            survivors, end = True, self._ended_by(error)
        else:
            end = self._ended_by(None)
        heard = b"".join(self._heard).replace(b"\0", b"\xef\xbf\xbd").decode("utf-8", "replace")
        self._output = turn.session.redactor.text(heard)
        self._show(begins=False)
        if self.machine.stop is not StopReason.LEASE_LOST:
            self._keep()
        turn.unsure = turn.unsure or survivors
        return end

    async def _until_gone(self, live: LiveSeat) -> bool:
        """Run the command until its whole group is gone; whether somebody survived that.

        Raises:
            RunnerError: ``sandbox_lost``.
        """
        tasks = self._turn.services.tasks
        running = tasks.spawn(f"shell {self.turn_id}", self._run(live))
        stopped = tasks.spawn(f"stop of {self.turn_id}", self._stopped.wait())
        try:
            await asyncio.wait({running, stopped}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            self._timed_out = not running.done() and not self._aborted
            if not running.done():
                await live.sandbox.kill_turn(self.turn_id, KILL_SECONDS)
                await asyncio.wait({running}, timeout=KILL_SECONDS)
            if not running.done():
                raise RunnerError("sandbox_lost", "The command did not end although it was killed.")
        finally:
            stopped.cancel()
            running.cancel()
        failed = running.result()
        if failed is not None:
            raise failed
        return bool((await live.sandbox.kill_turn(self.turn_id, REAP_SECONDS)).survivors)

    async def _run(self, live: LiveSeat) -> RunnerError | None:
        """A failure is a value: this task's only reader turns it into the turn's ending."""
        try:
            self._ran = await live.sandbox.run(self.turn_id, ["/bin/sh", "-c", self._command], self._heard.append)
        except RunnerError as error:
            return error
        return None

    def _ended_by(self, error: RunnerError | None) -> rules.End:
        if error is not None or self._aborted:
            failure = error or RunnerError("internal", "The command was stopped.")
            end = rules.step(self.machine, rules.PrepareFailed(failure))[-1]
            assert isinstance(end, rules.End)
            return replace(end, settled=error is None)
        self.machine.phase = TurnPhase.ENDED
        return rules.End(Outcome.COMPLETED, settled=True)

    # -- what is told ------------------------------------------------------------------------------------------------

    def _show(self, *, begins: bool) -> None:
        """Readers and the transcript see it as a tool call that no agent made."""
        call: dict[str, Any] = {
            "tool_call_id": f"shell-{self.turn_id}",
            "title": f"shell: {self._command[:TITLE_CHARS]}",
            "kind": "execute",
            "status": "in_progress",
            "raw_input": {"command": self._command},
        }
        if begins:
            self._turn.journal.event(EventType.TOOL_CALL, call)
            return
        call["status"] = "completed" if self._exit_code == 0 else STATUS[self._aborted]
        call["content"] = [{"type": "content", "content": {"type": "text", "text": self._output[-TOLD_CHARS:]}}]
        shown = {name: call[name] for name in ("tool_call_id", "status", "content")}
        self._turn.journal.event(EventType.TOOL_CALL_UPDATE, shown, as_record=(EventType.TOOL_CALL, call))

    def _keep(self) -> None:
        """Its output waits for the next prompt, and is durable with the ending."""
        session, services = self._turn.session, self._turn.services
        blocks = [{"type": "text", "text": session.redactor.text(self._told())}]
        row = PromptRow(
            *session.key,
            services.ids.mint("shell"),
            content_digest(blocks),
            PromptState.STORED.value,
            None,
            services.clock.now_ms(),
            blocks,
            kind="shell",
            seq=session.queue.number(),
        )
        session.queue.context.append(row)
        session.outbox.prompt(row)

    def _told(self) -> str:
        if self._aborted:
            how = "It was aborted by the user."
        elif self._timed_out:
            how = f"It was killed after {self._seconds:g} s."
        else:
            how = f"Exit code: {self._exit_code}."
        cut = len(self._output) > TOLD_CHARS or (self._ran is not None and self._ran.truncated)
        said = f"{'The end of its output' if cut else 'Its output'}:\n{self._output[-TOLD_CHARS:]}"
        return f"The user ran this command in the workspace:\n{self._command}\n{how}\n{said if self._output else ''}"
