"""``acp-runner snapshot``: the image of remote sandboxes, built at Daytona and compared with this installation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner.cli.terminal import FAILED, AsJson, Config, StateDir, print_json, run, say

if TYPE_CHECKING:
    from runner.assembly.snapshots import Checked

app = typer.Typer(help="Build and check the snapshot of Daytona sandboxes.", no_args_is_help=True)


@app.command("build")
def build_snapshot(
    again: Annotated[bool, typer.Option("--again", help="Delete one of the same content first.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Have a snapshot with this version's agents at Daytona, and check it from inside.

    The build's log is shown as it comes. One of the same content is used as it is. Prints its name.
    """
    from runner.assembly import snapshots
    from runner.cli.harness import settled
    from runner.clock import SystemClock

    async def work() -> tuple[str, Checked]:
        settings, known = settled(state_dir, config)
        made, how = await snapshots.build(settings, known, SystemClock(), say, again=again)
        say(f"{made.name}: {how}; checking it")
        return how, await snapshots.check(settings, known, SystemClock(), made.name)

    how, checked = run(work(), as_json=as_json)
    _show(checked, as_json, how=how)
    if not checked.differences and not as_json:
        say(f'set [daytona] snapshot = "{checked.name}"')


@app.command("check")
def check_snapshot(
    name: Annotated[str | None, typer.Argument(help="Default: [daytona] snapshot, else that of this version.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Compare what is in a snapshot with what is installed here, in a sandbox that is deleted afterwards.

    Exit code 1 when something is not the same.
    """
    from runner.assembly import snapshots
    from runner.cli.harness import settled
    from runner.clock import SystemClock

    async def work() -> Checked:
        settings, known = settled(state_dir, config)
        wanted = name or settings.daytona.snapshot or None
        return await snapshots.check(settings, known, SystemClock(), wanted)

    _show(run(work(), as_json=as_json), as_json)


def _show(checked: Checked, as_json: bool, **more: Any) -> None:
    """The name on stdout, what is not as here on stderr; ends the command when there is such a thing."""
    if as_json:
        print_json({"name": checked.name, **more, "differences": checked.differences, "inside": checked.told})
    else:
        for difference in checked.differences:
            say(f"{checked.name}: {difference}")
        told = checked.told
        found = ", ".join(sorted(told["harnesses"])) or "no harness"
        say(f"{checked.name}: Python {told['python']}, node {told['node'] or '(none)'}, user {told['uid']}, {found}")
        typer.echo(checked.name)
    if checked.differences:
        raise typer.Exit(FAILED)
