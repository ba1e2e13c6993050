"""Two runners and workers over a real Redis and PostgreSQL, many turns at once, and the comparison of DESIGN 3.9."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.client import ApiError, Client
from runner.store.stream.redis import GROUP, STREAM
from runner.turn.live_file import left_by, read
from tests.e2e.server import SECONDS, until
from tests.e2e.talk import Dispatched, Line
from tests.normal_form import ENDED, Final, cursor_of, normal_form
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.replicas.bed import Cluster, Member, Session, until_async

MORE = """
[pool]
idle_seconds = 600
[records]
stream = "{redis}"
max_deliveries = {max_deliveries}
reclaim_idle_seconds = {reclaim_idle_seconds}
"""


class WorkerProcess:
    """One ``acp-runner worker``; ``start`` and an end of it may alternate, and it keeps its name."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        *options: str,
        module: str = "runner.cli.main",
        env: dict[str, str] | None = None,
    ) -> None:
        folder.mkdir()
        self._env = env or {}
        self.url = ""
        self.log = folder / "worker.log"
        self._command = [sys.executable, "-m", module, "worker", "--state-dir", str(folder), "--config", str(config)]
        self._command += options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is at work; blocks."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**_own_environment(), **self._env},
            )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            raise AssertionError(f"no ready line in {SECONDS} s\n{self.said()}")
        line = self._process.stdout.readline()
        assert line, self.said()
        ready = json.loads(line)
        assert ready["ready"] is True
        self.url = ready.get("url", "")

    def said(self) -> str:
        """Its stderr so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self.ended()

    def ended(self) -> int:
        """Wait for its end; the exit status; blocks."""
        assert self._process is not None
        code = self._process.wait(SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def stop(self) -> None:
        """End it by SIGTERM, if it was not killed; blocks."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            assert self.ended() == 0, self.said()[-6000:]
            assert "Traceback" not in self.said(), self.said()[-6000:]
        self.ended()


def _own_environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("ACP_RUNNER_")}
    return {**own, "TERM": "dumb"}


