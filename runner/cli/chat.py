"""``acp-runner chat``: a conversation at the terminal; what is typed while a turn runs waits behind it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from runner.cli.prompt import (
    Conversation,
    Harness,
    Mode,
    Model,
    OnBusy,
    Permissions,
    SessionId,
    Workspace,
    fields_of,
    forwarded,
    session_of,
)
from runner.cli.questions import approve_command, at_terminal, pending
from runner.cli.terminal import FAILED, OK, Config, StateDir, run, say
from runner.cli.turn_view import TextView, tell_result
from runner.cli.typing_line import Abort, Key, Left, Line, Screen, Sent, keys_at_once, read_keys
from runner.client import ApiError, Client

NOT_SENT: Final = "Message not sent"
SHOWN_CHARS: Final = 20
SHOWN_WAITING: Final = 3
HELP: Final = "Enter sends, Esc stops the current prompt, Ctrl-D leaves"


def chat(
    session: SessionId = None,
    harness: Harness = None,
    workspace: Workspace = None,
    on_busy: Annotated[
        OnBusy, typer.Option(help="When a turn runs: queue behind it, steer: stop it and go first, or reject.")
    ] = OnBusy.QUEUE,
    mode: Mode = None,
    model: Model = None,
    permissions: Permissions = None,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Talk to an agent. Lines from a pipe are sent one after the other, each when the last one was answered.

    Esc aborts the current prompt; what waits behind it runs. A message that is refused stays on the line.
    """
    session_id = session_of(session)
    fields = fields_of(on_busy, harness, mode, model, workspace, permissions)
    say(f"session {session_id}")
    raise typer.Exit(run(_chat(session_id, fields, at_terminal(), state_dir, config)))


async def _chat(
    session: str, fields: dict[str, Any], terminal: bool, state_dir: Path | None, config: Path | None
) -> int:
    from runner.cli.locate import connected

    async with connected(state_dir, config, os.environ, say) as client:
        fields.update(await forwarded(client, session, fields, os.environ))
        talk = Chat(client, session, fields, terminal=terminal)
        return await (talk.at_the_terminal() if terminal else talk.from_a_pipe())


