"""The command ``acp-runner``."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli import (
    chat,
    doctor,
    harness,
    migrate,
    plane,
    prompt,
    questions,
    queue,
    serve,
    sessions,
    snapshot,
    worker,
)

app = typer.Typer(
    name="acp-runner",
    help="Runs coding agents in sandboxes, one turn per request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from runner import __version__

        typer.echo(f"acp-runner {__version__}")
        raise typer.Exit


@app.callback()
def acp_runner(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Runs coding agents in sandboxes, one turn per request."""


app.command("serve")(serve.serve)
app.command("plane")(plane.plane)
app.command("worker")(worker.worker)
app.command("migrate")(migrate.migrate)
app.command("prompt")(prompt.prompt)
app.command("chat")(chat.chat)
app.command("approve")(questions.approve)
app.add_typer(sessions.app, name="sessions")
app.add_typer(queue.app, name="queue")
app.command("pool")(sessions.pool)
app.add_typer(harness.app, name="harness")
app.add_typer(snapshot.app, name="snapshot")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