class DemoGate:
    """A point where the demo agent of a session waits: a named pipe in its workspace, which its tool reads."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def command(self) -> str:
        """The line of a prompt that waits here."""
        return f"/tool mkfifo {self._name} && cat {self._name}"

    def passed(self, workspace: Path) -> bool:
        """Let the agent pass; False while it has not come here."""
        try:
            fd = os.open(workspace / self._name, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            os.write(fd, b"on\n")
        finally:
            os.close(fd)
        return True


class Reader:
    """Follows a session at one replica for ever: comes back by its cursor whenever it is cut off."""

    def __init__(self, session: Session, member: Member) -> None:
        self.events: list[Line] = []
        self.cuts = 0
        self._task = asyncio.create_task(self._read(session.at(member), session.session))

    @property
    def cursor(self) -> str | None:
        """From where it goes on: what was told last, or up to where it was told to forget."""
        for line in reversed(self.events):
            if line.get("cursor"):
                return str(line["cursor"])
            if line["type"] == "resync" and "reason" not in line["data"]:
                return str(line["data"]["from"])
        return None

    async def _read(self, client: Client, session: str) -> None:
        while True:
            try:
                async for line in client.events(session, after=self.cursor, follow=True):
                    if line["kind"] == "event":
                        self.events.append(line)
            except ApiError:
                pass
            self.cuts += 1
            await asyncio.sleep(0.1)

    async def over(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


@dataclass
class Comparison:
    """What was streamed beside what is stored."""

    sessions: int = 0
    turns: int = 0
    lost: int = 0
    events: int = 0
    deltas: int = 0
    records: int = 0
    rows: int = 0
    rows_of_distinct_ids: int = 0
    rows_of_distinct_cursors: int = 0
    readers_cut: int = 0
    quarantined: int = 0
    pending: int = 0
    in_stream: int = 0
    spooled: int = 0
    live_entries: int = 0

    def expect_nothing_left(self) -> None:
        """No duplicate, and nothing under way."""
        assert self.records == self.rows == self.rows_of_distinct_ids == self.rows_of_distinct_cursors, self
        left = (self.quarantined, self.pending, self.in_stream, self.spooled, self.live_entries)
        assert left == (0, 0, 0, 0, 0), self

    def __str__(self) -> str:
        return "\n".join(f"  {name.replace('_', ' '):26} {value:>8}" for name, value in vars(self).items())


class Fleet:
    """Runners ``a`` and ``b``, a worker, and what they share.

    Args:
        lease: how long a grant lasts, seconds.
        module: what the worker runs in the place of ``acp-runner``, with ``env`` besides.
    """

    def __init__(
        self,
        folder: Path,
        redis: RedisServer,
        postgres: PostgresServer,
        *,
        lease: float = 4.0,
        max_deliveries: int = 5,
        reclaim_idle_seconds: int = 60,
        module: str = "runner.cli.main",
        env: dict[str, str] | None = None,
    ) -> None:
        self.redis, self.postgres = redis, postgres
        self.cluster = Cluster(folder, redis, lease, postgres)
        for member in self.cluster.members:
            more = MORE.format(
                redis=redis.url, max_deliveries=max_deliveries, reclaim_idle_seconds=reclaim_idle_seconds
            )
            member.config.write_text(member.config.read_text() + more)
        self.worker = WorkerProcess(folder / "worker", self.cluster.a.config, "--port", "0", module=module, env=env)
        self.readers: list[Reader] = []
        self._stack = AsyncExitStack()
        self._clients: dict[str, Client] = {}

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(start) for start in (self.cluster.start, self.worker.start)))
        for member in self.cluster.doors:
            self._clients[member.folder.name] = await self._stack.enter_async_context(member.client())

    async def over(self) -> None:
        """End everybody, whatever state they are in."""
        for reader in self.readers:
            await reader.over()
        await self._stack.aclose()
        await asyncio.to_thread(self.redis.ready)
        await asyncio.to_thread(self.postgres.ready)
        try:
            await asyncio.to_thread(self.worker.stop)
        finally:
            if self.worker.running:
                self.worker.kill()
            await asyncio.to_thread(self.cluster.over)

    @property
    def clients(self) -> list[Client]:
        """Of the two runners."""
        return list(self._clients.values())

    def session(self, name: str) -> Session:
        return Session(self.cluster, self._clients, name)

    # -- what is left ------------------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """Whether both runners say so."""
        told = await asyncio.gather(*(client.ready() for client in self.clients))
        return all(one["ready"] for one in told)

    def pending(self) -> int:
        """Entries that were delivered and nobody acknowledged, as ``XPENDING`` counts them."""
        answer = self.redis.command("XPENDING", STREAM, GROUP)
        if answer.startswith(b"-NOGROUP"):
            return 0
        assert answer.startswith(b"*4\r\n:"), answer
        return int(answer.split(b"\r\n")[1][1:])

    def in_stream(self) -> int:
        """Entries of the stream, as ``XLEN`` counts them."""
        return int(self.redis.command("XLEN", STREAM).strip()[1:])

    def spooled(self) -> int:
        """Writes that wait on a runner's machine, or were refused from there."""
        return sum(_spooled(member) for member in (self.cluster.a, self.cluster.b))

    def live_entries(self) -> int:
        """What the live files keep because the store may lack it."""
        folders = [member.state_dir / "live" for member in (self.cluster.a, self.cluster.b)]
        return sum(1 for folder in folders for paths in left_by(folder).values() for _ in read(paths))

    async def settled(self) -> bool:
        """Whether nothing is under way any more."""
        return not (self.pending() or self.in_stream() or self.spooled() or self.live_entries())

    def count(self, what: str) -> int:
        return int(self.postgres.sql(f"SELECT count({what}) FROM records", self.postgres.database))


def _spooled(member: Member) -> int:
    path = member.state_dir / "spool.sqlite3"
    assert path.exists()
    spool = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=SECONDS)
    try:
        return sum(spool.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("waiting", "refused"))
    finally:
        spool.close()


