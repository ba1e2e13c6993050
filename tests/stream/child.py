"""A worker, or a runner's way to the store, killed with SIGKILL at a named point of its third round.

python -m tests.stream.child worker|runner POINT REDIS_URL POSTGRES_URL
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from runner.clock import SystemClock
from runner.store.postgres.store import PostgresStore
from runner.store.stream.pipelined import PipelinedStore
from runner.store.stream.redis import RedisRecordStream
from runner.store.stream.worker import Worker
from tests.stream.bed import admission, row

FATAL_ROUND = 3
PER_ROUND = 10
WORKER_POINTS = ("insert_commit", "commit_ack")
RUNNER_POINTS = ("before_publish", "after_publish", "noted")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(work: Callable[..., Awaitable[Any]], *, before: bool, at: Callable[[tuple[Any, ...]], bool]) -> Any:
    """``work`` that dies around its third call for which ``at`` holds."""
    seen = 0

    async def call(*args: Any, **more: Any) -> Any:
        nonlocal seen
        seen += at(args)
        fatal = at(args) and seen == FATAL_ROUND
        if fatal and before:
            die()
        answer = await work(*args, **more)
        if fatal:
            die()
        return answer

    return call


def always(args: tuple[Any, ...]) -> bool:
    return True


async def work(point: str, redis: str, postgres: str) -> None:
    stream: Any = RedisRecordStream(redis, timeout_seconds=3.0)
    store = await PostgresStore.open(postgres)
    if point == "insert_commit":
        from runner.store.postgres import store as module

        kind: Any = module._Connection
        kind.execute = dying(kind.execute, before=True, at=lambda args: args[1] == "COMMIT")
    if point == "commit_ack":
        stream.acknowledge = dying(stream.acknowledge, before=True, at=always)
    worker = Worker(stream, store, SystemClock(), "w1", batch=PER_ROUND)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()
    await stream.close()
    await store.close()


async def run(point: str, redis: str, postgres: str) -> None:
    """Append ten records a round; the number of the newest one that was taken is a line on stdout."""
    stream: Any = RedisRecordStream(redis, timeout_seconds=3.0)
    if point in ("before_publish", "after_publish"):
        stream.publish = dying(stream.publish, before=point == "before_publish", at=always)
    store = PipelinedStore(await PostgresStore.open(postgres), stream)
    assert await store.admit(admission())
    for taken in range(0, FATAL_ROUND * PER_ROUND, PER_ROUND):
        await store.append([row(taken + n) for n in range(1, PER_ROUND + 1)])
        os.write(1, b"%d\n" % (taken + PER_ROUND))
    die()


if __name__ == "__main__":
    asyncio.run((work if sys.argv[1] == "worker" else run)(*sys.argv[2:]))
