"""The patches that travel with the package, and their application to an installation."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.resources import resource_path
from runner.rules.patches import Patch, PatchRefused, applied, patch_of

MANIFEST: Final = "manifest.toml"


@functools.cache
def shipped() -> Mapping[str, tuple[Patch, ...]]:
    """Harness to its patches in the manifest's order.

    Raises:
        RunnerError: see ``read_patches``.
    """
    return read_patches(resource_path("patches", MANIFEST).parent)


def read_patches(folder: Path) -> dict[str, tuple[Patch, ...]]:
    """The patches of a folder with a manifest.

    Raises:
        RunnerError: ``internal`` naming the file that cannot be used.
    """
    found: dict[str, tuple[Patch, ...]] = {}
    name = MANIFEST
    try:
        tables = tomllib.loads((folder / MANIFEST).read_text()).get("patch", [])
        for table in tables:
            name = str(table.get("file", MANIFEST))
            if Path(name).name != name:
                raise PatchRefused("it has to lie beside the manifest")
            patch = patch_of(table, (folder / name).read_bytes())
            found[patch.harness] = (*found.get(patch.harness, ()), patch)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunnerError("internal", f"patches/{name} cannot be used: {error}.") from error
    return found


def apply_patches(
    name: str,
    patches: Sequence[Patch],
    locked: Mapping[str, str],
    versions: Mapping[str, str],
    directory: Path,
    progress: Callable[[str], None],
) -> None:
    """Change the files of an installation, each whole or not at all.

    A package that the lock has, but not for this machine, is not there to be patched.

    Args:
        name: the harness, for the news.
        patches: what to apply, in order.
        locked: path to version of every package of the lock.
        versions: path to version of those that are installed.
        directory: the installation.
        progress: called with each line of news.

    Raises:
        RunnerError: ``harness_missing`` naming the patch and the file that it does not fit.
    """
    for patch in patches:
        try:
            if locked.get(patch.place) != patch.version:
                pinned = locked.get(patch.place, "no version")
                raise PatchRefused(f"it is made for version {patch.version}, and {pinned} is pinned")
            if patch.place in versions:
                _change(patch, directory)
                progress(f"{name}: applied {patch.file} to {patch.target}")
        except (PatchRefused, OSError) as error:
            where = f"{patch.place}/{_inside(patch)}"
            text = f"Harness {name!r}: patches/{patch.file} does not apply to {where}: {error}."
            raise RunnerError("harness_missing", text, harness=name) from error


def _change(patch: Patch, directory: Path) -> None:
    path = directory / patch.target
    if path.is_symlink() or not path.resolve().is_relative_to(directory.resolve()):
        raise PatchRefused("it is a symlink or lies behind one")
    content = applied(patch, path.read_bytes())
    beside = path.with_name(f".{path.name}.patched")
    beside.write_bytes(content)
    beside.chmod(path.stat().st_mode & 0o7777)
    os.replace(beside, path)


def _inside(patch: Patch) -> str:
    return patch.target.removeprefix(f"{patch.place}/")