class Turns:
    """One session with its reader, and the dispatches of its turns."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.session = fleet.session(f"s{number}")
        self.member = (fleet.cluster.a, fleet.cluster.b)[number % 2]
        # Half of the readers follow at the replica that does not run the session.
        self.reads_at = (fleet.cluster.a, fleet.cluster.b)[number // 2 % 2]
        self.reader: Reader | None = None
        self.dispatched: list[tuple[Dispatched, dict[str, Any] | None]] = []
        """Each with its result; None where its runner was killed."""

    @property
    def workspace(self) -> Path:
        return self.member.workspace(self.session.session)

    async def begin(self, prompt: str) -> None:
        """Dispatch; returns once the turn runs and is read."""
        turn = self.session.dispatch(self.member, prompt, harness="demo")
        self.dispatched.append((turn, None))
        await turn.event("turn_admitted")
        if self.reader is None:
            self.reader = Reader(self.session, self.reads_at)
            self.fleet.readers.append(self.reader)

    async def open(self, gate: DemoGate) -> None:
        """Let the agent pass a gate, once it has come there; not if its turn ended before."""
        turn, _ = self.dispatched[-1]
        await until(lambda: turn.over or gate.passed(self.workspace), f"the agent of {self.session.session} comes")

    async def result(self) -> dict[str, Any]:
        """Of the newest turn."""
        turn, _ = self.dispatched[-1]
        result = await turn.result()
        self.dispatched[-1] = (turn, result)
        return result

    async def died(self) -> None:
        """The runner of the newest turn was killed; its result may have come before."""
        turn, _ = self.dispatched[-1]
        try:
            self.dispatched[-1] = (turn, await turn.result())
        except ApiError:
            pass

    async def compare(self, into: Comparison) -> None:
        """What every client of the session received is what is stored, in normal form; both replicas tell the same."""
        records = await self.session.check()
        assert self.reader is not None
        reader, last = self.reader, records[-1]["cursor"]
        await until_async(lambda: _reached(reader, last), f"the reader of {self.session.session} has it all")
        stored = normal_form(records)
        assert normal_form(reader.events) == stored, self.session.session
        for turn, result in self.dispatched:
            own = normal_form(one for one in records if one["prompt_id"] == turn.events[0]["prompt_id"])
            told = normal_form(turn.events)
            if result is not None:
                assert told == own, self.session.session
            else:
                assert_all_of(told, own)
                into.lost += 1
            into.events += len(turn.events)
            into.deltas += sum(event["type"].endswith("_delta") for event in turn.events)
        into.sessions += 1
        into.turns += len(self.dispatched)
        into.records += len(records)
        into.readers_cut += reader.cuts


def assert_all_of(told: list[Final], stored: list[Final]) -> None:
    """What was told until the connection broke is stored: what was closed as it is, what was open at least so far."""
    tools = {one.data["tool_call_id"]: one for one in stored if one.type == "tool_call"}
    rest = iter(stored)
    for item in told:
        if item.type == "tool_call" and item.data.get("status") not in ENDED:
            assert tools[item.data["tool_call_id"]].data["title"] == item.data["title"]
        elif item.type in ("message", "thought"):
            name, text = item.data["message_id"], item.data["text"]
            assert any(one.data.get("message_id") == name and one.data["text"].startswith(text) for one in rest), item
        else:
            assert any(one == item for one in rest), item


async def _reached(reader: Reader, cursor: str) -> bool:
    return reader.cursor is not None and cursor_of({"cursor": reader.cursor}) >= cursor_of({"cursor": cursor})


async def compared(fleet: Fleet, everything: list[Turns]) -> Comparison:
    """Wait until nothing is under way; what was streamed equals what is stored."""
    await until_async(fleet.ready, "both runners are ready")
    found = Comparison()
    for turns in everything:
        await turns.compare(found)
    await until_async(fleet.settled, f"nothing is under way: {fleet.pending()}, {fleet.in_stream()}")
    found.rows = fleet.count("*")
    found.rows_of_distinct_ids = fleet.count("DISTINCT (project, record_id)")
    found.rows_of_distinct_cursors = fleet.count("DISTINCT (project, session_id, epoch, n)")
    found.quarantined = int(fleet.postgres.sql("SELECT count(*) FROM quarantine", fleet.postgres.database))
    found.pending, found.in_stream = fleet.pending(), fleet.in_stream()
    found.spooled, found.live_entries = fleet.spooled(), fleet.live_entries()
    return found


def outcomes(everything: list[Turns]) -> Counter[str]:
    """How the turns of all dispatches ended."""
    return Counter(result["outcome"] for turns in everything for _, result in turns.dispatched if result is not None)
