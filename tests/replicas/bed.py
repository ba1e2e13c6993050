"""Two runners that share a plane and a store, as real processes: over Redis, or over an ``acp-runner plane``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from runner.client import ApiError, Client
from runner.sandbox.census import ProcessInfo, scan
from tests.e2e.server import SECONDS, Server, until
from tests.e2e.talk import Dispatched, Line
from tests.ports import free_port
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer

TOKEN = "the token of every replica"
RUNNER_TOKEN = "the token of runners"
BEAT, LEASE, TIMEOUT = 0.3, 1.2, 0.5
STORE_ID = "SELECT value FROM meta WHERE name = 'store_id'"


def leases(url: str, lease: float) -> str:
    """The table of a replica."""
    return f"""
[leases]
url = "{url}"
beat_seconds = {BEAT}
lease_seconds = {lease}
beat_timeout_seconds = {TIMEOUT}
"""


TOKENS = f"""
[[auth.tokens]]
token = {json.dumps(TOKEN)}
project = "default"
scopes = ["dispatch", "read", "operate"]
[[auth.tokens]]
token = {json.dumps(RUNNER_TOKEN)}
project = "default"
scopes = ["runner"]
"""


class Member(Server):
    """One replica: a runner, or the plane; it comes back at its old address."""

    def __init__(self, folder: Path, config: str, store: Callable[[], str], *, port: int, role: str = "serve") -> None:
        super().__init__(folder, config + TOKENS, gates=folder.parent.parent)
        self._store = store
        self.command = [sys.executable, "-m", "runner.cli.main", role, "--port", str(port)]

    def instead_of_itself(self, module: str, env: dict[str, str]) -> None:
        """From its next start on it runs another module than ``acp-runner``'s, which gets the same words."""
        self.command = [module if word == "runner.cli.main" else word for word in self.command]
        self._env = env

    @property
    def token(self) -> str:
        return TOKEN

    @property
    def store_id(self) -> str:
        return self._store()

    def census(self) -> list[ProcessInfo]:
        return scan(f"{self.store_id}:{self.replica_id}:")

    def freeze(self) -> None:
        """SIGSTOP: its sockets take what comes, and nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def over(self) -> None:
        """End it, whatever state it is in, and see that it leaves nobody; blocks."""
        if self.running:
            self.thaw()
            self.stop()
        elif self.replica_id:
            self.assert_nobody()


class Cluster:
    """Runners ``a`` and ``b``, and what they share.

    Args:
        folder: for configurations, logs and state directories.
        redis: None: an ``acp-runner plane`` holds leases and store, and is the gateway.
        lease: how long a grant lasts, seconds.
        postgres: with an empty database, which is the store then; with a Redis only.
    """

    def __init__(
        self, folder: Path, redis: RedisServer | None, lease: float = LEASE, postgres: PostgresServer | None = None
    ) -> None:
        self.redis = redis
        self.plane: Member | None = None
        if redis is not None and postgres is not None:
            url = postgres.url()
            config, store = leases(redis.url, lease) + f'[store]\nurl = "{url}"\n', partial(_id_in_database, postgres)
        elif redis is not None:
            path = folder / "shared.sqlite3"
            config, store = leases(redis.url, lease) + f'[store]\nurl = "sqlite:///{path}"\n', partial(_id_in, path)
        else:
            store = partial(_id_in, folder / "plane" / "state" / "store.sqlite3")
            port = free_port()
            self.plane = Member(folder / "plane", leases("", lease), store, role="plane", port=port)
            config = leases(f"http://127.0.0.1:{port}", lease)
        self.a = Member(folder / "a", config, store, port=free_port())
        self.b = Member(folder / "b", config, store, port=free_port())
        self.members = [*([self.plane] if self.plane else []), self.a, self.b]

    def start(self) -> None:
        """Start everybody, the plane first; blocks."""
        if self.plane is not None:
            self.plane.start()
        _each(Member.start, self.a, self.b)

    @property
    def doors(self) -> list[Member]:
        """Whoever answers clients: both runners, and the plane as their gateway."""
        return [self.a, self.b, *([self.plane] if self.plane else [])]

    def kill_plane(self) -> None:
        """What the runners share their leases by is killed: Redis with all that it knew, or the plane process."""
        if self.redis is not None:
            self.redis.kill()
        else:
            assert self.plane is not None
            self.plane.kill()

    def restart_plane(self) -> None:
        if self.redis is not None:
            self.redis.start()
        else:
            assert self.plane is not None
            self.plane.start()

    def freeze_plane(self) -> None:
        """Its connections stay open, and nobody answers."""
        if self.redis is not None:
            self.redis.stop()
        else:
            assert self.plane is not None
            self.plane.freeze()

    def thaw_plane(self) -> None:
        if self.redis is not None:
            self.redis.cont()
        else:
            assert self.plane is not None
            self.plane.thaw()

    def over(self) -> None:
        """End everybody, the plane last."""
        try:
            _each(Member.over, self.a, self.b)
        finally:
            if self.plane is not None:
                self.plane.over()

    def by_id(self, replica_id: str) -> Member:
        return next(member for member in self.members if member.replica_id == replica_id)

    def said(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {member.folder.name}\n{member.said()}" for member in self.members)


class Session:
    """One session, driven through any replica."""

    def __init__(self, cluster: Cluster, clients: dict[str, Client], session: str) -> None:
        self.cluster = cluster
        self.session = session
        self._clients = clients

    def at(self, member: Member) -> Client:
        return self._clients[member.folder.name]

    def dispatch(self, member: Member, prompt: str, **fields: Any) -> Dispatched:
        """Dispatch through a replica and collect in the background."""
        return Dispatched(self.at(member), self.session, prompt, {"harness": "scripted", **fields})

    async def prompt(self, member: Member, prompt: str, **fields: Any) -> dict[str, Any]:
        """Dispatch and wait for the result; retries what is retryable, as a client should, for a while."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return await self.dispatch(member, prompt, **fields).result()
            except ApiError as error:
                if not error.problem.get("retryable") or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def owner(self, turn: Dispatched) -> Member:
        """Who runs a turn."""
        return self.cluster.by_id((await turn.event("turn_admitted"))["replica_id"])

    def other(self, member: Member) -> Member:
        """The runner that ``member`` is not."""
        return self.cluster.b if member is self.cluster.a else self.cluster.a

    async def view(self, member: Member) -> dict[str, Any]:
        return await self.at(member).session(self.session)

    async def questions(self, member: Member) -> list[Line]:
        return list((await self.at(member).interactions(self.session, status="pending"))["items"])

    async def records(self, member: Member) -> list[Line]:
        """Everything durable."""
        found: list[Line] = []
        after = None
        while True:
            page = await self.at(member).records(self.session, after=after)
            found += page["items"]
            after = page["next_cursor"]
            if after is None:
                return found

    async def check(self, *members: Member) -> list[Line]:
        """What holds behind every case, as every replica tells it: idle, one ending for each turn, cursors in order."""
        records: list[Line] = []
        asked = members or self.cluster.doors
        for member in asked:
            await until_async(lambda member=member: self._idle(member), f"idle at {member.folder.name}")
            seen = await self.records(member)
            assert not records or seen == records, f"{member.folder.name} tells another history"
            records = seen
        admitted = [record["data"]["turn_id"] for record in records if record["type"] == "turn_admitted"]
        done = Counter(record["data"]["turn_id"] for record in records if record["type"] == "done")
        assert done == Counter(admitted), records
        cursors = [tuple(map(int, record["cursor"].split("."))) for record in records]
        assert cursors == sorted(set(cursors))
        *_, end = [line async for line in self.at(asked[0]).export(self.session)]
        assert end["complete"], end
        return records

    async def _idle(self, member: Member) -> bool:
        view = await self.view(member)
        return bool(view["state"] == "idle" and view["running_turn"] is None and not view["open_interactions"])


async def until_async(done: Any, what: str, seconds: float = SECONDS) -> Any:
    """Poll an awaitable until it is true; refusals that may be retried count as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = await done()
        except ApiError as error:
            if not error.problem.get("retryable"):
                raise
            value = None
        if value:
            return value
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        await asyncio.sleep(0.02)


def _id_in(path: Path) -> str:
    store = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return str(store.execute(STORE_ID).fetchone()[0])
    finally:
        store.close()


def _id_in_database(postgres: PostgresServer) -> str:
    return postgres.sql(STORE_ID, postgres.database)


def _each(work: Callable[[Member], None], *members: Member) -> None:
    """At the same time; every one is over when this raises."""
    with ThreadPoolExecutor(len(members)) as pool:
        for done in [pool.submit(work, member) for member in members]:
            done.result()


__all__ = ["Cluster", "Member", "Session", "until", "until_async"]
