"""``acp-runner worker``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner.cli.terminal import INTERRUPTED, USAGE, Config, StateDir, fail, print_json

if TYPE_CHECKING:
    from runner.config import Settings

NOTHING = (
    "Nothing to do: [records] stream is empty, so runners write their records themselves. "
    "Name a Redis there, and a shared store in [store] url, or use --retention."
)


def worker(
    name: Annotated[
        str | None, typer.Option(help="Name of this worker, the same over restarts; default: host and state directory.")
    ] = None,
    reclaim: Annotated[
        bool, typer.Option("--reclaim", help=r"Take over what other workers hold for \[records] reclaim_idle_seconds.")
    ] = False,
    retention: Annotated[
        bool, typer.Option("--retention", help=r"Delete what is older than \[records] retention_days, once, and exit.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --retention: only count.")] = False,
    host: Annotated[str, typer.Option(help="Address to bind for --port.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve GET /metrics there; 0 chooses a port; default: not.")
    ] = None,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Move records from the stream of the settings to the store until SIGTERM or Ctrl-C.

    Prints one JSON line on stdout when it is at work (with --port its url), or what --retention deleted; logs go to
    stderr. Any number of them may run.
    """
    import asyncio

    from runner.assembly import log_to_stderr
    from runner.cli.locate import chosen_state_dir
    from runner.config import load_settings
    from runner.errors import RunnerError
    from runner.sandbox.isolation import not_dumpable

    log_to_stderr()
    not_dumpable()
    directory = chosen_state_dir(state_dir, os.environ)
    try:
        settings = load_settings(config, os.environ)
        if retention or dry_run:
            code = asyncio.run(_retain(settings, directory, retention, dry_run))
        else:
            code = asyncio.run(_work(settings, directory, name, reclaim, host, port))
    except RunnerError as error:
        fail(error.code, error.message)
    except OSError as error:
        fail("internal", f"cannot serve: {error.strerror or error}")
    except (asyncio.CancelledError, KeyboardInterrupt):
        code = INTERRUPTED
    raise typer.Exit(code)


async def _work(
    settings: Settings, directory: Path, name: str | None, reclaim: bool, host: str, port: int | None
) -> int:
    from runner.assembly.working import work

    if not settings.records.stream:
        fail("invalid_request", NOTHING, exit_code=USAGE)
    return await work(
        settings, state_dir=directory, name=name, reclaim=reclaim, on_ready=_announce, host=host, port=port
    )


async def _retain(settings: Settings, directory: Path, retention: bool, dry_run: bool) -> int:
    from runner.assembly.working import retain

    if not retention:
        fail("invalid_request", "--dry-run goes with --retention.", exit_code=USAGE)
    if settings.records.retention_days == 0:
        typer.echo("[records] retention_days is 0: everything is kept", err=True)
    print_json(await retain(settings, state_dir=directory, dry_run=dry_run))
    return 0


def _announce(ready: dict[str, Any]) -> None:
    print_json(ready)
    sys.stdout.flush()
