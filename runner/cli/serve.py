"""``acp-runner serve``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from runner.cli.terminal import INTERRUPTED, Config, StateDir, fail, print_json, say


def serve(
    host: Annotated[str | None, typer.Option(help=r"Address to bind; default \[server] host, 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=r"Port; 0 chooses one; default \[server] port, 8765.")
    ] = None,
    state_dir: StateDir = None,
    config: Config = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Serve the HTTP API until SIGTERM or Ctrl-C, which drain.

    Prints one JSON line on stdout when it accepts requests; logs go to stderr.
    """
    run(host, port, state_dir, config, with_parent=with_parent)


def run(
    host: str | None,
    port: int | None,
    state_dir: Path | None,
    config: Path | None,
    *,
    with_parent: bool = False,
    gateway: bool = False,
) -> NoReturn:
    """Serve until a signal, and exit; ``gateway`` serves a plane."""
    import asyncio

    from runner.assembly import log_to_stderr
    from runner.assembly import serve as serve_all
    from runner.cli.locate import chosen_state_dir
    from runner.config import load_settings
    from runner.errors import RunnerError
    from runner.sandbox.isolation import not_dumpable

    log_to_stderr()
    not_dumpable()
    directory = chosen_state_dir(state_dir, os.environ)
    try:
        settings = load_settings(config, os.environ)
        if gateway and settings.leases.url.startswith("http"):
            text = "leases.url: a plane cannot use another plane; leave it empty, or name a Redis."
            raise RunnerError("invalid_request", text, field="leases.url")
        if with_parent:
            threading.Thread(target=_end_with_parent, name="with-parent", daemon=True).start()
        code = asyncio.run(
            serve_all(
                settings,
                state_dir=directory,
                host=settings.server.host if host is None else host,
                port=settings.server.port if port is None else port,
                on_ready=_announce,
                gateway=gateway,
            )
        )
    except RunnerError as error:
        fail(error.code, error.message)
    except OSError as error:
        fail("internal", f"cannot serve: {error.strerror or error}")
    except (asyncio.CancelledError, KeyboardInterrupt):
        code = INTERRUPTED
    raise typer.Exit(code)


def _announce(ready: dict[str, Any]) -> None:
    """The ready line, and what a person needs."""
    print_json({"ready": True, "url": ready.get("url"), "replica_id": ready.get("replica_id")})
    sys.stdout.flush()
    say(f"serving at {ready.get('url')}")


def _end_with_parent() -> None:
    """End as by SIGTERM once stdin is closed: whoever started this server has gone."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
