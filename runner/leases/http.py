"""The lease plane of another process, reached over HTTP; notes come over one WebSocket (DESIGN 3.1, 3.7, 4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import orjson
from aiohttp import ClientError, ClientWSTimeout, WSMsgType
from pydantic import TypeAdapter, ValidationError

from runner.errors import RunnerError
from runner.leases.port import BeatAnswer, Heartbeat, Holder, Note, OnNote, ReplicaInfo
from runner.tasks import Tasks
from runner.wire.coordination import LISTENING, Pushed, Released
from runner.wire.plane import PREFIX, PlaneClient, body_of

log = logging.getLogger("runner.leases")

CALL_SECONDS: Final = 3.0
PING_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 0.5
FIRST_RETRY_SECONDS: Final = 0.1
LAST_RETRY_SECONDS: Final = 5.0
NOTE_MAX: Final = 256 * 1024

T = TypeVar("T")
_BEAT: Final = TypeAdapter(BeatAnswer)
_HOLDER: Final = TypeAdapter(Holder | None)
_REPLICAS: Final = TypeAdapter(dict[str, list[ReplicaInfo]])
_RELEASED: Final = TypeAdapter(Released)
_PUSHED: Final = TypeAdapter(Pushed)


class HttpLeasePlane:
    """``LeasePlane`` over a plane's coordination routes.

    A refusal of this runner's own requests (an unknown token, a project without one) is ``internal``: waiting does not
    mend it.

    Args:
        url: of the plane.
        tokens: a token of scope ``runner`` for each project that this runner serves.
        seconds: longest wait for one answer.
        ping_seconds: silence of the WebSocket after which it is probed, and given up when that is not answered.
    """

    shared = True

    def __init__(
        self, url: str, tokens: Mapping[str, str], *, seconds: float = CALL_SECONDS, ping_seconds: float = PING_SECONDS
    ) -> None:
        self._client = PlaneClient(url, tokens, unreachable="plane_unavailable", seconds=seconds)
        self._seconds = seconds
        self._ping_seconds = ping_seconds
        self._tasks = Tasks("plane")
        self._announced: dict[str, ReplicaInfo] = {}
        self._lines: dict[str, _Line] = {}

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        body = asdict(beat)
        del body["project"]
        return await self._ask("heartbeat", _BEAT, body, beat.project)

    async def look(self, project: str, session_id: str) -> Holder | None:
        return await self._ask("look", _HOLDER, {"session_id": session_id}, project)

    async def release_replica(self, replica_id: str) -> int:
        self._announced.pop(replica_id, None)
        body = {"replica_id": replica_id, "tokens": self._client.other_tokens()}
        return (await self._ask("release", _RELEASED, body))["released"]

    async def announce(self, replica: ReplicaInfo) -> None:
        self._announced[replica.replica_id] = replica
        await self._client.post("announce", body_of(self._hello(replica)))

    async def replicas(self) -> list[ReplicaInfo]:
        known: dict[str, ReplicaInfo] = {}
        for project in self._client.projects:
            answer = await self._ask("replicas", _REPLICAS, {}, project)
            known.update((info.replica_id, info) for info in answer["items"])
        return [known[name] for name in sorted(known)]

    async def take_lease(self, name: str, replica_id: str, seconds: float) -> bool:
        """Always False: the plane does by itself what named leases are for."""
        return False

    async def push(self, replica_id: str, note: Note) -> bool:
        project = str(note.get("project") or self._client.projects[0])
        return (await self._ask("push", _PUSHED, {"replica_id": replica_id, "note": dict(note)}, project))["listened"]

    async def listen(self, replica_id: str, on_note: OnNote) -> None:
        """As the port says; returns once the plane confirmed it or a first try failed: more follow by themselves."""
        line = self._lines.get(replica_id)
        if line is None:
            line = self._lines[replica_id] = _Line(replica_id)
            _ = self._tasks.spawn(f"notes {replica_id}", self._keep(line))
        line.listeners.append(on_note)
        try:
            async with asyncio.timeout(self._seconds):
                await line.tried.wait()
        except TimeoutError:
            log.warning("the plane %s delivers no notes yet", self._client.url)

    async def close(self) -> None:
        await self._tasks.close(self._seconds)
        await self._client.close()

    async def _ask(self, path: str, answer: TypeAdapter[T], body: Mapping[str, Any], project: str | None = None) -> T:
        content, _ = await self._client.post(path, body_of(body), project)
        try:
            return answer.validate_json(content)
        except ValidationError:
            raise RunnerError("plane_unavailable", f"The plane's answer to {path} cannot be read.") from None

    def _hello(self, replica: ReplicaInfo) -> dict[str, Any]:
        return {"replica": asdict(replica), "tokens": self._client.other_tokens()}

    async def _keep(self, line: _Line) -> None:
        """One WebSocket after the other, for ever; the pause between them grows until one was confirmed."""
        pause, told = FIRST_RETRY_SECONDS, False
        while True:
            line.up = False
            why = "it was closed"
            try:
                await self._follow(line)
            except (RunnerError, ClientError, OSError, TimeoutError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
            except Exception:
                log.exception("the line for notes of replica %s failed", line.replica_id)
            line.tried.set()
            if line.up:
                pause, told = FIRST_RETRY_SECONDS, False
            if not told:
                told = True
                log.warning("notes of the plane %s do not come: %s", self._client.url, why)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LAST_RETRY_SECONDS)

    async def _follow(self, line: _Line) -> None:
        async with asyncio.timeout(self._seconds):
            socket = await self._client.session().ws_connect(
                f"{self._client.url}{PREFIX}commands",
                headers={"Authorization": f"Bearer {self._client.token(None)}"},
                heartbeat=self._ping_seconds,
                max_msg_size=NOTE_MAX,
                timeout=ClientWSTimeout(ws_close=CLOSE_SECONDS),
            )
        try:
            hello = self._hello(self._announced.get(line.replica_id, ReplicaInfo(line.replica_id)))
            await socket.send_str(body_of(hello).decode())
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    line.take(message.data)
        finally:
            await socket.close()


@dataclass(slots=True, eq=False)
class _Line:
    """What comes for one replica. ``tried``: the plane was asked once; ``up``: it confirmed this connection."""

    replica_id: str
    listeners: list[OnNote] = field(default_factory=list)
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    up: bool = False

    def take(self, text: str) -> None:
        """Hand a note to every listener; what is not a note ends the connection with ``ValueError``."""
        note = orjson.loads(text)
        if not isinstance(note, dict):
            raise ValueError("a note must be an object")
        if note.get("kind") == LISTENING:
            self.up = True
            self.tried.set()
            return
        for on_note in self.listeners:
            try:
                on_note(note)
            except Exception:
                log.exception("a note could not be handled")
