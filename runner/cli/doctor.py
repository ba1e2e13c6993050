"""``acp-runner doctor``: the settings in force, what is missing, and the command that installs it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner.cli.terminal import FAILED, AsJson, Config, StateDir, fail, plain, print_json

if TYPE_CHECKING:
    from runner.config import Settings
    from runner.sandbox.port import Condition, Provider


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``needed`` tells whether the product works without it."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None
    needed: bool = True


def doctor(
    sandbox: Annotated[str | None, typer.Option(help="Also prove this provider: local or daytona.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Print the settings, redacted, and what is missing together with the command that helps.

    Exit code 1 when something is missing that acp-runner needs.
    """
    from runner.cli.locate import chosen_state_dir
    from runner.config import load_settings
    from runner.errors import RunnerError

    if sandbox not in (None, "local", "daytona"):
        raise typer.BadParameter("must be local or daytona", param_hint="--sandbox")
    directory = chosen_state_dir(state_dir, os.environ)
    try:
        settings = load_settings(config, os.environ)
        findings = examine(settings, directory)
        if sandbox is not None:
            findings += (proven := check_sandbox(settings, sandbox))
            if sandbox == "daytona" and proven[0].name != "sandbox daytona":
                findings += check_snapshots(settings, directory)
    except RunnerError as error:
        fail(error.code, error.message, as_json=as_json)
    shown = settings.redacted()
    if as_json:
        print_json(
            {
                "file": str(settings.file) if settings.file else None,
                "state_dir": str(directory),
                "settings": shown,
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        typer.echo(f"# {settings.file or 'no configuration file; defaults'}")
        _print_settings(shown)
        typer.echo(f"\n# state directory {directory}")
        for finding in findings:
            _print_finding(finding)
    raise typer.Exit(0 if all(finding.ok for finding in findings if finding.needed) else FAILED)


def examine(settings: Settings, directory: Path) -> list[Finding]:
    """What can be seen without starting anything."""
    version = ".".join(map(str, sys.version_info[:3]))
    findings = [
        Finding(
            "python", sys.version_info >= (3, 11), f"{version} at {sys.executable}", "install Python 3.11 or newer"
        ),
        _writable(directory),
        _server(directory),
        _isolation(settings),
        _keys(settings, directory),
        *_windows(settings),
        _npm(),
        *_plane(settings),
        *_store(settings),
        *_stream(settings),
    ]
    return findings + _harnesses(settings, directory)


def _writable(directory: Path) -> Finding:
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    ok = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    fix = None if ok else f"make {place} writable, or set ACP_RUNNER_STATE_DIR"
    return Finding("state directory", ok, f"{directory} {'can' if ok else 'cannot'} be written", fix)


def _server(directory: Path) -> Finding:
    from runner.cli.locate import find

    place = find(directory, {})
    detail = f"running at {place.url}" if place else "not running"
    return Finding("server", place is not None, detail, None if place else "acp-runner serve", needed=False)


def _plane(settings: Settings) -> list[Finding]:
    """Whether one is needed is for ``[leases] on_unreachable``; over HTTP it has the store, too."""
    import asyncio

    from runner.assembly.choices import is_http, look_at_plane
    from runner.errors import RunnerError

    if not settings.leases.url:
        return []
    needed = is_http(settings) or settings.leases.on_unreachable == "closed"
    try:
        return [Finding("leases", True, asyncio.run(look_at_plane(settings)))]
    except RunnerError as error:
        return [Finding("leases", False, error.message, needed=needed or error.code == "invalid_request")]


def _store(settings: Settings) -> list[Finding]:
    """A database of others has to be there; its own file the runner makes itself."""
    import asyncio

    from runner.assembly.choices import is_postgresql, look_at_database
    from runner.errors import RunnerError

    if not is_postgresql(settings):
        return []

    try:
        return [Finding("store", True, asyncio.run(look_at_database(settings)))]
    except RunnerError as error:
        return [Finding("store", False, error.message)]


def _stream(settings: Settings) -> list[Finding]:
    """Runners go on without it, so it need not be there; a runner that cannot read the setting does not start."""
    import asyncio

    from runner.assembly.choices import look_at_stream
    from runner.errors import RunnerError

    if not settings.records.stream:
        return []

    try:
        return [Finding("record stream", True, asyncio.run(look_at_stream(settings)), needed=False)]
    except RunnerError as error:
        return [Finding("record stream", False, error.message, needed=error.code == "invalid_request")]


def _isolation(settings: Settings) -> Finding:
    """The level that cells get, by what each limit is kept, and why it is no better."""
    from runner.assembly.isolating import decided
    from runner.errors import RunnerError
    from runner.sandbox.isolation import probe_now

    try:
        found = decided(settings, probe_now())
    except RunnerError as error:
        return Finding("isolation", False, error.message, "choose another [local] isolation or network")
    limits = ", ".join(f"{name} {_bound(**bound)}" for name, bound in found.limits.view().items())
    detail = f"{found.level}, network {found.network}, {limits}{f' ({found.why})' if found.why else ''}"
    fix = None if shutil.which("bwrap") else "apt-get install bubblewrap"
    return Finding("isolation", found.level == "cell", detail, fix, needed=False)


def _windows(settings: Settings) -> list[Finding]:
    """How long a sandbox is kept warm, whichever table or default says so."""
    found = []
    for name in ("local", *(["daytona"] if settings.daytona.api_key else [])):
        members = settings.pool.windows(name)._asdict()
        if name == "local":
            del members["disk_seconds"]
        told = ", ".join(f"{of} {seconds:g}" for of, seconds in members.items())
        found.append(Finding(f"kept warm, {name}", True, told))
    return found


def _bound(limit: float, by: str) -> str:
    return f"{limit} by {by}" if by != "off" else f"{limit} but off" if limit else "off"


def _keys(settings: Settings, directory: Path) -> Finding:
    """Whether model keys stay outside of local sandboxes, and of which harnesses."""
    from runner.harness.catalogue import Catalogue

    if not settings.credentials.proxy:
        return Finding("model keys", False, "they enter sandboxes", "set [credentials] proxy = true", needed=False)
    known = Catalogue.build(settings.harness, directory, base_dir=settings.base_dir)
    names = [name for name in known.names() if known.get(name).routes]
    hosts = f"; they may also be sent to {', '.join(settings.credentials.hosts)}" if settings.credentials.hosts else ""
    return Finding("model keys", True, f"kept out of local sandboxes of {', '.join(names)}{hosts}", needed=False)


def _npm() -> Finding:
    npm = shutil.which("npm")
    fix = None if npm else "install Node.js with npm from your distribution, e.g. apt-get install npm"
    return Finding("npm", npm is not None, npm or "not found: no harness can be installed", fix, needed=False)


def _harnesses(settings: Settings, directory: Path) -> list[Finding]:
    from runner.cli.harness import entries_of
    from runner.harness.catalogue import Catalogue

    known = Catalogue.build(settings.harness, directory, base_dir=settings.base_dir)
    return [
        Finding(
            f"harness {entry['name']}",
            entry["available"],
            _told(entry),
            None if entry["available"] else entry["install_command"],
            needed=entry["name"] == "demo",
        )
        for entry in entries_of(known)
    ]


def _told(entry: dict[str, Any]) -> str:
    told = entry["reason"] or f"available{', version ' + entry['version'] if entry['version'] else ''}"
    login = entry["login"]
    return f"{told}; {login['detail']}" if login["logged_in"] is not None else str(told)


def check_sandbox(settings: Settings, name: str) -> list[Finding]:
    """A provider's self-check in a directory, or an account, of its own: starts and tears down real sandboxes."""
    import asyncio

    from runner.assembly import sandboxes
    from runner.assembly.isolating import isolation_of
    from runner.clock import SystemClock
    from runner.ids import Ids
    from runner.sandbox.egress import variables
    from runner.sandbox.local import LocalProvider
    from runner.sandbox.selfcheck import check

    async def checked(directory: Path) -> list[Finding]:
        store_id, replica_id, clock = Ids().mint("store"), Ids().mint("rep"), SystemClock()
        provider: Provider
        added: Collection[str] = ()
        if name == "local":
            bounds = await isolation_of(settings)
            provider = LocalProvider(directory, store_id, replica_id, clock=clock, bounds=bounds)
            added = variables() if bounds.network == "proxy" else ()
        else:
            offered = sandboxes.daytona(settings, directory, store_id, replica_id, clock)
            if not offered:
                return [Finding("sandbox daytona", False, "not set up", "set [daytona] api_key")]
            provider = offered["daytona"]
        try:
            if name == "daytona" and (condition := await _reached(provider)).reason is not None:
                return [Finding("sandbox daytona", False, condition.reason, condition.install_command)]
            found = await check(provider, added)
            return [Finding(f"sandbox {name}: {item.name}", item.ok, item.detail) for item in found]
        finally:
            await provider.close()

    with tempfile.TemporaryDirectory(prefix="acp-runner-doctor-") as directory:
        return asyncio.run(checked(Path(directory)))


async def _reached(provider: Provider) -> Condition:
    """One call first: a start keeps trying for minutes where nobody answers."""
    condition = provider.condition()
    if condition.available:
        await provider.home_identity("doctor", "nobody")
    return provider.condition()


def check_snapshots(settings: Settings, directory: Path) -> list[Finding]:
    """Whether what the settings name holds what is installed here; an image of one's own may do without."""
    import asyncio

    from runner.assembly import snapshots
    from runner.clock import SystemClock
    from runner.errors import RunnerError
    from runner.harness.catalogue import Catalogue

    known = Catalogue.build(settings.harness, directory, base_dir=settings.base_dir)
    names = sorted({settings.daytona.snapshot, *settings.daytona.snapshots.values()} - {""})
    if not names:
        text = "none is set: sandboxes are made of the account's own, which has no agents"
        return [Finding("snapshot", False, text, "acp-runner snapshot build", needed=False)]
    findings = []
    for name in names:
        try:
            checked = asyncio.run(snapshots.check(settings, known, SystemClock(), name))
            told = "; ".join(checked.differences) or "holds what this version would put into it"
            ok = not checked.differences
        except RunnerError as error:
            ok, told = False, error.message
        findings.append(Finding(f"snapshot {name}", ok, told, "acp-runner snapshot build", needed=False))
    return findings


def _print_settings(shown: dict[str, Any]) -> None:
    for section, members in shown.items():
        if isinstance(members, dict) and members:
            typer.echo(f"[{section}]")
            for name, value in members.items():
                typer.echo(plain(f"{name} = {_value(value)}"))


def _value(value: Any) -> str:
    from runner.wire.codec import to_json

    return "(none)" if value is None else to_json(value).decode()


def _print_finding(finding: Finding) -> None:
    detail = f": {finding.detail}" if finding.detail else ""
    mark = "ok     " if finding.ok else "FAILED " if finding.needed else "absent "
    told = not finding.fix or finding.fix in finding.detail
    cure = "" if finding.ok or told else f"; {finding.fix}"
    typer.echo(plain(f"{mark} {finding.name}{detail}{cure}"))
