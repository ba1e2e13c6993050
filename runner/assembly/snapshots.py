"""A snapshot of this installation at Daytona: built, and compared with what is here (docs/daytona.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runner.assembly.sandboxes import connect
from runner.assembly.snapshot_image import Image, image, installs, members_of_image
from runner.clock import Clock
from runner.config import Settings
from runner.harness.catalogue import Catalogue
from runner.harness.installed import Machine, harness_directory, node_cpu, read_manifest
from runner.rules.patches import patches_digest
from runner.rules.snapshot import Expected, ExpectedHarness, Reported, differences
from runner.sandbox.bridge_files import bridge_digest
from runner.sandbox.contents import bundle_digest, tree_digest
from runner.sandbox.daytona.building import Build, How, report


@dataclass(frozen=True, slots=True)
class Checked:
    """A snapshot's self-check: its name, what was found inside, and each thing that is not as here."""

    name: str
    told: Mapping[str, Any]
    differences: list[str]


def expected(made: Image, known: Catalogue, machine: Machine) -> Expected:
    """What a sandbox of ``machine`` must hold; reads all files of the harnesses that are installed here."""
    harnesses = {}
    for name, pinned in installs(known).items():
        directory = harness_directory(known.state_dir, name)
        manifest = read_manifest(directory)
        same = manifest is not None and manifest.is_of(pinned) and machine == Machine.here()
        harnesses[name] = ExpectedHarness(
            lock_digest=pinned.digest(),
            patches=pinned.patches_digest(),
            packages=pinned.versions(machine),
            files=tree_digest(directory / "node_modules") if same else None,
        )
    inside = bundle_digest({name[7:]: data for name, data in members_of_image().items() if name.startswith("inside/")})
    return Expected(made.content, bridge_digest(), inside, node_cpu(), harnesses)


async def build(
    settings: Settings, known: Catalogue, clock: Clock, news: Callable[[str], None], *, again: bool = False
) -> tuple[Image, How]:
    """Have the snapshot of this installation at the service.

    Args:
        settings: with ``[daytona]``.
        known: the harnesses.
        clock: of the deadlines.
        news: called with each line of the build's log.
        again: delete one of this name first.

    Raises:
        RunnerError: ``invalid_request``: Daytona is not set up here; else see ``image`` and ``Build.ensure``.
    """
    made = image(settings.daytona.root, known)
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
    made = image(given.root, known)
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
