"""Patches to third-party packages: what one says, whether it fits, what comes of it, and what names a set of them.

Standard library only: the same file patches an installation of this machine and one in the image of a remote sandbox.
A patch is for one file of one exact version whose digest is known, so nothing is searched for: every line of context
has to stand where the patch says.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_FIELDS = frozenset({"harness", "package", "version", "file", "sha256", "reason"})


class PatchRefused(ValueError):
    """A patch that says nothing usable or does not fit; the message is a sentence's end without its point."""


@dataclass(frozen=True)
class Patch:
    """One change of one file of one package.

    Attributes:
        harness: whose installation it is for.
        package: npm's name of the package.
        version: the exact version that it fits.
        file: name of the patch, for people.
        sha256: digest of the file before it is changed, in hex.
        diff: the unified diff, with ``-p1`` names relative to the package's folder.
    """

    harness: str
    package: str
    version: str
    file: str
    sha256: str
    diff: bytes

    @property
    def place(self) -> str:
        """The package's folder below the installation."""
        return f"node_modules/{self.package}"

    @property
    def target(self) -> str:
        """The changed file below the installation.

        Raises:
            PatchRefused: the diff names none, or one outside the package.
        """
        return f"{self.place}/{target_of(self.diff)}"

    def facts(self) -> dict[str, str]:
        """What an installation records of it: enough to tell it from any other."""
        return {
            "package": self.package,
            "version": self.version,
            "file": self.file,
            "sha256": hashlib.sha256(self.diff).hexdigest(),
        }


def patch_of(table: Mapping[str, object], diff: bytes) -> Patch:
    """A patch from its table of the manifest and the content of its file.

    Raises:
        PatchRefused: a member is missing, unknown or no text, or the diff is not of one changed file.
    """
    names = set(table)
    for wrong in (sorted(_FIELDS - names), sorted(names - _FIELDS)):
        if wrong:
            raise PatchRefused(f"its table {'lacks' if wrong[0] in _FIELDS else 'has an unknown member'} {wrong[0]}")
    if not all(isinstance(value, str) and value for value in table.values()):
        raise PatchRefused("a member of its table is no text")
    members = {name: str(value) for name, value in table.items() if name != "reason"}
    patch = Patch(diff=diff, **members)
    if not re.fullmatch("[0-9a-f]{64}", patch.sha256):
        raise PatchRefused("its sha256 is no digest in hex")
    _ = patch.target
    return patch


def target_of(diff: bytes) -> str:
    """The one file that a diff changes, below the package's folder.

    Raises:
        PatchRefused: there is none, it is made, removed or renamed, or it lies outside.
    """
    lines = _LINES.findall(diff)
    for before, after in itertools.pairwise(lines):
        if before.startswith(b"--- ") and after.startswith(b"+++ "):
            names = {_named(before), _named(after)}
            if len(names) != 1:
                raise PatchRefused("it makes, removes or renames a file")
            return names.pop()
    raise PatchRefused("it names no file")


def _named(line: bytes) -> str:
    name = line[4:].split(b"\t")[0].strip().decode("utf-8", "replace")
    inside = name.split("/")[1:]
    if not inside or any(part in ("", ".", "..") for part in inside):
        raise PatchRefused(f"{name} is no file of the package")
    return "/".join(inside)


def applied(patch: Patch, before: bytes) -> bytes:
    """The changed file.

    Args:
        patch: what to do.
        before: the file as the package has it.

    Raises:
        PatchRefused: it is another file than the patch was made for, or the diff does not fit it.
    """
    if hashlib.sha256(before).hexdigest() != patch.sha256:
        raise PatchRefused("the file has other content than the patch was made for")
    return changed(patch.diff, before)


def changed(diff: bytes, before: bytes) -> bytes:
    """Apply the hunks of a unified diff of one file, each exactly where it says.

    Raises:
        PatchRefused: naming the line of ``before`` that is another one.
    """
    old, said = _LINES.findall(before), _LINES.findall(diff)
    made: list[bytes] = []
    taken = number = hunks = 0
    while number < len(said):
        head = _HUNK.match(said[number])
        if head is None:
            if hunks and said[number].startswith((b"--- ", b"diff ")):
                raise PatchRefused("it changes more than one file")
            number += 1
            continue
        hunks += 1
        start, gone, come = int(head[1]), _count(head[2]), _count(head[4])
        first = start - 1 if gone else start
        if first < taken or first > len(old):
            raise PatchRefused(f"hunk {hunks} lies outside the file or before the one above it")
        made += old[taken:first]
        taken, number = first, number + 1
        while gone or come:
            if number >= len(said):
                raise PatchRefused(f"hunk {hunks} ends too early")
            kind, text, number = _line(said, number)
            if kind not in b" -+" or not kind:
                raise PatchRefused(f"hunk {hunks} has a line that is none of a diff")
            if kind != b"+":
                if taken >= len(old) or old[taken] != text:
                    raise PatchRefused(f"line {taken + 1} is another than the patch expects")
                taken, gone = taken + 1, gone - 1
            if kind != b"-":
                made.append(text)
                come -= 1
            if gone < 0 or come < 0:
                raise PatchRefused(f"hunk {hunks} has more lines than it says")
    if not hunks:
        raise PatchRefused("it changes nothing")
    return b"".join([*made, *old[taken:]])


def _count(said: bytes | None) -> int:
    return 1 if said is None else int(said)


def _line(said: list[bytes], number: int) -> tuple[bytes, bytes, int]:
    """One line of a hunk: its kind, its text, and where the next one is; a backslash line takes the end of line off."""
    line = said[number]
    text, number = line[1:], number + 1
    if line == b"\n":  # an editor took the blank of an empty line of context away
        return b" ", b"\n", number
    if number < len(said) and said[number].startswith(b"\\"):
        return line[:1], text[:-1] if text.endswith(b"\n") else text, number + 1
    return line[:1], text, number


def patches_digest(facts: Iterable[Mapping[str, str]]) -> str:
    """Names a set of patches (``Patch.facts``), whatever their order; a facet of the fingerprint (DESIGN 2)."""
    ordered = sorted(json.dumps(dict(one), sort_keys=True) for one in facts)
    return hashlib.sha256("\n".join(ordered).encode()).hexdigest()[:32]
