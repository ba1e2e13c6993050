"""Small programs of ours on a sandbox's own Python: one request, one line; nothing has to be there before."""

from __future__ import annotations

import base64
import functools
import json
import secrets
import shlex
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from runner.errors import RunnerError
from runner.sandbox.daytona.names import root_of
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Found

CALL_SECONDS: Final = 30.0
Said = dict[str, Any]


@functools.cache
def program(module: ModuleType) -> str:
    """The text of a module, which is of the standard library alone, as one argument of an interpreter."""
    packed = base64.b64encode(zlib.compress(Path(str(module.__file__)).read_bytes(), 9)).decode()
    return f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"


async def place(service: DaytonaService, found: Found) -> dict[str, str]:
    """``root``: the workspace over there; ``staged``: a path beside it for what is carried in or out."""
    root = await root_of(service, found)
    return {"root": f"{root}/workspace", "staged": f"{root}/staged-{secrets.token_hex(8)}"}


async def ask(
    service: DaytonaService,
    found: Found,
    python: str,
    module: ModuleType,
    asked: Mapping[str, Any],
    seconds: float = CALL_SECONDS,
) -> Said:
    """What a module's ``main`` says to a request.

    Raises:
        CallFailed: the service refused or was not reached.
        RunnerError: ``sandbox_lost``: the program did not run.
    """
    request = base64.b64encode(json.dumps(asked).encode()).decode()
    words = [python, "-I", "-c", program(module), request]
    code, said = await service.execute(found.id, shlex.join(words), seconds)
    line = next((line for line in reversed(said.splitlines()) if line.startswith("{")), "")
    try:
        answer = json.loads(line) if code == 0 else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise RunnerError("sandbox_lost", f"The sandbox did not tell of its files: {said.strip()[-200:]}")
    return answer


async def discard(service: DaytonaService, found: Found, path: str) -> None:
    """Delete what was carried; what stays is swept by a later request."""
    with suppress(CallFailed):
        await service.discard(found.id, path)
