"""``acp-runner prompt``: one prompt, streamed; asks, stops and reports as DESIGN 5 says."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from runner.cli.questions import approve_command, ask, at_terminal, pending
from runner.cli.terminal import (
    BUSY,
    FAILED,
    INTERRUPTED,
    OK,
    PAUSED,
    AsJson,
    Config,
    StateDir,
    run,
    say,
)
from runner.cli.turn_view import JsonView, TextView, View, tell_result
from runner.client import ApiError, Client
from runner.ids import parse_cursor, valid_id

ATTACH_TRIES: Final = 3
RESUME_SECONDS: Final = 15.0
DEFAULT_HARNESS: Final = "demo"


class OnBusy(StrEnum):
    """What becomes of a prompt whose session is busy (DESIGN 3.6)."""

    REJECT = "reject"
    QUEUE = "queue"
    STEER = "steer"


SessionId = Annotated[str | None, typer.Option("--session", "-s", help="Session id; default a new one.")]
Harness = Annotated[str | None, typer.Option("--harness", help="Which coding agent.")]
Workspace = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help=r"A directory to work in, in place (below \[local] roots)."),
]
Mode = Annotated[str | None, typer.Option(help="The agent's mode.")]
Model = Annotated[str | None, typer.Option(help="The agent's model.")]
Permissions = Annotated[
    str | None, typer.Option(help="What the agent may do unasked: ask, allow, deny or allow_reads.")
]


def session_of(given: str | None) -> str:
    """The session that a command talks to; a new one by default."""
    session_id = given or f"cli-{uuid.uuid4().hex[:12]}"
    if not valid_id(session_id):
        raise typer.BadParameter("must match [A-Za-z0-9_-]{1,128}", param_hint="--session")
    return session_id


def fields_of(
    on_busy: OnBusy,
    harness: str | None,
    mode: str | None,
    model: str | None,
    workspace: Path | None,
    permissions: str | None,
) -> dict[str, Any]:
    """The fields of a dispatch that these options ask for."""
    fields: dict[str, Any] = {"on_busy": on_busy.value}
    fields.update({name: value for name, value in (("harness", harness), ("mode", mode), ("model", model)) if value})
    if workspace is not None:
        fields["workspace"] = {"path": str(workspace.resolve())}
    if permissions is not None:
        fields["permissions"] = {"default": permissions}
    return fields


def prompt(
    text: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    session: SessionId = None,
    harness: Harness = None,
    workspace: Workspace = None,
    on_busy: Annotated[
        OnBusy, typer.Option(help="When a turn runs: reject, queue behind it, or steer: stop it and go first.")
    ] = OnBusy.REJECT,
    mode: Mode = None,
    model: Model = None,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="A variable for the agent.")] = None,
    permissions: Permissions = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the agent warm even when nobody reads.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Send a prompt and stream the answer; starts a server for the call when none runs.

    Exit codes: 0 ok, 1 failed, lost, cancelled or any other error, 2 bad usage, 3 refused because a turn runs,
    4 paused for an answer.
    """
    content = sys.stdin.read() if text == "-" else text
    if not content.strip():
        raise typer.BadParameter("is empty", param_hint="TEXT")
    session_id = session_of(session)
    fields = fields_of(on_busy, harness, mode, model, workspace, permissions)
    fields["prompt_id"] = f"cli_{uuid.uuid4().hex}"
    if env:
        fields["env"] = _variables(env)
    if keep:
        fields["keep_on_disconnect"] = True
    if session is None and not as_json:
        say(f"session {session_id}")
    view: View = JsonView() if as_json else TextView()
    asks = not as_json and at_terminal()
    raise typer.Exit(run(_prompt(session_id, content, fields, view, asks, state_dir, config), as_json=as_json))


