"""``acp-runner sessions`` and ``acp-runner pool``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runner.cli.terminal import AsJson, StateDir, plain, print_json, print_table, run, say

app = typer.Typer(
    help="List, show, export, fork, stop and kill sessions.", invoke_without_command=True, no_args_is_help=False
)

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Session id.")]


@app.callback(invoke_without_command=True)
def sessions(context: typer.Context, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """List, show, export, fork, stop and kill sessions; without a command: list."""
    if context.invoked_subcommand is None:
        _list(as_json, state_dir, None)


@app.command("list")
def list_sessions(
    limit: Annotated[int | None, typer.Option(min=1, max=1000, help="At most this many.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """The project's sessions."""
    _list(as_json, state_dir, limit)


def _list(as_json: bool, state_dir: Any, limit: int | None) -> None:
    page = run(_ask(state_dir, "sessions", limit=limit), as_json=as_json)
    if as_json:
        print_json(page)
        return
    rows = []
    for view in page.get("items", []):
        last = view.get("last_turn") or {}
        pool = view.get("pool") or {}
        rows.append(
            (
                view.get("session_id"),
                view.get("state"),
                view.get("harness"),
                pool.get("state"),
                last.get("outcome"),
                view.get("updated_at"),
            )
        )
    print_table("sessions", ("session", "state", "harness", "sandbox", "last turn", "updated"), rows)
    if page.get("next_cursor"):
        say("there are more; see --limit")


@app.command("show")
def show_session(session: SessionId, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """A session as it is now."""
    view = run(_ask(state_dir, "session", session), as_json=as_json)
    if as_json:
        print_json(view)
    else:
        print_members(view)


@app.command("export")
def export_session(session: SessionId, state_dir: StateDir = None) -> None:
    """Everything durable of a session as JSON lines: the session, its records, the end."""
    if not run(_export(state_dir, session)):
        say("the history is not complete; the last line says why")


async def _export(state_dir: Any, session: str) -> bool:
    """Print it as it comes; whether it is complete."""
    from runner.cli.locate import require
    from runner.wire.codec import to_json

    complete = False
    async with require(state_dir).client() as client:
        async for line in client.export(session):
            typer.echo(to_json(line).decode())
            complete = bool(line.get("complete"))
    return complete


@app.command("fork")
def fork_session(
    session: SessionId,
    after: Annotated[str, typer.Argument(metavar="CURSOR", help="The last cursor that goes over, such as 3.17.")],
    to: Annotated[str | None, typer.Option(help="Id of the new session.")] = None,
    allow_incomplete: Annotated[bool, typer.Option(help="Also when a part of the history is missing.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """A new session with the history up to a cursor."""
    work = _ask(state_dir, "fork", session, after, session_id=to, allow_incomplete=allow_incomplete or None)
    made = run(work, as_json=as_json)
    if as_json:
        print_json(made)
    else:
        typer.echo(plain(str(made["session_id"])))
        say(f"workspace: {made['workspace']}")


@app.command("stop")
def stop_session(
    session: SessionId,
    turn: Annotated[str | None, typer.Option(help="Only this turn.")] = None,
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for the end.")] = 30,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Stop the session's turn; the agent stays warm."""
    if not as_json:
        say(f"stopping {session}")
    work = _ask(state_dir, "cancel", session, expected_execution_id=turn, wait_seconds=wait)
    _tell(run(work, as_json=as_json), as_json)


@app.command("kill")
def kill_session(session: SessionId, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Destroy the session's sandbox; the session and its workspace stay."""
    if not as_json:
        say(f"killing {session}")
    _tell(run(_ask(state_dir, "kill", session), as_json=as_json), as_json)


def pool(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Warm and busy sandboxes, and why each start was warm or cold."""
    view = run(_ask(state_dir, "pool"), as_json=as_json)
    if as_json:
        print_json(view)
        return
    names = ("session_id", "state", "provider", "start", "reason", "agent_pid", "warm_until")
    rows = [tuple(item.get(name) for name in names) for item in view.get("items", [])]
    print_table("seats", [name.replace("_id", "").replace("_", " ") for name in names], rows)
    if view.get("spares"):
        names = ("spare_id", "state", "harness", "provider", "recipe", "agent_pid", "expires_at")
        rows = [tuple(item.get(name) for name in names) for item in view["spares"]]
        print_table("spares", [name.replace("_id", "").replace("_", " ") for name in names], rows)
    if "max_seats" in view:
        say(f"{view.get('taken', len(view.get('items', [])))} of {view['max_seats']} seats taken")


def print_members(value: dict[str, Any], prefix: str = "") -> None:
    """``name: value`` lines on stdout, nested names joined by dots."""
    for name, item in value.items():
        if isinstance(item, dict) and item:
            print_members(item, f"{prefix}{name}.")
        elif item not in (None, [], {}):
            typer.echo(plain(f"{prefix}{name}: {item}"))


def _tell(reply: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(reply)
    else:
        outcome = reply.get("outcome")
        say(f"{reply.get('state')}{f': {outcome}' if outcome else ''}")


async def _ask(state_dir: Any, method: str, *arguments: str, **options: Any) -> dict[str, Any]:
    from runner.cli.locate import require

    async with require(state_dir).client() as client:
        reply: dict[str, Any] = await getattr(client, method)(*arguments, **options)
        return reply
