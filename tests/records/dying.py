"""``acp-runner`` that is killed by itself, with SIGKILL, at a named point of its way to the store, once it is told to.

``DYING_AT`` names the point, ``DYING_FILE`` a file: the first one that comes to the point and finds it, takes it away
and dies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from runner.store.postgres import store as postgres
from runner.store.stream.redis import RedisRecordStream

BEFORE_PUBLISH = "before publish"
AFTER_PUBLISH = "after publish"
BEFORE_COMMIT = "between insert and commit"
AFTER_COMMIT = "between commit and ack"

Call = Callable[..., Awaitable[Any]]


def dying(work: Call, file: Path, *, before: bool, at: Callable[[tuple[Any, ...]], bool] = bool) -> Any:
    """``work`` that dies around the calls for which ``at`` holds."""

    async def call(*args: Any, **more: Any) -> Any:
        fatal = at(args)
        if fatal and before:
            die_if_told(file)
        answer = await work(*args, **more)
        if fatal and not before:
            die_if_told(file)
        return answer

    return call


def die_if_told(file: Path) -> None:
    try:
        file.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, file: Path) -> None:
    """Put the point in the way of everything that this process writes."""
    stream: Any = RedisRecordStream
    connection: Any = postgres._Connection
    if point in (BEFORE_PUBLISH, AFTER_PUBLISH):
        stream.publish = dying(stream.publish, file, before=point == BEFORE_PUBLISH)
    elif point == BEFORE_COMMIT:
        connection.execute = dying(connection.execute, file, before=True, at=lambda args: args[1] == "COMMIT")
    elif point == AFTER_COMMIT:
        connection.execute = dying(connection.execute, file, before=False, at=lambda args: args[1] == "COMMIT")
    else:
        raise ValueError(point)


if __name__ == "__main__":
    arm(os.environ["DYING_AT"], Path(os.environ["DYING_FILE"]))
    from runner.cli.main import main

    main()
