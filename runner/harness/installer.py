"""Installs and checks harnesses: pinned npm packages in the state directory, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.installed import FILES, MANIFEST, NpmInstall, harness_directory, read_manifest
from runner.harness.npm import INSTALL_SECONDS, install_packages
from runner.harness.patching import apply_patches
from runner.harness.probe import probe
from runner.harness.spec import HarnessSpec, missing

_LOCK_POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class InstalledHarness:
    """An installation.

    Attributes:
        name: the harness.
        version: pinned version of its adapter, None when there is nothing to pin.
        directory: where it lies, None when there is nothing to install.
        fresh: it was installed by this call.
    """

    name: str
    version: str | None
    directory: Path | None
    fresh: bool


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Whether a harness works here.

    Attributes:
        ok: its files are as installed and its agent answered ``initialize`` with the pinned version.
        version: the version that the agent itself named, else the pinned one.
        detail: one sentence: what it answered, or what is wrong and what helps.
        agent: the agent's own name.
        protocol_version: the ACP version that it chose, None when it never answered.
        elapsed_ms: spawn to answer, milliseconds.
    """

    ok: bool
    version: str | None
    detail: str
    agent: str | None = None
    protocol_version: int | None = None
    elapsed_ms: int | None = None


def install(
    name: str,
    state_dir: Path,
    progress: Callable[[str], None] = lambda line: None,
    *,
    catalogue: Catalogue | None = None,
    seconds: float = INSTALL_SECONDS,
) -> InstalledHarness:
    """Install a harness, unless exactly these packages are installed and unharmed.

    Blocking; safe against a second call at the same time (it waits) and against a crash (what is
    half done is never used and is removed by the next call).

    Args:
        name: the harness.
        state_dir: the runner's state directory.
        progress: called with each line of news.
        catalogue: default the built-in harnesses.
        seconds: how long all may take, the waiting included.

    Raises:
        RunnerError: ``harness_unknown``; ``harness_missing`` when npm is absent or fails, or a patch does not apply.
    """
    spec = _spec(name, state_dir, catalogue)
    if spec.install is None:
        progress(f"{name}: nothing to install")
        return InstalledHarness(name, spec.version, None, fresh=False)
    deadline = time.monotonic() + seconds
    target = harness_directory(state_dir, name)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _exclusive(name, target.parent, progress, deadline):
        _remove_leftovers(name, target.parent)
        if _is_whole(target, spec.install):
            progress(f"{name}: version {spec.version} is already installed")
            return InstalledHarness(name, spec.version, target, fresh=False)
        _install_beside(spec, spec.install, target, progress, deadline)
    progress(f"{name}: installed version {spec.version}")
    return InstalledHarness(name, spec.version, target, fresh=True)


def check(
    name: str, state_dir: Path, *, catalogue: Catalogue | None = None, seconds: float | None = None
) -> CheckResult:
    """Compare an installation with its manifest and make its agent answer ``initialize``. Blocking.

    Args:
        name: the harness.
        state_dir: the runner's state directory.
        catalogue: default the built-in harnesses.
        seconds: how long the agent may take to answer.

    Raises:
        RunnerError: ``harness_unknown``; everything else is a result that is not ``ok``.
    """
    spec = _spec(name, state_dir, catalogue)
    try:
        spec.resolve(state_dir)
        if spec.install is not None:
            _verify_files(spec, harness_directory(state_dir, name))
        said = probe(spec, state_dir, seconds)
    except RunnerError as error:
        return CheckResult(False, spec.version, error.message)
    right = spec.version is None or said.version == spec.version
    wrong = "" if right else f", but version {spec.version} is pinned"
    agent = f"{said.agent or name} {said.version or '(no version)'}"
    detail = f"{agent} answered with ACP version {said.protocol_version} after {said.elapsed_ms} ms{wrong}"
    version = said.version or spec.version
    return CheckResult(right, version, detail, said.agent, said.protocol_version, said.elapsed_ms)


def _spec(name: str, state_dir: Path, catalogue: Catalogue | None) -> HarnessSpec:
    return (catalogue or Catalogue.build({}, state_dir)).get(name)


def _install_beside(
    spec: HarnessSpec, packages: NpmInstall, target: Path, progress: Callable[[str], None], deadline: float
) -> None:
    made = Path(tempfile.mkdtemp(prefix=f".{spec.name}.new-", dir=target.parent))
    try:
        left = deadline - time.monotonic()
        versions = install_packages(spec.name, packages, made, progress, left)
        patches = packages.patches()
        apply_patches(spec.name, patches, packages.locked(), versions, made, progress)
        progress(f"{spec.name}: recording the files")
        (made / FILES).write_text(json.dumps(_digests(made), separators=(",", ":")))
        manifest: dict[str, object] = {"name": spec.name, "lock_digest": packages.digest(), "packages": versions}
        manifest["patches"] = [patch.facts() for patch in patches]
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        if target.exists():
            # An agent that runs from the old directory keeps its open files until it ends.
            target.rename(made.with_name(made.name.replace(".new-", ".old-")))
        made.rename(target)
    finally:
        _remove_leftovers(spec.name, target.parent)


def _is_whole(target: Path, packages: NpmInstall) -> bool:
    manifest = read_manifest(target)
    if manifest is None or not manifest.is_of(packages):
        return False
    return _first_damage(target, contents=False) is None


def _verify_files(spec: HarnessSpec, directory: Path) -> None:
    damage = _first_damage(directory, contents=True)
    if damage is not None:
        raise missing(spec.name, f"its installation is damaged: {damage}", spec.install_command)


def _first_damage(directory: Path, *, contents: bool) -> str | None:
    """What is wrong with the first file that is not as installed; None when all are."""
    try:
        recorded: dict[str, list[object]] = json.loads((directory / FILES).read_bytes())
    except (OSError, ValueError) as error:
        return f"its list of files cannot be read ({error})"
    for relative, (size, executable, digest) in recorded.items():
        path = directory / relative
        try:
            status = path.lstat()
            if status.st_size != size or bool(status.st_mode & 0o100) != executable:
                return f"{relative} has changed"
            if contents and _digest(path) != digest:
                return f"{relative} has changed"
        except OSError:
            return f"{relative} is gone"
    return None


def _digests(directory: Path) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or path.is_file():
            status = path.lstat()
            relative = path.relative_to(directory).as_posix()
            found[relative] = [status.st_size, bool(status.st_mode & 0o100), _digest(path)]
    return found


def _digest(path: Path) -> str:
    if path.is_symlink():
        return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _exclusive(name: str, parent: Path, progress: Callable[[str], None], deadline: float) -> Iterator[None]:
    """Hold the installation lock; it ends with the process, so a crash leaves it free."""
    with (parent / f".{name}.lock").open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise missing(name, "another installation of it does not end", None) from None
                if not told:
                    progress(f"{name}: waiting for another installation of it")
                    told = True
                time.sleep(_LOCK_POLL_SECONDS)
        yield


def _remove_leftovers(name: str, parent: Path) -> None:
    for kind in ("new", "old"):
        for left in parent.glob(f".{name}.{kind}-*"):
            shutil.rmtree(left, ignore_errors=True)
