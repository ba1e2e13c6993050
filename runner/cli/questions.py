"""Questions of an agent: shown, asked at a terminal, answered; and ``acp-runner approve``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

import typer

from runner.cli.terminal import USAGE, AsJson, StateDir, fail, print_json, run, say
from runner.client import Client


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer: exactly one is set."""

    option_id: str | None = None
    decision: str | None = None

    @property
    def given(self) -> bool:
        """Whether one is set."""
        return self.option_id is not None or self.decision is not None


def at_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def approve_command(question: dict[str, Any]) -> str:
    """The command that allows this question."""
    return (
        f"acp-runner approve {quote(str(question.get('interaction_id')))}"
        f" --session {quote(str(question.get('session_id')))} --allow"
    )


def describe(question: dict[str, Any]) -> str:
    """What the agent wants, in one line."""
    call = question.get("tool_call") or {}
    kind, title = call.get("kind") or question.get("kind"), call.get("title") or ""
    return f"{kind}: {title}" if title else str(kind)


def ask(question: dict[str, Any]) -> Verdict | None:
    """Ask at the terminal; None leaves the question open (an empty line, Ctrl-D or Ctrl-C)."""
    options = [option for option in question.get("options") or [] if isinstance(option, dict)]
    say(f"The agent asks for permission: {describe(question)}")
    for number, option in enumerate(options, start=1):
        say(f"  {number}) {option.get('name') or option.get('option_id')}")
    while True:
        try:
            choice = typer.prompt("Your choice (empty leaves it open)", default="", show_default=False, err=True)
        except (typer.Abort, KeyboardInterrupt, EOFError):
            return None
        if not choice.strip():
            return None
        if choice.strip().isdigit() and 1 <= int(choice) <= len(options):
            return Verdict(option_id=str(options[int(choice) - 1].get("option_id")))
        say(f"  a number from 1 to {len(options)}, please")


async def pending(client: Client, session: str | None) -> list[dict[str, Any]]:
    """Open questions of a session, or of the project."""
    items: list[dict[str, Any]] = (await client.interactions(session, status="pending"))["items"]
    return items


def approve(
    interaction: Annotated[str | None, typer.Argument(help="Which question; left out: the only one.")] = None,
    allow: Annotated[bool, typer.Option("--allow", help="Allow it once.")] = False,
    deny: Annotated[bool, typer.Option("--deny", help="Deny it.")] = False,
    option: Annotated[str | None, typer.Option(help="Choose this option of the agent by its id.")] = None,
    session: Annotated[str | None, typer.Option("--session", "-s", help="Only questions of this session.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Answer an agent's question; the answer starts a turn that goes on with the waiting prompt."""
    if allow + deny + (option is not None) > 1:
        fail("invalid_request", "only one of --allow, --deny and --option", as_json=as_json, exit_code=USAGE)
    verdict = Verdict(option_id=option, decision="allow" if allow else "deny" if deny else None)
    if not verdict.given and (as_json or not at_terminal()):
        fail("invalid_request", "one of --allow, --deny and --option is needed", as_json=as_json, exit_code=USAGE)
    answered = run(_approve(interaction, session, verdict, state_dir), as_json=as_json)
    if answered is None:
        say("left open")
    elif as_json:
        print_json(answered)
    elif answered.get("status") == "answered":
        say("answered; the agent has not taken it yet")
    else:
        say(f"answered: {answered.get('status')}")


async def _approve(
    interaction: str | None, session: str | None, verdict: Verdict, state_dir: Any
) -> dict[str, Any] | None:
    from runner.cli.locate import require

    async with require(state_dir).client() as client:
        question = await _which(client, interaction, session)
        chosen = verdict if verdict.given else ask(question)
        if chosen is None:
            return None
        return await client.answer(
            str(question["session_id"]),
            str(question["interaction_id"]),
            option_id=chosen.option_id,
            decision=chosen.decision,
        )


async def _which(client: Client, interaction: str | None, session: str | None) -> dict[str, Any]:
    """The question that is meant; an id with its session goes to the server as it is."""
    from runner.client import ApiError

    if interaction is not None and session is not None:
        found = [item for item in await pending(client, session) if item.get("interaction_id") == interaction]
        return found[0] if found else {"session_id": session, "interaction_id": interaction}
    open_questions = await pending(client, session)
    if interaction is not None:
        open_questions = [item for item in open_questions if item.get("interaction_id") == interaction]
    if len(open_questions) == 1:
        return open_questions[0]
    if not open_questions:
        raise ApiError("not_found", 404, "No such question is open." if interaction else "No question is open.")
    for item in open_questions:
        say(f"{approve_command(item)}    # {describe(item)}")
    raise ApiError("interaction_conflict", 409, f"{len(open_questions)} questions are open: name one.")
