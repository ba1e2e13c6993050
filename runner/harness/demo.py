"""The demo agent: standard library only, scripted by commands in the prompt, always available."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from runner.harness.spec import HarnessSpec, Login, Resolved, missing
from runner.resources import resource_path

NAME: Final = "demo"


def _resolve(state_dir: Path) -> Resolved:
    try:
        program = resource_path("sandboxes", "inside", "demo_agent.py")
    except FileNotFoundError as error:
        raise missing(NAME, str(error), None) from error
    # -I and -S: nothing of the surroundings reaches it, and it starts in a third of the time.
    return Resolved((sys.executable, "-I", "-S", str(program)), (program.parent,))


SPEC: Final = HarnessSpec(
    name=NAME,
    title="Demo agent",
    resolve=_resolve,
    min_start_seconds=5.0,
    resume="load",
    login=Login("The demo agent needs no credentials."),
)
