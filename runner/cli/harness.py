"""``acp-runner harness``: list, install and check coding agents, and log in to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from runner.cli.terminal import FAILED, AsJson, Config, StateDir, fail, print_json, print_table, say

if TYPE_CHECKING:
    from runner.config import Settings
    from runner.harness.catalogue import Catalogue

T = TypeVar("T")
app = typer.Typer(help="List, install, check and log in to coding agents.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Harness.")]


@app.callback(invoke_without_command=True)
def harness(context: typer.Context) -> None:
    """List, install, check and log in to coding agents; without a command: list."""
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
        (
            entry["name"],
            entry["version"],
            "yes" if entry["available"] else "no",
            entry["login"]["detail"],
            entry["reason"] or entry["title"],
        )
        for entry in entries
    ]
    print_table("harnesses", ("harness", "version", "available", "login", ""), rows)


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
    login = login_of(known, name)
    if as_json:
        print_json({"name": name, **asdict(result), "login": login})
    else:
        say(f"{name}: {'ok' if result.ok else 'not ok'}: {result.detail}")
        if login["logged_in"] is not None:
            say(f"{name}: {login['detail']}")
    raise typer.Exit(0 if result.ok else FAILED)


@app.command("login")
def log_in(
    name: Name,
    with_api_key: Annotated[
        bool, typer.Option("--with-api-key", help="Store an API key, read from stdin, instead of asking.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether somebody is logged in; exit code 0 or 1.")
    ] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Forget the login of this machine.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Log in to a coding agent on this machine; its sessions here use the login when they are given no key."""
    from runner.harness.signing_in import shelf_of, sign_in

    if with_api_key + check + forget > 1:
        raise typer.BadParameter("choose one of --with-api-key, --check and --forget")
    known = _expected(lambda: catalogue(state_dir, config), as_json)
    spec = _expected(lambda: known.get(name), as_json)
    shelf = _expected(lambda: shelf_of(spec, known.state_dir), as_json)
    if forget:
        with shelf.locked():
            there = shelf.forget()
        say(f"{name}: {'the login is forgotten' if there else 'nobody was logged in'}")
    elif not check:
        key = _key() if with_api_key else None
        _expected(lambda: sign_in(spec, known.state_dir, say, os.environ, key=key), as_json)
    login = login_of(known, name)
    if as_json:
        print_json({"name": name, **login})
    elif not forget:
        say(f"{name}: {login['detail']}")
    raise typer.Exit(0 if login["logged_in"] or forget else FAILED)


def _key() -> str:
    import getpass

    key = (getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if not key:
        raise typer.BadParameter("no key on stdin", param_hint="--with-api-key")
    return key


def login_of(known: Catalogue, name: str) -> dict[str, Any]:
    """Whether this machine is logged in to a harness, until when, and for people."""
    import time

    from runner.clock import rfc3339
    from runner.harness.logins import Shelf

    login = known.get(name).login
    if login is None or login.form is None:
        return {"logged_in": None, "expires_at": None, "refreshes": None, "detail": ""}
    found = Shelf(known.state_dir, name, login.form).login()
    if found is None:
        return {"logged_in": False, "expires_at": None, "refreshes": None, "detail": "not logged in"}
    expires_at = rfc3339(found.expires_ms) if found.expires_ms is not None else None
    detail = "logged in"
    if expires_at is not None and found.rotates:
        detail += f", refreshed by the agent at {expires_at}"
    elif expires_at is not None:
        detail += f", {'expired' if found.expired(int(time.time() * 1000)) else 'expires'} {expires_at}"
    return {"logged_in": True, "expires_at": expires_at, "refreshes": found.rotates, "detail": detail}


def catalogue(state_dir: Path | None, config: Path | None) -> Catalogue:
    """The harnesses of the configuration and the built-in ones."""
    return settled(state_dir, config)[1]


def settled(state_dir: Path | None, config: Path | None) -> tuple[Settings, Catalogue]:
    """The settings in force, and the harnesses that they and the package know."""
    from runner.cli.locate import chosen_state_dir
    from runner.config import load_settings
    from runner.harness.catalogue import Catalogue

    settings = load_settings(config, os.environ)
    directory = chosen_state_dir(state_dir, os.environ)
    return settings, Catalogue.build(settings.harness, directory, base_dir=settings.base_dir)


def entries_of(known: Catalogue) -> list[dict[str, Any]]:
    """Name, title, availability and login of each harness."""
    return [
        {
            "name": name,
            "title": known.get(name).title,
            **asdict(known.availability(name)),
            "login": login_of(known, name),
        }
        for name in known.names()
    ]


def _expected(work: Callable[[], T], as_json: bool) -> T:
    from runner.errors import RunnerError

    try:
        return work()
    except RunnerError as error:
        fail(error.code, error.message, as_json=as_json, retryable=error.retryable)
