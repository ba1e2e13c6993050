"""Clients that follow a session for as long as a run lasts, at whichever replica answers, from their last cursor on."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from runner.errors import RunnerError, owned_elsewhere
from runner.server.relay import Relay, RelayReader
from runner.server.upstream import Broken, Peers, held_by
from runner.session.owners import Elsewhere
from runner.session.port import Reader, ReaderCut, ReaderEnded
from tests.simulation.replicas import PROJECT, Fallen, Node
from tests.simulation.world import CALLER, World

ASK_SECONDS = 5.0
Cursor = tuple[int, int]


class Upstream:
    """A reader at another replica, as one of HTTP is: it says nothing while that is frozen, and breaks when it dies."""

    ended = False

    def __init__(self, node: Node, reader: Reader) -> None:
        self._node = node
        self._reader = reader
        self._asked: asyncio.Task[Any] | None = None

    async def next(self, seconds: float) -> bytes | None:
        if self._asked is None:
            self._asked = asyncio.create_task(self._node.serve(lambda: self._reader.next(ASK_SECONDS)))
            self._asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({self._asked}, timeout=seconds)
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        try:
            return cast(bytes | None, asked.result())
        except (Fallen, ReaderCut):
            raise Broken("It is gone.") from None

    def close(self, *, cut: bool = False) -> None:
        if self._asked is not None:
            self._asked.cancel()
        if self._node.up:
            self._reader.close()


class Relayed(RelayReader):
    """A follower at one replica of what any replica shows."""

    def __init__(self, world: World, node: Node, session_id: str, after: str | None) -> None:
        services, mirrors = node.replica.services, node.replica.mirrors
        relay = Relay(services.owners, cast(Peers, None), node.sessions, mirrors)
        super().__init__(relay, CALLER, session_id, after, {})
        self._world = world

    async def _upstream(self, owner: Elsewhere) -> Reader | None:
        target = self._world.nodes_by_id[owner.replica_id]

        async def follow() -> Reader:
            if await target.replica.services.owners.elsewhere(PROJECT, self._session_id) is not None:
                raise owned_elsewhere("Another replica holds it by now.")
            return cast(Reader, await target.sessions.follow(CALLER, self._session_id, self._cursor, True))

        try:
            if target.replica_id != owner.replica_id:
                raise Fallen
            return Upstream(target, await asyncio.wait_for(target.serve(follow), ASK_SECONDS))
        except (Fallen, TimeoutError):
            if await self._relay.owners.gone(owner.replica_id):
                return None
            raise held_by(owner) from None


class Follower:
    """One client: ``seen`` is what it has of its session, by cursor, and what it was told to forget is not."""

    def __init__(self, world: World, session_id: str) -> None:
        self.session_id = session_id
        self.seen: dict[Cursor, dict[str, Any]] = {}
        self.over = False
        self._world = world
        self._after: str | None = None
        self.task = asyncio.create_task(self._follow(), name=f"follower of {session_id}")

    async def _follow(self) -> None:
        chance = self._world.chance
        while not self.over:
            await asyncio.sleep(chance.pick((0.0, 0.5, 0.7, 3.0)))
            up = [node for node in self._world.nodes if node.up and not node.leaving]
            if up:
                node = chance.pick(up)
                try:
                    await self._read(node, chance.pick((3.0, 20.0, 10_000.0)))
                except (Fallen, ReaderCut, ReaderEnded, RunnerError):
                    continue
                except asyncio.CancelledError:
                    if not node.leaving:
                        raise

    async def _read(self, node: Node, seconds: float) -> None:
        """Follow at a replica for a while."""
        reader = Relayed(self._world, node, self.session_id, self._after)
        await node.serve(reader.attach)
        until = asyncio.get_running_loop().time() + seconds
        try:
            while not self.over and asyncio.get_running_loop().time() < until:
                for line in (await node.serve(lambda: reader.next(1.0)) or b"").splitlines():
                    self._take(json.loads(line))
        finally:
            if node.up:
                reader.close()

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "resync":
            self.seen.clear()
            self._after = None
            return
        epoch, _, n = event["cursor"].partition(".")
        cursor = int(epoch), int(n)
        if self.seen and cursor <= max(self.seen):
            self._world.store.faults.append(f"a follower of {self.session_id} got {cursor} behind {max(self.seen)}")
        self.seen[cursor], self._after = event, event["cursor"]
