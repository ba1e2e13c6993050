"""``acp-runner queue``: the prompts of a session that wait, and abort of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runner.cli.terminal import FAILED, AsJson, StateDir, print_json, print_table, run, say

app = typer.Typer(help="The prompts of a session that wait, and abort of one.", no_args_is_help=True)

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Session id.")]


@app.command("list")
def list_queue(session: SessionId, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """The prompt that runs, and those that wait, in the order in which they will run."""
    view: dict[str, Any] = run(_ask(state_dir, "prompts", session), as_json=as_json)
    if as_json:
        print_json(view)
        return
    rows: list[tuple[Any, ...]] = [("", view["active"], "active")] if view.get("active") else []
    rows += [(item.get("position"), item.get("prompt_id"), item.get("state")) for item in view.get("items", [])]
    print_table("prompts", ("position", "prompt", "state"), rows)


@app.command("abort")
def abort(
    session: SessionId,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Prompt id.")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Abort one prompt and nothing else; what waits behind it runs. Exit code 1: there was nothing to abort."""
    aborted: bool = run(_ask(state_dir, "abort_prompt", session, prompt), as_json=as_json)
    if as_json:
        print_json({"aborted": aborted})
    else:
        say(f"aborted {prompt}" if aborted else f"nothing to abort: {prompt} is over, or was never here")
    if not aborted:
        raise typer.Exit(FAILED)


async def _ask(state_dir: Any, method: str, *arguments: str) -> Any:
    from runner.cli.locate import require

    async with require(state_dir).client() as client:
        return await getattr(client, method)(*arguments)