def _variables(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{name or item!r} is not NAME=VALUE", param_hint="--env")
        found[name] = value
    return found


async def _prompt(
    session: str,
    text: str,
    fields: dict[str, Any],
    view: View,
    asks: bool,
    state_dir: Path | None,
    config: Path | None,
) -> int:
    from runner.cli import locate

    async with AsyncExitStack() as stack:
        stack.callback(view.close)
        client = await stack.enter_async_context(locate.connected(state_dir, config, os.environ, view.waiting))
        fields.update(await forwarded(client, session, fields, os.environ))
        return await Conversation(client, session, text, fields, view, asks=asks).run()


async def forwarded(
    client: Client, session: str, fields: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """``secrets`` and ``env`` that the harness declares and this environment has; nothing else is forwarded."""
    harness = fields.get("harness")
    if harness is None:
        with suppress(ApiError):
            harness = (await client.session(session)).get("harness")
    known = (await client.health()).get("harnesses") or []
    entry: dict[str, Any] = next((item for item in known if item.get("name") == (harness or DEFAULT_HARNESS)), {})
    keys = {name: environ[name] for name in entry.get("key_vars") or () if environ.get(name)}
    settings = {name: environ[name] for name in entry.get("setting_vars") or () if environ.get(name)}
    own = dict(fields.get("env") or {})
    found: dict[str, Any] = {}
    if keys := {name: value for name, value in keys.items() if name not in own}:
        found["secrets"] = keys
    if settings:
        found["env"] = {**settings, **own}
    return found


class Conversation:
    """One prompt until its end, through broken streams and answered questions.

    The prompt's id makes attaching again harmless: the same content never runs twice.
    """

    def __init__(
        self, client: Client, session: str, text: str, fields: dict[str, Any], view: View, *, asks: bool
    ) -> None:
        self._client = client
        self._session = session
        self._text = text
        self._fields = fields
        self._view = view
        self._asks = asks
        self._seen = (-1, -1)
        self._turn_id: str | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return str(self._fields["prompt_id"])

    async def run(self) -> int:
        """The exit code."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        try:
            result = await self.until_ended()
        except asyncio.CancelledError:
            return INTERRUPTED
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            if self._stopping is not None:
                self._stopping.cancel()
        self._view.close()
        if result.get("outcome") == "paused":
            await self._tell_questions()
            return PAUSED
        tell_result(result)
        if (result.get("error") or {}).get("code") == "session_turn_in_use":
            return BUSY
        return OK if result.get("ok") else FAILED

    async def until_ended(self) -> dict[str, Any]:
        """The last result of the prompt: a paused one only when the question stays open."""
        result = await self._attach()
        while result.get("outcome") == "paused" and self._asks:
            if not await self._answer_questions():
                break
            result = await self._resumed(result)
        return result

    async def _resumed(self, before: dict[str, Any]) -> dict[str, Any]:
        """The result after an answer; the old one when no turn takes it in time."""
        deadline = asyncio.get_running_loop().time() + RESUME_SECONDS
        while True:
            self._view.waiting("waiting for the agent")
            result = await self._attach()
            if result.get("turn_id") != before.get("turn_id") or result.get("outcome") != "paused":
                return result
            if asyncio.get_running_loop().time() > deadline:
                return result
            await asyncio.sleep(0.2)

    async def _attach(self) -> dict[str, Any]:
        for left in reversed(range(ATTACH_TRIES)):
            try:
                return await self._stream()
            except ApiError as error:
                if error.code != "stream_broken" or left == 0:
                    raise
        raise AssertionError("unreachable")

    async def _stream(self) -> dict[str, Any]:
        async with aclosing(self._client.dispatch(self._session, self._text, **self._fields)) as lines:
            async for line in lines:
                if self._is_new(line):
                    self._view.line(line)
                if line.get("kind") == "result":
                    result: dict[str, Any] = line["result"]
                    return result
        raise ApiError("stream_broken", 200, "The stream ended without a result.")

    def _is_new(self, line: dict[str, Any]) -> bool:
        """Attaching again shows the prompt's events from its first one on: those seen are skipped."""
        data = line.get("data") or {}
        if line.get("type") == "turn_admitted":
            self._turn_id = data.get("turn_id")
        cursor = parse_cursor(str(line.get("cursor", "")))
        if cursor is None:
            return True
        if cursor <= self._seen:
            return False
        self._seen = cursor
        return True

    async def _answer_questions(self) -> bool:
        """Ask about each open question; False when one was left open or none was found."""
        questions = await pending(self._client, self._session)
        self._view.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        try:
            for question in questions:
                verdict = ask(question)
                if verdict is None:
                    return False
                await self._client.answer(
                    self._session,
                    str(question["interaction_id"]),
                    **verdict.fields(question),
                )
        finally:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupted)
        return bool(questions)

    async def _tell_questions(self) -> None:
        say("acp-runner: the turn is paused: the agent waits for an answer")
        for question in await pending(self._client, self._session):
            say(f"  {approve_command(question)}")

    def _interrupted(self) -> None:
        """Ctrl-C: the first stops the prompt and goes on reading, the second leaves."""
        if self._stopping is None:
            say("stopping (Ctrl-C again leaves at once)")
            self._stopping = asyncio.get_running_loop().create_task(self._stop(), name="stop")
        elif self._task is not None:
            self._task.cancel()

    async def _stop(self) -> None:
        """A prompt that may wait among others is aborted alone; a Stop would take the others with it."""
        try:
            if self._fields.get("on_busy") in (None, OnBusy.REJECT):
                await self._client.cancel(self._session, expected_execution_id=self._turn_id)
            else:
                await self._client.abort_prompt(self._session, self.prompt_id)
        except ApiError as error:
            say(f"acp-runner: {error.code}: {error.message}")
