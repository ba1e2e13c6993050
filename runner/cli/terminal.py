"""How commands speak: values on stdout, words on stderr, one clear line for an expected error."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer

T = TypeVar("T")
OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
BUSY: Final = 3
PAUSED: Final = 4
INTERRUPTED: Final = 130
_WIDE: Final = 10_000

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", help="State directory; default $ACP_RUNNER_STATE_DIR or ~/.local/state/acp-runner."),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="Configuration file; default ./acp-runner.toml if it exists.")
]

# Escape sequences of an agent or a server must not reach a terminal; newline and tab may.
_CONTROLS: Final = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


def plain(text: str) -> str:
    """``text`` without control characters, and with lone surrogates replaced."""
    return text.translate(_CONTROLS).encode("utf-8", "replace").decode()


def say(text: str) -> None:
    """A line for people, on stderr."""
    typer.echo(plain(text), err=True)


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    from runner.wire.codec import to_json

    typer.echo(to_json(value).decode())


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout; empty cells for None. Cells are folded at a terminal only: a pipe gets whole ones."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None, box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else plain(str(cell))) for cell in row))
    if rows:
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE).print(table)
    else:
        say(f"no {title}")


def fail(
    code: str, message: str, *, as_json: bool = False, exit_code: int = FAILED, retryable: bool = False
) -> NoReturn:
    """End the command with one line on stderr, and with JSON an ``error`` object on stdout."""
    say(f"acp-runner: {code}: {message}")
    if as_json:
        print_json({"error": {"code": code, "message": message, "retryable": retryable}})
    raise typer.Exit(exit_code)


def run(work: Coroutine[Any, Any, T], *, as_json: bool = False) -> T:
    """Run a command's work; an expected error ends the command by ``fail``, Ctrl-C with 130."""
    from runner.client import ApiError
    from runner.errors import RunnerError

    try:
        return asyncio.run(work)
    except (ApiError, RunnerError) as error:
        busy = error.code == "session_turn_in_use"
        fail(
            error.code,
            error.message,
            as_json=as_json,
            exit_code=BUSY if busy else FAILED,
            retryable=error.retryable,
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
