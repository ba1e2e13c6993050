"""Where installed harnesses lie and what an installation says about itself.

Layout below the state directory: ``harnesses/<name>/manifest.json``, ``files.json`` and
``node_modules/``. The manifest is written last, so a directory without one is not an installation.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from runner.harness.patching import shipped
from runner.rules.patches import Patch, patches_digest

MANIFEST: Final = "manifest.json"
FILES: Final = "files.json"

_CPUS: Final = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class NpmInstall:
    """Pinned npm packages.

    Attributes:
        lock: name of the lock file in the package's ``locks`` folder; it holds every version and
            integrity digest, and no address.
        packages: the direct packages and their exact versions, as the lock has them.
    """

    lock: str
    packages: Mapping[str, str]

    def lock_bytes(self) -> bytes:
        """The lock file as it is shipped."""
        return (resources.files("runner.harness") / "locks" / f"{self.lock}.json").read_bytes()

    def digest(self) -> str:
        """Names this exact set of packages."""
        return hashlib.sha256(self.lock_bytes()).hexdigest()

    def locked(self) -> dict[str, str]:
        """Path to version of every package of the lock, of other machines too."""
        return {path: str(entry["version"]) for path, entry in self._entries()}

    def versions(self, machine: Machine) -> dict[str, str]:
        """Path to version of every package that belongs on a machine."""
        return {path: str(entry["version"]) for path, entry in self._entries() if machine.takes(entry)}

    def _entries(self) -> list[tuple[str, Mapping[str, Any]]]:
        packages: dict[str, Mapping[str, Any]] = json.loads(self.lock_bytes())["packages"]
        return [(path, entry) for path, entry in packages.items() if path]

    def patches(self) -> tuple[Patch, ...]:
        """What is changed in them; the shipped patches are those of the harness of the lock's name.

        Raises:
            RunnerError: ``internal``: the shipped patches cannot be read.
        """
        return shipped().get(self.lock, ())

    def patches_digest(self) -> str:
        """Names this exact set of patches."""
        return patches_digest(patch.facts() for patch in self.patches())


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is installed.

    Attributes:
        name: the harness.
        lock_digest: digest of the lock it was made from.
        packages: path below the installation to version, of every package.
        patches: what is changed in them (``Patch.facts``).
    """

    name: str
    lock_digest: str
    packages: Mapping[str, str]
    patches: tuple[Mapping[str, str], ...] = ()

    def is_of(self, install: NpmInstall) -> bool:
        """Whether exactly these packages with exactly these patches are installed."""
        mine = self.lock_digest, patches_digest(self.patches)
        return mine == (install.digest(), install.patches_digest())


def harness_directory(state_dir: Path, name: str) -> Path:
    """Where this harness is installed, whether or not it is."""
    return state_dir / "harnesses" / name


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of an installation, None when there is none or it is unreadable."""
    try:
        found: Any = json.loads((directory / MANIFEST).read_bytes())
        patches = tuple(dict(patch) for patch in found.get("patches", ()))
        return Manifest(found["name"], found["lock_digest"], dict(found["packages"]), patches)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def node_cpu(machine: str | None = None) -> str:
    """A processor in npm's words (``x64``, ``arm64``); default this machine's."""
    name = (machine or platform.machine()).lower()
    return _CPUS.get(name, name)


@dataclass(frozen=True, slots=True)
class Machine:
    """What npm looks at to choose packages, in its words."""

    os: str
    cpu: str
    libc: str

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        return cls(sys.platform, node_cpu(), "glibc" if platform.libc_ver()[0] else "musl")

    def takes(self, entry: Mapping[str, Any]) -> bool:
        """Whether npm installs this lock entry there."""
        here = {"os": self.os, "cpu": self.cpu, "libc": self.libc}
        return all(_allows(entry.get(field), value) for field, value in here.items())


def fits_this_machine(entry: Mapping[str, Any]) -> bool:
    """Whether npm installs this lock entry here, by its ``os``, ``cpu`` and ``libc``."""
    return Machine.here().takes(entry)


def _allows(wanted: object, value: str) -> bool:
    if wanted is None:
        return True
    names = [wanted] if isinstance(wanted, str) else list(wanted) if isinstance(wanted, list) else []
    positive = [name for name in names if not name.startswith("!")]
    return f"!{value}" not in names and (not positive or value in positive)
