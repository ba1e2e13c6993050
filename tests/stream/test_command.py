"""``acp-runner worker`` as a process, beside a real ``serve`` that gives its records to the stream."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession

from runner.client import Client
from runner.store.port import Store
from runner.store.sqlite import SqliteStore
from runner.store.stream.codec import encode
from runner.store.stream.redis import RedisRecordStream
from tests.redis_server import RedisServer
from tests.server.scraped import scrape
from tests.stream.bed import admission, rows, stored, until

SECONDS = 40.0
COMMAND = (sys.executable, "-m", "runner.cli.main")


class Machine:
    """A configuration that names the test's Redis and one store file, and processes on it."""

    def __init__(self, folder: Path, redis: str) -> None:
        self.folder = folder
        self.redis = redis
        self.database = folder / "store.sqlite3"
        self.config = folder / "acp-runner.toml"
        self.over(f"sqlite:///{self.database}")
        self.started: list[Process] = []

    def over(self, store: str) -> None:
        """Name a store in the configuration."""
        records = f'[records]\nstream = "{self.redis}"\n'
        self.config.write_text(f'[store]\nurl = "{store}"\n{records}[turn]\ndrain_seconds = 1\n')

    async def start(self, *words: str, state: str = "state") -> Process:
        directory = str(self.folder / state)
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *words, "--state-dir", directory, "--config", str(self.config), stdout=PIPE, stderr=PIPE
        )
        self.started.append(process)
        return process

    async def ready(self, *words: str) -> tuple[Process, dict]:
        process = await self.start(*words)
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await process.stdout.readline()
        assert line, (await process.communicate())[1].decode()
        return process, json.loads(line)

    async def end(self, process: Process, number: int = signal.SIGTERM) -> tuple[int | None, str]:
        if process.returncode is None and number:
            process.send_signal(number)
        async with asyncio.timeout(SECONDS):
            _, said = await process.communicate()
        return process.returncode, said.decode()


@pytest.fixture
async def machine(tmp_path: Path, redis_server: RedisServer) -> AsyncIterator[Machine]:
    made = Machine(tmp_path, redis_server.url)
    yield made
    for process in made.started:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
async def stream(redis_server: RedisServer) -> AsyncIterator[RedisRecordStream]:
    made = RedisRecordStream(redis_server.url, timeout_seconds=3.0)
    yield made
    await made.close()


async def has(store: Store, count: int) -> bool:
    return len(await stored(store)) == count


async def test_a_worker_says_its_name_drains_and_exits(machine: Machine, stream: RedisRecordStream) -> None:
    store = await SqliteStore.open(machine.database)
    assert await store.admit(admission())
    await stream.publish([encode(one) for one in rows(700)])
    worker, ready = await machine.ready("worker", "--name", "w-1", "--reclaim")
    assert ready == {"ready": True, "worker": "w-1"}
    await until(lambda: has(store, 700), SECONDS)
    assert (await machine.end(worker))[0] == 0
    assert (await stream.look())[2:] == (0, 0)
    await store.close()


async def test_a_store_that_is_away_at_the_start_is_waited_for(machine: Machine) -> None:
    folder = machine.folder / "mounted later"
    machine.over(f"sqlite:///{folder / 'store.sqlite3'}")
    for told_to_stop in (True, False):
        early = await machine.start("worker")
        assert early.stdout is not None
        assert early.stderr is not None
        async with asyncio.timeout(SECONDS):
            assert b"records wait: " in await early.stderr.readline()
            if not told_to_stop:
                folder.mkdir()
                assert json.loads(await early.stdout.readline())["ready"] is True
        assert (await machine.end(early))[0] == 0


async def test_a_worker_with_a_port_tells_its_numbers(machine: Machine, stream: RedisRecordStream) -> None:
    store = await SqliteStore.open(machine.database)
    assert await store.admit(admission())
    await stream.publish([encode(one) for one in rows(70)])
    worker, ready = await machine.ready("worker", "--port", "0")
    await until(lambda: has(store, 70), SECONDS)
    token = (machine.folder / "state" / "token").read_text().strip()
    async with ClientSession(ready["url"], headers={"Authorization": f"Bearer {token}"}) as http:
        async with asyncio.timeout(SECONDS):
            while (now := await scrape(http)).of("worker_entries_total", result="written") < 70:
                await asyncio.sleep(0.02)
        assert now.of("worker_entries_total", result="read") == now.of("records_written_total") == 70
        assert now.of("worker_entries_total", result="lost") == now.of("worker_outages_total") == 0
        async with http.get("/metrics", headers={"Authorization": "Bearer x"}) as answer:
            assert answer.status == 401
        async with http.get("/v1/sessions") as answer:
            assert answer.status == 404
    assert (await machine.end(worker))[0] == 0
    await store.close()


async def test_a_name_is_taken_once_and_stays_the_same(machine: Machine) -> None:
    """Case G9: stable names; a second worker of the same name is refused and told what to do."""
    first, ready = await machine.ready("worker")
    code, said = await machine.end(await machine.start("worker"), 0)
    assert (code, "--name" in said) == (1, True)
    second, other = await machine.ready("worker", "--name", "other")
    assert other["worker"] == "other"
    assert (await machine.end(first))[0] == (await machine.end(second))[0] == 0
    again, once_more = await machine.ready("worker")
    assert once_more == ready
    assert (await machine.end(again))[0] == 0


async def test_without_a_stream_there_is_nothing_to_do(machine: Machine) -> None:
    machine.config.write_text("")
    code, said = await machine.end(await machine.start("worker"), 0)
    assert (code, "[records] stream" in said) == (2, True)


async def test_a_stream_needs_a_shared_store(machine: Machine) -> None:
    machine.config.write_text('[records]\nstream = "redis://127.0.0.1:1/0"\n')
    code, said = await machine.end(await machine.start("worker"), 0)
    assert (code, "records.stream: needs a shared store" in said) == (1, True)


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
async def test_a_turn_of_a_real_server_arrives_by_the_worker(
    store: str, machine: Machine, stream: RedisRecordStream, request: pytest.FixtureRequest
) -> None:
    """The worker takes no lock that ``serve`` holds; what clients read is the same before and after it ran."""
    if store == "postgresql":
        machine.over(request.getfixturevalue("postgres_url"))
    server, ready = await machine.ready("serve", "--port", "0")
    token = (machine.folder / "state" / "token").read_text().strip()
    async with Client(ready["url"], token) as client:
        result = await client.prompt("demo", "hello", harness="demo")
        assert result["ok"], result
        before = await client.records("demo")
        async with ClientSession(ready["url"], headers={"Authorization": f"Bearer {token}"}) as http:
            now = await scrape(http)
        sent = now.of("record_stream_published_records_total")
        assert sent + now.of("records_written_total") >= len(before["items"])
        assert now.of("spool_writes") == now.of("record_stream_circuit_open") == 0
        assert now.of("live_file_bytes") > 0
        assert now.of("turns_total", outcome="completed", harness="demo") == 1
        worker, _ = await machine.ready("worker")

        async def empty() -> bool:
            return (await stream.look())[2:] == (0, 0)

        await until(empty, SECONDS)
        after = await client.records("demo")
    assert after == before
    assert [record["type"] for record in after["items"]].count("done") == 1
    assert (await machine.end(worker))[0] == 0
    code, said = await machine.end(server)
    assert code == 0, said
    assert "quarantine" not in said
