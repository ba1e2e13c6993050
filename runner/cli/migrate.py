"""``acp-runner migrate``: the store's schema, forth and back."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from runner.cli.terminal import Config, StateDir, run, say


def migrate(
    to: Annotated[
        int | None, typer.Option(min=0, help="Schema version; default: the one that this code needs.")
    ] = None,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL that does it on stdout, and change nothing.")
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Allow a way back to lose what the earlier schema has no place for.")
    ] = False,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Bring the store of the settings to a schema version, whole or not at all.

    Stop the runners that use it first. Prints a line for each revision on stdout.
    """
    from runner.assembly.migrating import migrate as migrate_store
    from runner.cli.locate import chosen_state_dir
    from runner.config import load_settings

    async def work() -> None:
        settings = load_settings(config, os.environ)
        directory = chosen_state_dir(state_dir, os.environ)
        done = await migrate_store(settings, directory, to=to, discard=discard, dry=sql)
        if sql:
            typer.echo(done.script, nl=False)
            return
        for line in done.steps:
            typer.echo(line)
        say(f"{done.where} is migrated" if done.steps else f"{done.where} has that version already")

    run(work())
