"""Routes what an agent says: to the call that waits for it, to a session's inbox, or to an answer of ours."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from runner.acp.answers import agent_error, mapping
from runner.acp.asked import ELICITATION, METHODS, Asked
from runner.acp.inbox import AgentError, Closed, Inbox, PromptAnswered
from runner.acp.peer import Message, Peer, response_id
from runner.acp.replay import Reopened, ReplayWindow
from runner.clock import Clock
from runner.errors import RunnerError

METHOD_NOT_FOUND: Final = -32601
INVALID_REQUEST: Final = -32600


class Inbound:
    """What is open on a connection, and where each message of the agent belongs.

    Args:
        reply: takes the frame of an automatic answer; never raises, its result is of no matter here.
        drained: called whenever an inbox was drained.

    Attributes:
        calls: our open requests but prompts.
        prompts: the agent session of each open ``session/prompt``.
        counts: what was dropped, declined or ignored, by name.
    """

    def __init__(self, reply: Callable[[bytes], object], drained: Callable[[], None]) -> None:
        self._reply = reply
        self._drained = drained
        self.inboxes: dict[str, Inbox] = {}
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.prompts: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self.asked = Asked(reply, self.counts)

    def open(self, agent_session_id: str) -> Inbox:
        """The session's inbox, made when it is not there yet."""
        inbox = self.inboxes.get(agent_session_id)
        if inbox is None:
            inbox = self.inboxes[agent_session_id] = Inbox(self._drained)
        return inbox

    def forget(self, agent_session_id: str) -> None:
        """The session was closed: its inbox goes, and its open questions are answered ``cancelled``."""
        self.inboxes.pop(agent_session_id, None)
        self.asked.forget(agent_session_id)

    async def replay(self, agent_session_id: str, clock: Clock, request: Coroutine[Any, Any, Any]) -> Reopened:
        """Run a ``session/load`` or ``session/resume`` with a replay window in place of the session's inbox.

        Raises:
            ValueError: the session has an inbox: it is live (case D3); ``request`` was not begun.
            RunnerError: the connection ended meanwhile. And whatever ``request`` raises.
        """
        if agent_session_id in self.inboxes:
            request.close()
            raise ValueError("this agent session is live already")
        window = self.inboxes[agent_session_id] = ReplayWindow(clock)
        try:
            answer = await request
            await window.quiet()
        finally:
            self._end_replay(agent_session_id, window)
        if window.end is not None:
            raise copy_of(window.end)
        self.open(agent_session_id)
        return window.reopened(agent_session_id, answer)

    def _end_replay(self, agent_session_id: str, window: ReplayWindow) -> None:
        window.over = True
        self.counts["replayed"] += window.dropped
        window.dropped = 0
        if self.inboxes.get(agent_session_id) is window:
            del self.inboxes[agent_session_id]

    def prompting(self, agent_session_id: str) -> None:
        """A prompt of ours ends the session's replay window: what comes now answers it."""
        window = self.inboxes.get(agent_session_id)
        if isinstance(window, ReplayWindow):
            self._end_replay(agent_session_id, window)
            self.open(agent_session_id)

    def close(self, error: RunnerError) -> None:
        """Fail every open call, and end every inbox behind what arrived before."""
        for call in self.calls.values():
            if not call.done():
                call.set_exception(copy_of(error))
        self.asked.clear()
        self.prompts.clear()
        for inbox in self.inboxes.values():
            inbox.put(Closed(error))
            inbox.notify()

    def take(self, messages: Iterable[Message]) -> set[Inbox]:
        """Route messages in order; the inboxes that got something. Nobody is notified yet."""
        touched: set[Inbox] = set()
        run: list[dict[str, Any]] = []
        run_bytes = 0
        run_session: Any = None
        box: Inbox | None = None
        for message, size in messages:
            if message.get("method") == "session/update":
                params = message.get("params")
                update = params.get("update") if isinstance(params, dict) else None
                if not isinstance(params, dict) or not isinstance(update, dict):
                    self.counts["malformed"] += 1
                    continue
                session = params.get("sessionId")
                if session != run_session or box is None:
                    if run and box is not None:
                        box.put_updates(run, run_bytes)
                        run, run_bytes = [], 0
                    run_session, box = session, self._inbox_of(params)
                    if box is None:
                        self.counts["stray_updates"] += 1
                        continue
                    touched.add(box)
                run.append(update)
                run_bytes += size
                continue
            if run and box is not None:
                box.put_updates(run, run_bytes)
                run, run_bytes = [], 0
            other = self._other(message, size)
            if other is not None:
                touched.add(other)
            run_session, box = None, None
        if run and box is not None:
            box.put_updates(run, run_bytes)
        return touched

    def _inbox_of(self, params: dict[str, Any]) -> Inbox | None:
        agent_session_id = params.get("sessionId")
        return self.inboxes.get(agent_session_id) if isinstance(agent_session_id, str) else None

    def _other(self, message: dict[str, Any], size: int) -> Inbox | None:
        method = message.get("method")
        if method is None:
            return self._response(message, size)
        if not isinstance(method, str):
            self.counts["malformed"] += 1
            return None
        if "id" not in message:
            return self._notified(message, method)
        return self._request(message, method, size)

    # Notifications and requests of the agent.

    def _notified(self, message: dict[str, Any], method: str) -> Inbox | None:
        if method == "$/cancel_request":
            return self.asked.withdrawn(message.get("params"), self.inboxes)
        if method == "elicitation/complete":
            return self.asked.completed(message.get("params"), self.inboxes)
        self.counts["unknown_notifications"] += 1
        return None

    def _request(self, message: dict[str, Any], method: str, size: int) -> Inbox | None:
        request_id = message["id"]
        params = mapping(message.get("params"))
        if isinstance(request_id, bool | dict | list):
            self.counts["malformed"] += 1
        elif method in METHODS:
            return self._question(request_id, method, params, size)
        elif request_id is None:
            # The schema allows a null id, but here it is rather a notification that was written carelessly.
            self.counts["malformed"] += 1
        else:
            self.counts["unknown_requests"] += 1
            self._reply(Peer.error(request_id, METHOD_NOT_FOUND, f"Method not found: {method[:200]}"))
        return None

    def _question(self, request_id: Any, method: str, params: dict[str, Any], size: int) -> Inbox | None:
        agent_session_id, prompt = params.get("sessionId"), params.get("requestId")
        if method == ELICITATION and agent_session_id is None and type(prompt) is int:
            agent_session_id = self.prompts.get(prompt)
        inbox = self.inboxes.get(agent_session_id) if isinstance(agent_session_id, str) else None
        if isinstance(inbox, ReplayWindow):
            # A question of the past: nothing that we sent waits for its answer.
            self.counts["replayed"] += 1
            self._reply(Peer.error(request_id, INVALID_REQUEST, "No prompt is open in this session"))
            return None
        of = (str(agent_session_id), inbox) if inbox is not None else None
        return self.asked.take(request_id, method, params, of, size)

    # Answers of the agent.

    def _response(self, message: dict[str, Any], size: int) -> Inbox | None:
        request_id = response_id(message)
        if request_id is None:
            self.counts["malformed"] += 1
            return None
        error = agent_error(message.get("error"))
        # Neither result nor error is no response, but it is all that some agents say when they end (case A7).
        result = message.get("result")
        agent_session_id = self.prompts.pop(request_id, None)
        if agent_session_id is not None:
            return self._prompt_answered(request_id, agent_session_id, result, error, size)
        call = self.calls.get(request_id)
        if call is None or call.done():
            self.counts["duplicate_terminals"] += 1
        elif error is not None:
            call.set_exception(error)
        else:
            call.set_result(result)
            opened = mapping(result).get("sessionId")
            if isinstance(opened, str):
                # What follows the answer to session/new in the same chunk must find its inbox.
                self.open(opened)
        return None

    def _prompt_answered(
        self, request_id: int, agent_session_id: str, result: Any, error: AgentError | None, size: int
    ) -> Inbox | None:
        inbox = self.inboxes.get(agent_session_id)
        if inbox is None:
            self.counts["stray_terminals"] += 1
            return None
        inbox.put(PromptAnswered(request_id, result if isinstance(result, dict) else None, error), size)
        return inbox


def copy_of(error: RunnerError) -> RunnerError:
    """The same error as a new object: one that is raised twice would gather tracebacks."""
    return RunnerError(error.code, error.message, **error.extra)
