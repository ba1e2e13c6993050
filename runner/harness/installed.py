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


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is installed.

    Attributes:
        name: the harness.
        lock_digest: digest of the lock it was made from.
        packages: path below the installation to version, of every package.
    """

    name: str
    lock_digest: str
    packages: Mapping[str, str]


def harness_directory(state_dir: Path, name: str) -> Path:
    """Where this harness is installed, whether or not it is."""
    return state_dir / "harnesses" / name


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of an installation, None when there is none or it is unreadable."""
    try:
        found: Any = json.loads((directory / MANIFEST).read_bytes())
        return Manifest(found["name"], found["lock_digest"], dict(found["packages"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def node_cpu() -> str:
    """This machine's processor in npm's words (``x64``, ``arm64``)."""
    machine = platform.machine().lower()
    return _CPUS.get(machine, machine)


def fits_this_machine(entry: Mapping[str, Any]) -> bool:
    """Whether npm installs this lock entry here, by its ``os``, ``cpu`` and ``libc``."""
    libc = "glibc" if platform.libc_ver()[0] else "musl"
    here = {"os": sys.platform, "cpu": node_cpu(), "libc": libc}
    return all(_allows(entry.get(field), value) for field, value in here.items())


def _allows(wanted: object, value: str) -> bool:
    if wanted is None:
        return True
    names = [wanted] if isinstance(wanted, str) else list(wanted) if isinstance(wanted, list) else []
    positive = [name for name in names if not name.startswith("!")]
    return f"!{value}" not in names and (not positive or value in positive)
