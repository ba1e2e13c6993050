"""What sandboxes are made of: snapshots, volumes, secrets."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiohttp import web

from tests.daytona_emulator.box import ORGANIZATION
from tests.daytona_emulator.building import BuildFailed, Workshop, read
from tests.daytona_emulator.clock import MovableClock, iso
from tests.daytona_emulator.problems import Problem

DEFAULT_SNAPSHOT = "daytona-small"
UNREADY = frozenset({"pending", "pulling", "building", "snapshotting", "inactive"})


@dataclass(slots=True)
class Snapshot:
    """One image that sandboxes start from. ``runs_as``: the user of an image whose steps were run."""

    name: str
    created_at: float
    image: str = ""
    dockerfile: str = ""
    entrypoint: list[str] | None = None
    cpu: int = 1
    memory: int = 1
    disk: int = 3
    gpu: int = 0
    id: str = field(default_factory=lambda: str(uuid4()))
    state: str = "active"
    error_reason: str | None = None
    log: list[str] = field(default_factory=list)
    runs_as: str = ""

    def document(self) -> dict[str, Any]:
        created = iso(self.created_at)
        document: dict[str, Any] = {
            "id": self.id,
            "organizationId": ORGANIZATION,
            "general": False,
            "name": self.name,
            "state": self.state,
            "size": 0.5 if self.state == "active" else None,
            "entrypoint": self.entrypoint,
            "cpu": self.cpu,
            "gpu": self.gpu,
            "mem": self.memory,
            "disk": self.disk,
            "errorReason": self.error_reason,
            "createdAt": created,
            "updatedAt": created,
            "lastUsedAt": None,
            "sourceSandboxId": None,
        }
        if self.image:
            document["imageName"] = self.image
        if self.dockerfile:
            info = {"dockerfileContent": self.dockerfile, "createdAt": created, "updatedAt": created}
            document["buildInfo"] = info | {"snapshotRef": f"daytona-{self.id[:8]}:latest"}
        return document


class Catalogue:
    """Snapshots, volumes and secrets of the organization.

    Attributes:
        fail_builds: the reason with which the next builds end; empty: they succeed.
        hang_builds: the next builds stay ``pending``.
        workshop: where the steps of a build are run.
        build_seconds: how long a build lasts; the SDK looks once a second and opens no log of a shorter one.
    """

    def __init__(self, clock: MovableClock, step: float, base: Callable[[], str], workshop: Workshop) -> None:
        self.workshop = workshop
        self._clock = clock
        self._step = step
        self._base = base
        self._snapshots = {DEFAULT_SNAPSHOT: Snapshot(DEFAULT_SNAPSHOT, clock.now(), image="daytonaio/sandbox:0")}
        self._volumes: dict[str, dict[str, Any]] = {}
        self._secrets: dict[str, dict[str, Any]] = {}
        self._builds: set[asyncio.Task[None]] = set()
        self.values: dict[str, str] = {}
        self.fail_builds = ""
        self.hang_builds = False
        self.build_seconds = 1.2

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/snapshots", self._create_snapshot),
            web.get("/api/snapshots", self._list_snapshots),
            web.get("/api/snapshots/{id}", self._get_snapshot),
            web.delete("/api/snapshots/{id}", self._delete_snapshot),
            web.post("/api/snapshots/{id}/activate", self._activate_snapshot),
            web.get("/api/snapshots/{id}/build-logs-url", self._build_logs_url),
            web.get("/api/build-logs/snapshot/{id}", self._build_logs),
            web.post("/api/volumes", self._create_volume),
            web.get("/api/volumes", self._list_volumes),
            web.get("/api/volumes/by-name/{name}", self._volume_by_name),
            web.get("/api/volumes/{id}", self._get_volume),
            web.delete("/api/volumes/{id}", self._delete_volume),
            web.post("/api/secret", self._create_secret),
            web.get("/api/secret", self._list_secrets),
            web.get("/api/secret/paginated", self._page_secrets),
            web.get("/api/secret/{id}", self._get_secret),
            web.patch("/api/secret/{id}", self._update_secret),
            web.delete("/api/secret/{id}", self._delete_secret),
        ]

    def add(self, name: str, **fields: Any) -> Snapshot:
        """Have a snapshot without building it."""
        self._snapshots[name] = snapshot = Snapshot(name, self._clock.now(), **fields)
        return snapshot

    def usable(self, wanted: str) -> Snapshot:
        """The snapshot a sandbox asks for, the default without a name."""
        name = wanted or DEFAULT_SNAPSHOT
        snapshot = self._find(name)
        if snapshot is None:
            raise Problem(400, f"Snapshot {name} not found. Did you add it through the Daytona Dashboard?")
        if snapshot.state in UNREADY:
            raise Problem(400, f"Snapshot {snapshot.name} is {snapshot.state}")
        if snapshot.state != "active":
            raise Problem(400, f"Snapshot {snapshot.name} is not active ({snapshot.state})")
        return snapshot

    def states(self) -> dict[str, str]:
        """Name to state of every snapshot."""
        return {snapshot.name: snapshot.state for snapshot in self._snapshots.values()}

    def put_into(self, wanted: str, state: str) -> None:
        """A snapshot that was built is in this state now."""
        snapshot = self._find(wanted)
        if snapshot is None:
            raise Problem(404, f"Snapshot {wanted} not found")
        snapshot.state = state

    def resolve(self, asked: list[dict[str, str]]) -> dict[str, str]:
        """Variable → placeholder of the secrets a sandbox names."""
        by_name = {secret["name"]: secret for secret in self._secrets.values()}
        resolved = {}
        for entry in asked:
            for variable, name in entry.items():
                if name not in by_name:
                    raise Problem(400, f"Secret {name} not found")
                resolved[variable] = by_name[name]["placeholder"]
        return resolved

    async def close(self) -> None:
        for build in self._builds:
            build.cancel()
        await asyncio.gather(*self._builds, return_exceptions=True)

    async def _create_snapshot(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["name"] in self._snapshots:
            raise Problem(409, f'Snapshot with name "{asked["name"]}" already exists for this organization')
        names = {"cpu": "cpu", "memory": "memory", "disk": "disk", "gpu": "gpu", "entrypoint": "entrypoint"}
        fields = {field: asked[name] for name, field in names.items() if asked.get(name) is not None}
        dockerfile = (asked.get("buildInfo") or {}).get("dockerfileContent", "")
        snapshot = self.add(asked["name"], image=asked.get("imageName") or "", dockerfile=dockerfile, **fields)
        snapshot.state = "pending"
        if not self.hang_builds:
            task = asyncio.get_running_loop().create_task(self._build(snapshot))
            self._builds.add(task)
            task.add_done_callback(self._builds.discard)
        return web.json_response(snapshot.document())

    async def _build(self, snapshot: Snapshot) -> None:
        await asyncio.sleep(self._step)
        snapshot.state = "building" if snapshot.dockerfile else "pulling"
        try:
            await self._made(snapshot, self.fail_builds)
        except BuildFailed as failed:
            snapshot.log.append(f"ERROR: {failed}\n")
            snapshot.error_reason = str(failed)
            snapshot.state = "build_failed" if snapshot.dockerfile else "error"
        else:
            snapshot.state = "active"

    async def _made(self, snapshot: Snapshot, failure: str) -> None:
        steps = read(snapshot.dockerfile) if snapshot.dockerfile else []
        pause = self.build_seconds / (len(steps) + 1) if steps else self._step
        for number, step in enumerate(steps, 1):
            snapshot.log.append(f"Step {number}/{len(steps)} : {step.instruction} {step.text}\n")
            await asyncio.sleep(pause)
            await self.workshop.run(step, snapshot.log.append)
            if step.instruction == "USER" and self.workshop.path:
                snapshot.runs_as = step.text
        await asyncio.sleep(pause)
        if failure:
            raise BuildFailed(failure)
        if steps:
            snapshot.log.append("Successfully built\n")

    async def _list_snapshots(self, request: web.Request) -> web.Response:
        page, limit = int(request.query.get("page", "1")), int(request.query.get("limit", "100"))
        every = list(self._snapshots.values())
        items = [snapshot.document() for snapshot in every[(page - 1) * limit : page * limit]]
        pages = max(1, -(-len(every) // limit))
        return web.json_response({"items": items, "total": len(every), "page": page, "totalPages": pages})

    async def _get_snapshot(self, request: web.Request) -> web.Response:
        return web.json_response(self._snapshot(request).document())

    async def _delete_snapshot(self, request: web.Request) -> web.Response:
        del self._snapshots[self._snapshot(request).name]
        return web.Response()

    async def _activate_snapshot(self, request: web.Request) -> web.Response:
        snapshot = self._snapshot(request)
        if snapshot.state != "inactive":
            raise Problem(400, f"Snapshot {snapshot.name} is already active")
        snapshot.state = "active"
        return web.json_response(snapshot.document())

    async def _build_logs_url(self, request: web.Request) -> web.Response:
        return web.json_response({"url": f"{self._base()}/api/build-logs/snapshot/{self._snapshot(request).id}"})

    async def _build_logs(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._snapshot(request)
        return await text_stream(request, snapshot.log, lambda: snapshot.state not in UNREADY)

    def _find(self, wanted: str) -> Snapshot | None:
        by_id = (snapshot for snapshot in self._snapshots.values() if snapshot.id == wanted)
        return self._snapshots.get(wanted) or next(by_id, None)

    def _snapshot(self, request: web.Request) -> Snapshot:
        snapshot = self._find(request.match_info["id"])
        if snapshot is None:
            raise Problem(404, f"Snapshot {request.match_info['id']} not found")
        return snapshot

    async def _create_volume(self, request: web.Request) -> web.Response:
        now = iso(self._clock.now())
        head = {"id": str(uuid4()), "name": (await request.json())["name"], "organizationId": ORGANIZATION}
        volume = {**head, "state": "ready", "createdAt": now, "updatedAt": now, "errorReason": None}
        self._volumes[volume["id"]] = volume
        return web.json_response(volume)

    async def _list_volumes(self, request: web.Request) -> web.Response:
        return web.json_response(list(self._volumes.values()))

    async def _volume_by_name(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        for volume in self._volumes.values():
            if volume["name"] == name:
                return web.json_response(volume)
        raise Problem(404, f"Volume with name {name} not found")

    async def _get_volume(self, request: web.Request) -> web.Response:
        return web.json_response(_known(self._volumes, request, "Volume"))

    async def _delete_volume(self, request: web.Request) -> web.Response:
        del self._volumes[_known(self._volumes, request, "Volume")["id"]]
        return web.Response()

    async def _create_secret(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if any(secret["name"] == asked["name"] for secret in self._secrets.values()):
            raise Problem(409, f"Secret with name {asked['name']} already exists")
        now = iso(self._clock.now())
        placeholder = f"dtn_secret_{secrets.token_hex(6)}"
        secret = {"id": str(uuid4()), "name": asked["name"], "placeholder": placeholder, "createdAt": now}
        secret |= {"updatedAt": now, "hosts": asked.get("hosts") or []}
        if asked.get("description"):
            secret["description"] = asked["description"]
        self._secrets[secret["id"]] = secret
        self.values[placeholder] = asked["value"]
        return web.json_response(secret, status=201)

    async def _list_secrets(self, request: web.Request) -> web.Response:
        return web.json_response(list(self._secrets.values()))

    async def _page_secrets(self, request: web.Request) -> web.Response:
        name = request.query.get("name", "")
        found = [secret for secret in self._secrets.values() if name in secret["name"]]
        return web.json_response({"items": found, "total": len(found), "nextCursor": None})

    async def _get_secret(self, request: web.Request) -> web.Response:
        return web.json_response(_known(self._secrets, request, "Secret"))

    async def _update_secret(self, request: web.Request) -> web.Response:
        secret = _known(self._secrets, request, "Secret")
        asked = await request.json()
        secret |= {name: asked[name] for name in ("description", "hosts") if asked.get(name) is not None}
        if asked.get("value") is not None:
            self.values[secret["placeholder"]] = asked["value"]
        secret["updatedAt"] = iso(self._clock.now())
        return web.json_response(secret)

    async def _delete_secret(self, request: web.Request) -> web.Response:
        secret = self._secrets.pop(_known(self._secrets, request, "Secret")["id"])
        self.values.pop(secret["placeholder"], None)
        return web.Response(status=204)


def _known(rows: dict[str, dict[str, Any]], request: web.Request, what: str) -> dict[str, Any]:
    wanted = request.match_info["id"]
    if wanted not in rows:
        raise Problem(404, f"{what} with ID {wanted} not found")
    return rows[wanted]


async def text_stream(request: web.Request, lines: list[str], over: Callable[[], bool]) -> web.StreamResponse:
    """A log as it grows; with ``follow=true`` until it is over."""
    answer = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
    await answer.prepare(request)
    seen = 0
    while True:
        last = over() or request.query.get("follow") != "true"
        while seen < len(lines):
            await answer.write(lines[seen].encode())
            seen += 1
        if last:
            return answer
        await asyncio.sleep(0.01)
