"""``acp-runner plane``."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.serve import run
from runner.cli.terminal import Config, StateDir


def plane(
    host: Annotated[str | None, typer.Option(help=r"Address to bind; default \[server] host, 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=r"Port; 0 chooses one; default \[server] port, 8765.")
    ] = None,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Serve leases and the store to runners, and their sessions to clients, until SIGTERM or Ctrl-C.

    It runs no agent itself; runners name its URL in their settings. Prints one JSON line on stdout when it accepts
    requests; logs go to stderr.
    """
    run(host, port, state_dir, config, gateway=True)
