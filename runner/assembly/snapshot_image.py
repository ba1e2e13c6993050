"""What a snapshot of this installation is made of (docs/decisions/daytona-snapshot.md)."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import lzma
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import runner.acp.link
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.installed import NpmInstall
from runner.harness.npm import ARGUMENTS
from runner.resources import resource_path
from runner.rules import patches as patch_rules
from runner.rules.snapshot import snapshot_name
from runner.sandbox import contents
from runner.sandbox.bridge_files import bridge_digest

MAX_BYTES: Final = 90_000
"""The service takes a request of 100 kB; the Dockerfile is all but its frame."""
CHUNK: Final = 32_000
"""A Dockerfile's line may have 65,535 bytes."""
NOT_INSIDE: Final = frozenset({"probe.py", "report.py"})
_ROOT: Final = re.compile(r"/[A-Za-z0-9._/-]*[A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Image:
    """A snapshot to build: its name, which names its content, and its Dockerfile."""

    name: str
    content: str
    dockerfile: str


def image(root: str, known: Catalogue) -> Image:
    """The snapshot of this installation's harnesses below ``root``.

    Raises:
        RunnerError: ``invalid_request``: ``root`` is no plain absolute path; ``too_large``: it does not fit a request.
    """
    if not _ROOT.fullmatch(root) or ".." in root:
        text = f"[daytona] root: {root!r} is no plain absolute path."
        raise RunnerError("invalid_request", text, field="daytona.root")
    template, plan, members = _template(), _plan(known), members_of_image()
    digest = _digest(template, root, plan, members)
    members["plan.json"] = json.dumps({**plan, "content": digest}, separators=(",", ":")).encode()
    dockerfile = _filled(template, root, base64.b64encode(_packed(members)).decode())
    if len(dockerfile) > MAX_BYTES:
        text = f"The snapshot's Dockerfile has {len(dockerfile)} bytes; the service takes {MAX_BYTES}."
        raise RunnerError("too_large", text)
    return Image(snapshot_name(digest), digest, dockerfile)


def content_of(root: str, known: Catalogue) -> str:
    """The digest by which an image of this installation is known, without the image."""
    return _digest(_template(), root, _plan(known), members_of_image())


def _template() -> str:
    return resource_path("sandboxes", "daytona", "Dockerfile").read_text()


def _digest(template: str, root: str, plan: Mapping[str, Any], members: Mapping[str, bytes]) -> str:
    content = hashlib.sha256(json.dumps([template, root, plan], sort_keys=True).encode())
    for name, data in sorted(members.items()):
        content.update(f"{name}:{hashlib.sha256(data).hexdigest()}\n".encode())
    return content.hexdigest()[:32]


def _plan(known: Catalogue) -> dict[str, Any]:
    harnesses = {}
    for name, pinned in installs(known).items():
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


def installs(known: Catalogue) -> dict[str, NpmInstall]:
    """Harness to its pinned packages, of those that have any."""
    found = {name: known.get(name).install for name in known.names()}
    return {name: pinned for name, pinned in found.items() if pinned is not None}


def members_of_image() -> dict[str, bytes]:
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
