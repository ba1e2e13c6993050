"""What a snapshot of this installation is made of, and whether one is (docs/daytona.md)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import lzma
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import runner.acp.link
from runner.assembly.sandboxes import connect
from runner.clock import Clock
from runner.config import Settings
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.installed import Machine, NpmInstall, harness_directory, node_cpu, read_manifest
from runner.harness.npm import ARGUMENTS
from runner.resources import resource_path
from runner.rules import patches as patch_rules
from runner.rules.patches import patches_digest
from runner.rules.snapshot import Expected, ExpectedHarness, Reported, differences, snapshot_name
from runner.sandbox import contents
from runner.sandbox.bridge_files import bridge_digest
from runner.sandbox.contents import bundle_digest, tree_digest
from runner.sandbox.daytona.building import Build, How, report

MAX_BYTES: Final = 90_000
"""The service takes a request of 100 kB; the Dockerfile is all but its frame."""
CHUNK: Final = 32_000
"""A Dockerfile's line may have 65,535 bytes."""
NOT_INSIDE: Final = frozenset({"probe.py", "report.py"})
_ROOT: Final = re.compile(r"/[A-Za-z0-9._/-]*[A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A snapshot to build: its name, which names its content, and its Dockerfile."""

    name: str
    content: str
    dockerfile: str


@dataclass(frozen=True, slots=True)
class Checked:
    """A snapshot's self-check: its name, what was found inside, and each thing that is not as here."""

    name: str
    told: Mapping[str, Any]
    differences: list[str]


def recipe(root: str, known: Catalogue) -> Recipe:
    """The snapshot of this installation's harnesses below ``root``.

    Raises:
        RunnerError: ``invalid_request``: ``root`` is no plain absolute path; ``too_large``: it does not fit a request.
    """
    if not _ROOT.fullmatch(root) or ".." in root:
        text = f"[daytona] root: {root!r} is no plain absolute path."
        raise RunnerError("invalid_request", text, field="daytona.root")
    template = resource_path("sandboxes", "daytona", "Dockerfile").read_text()
    plan, members = _plan(known), _members()
    content = hashlib.sha256(json.dumps([template, root, plan], sort_keys=True).encode())
    for name, data in sorted(members.items()):
        content.update(f"{name}:{hashlib.sha256(data).hexdigest()}\n".encode())
    digest = content.hexdigest()[:32]
    members["plan.json"] = json.dumps({**plan, "content": digest}, separators=(",", ":")).encode()
    dockerfile = _filled(template, root, base64.b64encode(_packed(members)).decode())
    if len(dockerfile) > MAX_BYTES:
        text = f"The snapshot's Dockerfile has {len(dockerfile)} bytes; the service takes {MAX_BYTES}."
        raise RunnerError("too_large", text)
    return Recipe(snapshot_name(digest), digest, dockerfile)


def _plan(known: Catalogue) -> dict[str, Any]:
    harnesses = {}
    for name, pinned in _installs(known).items():
        tables = [
            {
                "harness": patch.harness,
                "package": patch.package,
                "version": patch.version,
                "file": patch.file,
                "sha256": patch.sha256,
                "diff": base64.b64encode(patch.diff).decode(),
            }
            for patch in pinned.patches()
        ]
        facts = [patch.facts() for patch in pinned.patches()]
        harnesses[name] = {
            "lock": base64.b64encode(pinned.lock_bytes()).decode(),
            "patches": tables,
            "manifest": {"name": name, "lock_digest": pinned.digest(), "patches": facts},
        }
    bridge = {"bridge": bridge_digest(), "websockets": version("websockets")}
    return {"npm": list(ARGUMENTS), "harnesses": harnesses, **bridge}


def _installs(known: Catalogue) -> dict[str, NpmInstall]:
    found = {name: known.get(name).install for name in known.names()}
    return {name: pinned for name, pinned in found.items() if pinned is not None}


def _members() -> dict[str, bytes]:
    """By path below the parcel; nothing of this machine but what the package ships."""
    inside = resource_path("sandboxes", "inside")
    members = {
        "build.py": resource_path("sandboxes", "daytona", "build.py").read_bytes(),
        "patches.py": Path(patch_rules.__file__).read_bytes(),
        "contents.py": Path(contents.__file__).read_bytes(),
        "link.py": Path(runner.acp.link.__file__).read_bytes(),
    }
    for path in inside.rglob("*.py"):
        name = path.relative_to(inside).as_posix()
        if name not in NOT_INSIDE:
            members[f"inside/{name}"] = path.read_bytes()
    return members


def _packed(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in sorted(members.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return lzma.compress(buffer.getvalue(), preset=9)


def _filled(template: str, root: str, packed: str) -> str:
    lines: list[str] = []
    for line in template.replace("@ROOT@", root).splitlines():
        if "@PARCEL@" in line:
            lines += [line.replace("@PARCEL@", packed[at : at + CHUNK]) for at in range(0, len(packed), CHUNK)]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def expected(made: Recipe, known: Catalogue, machine: Machine) -> Expected:
    """What a sandbox of ``machine`` must hold; reads all files of the harnesses that are installed here."""
    harnesses = {}
    for name, pinned in _installs(known).items():
        directory = harness_directory(known.state_dir, name)
        manifest = read_manifest(directory)
        same = manifest is not None and manifest.is_of(pinned) and machine == Machine.here()
        harnesses[name] = ExpectedHarness(
            lock_digest=pinned.digest(),
            patches=pinned.patches_digest(),
            packages=pinned.versions(machine),
            files=tree_digest(directory / "node_modules") if same else None,
        )
    inside = bundle_digest({name[7:]: data for name, data in _members().items() if name.startswith("inside/")})
    return Expected(made.content, bridge_digest(), inside, node_cpu(), harnesses)


async def build(
    settings: Settings, known: Catalogue, clock: Clock, news: Callable[[str], None], *, again: bool = False
) -> tuple[Recipe, How]:
    """Have the snapshot of this installation at the service.

    Args:
        settings: with ``[daytona]``.
        known: the harnesses.
        clock: of the deadlines.
        news: called with each line of the build's log.
        again: delete one of this name first.

    Raises:
        RunnerError: ``invalid_request``: Daytona is not set up here; else see ``recipe`` and ``Build.ensure``.
    """
    made = recipe(settings.daytona.root, known)
    service = await connect(settings)()
    try:
        work = Build(service, clock, made.name, made.dockerfile, news)
        return made, await work.ensure(again=again)
    finally:
        await service.close()


async def check(settings: Settings, known: Catalogue, clock: Clock, name: str | None = None) -> Checked:
    """Compare what is in a snapshot with what is here, in a sandbox that is deleted afterwards.

    Args:
        settings: with ``[daytona]``.
        known: the harnesses.
        clock: of the deadlines.
        name: the snapshot; default that of this installation.

    Raises:
        RunnerError: ``invalid_request``: Daytona is not set up here; ``sandbox_start_failed``.
    """
    given = settings.daytona
    made = recipe(given.root, known)
    name = made.name if name is None else name
    service = await connect(settings)()
    try:
        told = await report(service, clock, name, given.root, given.python)
    finally:
        await service.close()
    system, processor, libc = told["platform"]
    machine = Machine(system, node_cpu(processor), libc)
    wanted = await asyncio.to_thread(expected, made, known, machine)
    patched = {harness: _patches(there.get("manifest")) for harness, there in told["harnesses"].items()}
    return Checked(name, told, differences(wanted, Reported(told, machine.cpu, patched)))


def _patches(manifest: Any) -> str:
    try:
        return patches_digest(manifest.get("patches", ()))
    except (AttributeError, TypeError, ValueError):
        return "unreadable"