class Chat:
    """The messages of one person to one session, and the line on which the next one is typed."""

    def __init__(self, client: Client, session: str, fields: dict[str, Any], *, terminal: bool) -> None:
        self.client = client
        self.session = session
        self.fields = fields
        self.terminal = terminal
        self.line = Line()
        self.screen = Screen(self.line, terminal=terminal)
        self._live: list[Message] = []
        self._typed: asyncio.Queue[str] = asyncio.Queue()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._at_once: Callable[[bool], None] = lambda wanted: None

    # -- where the messages come from --------------------------------------------------------------------------------

    async def from_a_pipe(self) -> int:
        """One line after the other; the exit code tells whether all were answered."""
        code = OK
        while text := await asyncio.to_thread(sys.stdin.readline):
            if text.strip() and not await self._follow(Message(self, text.rstrip("\n"))):
                code = FAILED
        return code

    async def at_the_terminal(self) -> int:
        """Until Ctrl-D, or Ctrl-C while nothing runs. What runs then goes on without a reader."""
        with keys_at_once(sys.stdin.fileno()) as self._at_once:
            self._listen()
            sending = self._spawn(self._send_in_order())
            self.screen.say(HELP)
            try:
                await self._over.wait()
            finally:
                self._listen_no_more()
                sending.cancel()
                for task in self._tasks:
                    task.cancel()
        sys.stderr.write("\n")
        return OK

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), self._read)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)

    def _listen_no_more(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(sys.stdin.fileno())
        loop.remove_signal_handler(signal.SIGINT)

    def _read(self) -> None:
        for key in self.line.feed(read_keys(sys.stdin.fileno())):
            self._pressed(key)
        self.screen.draw()

    def _pressed(self, key: Key) -> None:
        match key:
            case Sent(text):
                self.screen.say(f"> {text}")
                self._typed.put_nowait(text)
            case Abort():
                self._spawn(self._abort_current())
            case Left():
                self._over.set()

    def _interrupted(self) -> None:
        if self._live:
            self._spawn(self._abort_current())
        else:
            self._over.set()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A question is asked in the ordinary way meanwhile."""
        with self.screen.others() if self.terminal else nullcontext():
            if self.terminal:
                self._listen_no_more()
                self._at_once(False)
            try:
                yield
            finally:
                if self.terminal:
                    self._at_once(True)
                    self._listen()

    # -- what becomes of them ----------------------------------------------------------------------------------------

    async def _send_in_order(self) -> None:
        """The next message goes when the server has the one before."""
        while True:
            message = Message(self, await self._typed.get())
            self._spawn(self._follow(message))
            await message.taken.wait()

    async def _follow(self, message: Message) -> bool:
        """Show a message's answer to its end; whether all was well."""
        self._live.append(message)
        try:
            result = await message.until_ended()
        except ApiError as error:
            if message.taken.is_set() or error.code == "stream_broken":
                self.screen.say(f"acp-runner: {error.code}: {error.message}")
            else:
                self._not_sent(message, error.message)
            return False
        finally:
            self._live.remove(message)
            message.taken.set()
            self.tell_waiting()
        self.screen.flush()
        failure = result.get("error") or {}
        if failure.get("code") == "session_turn_in_use" and result.get("turn_id") is None:
            self._not_sent(message, str(failure.get("message")))
        elif result.get("outcome") == "paused":
            await self._tell_questions()
        else:
            with self.screen.others():
                tell_result(result)
        return bool(result.get("ok"))

    def _not_sent(self, message: Message, why: str) -> None:
        """The text stays; whether to send it again is for the person to say."""
        self.screen.say(f"{NOT_SENT}: {why}")
        self.line.give_back(message.text)
        self.screen.draw()

    async def _tell_questions(self) -> None:
        self.screen.say("acp-runner: the turn is paused: the agent waits for an answer")
        for question in await pending(self.client, self.session):
            self.screen.say(f"  {approve_command(question)}")

    async def _abort_current(self) -> None:
        """The prompt that runs, whoever sent it; before it runs, the oldest of this conversation."""
        try:
            current = (await self.client.prompts(self.session)).get("active")
            if current is None and self._live:
                current = self._live[0].prompt_id
            if current is None or not await self.client.abort_prompt(self.session, str(current)):
                self.screen.say("nothing to stop")
        except ApiError as error:
            self.screen.say(f"acp-runner: {error.code}: {error.message}")

    def tell_waiting(self) -> None:
        """Show what waits before the typed line."""
        waiting = [message.text for message in self._live if message.waits]
        shown = ", ".join(f"“{text[:SHOWN_CHARS]}”" for text in waiting[:SHOWN_WAITING])
        more = ", …" if len(waiting) > SHOWN_WAITING else ""
        self.screen.status = f"[{len(waiting)} waiting: {shown}{more}] " if waiting else ""
        self.screen.draw()


class Message(Conversation):
    """One message until its end.

    Attributes:
        text: as it was typed.
        taken: the server has it, or it came to nothing.
        waits: it is queued.
    """

    def __init__(self, owner: Chat, text: str) -> None:
        fields = {**owner.fields, "prompt_id": f"cli_{uuid.uuid4().hex}"}
        super().__init__(owner.client, owner.session, text, fields, ChatView(owner.screen, self), asks=owner.terminal)
        self._owner = owner
        self.text = text
        self.taken = asyncio.Event()
        self.waits = False

    def seen(self, line: dict[str, Any]) -> None:
        """An event of it, or its result."""
        if line.get("cursor") is not None:
            self.taken.set()
        waits = line.get("type") == "turn_queued"
        if waits != self.waits:
            self.waits = waits
            self._owner.tell_waiting()

    async def _answer_questions(self) -> bool:
        with self._owner.aside():
            return await super()._answer_questions()


class ChatView(TextView):
    """Shows a message's answer above the typed line."""

    def __init__(self, screen: Screen, message: Message) -> None:
        super().__init__()
        self._screen = screen
        self._message = message

    def line(self, line: dict[str, Any]) -> None:
        """See ``View.line``."""
        self._message.seen(line)
        super().line(line)

    def waiting(self, text: str) -> None:
        """The typed line is where a spinner would be."""

    def close(self) -> None:
        """End an open line."""
        self._screen.flush()

    def _text(self, text: str) -> None:
        self._screen.text(text)

    def _note(self, text: str, style: str = "dim") -> None:
        self._screen.say(text)
