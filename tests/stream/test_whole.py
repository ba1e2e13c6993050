"""A real runner that is killed in a turn, its records in the stream and no worker there: the next one has them all."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from runner.client import Client
from runner.store.stream.redis import RedisRecordStream
from tests.agents import AgentScript, Gate, steps
from tests.e2e.conftest import scripted_talk
from tests.e2e.server import SECONDS, Server
from tests.e2e.test_nothing_shown_is_lost import Follower, failed, history, without_end
from tests.normal_form import normal_form
from tests.redis_server import RedisServer
from tests.stream.bed import until

CALLS = [
    step
    for n in range(40)
    for step in (
        steps.text(f"before {n} "),
        steps.tool(f"call-{n}", "in_progress", f"run {n}"),
        steps.tool_status(f"call-{n}", "completed"),
    )
]


async def work(server: Server) -> asyncio.subprocess.Process:
    words = ("-m", "runner.cli.main", "worker", "--state-dir", str(server.state_dir), "--config", str(server.config))
    worker = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    async with asyncio.timeout(SECONDS):
        assert b'"ready":true' in await worker.stdout.readline()
    return worker


@pytest.mark.timeout(120)
@pytest.mark.parametrize("redis_too", [False, True], ids=["redis lives", "redis is emptied with it"])
async def test_a_runner_is_killed_with_records_in_the_stream(
    tmp_path: Path, redis_server: RedisServer, redis_too: bool
) -> None:
    """Cases G1, M3: what was shown is in the history of the next runner, once; the worker's copies change nothing."""
    database = tmp_path / "server" / "state" / "store.sqlite3"
    config = f'[store]\nurl = "sqlite:///{database}"\n[records]\nstream = "{redis_server.url}"\n'
    server = Server(tmp_path / "server", config)
    stream = RedisRecordStream(redis_server.url, timeout_seconds=3.0)
    script, end = AgentScript(tmp_path), Gate(tmp_path / "end")
    script.on_prompt(*CALLS, steps.gate(end))
    server.start()
    try:
        async with server.client() as client:
            talk = scripted_talk(server, client, "s", script)
            turn = talk.dispatch("go")
            await turn.event("turn_admitted")
            follower = Follower(client, "s")
            await end.reached(SECONDS)
            await until(lambda: is_in_stream(stream, 80), SECONDS)
            await follower.until(lambda seen: seen[-1]["data"].get("tool_call_id") == "call-39")
            server.kill()
            if redis_too:
                redis_server.flush()
            seen = await follower.over()
            await turn.drop()
        server.start()
        async with server.client() as client:
            await expect_history(client, seen)
            worker = await work(server)
            await until(lambda: is_empty(stream), SECONDS)
            worker.send_signal(signal.SIGTERM)
            assert await worker.wait() == 0
            await expect_history(client, seen)
            assert (await client._call("GET", "/v1/quarantine"))["items"] == []
    finally:
        await stream.close()
        server.stop()


async def is_in_stream(stream: RedisRecordStream, count: int) -> bool:
    return (await stream.look()).length >= count


async def is_empty(stream: RedisRecordStream) -> bool:
    return (await stream.look())[2:] == (0, 0)


async def expect_history(client: Client, seen) -> None:
    events = await history(client, "s")
    assert without_end(normal_form(events)) == failed(normal_form(seen))
