"""Questions of an agent: shown, asked at a terminal, answered; and ``acp-runner approve``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Annotated, Any, Final

import typer

from runner.cli.terminal import USAGE, AsJson, StateDir, fail, plain, print_json, run, say
from runner.client import Client

ELICITATION: Final = "elicitation"
YES: Final = frozenset({"y", "yes", "true", "1"})
NO: Final = frozenset({"n", "no", "false", "0"})


class Unreadable(ValueError):
    """A value that its field of a form cannot hold; the message says which."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer: an option of the agent, or a decision; ``filled``: the fields of its form, as they were typed."""

    option_id: str | None = None
    decision: str | None = None
    filled: Mapping[str, str] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        """Whether one is set."""
        return self.option_id is not None or self.decision is not None

    def fields(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What the server is sent for this question. Raises ``Unreadable``."""
        if question.get("kind") != ELICITATION:
            return {"option_id": self.option_id, "decision": self.decision}
        if self.decision != "allow":
            return {"action": "decline"}
        content = {name: _value(question, name, text) for name, text in self.filled.items()}
        return {"action": "accept", "content": content} if "schema" in question else {"action": "accept"}


def _properties(question: Mapping[str, Any]) -> dict[str, Any]:
    schema = question.get("schema")
    found = schema.get("properties") if isinstance(schema, dict) else None
    return {name: each for name, each in found.items() if isinstance(each, dict)} if isinstance(found, dict) else {}


def _value(question: Mapping[str, Any], name: str, text: str) -> Any:
    """A typed text as its field wants it; an unknown field is the server's to refuse."""
    kind = _properties(question).get(name, {}).get("type")
    try:
        if kind == "integer":
            return int(text)
        if kind == "number":
            return float(text)
    except ValueError:
        raise Unreadable(f"{name}: {text!r} is no number") from None
    if kind == "array":
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind != "boolean":
        return text
    if text.lower() not in YES | NO:
        raise Unreadable(f"{name}: yes or no, please")
    return text.lower() in YES


def at_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def approve_command(question: dict[str, Any]) -> str:
    """The command that allows this question, with a place for each field that its form needs."""
    schema = question.get("schema")
    needed = schema.get("required") if isinstance(schema, dict) else None
    fields = "".join(f" --set {quote(f'{name}=…')}" for name in needed or [])
    return (
        f"acp-runner approve {quote(str(question.get('interaction_id')))}"
        f" --session {quote(str(question.get('session_id')))} --allow{fields}"
    )


def describe(question: dict[str, Any]) -> str:
    """What the agent wants, in one line."""
    if question.get("kind") == ELICITATION:
        url = question.get("url")
        return f"{question.get('message')} {url}" if url else str(question.get("message"))
    call = question.get("tool_call") or {}
    kind, title = call.get("kind") or question.get("kind"), call.get("title") or ""
    return f"{kind}: {title}" if title else str(kind)


def ask(question: dict[str, Any]) -> Verdict | None:
    """Ask at the terminal; None leaves the question open (an empty line, Ctrl-D or Ctrl-C)."""
    try:
        return _fill_in(question) if question.get("kind") == ELICITATION else _choose(question)
    except (typer.Abort, KeyboardInterrupt, EOFError):
        return None


def _choose(question: dict[str, Any]) -> Verdict | None:
    options = [option for option in question.get("options") or [] if isinstance(option, dict)]
    say(f"The agent asks for permission: {describe(question)}")
    if question.get("last_error"):
        say(f"  The last answer did not reach it: {question['last_error']}")
    if not options:
        say("  It offers no choice: you can only deny it.")
        return Verdict(decision="deny") if _typed("Deny it? (empty leaves it open)").lower() in YES else None
    for number, option in enumerate(options, start=1):
        say(f"  {number}) {option.get('name') or option.get('option_id')}")
    while True:
        choice = _typed("Your choice (empty leaves it open)")
        if not choice:
            return None
        if choice.isdigit() and 1 <= int(choice) <= len(options):
            return Verdict(option_id=str(options[int(choice) - 1].get("option_id")))
        say(f"  a number from 1 to {len(options)}, please")


def _fill_in(question: dict[str, Any]) -> Verdict | None:
    say(f"The agent asks: {describe(question)}")
    properties = _properties(question)
    what = "y to answer" if properties else "y to agree"
    while (choice := _typed(f"Your choice ({what}, n to decline, empty leaves it open)").lower()) not in YES | NO:
        if not choice:
            return None
    if choice in NO:
        return Verdict(decision="deny")
    required = question["schema"].get("required") or [] if properties else []
    filled = {name: text for name, each in properties.items() if (text := _field(question, name, each, required))}
    return Verdict(decision="allow", filled=filled)


def _field(question: dict[str, Any], name: str, each: dict[str, Any], required: Sequence[str]) -> str:
    shown = str(each.get("title") or name)
    choices = each.get("enum") or (each.get("items") or {}).get("enum")
    hint = "" if name in required else ", may be empty"
    while True:
        text = _typed(f"  {shown} ({', '.join(map(str, choices)) if choices else each.get('type')}{hint})")
        if not text and name in required:
            continue
        try:
            if text:
                _value(question, name, text)
            return text
        except Unreadable as error:
            say(f"  {error}")


def _typed(prompt: str) -> str:
    return str(typer.prompt(plain(prompt), default="", show_default=False, err=True)).strip()


async def pending(client: Client, session: str | None) -> list[dict[str, Any]]:
    """Open questions of a session, or of the project."""
    items: list[dict[str, Any]] = (await client.interactions(session, status="pending"))["items"]
    return items


def approve(
    interaction: Annotated[str | None, typer.Argument(help="Which question; left out: the only one.")] = None,
    allow: Annotated[bool, typer.Option("--allow", help="Allow it once; of a form or a URL: accept.")] = False,
    deny: Annotated[bool, typer.Option("--deny", help="Deny it; of a form or a URL: decline.")] = False,
    option: Annotated[str | None, typer.Option(help="Choose this option of the agent by its id.")] = None,
    filled: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE: a field of the form.")] = None,
    session: Annotated[str | None, typer.Option("--session", "-s", help="Only questions of this session.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Answer an agent's question; the answer starts a turn that goes on with the waiting prompt."""
    if allow + deny + (option is not None) > 1:
        fail("invalid_request", "only one of --allow, --deny and --option", as_json=as_json, exit_code=USAGE)
    values = dict(part.partition("=")[::2] for part in filled or [] if "=" in part)
    if len(values) != len(filled or []) or (values and not allow):
        fail("invalid_request", "--set takes NAME=VALUE, once each, with --allow", as_json=as_json, exit_code=USAGE)
    verdict = Verdict(option_id=option, decision="allow" if allow else "deny" if deny else None, filled=values)
    if not verdict.given and (as_json or not at_terminal()):
        fail("invalid_request", "one of --allow, --deny and --option is needed", as_json=as_json, exit_code=USAGE)
    try:
        answered = run(_approve(interaction, session, verdict, state_dir), as_json=as_json)
    except Unreadable as error:
        fail("invalid_request", str(error), as_json=as_json, exit_code=USAGE)
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
            str(question["session_id"]), str(question["interaction_id"]), **chosen.fields(question)
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
