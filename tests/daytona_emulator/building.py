"""Images: a Dockerfile is read as the service's builder reads it, and its steps are run where that was asked for.

Nothing is pulled and there is no root filesystem: a step sees this machine read-only, and writes below one folder.
Steps that change the system of an image (``SYSTEM``) are only logged.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

KNOWN = frozenset({"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "LABEL", "ARG", "EXPOSE"})
SYSTEM = ("useradd ", "ln ", "apt-get ")
LINE_BYTES = 65_535
READ_ONLY = ("bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc")


class BuildFailed(Exception):
    """The build ends with this reason."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction and what follows it."""

    instruction: str
    text: str


def read(dockerfile: str) -> list[Step]:
    """The steps of a Dockerfile without a build context.

    Raises:
        BuildFailed: in the builder's words.
    """
    steps: list[Step] = []
    for number, line in enumerate(dockerfile.splitlines(), 1):
        if len(line.encode()) > LINE_BYTES:
            raise BuildFailed(f"dockerfile line greater than maximum allowed size of {LINE_BYTES}")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        instruction, _, text = line.strip().partition(" ")
        instruction = instruction.upper()
        if instruction not in KNOWN:
            raise BuildFailed(f"dockerfile parse error on line {number}: unknown instruction: {instruction}")
        if not steps and instruction not in ("FROM", "ARG"):
            raise BuildFailed("no build stage in current context")
        if instruction == "COPY" and "--from=" not in text:
            raise BuildFailed(f"COPY failed: file not found in build context: {text}")
        steps.append(Step(instruction, text.strip()))
    if not steps:
        raise BuildFailed("the Dockerfile cannot be empty")
    return steps


@dataclass(slots=True)
class Workshop:
    """Where steps are run.

    Attributes:
        path: ``PATH`` of the steps; empty: none is run.
        writable: the folder that they may change.
        environ: what they have besides.
    """

    environ: Mapping[str, str]
    path: str = ""
    writable: str = ""

    async def run(self, step: Step, log: Callable[[str], None]) -> None:
        """One step; the first of an image empties the folder.

        Raises:
            BuildFailed: it ended with another code than 0.
        """
        if not self.path:
            return
        if step.instruction == "FROM":  # an image begins empty
            shutil.rmtree(self.writable, ignore_errors=True)
        if step.instruction != "RUN" or step.text.startswith(SYSTEM):
            return
        os.makedirs(self.writable, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(*READ_ONLY, "--bind", self.writable, self.writable, "/bin/sh", "-c", step.text),
            cwd=self.writable,
            env={**self.environ, "PATH": self.path, "HOME": self.writable, "TMPDIR": self.writable},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        async for line in process.stdout:
            log(line.decode("utf-8", "replace"))
        code = await process.wait()
        if code != 0:
            raise BuildFailed(f"The command '/bin/sh -c {step.text[:80]}' returned a non-zero code: {code}")
