"""``acp-runner harness``: list, install and check coding agents."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from runner.cli.terminal import FAILED, AsJson, Config, StateDir, fail, print_json, print_table, say

if TYPE_CHECKING:
    from runner.harness.catalogue import Catalogue

T = TypeVar("T")
app = typer.Typer(help="List, install and check coding agents.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Harness.")]


@app.callback(invoke_without_command=True)
def harness(context: typer.Context) -> None:
    """List, install and check coding agents; without a command: list."""
    if context.invoked_subcommand is None:
        list_harnesses()


@app.command("list")
def list_harnesses(as_json: AsJson = False, state_dir: StateDir = None, config: Config = None) -> None:
    """Which coding agents can be started here."""
    entries = _expected(lambda: entries_of(catalogue(state_dir, config)), as_json)
    if as_json:
        print_json({"items": entries, "next_cursor": None})
        return
    rows = [
        (entry["name"], entry["version"], "yes" if entry["available"] else "no", entry["reason"] or entry["title"])
        for entry in entries
    ]
    print_table("harnesses", ("harness", "version", "available", ""), rows)


@app.command("install")
def install_harness(name: Name, as_json: AsJson = False, state_dir: StateDir = None, config: Config = None) -> None:
    """Install a harness's pinned packages into the state directory."""
    from runner.harness.installer import install

    known = _expected(lambda: catalogue(state_dir, config), as_json)
    done = _expected(lambda: install(name, known.state_dir, say, catalogue=known), as_json)
    if as_json:
        print_json({**asdict(done), "directory": str(done.directory) if done.directory else None})


@app.command("check")
def check_harness(name: Name, as_json: AsJson = False, state_dir: StateDir = None, config: Config = None) -> None:
    """Compare an installation with its pins, start the agent and speak ``initialize``."""
    from runner.harness.installer import check

    known = _expected(lambda: catalogue(state_dir, config), as_json)
    result = _expected(lambda: check(name, known.state_dir, catalogue=known), as_json)
    if as_json:
        print_json({"name": name, **asdict(result)})
    else:
        say(f"{name}: {'ok' if result.ok else 'not ok'}: {result.detail}")
    raise typer.Exit(0 if result.ok else FAILED)


def catalogue(state_dir: Path | None, config: Path | None) -> Catalogue:
    """The harnesses of the configuration and the built-in ones."""
    from runner.cli.locate import chosen_state_dir
    from runner.config import load_settings
    from runner.harness.catalogue import Catalogue

    settings = load_settings(config, os.environ)
    return Catalogue.build(settings.harness, chosen_state_dir(state_dir, os.environ), base_dir=settings.base_dir)


def entries_of(known: Catalogue) -> list[dict[str, Any]]:
    """Name, title and availability of each harness."""
    return [
        {"name": name, "title": known.get(name).title, **asdict(known.availability(name))} for name in known.names()
    ]


def _expected(work: Callable[[], T], as_json: bool) -> T:
    from runner.errors import RunnerError

    try:
        return work()
    except RunnerError as error:
        fail(error.code, error.message, as_json=as_json, retryable=error.retryable)
