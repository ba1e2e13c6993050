"""The control API's sandbox routes."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.daytona_emulator.box import Box
from tests.daytona_emulator.catalogue import Catalogue, text_stream
from tests.daytona_emulator.clock import MovableClock, iso
from tests.daytona_emulator.lifecycle import Boxes
from tests.daytona_emulator.preview import Previews
from tests.daytona_emulator.problems import Problem

DEFAULT_LIMIT = 100
MAX_SIGNED_SECONDS = 86_400
SSH_MINUTES = 60
_PLAIN = {"user": "user", "target": "target", "cpu": "cpu", "memory": "memory", "disk": "disk", "gpu": "gpu"}
_INTERVALS = {
    "autoStopInterval": "auto_stop",
    "autoArchiveInterval": "auto_archive",
    "autoDeleteInterval": "auto_delete",
    "ttlMinutes": "ttl",
    "queueTimeout": "queue_timeout",
}
_NETWORK = ("networkBlockAll", "networkAllowList", "domainAllowList")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control:
    """Routes below ``/api/sandbox``.

    Args:
        base: gives the service's origin.
    """

    def __init__(
        self, boxes: Boxes, catalogue: Catalogue, previews: Previews, clock: MovableClock, base: Callable[[], str]
    ) -> None:
        self._boxes = boxes
        self._catalogue = catalogue
        self._previews = previews
        self._clock = clock
        self._base = base
        self._ssh: dict[str, tuple[str, float]] = {}

    @property
    def proxy(self) -> str:
        """The toolbox's base URL."""
        return f"{self._base()}/toolbox"

    def routes(self) -> list[web.RouteDef]:
        one = "/api/sandbox/{id}"
        acts = {"start": self._boxes.start, "stop": self._boxes.stop, "archive": self._boxes.archive}
        routes = [web.post(f"{one}/{name}", self._acting(act)) for name, act in acts.items()]
        for name, field in (("autostop", "auto_stop"), ("autoarchive", "auto_archive"), ("autodelete", "auto_delete")):
            routes.append(web.post(f"{one}/{name}/{{value}}", self._setting(field)))
        return [
            *routes,
            web.post(f"{one}/ttl/{{value}}", self._setting("ttl")),
            web.post(f"{one}/recover", self._acting(self._boxes.recover)),
            web.post("/api/sandbox", self._create),
            web.get("/api/sandbox", self._list),
            web.get("/api/sandbox/ssh-access/validate", self._validate_ssh),
            web.get(one, self._get),
            web.delete(one, self._acting(self._boxes.delete)),
            web.put(f"{one}/labels", self._labels),
            web.put(f"{one}/secrets", self._secrets),
            web.post(f"{one}/network-settings", self._network),
            web.post(f"{one}/public/{{value}}", self._public),
            web.post(f"{one}/last-activity", self._activity),
            web.get(f"{one}/toolbox-proxy-url", self._proxy_url),
            web.get(f"{one}/build-logs-url", self._build_logs_url),
            web.get("/api/build-logs/sandbox/{id}", self._build_logs),
            web.get(f"{one}/ports/{{port}}/preview-url", self._preview),
            web.get(f"{one}/ports/{{port}}/signed-preview-url", self._signed_preview),
            web.post(f"{one}/ports/{{port}}/signed-preview-url/{{token}}/expire", self._expire),
            web.post(f"{one}/ssh-access", self._ssh_access),
            web.delete(f"{one}/ssh-access", self._revoke_ssh),
        ]

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        build = asked.get("buildInfo") or {}
        fields = {field: asked[name] for name, field in {**_PLAIN, **_INTERVALS}.items() if asked.get(name) is not None}
        fields |= {name: asked[name] for name in ("labels", "env", "public", "volumes") if asked.get(name) is not None}
        fields["network"] = {name: asked[name] for name in _NETWORK if asked.get(name) is not None}
        if not build:
            snapshot = self._catalogue.usable(asked.get("snapshot") or "")
            resources = {name: value for name, value in fields.items() if name in ("cpu", "memory", "disk", "gpu")}
            if resources:
                raise Problem(400, "Cannot specify Sandbox resources when using a snapshot")
            fields["runs_as"] = snapshot.runs_as
            fields |= {"snapshot": snapshot.name, "cpu": snapshot.cpu, "memory": snapshot.memory, "disk": snapshot.disk}
        fields["dockerfile"] = build.get("dockerfileContent", "")
        fields["secrets"] = self._catalogue.resolve(asked.get("secrets") or [])
        box = self._boxes.make(asked.get("name") or f"sandbox-{secrets.token_hex(4)}", **fields)
        return self._answer(self._boxes.create(box))

    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        labels = json.loads(query.get("labels", "{}"))
        states = query.getall("states", [])
        name = query.get("name", "")
        found = [
            box
            for box in self._boxes.all()
            if labels.items() <= box.labels.items()
            and (not states or box.state in [part for text in states for part in text.split(",")])
            and name in box.name
        ]
        limit = min(int(query.get("limit", DEFAULT_LIMIT)), 200)
        begin = _after(found, query.get("cursor", ""))
        page = found[begin : begin + limit]
        more = begin + limit < len(found)
        cursor = page[-1].id if more and page else None
        return web.json_response({"items": [box.item(self.proxy) for box in page], "nextCursor": cursor})

    async def _get(self, request: web.Request) -> web.Response:
        return self._answer(self._box(request))

    async def _labels(self, request: web.Request) -> web.Response:
        box = self._box(request)
        box.labels = dict((await request.json())["labels"])
        return web.json_response({"labels": box.labels})

    async def _secrets(self, request: web.Request) -> web.Response:
        box = self._box(request)
        box.secrets = self._catalogue.resolve((await request.json()).get("secrets") or [])
        return self._answer(box)

    async def _network(self, request: web.Request) -> web.Response:
        box = self._box(request)
        asked = await request.json()
        box.network |= {name: asked[name] for name in _NETWORK if asked.get(name) is not None}
        return self._answer(box)

    async def _public(self, request: web.Request) -> web.Response:
        box = self._box(request)
        box.public = request.match_info["value"] == "true"
        return self._answer(box)

    async def _activity(self, request: web.Request) -> web.Response:
        self._boxes.refresh(self._box(request))
        return web.Response(status=201)

    async def _proxy_url(self, request: web.Request) -> web.Response:
        self._box(request)
        return web.json_response({"url": self.proxy})

    async def _build_logs_url(self, request: web.Request) -> web.Response:
        box = self._box(request)
        return web.json_response({"url": f"{self._base()}/api/build-logs/sandbox/{box.id}"})

    async def _build_logs(self, request: web.Request) -> web.StreamResponse:
        box = self._box(request)
        return await text_stream(request, box.build_log, lambda: box.settled)

    async def _preview(self, request: web.Request) -> web.Response:
        box = self._box(request)
        door = await self._previews.open(box, int(request.match_info["port"]))
        return web.json_response({"sandboxId": box.id, "url": door.url, "token": box.token})

    async def _signed_preview(self, request: web.Request) -> web.Response:
        box = self._box(request)
        seconds = int(request.query.get("expiresInSeconds", "60"))
        if not 1 <= seconds <= MAX_SIGNED_SECONDS:
            raise Problem(400, "expiresInSeconds must be between 1 second and 24 hours")
        port = int(request.match_info["port"])
        door = await self._previews.open(box, port, seconds)
        return web.json_response({"sandboxId": box.id, "port": port, "token": door.signed, "url": door.url})

    async def _expire(self, request: web.Request) -> web.Response:
        self._previews.expire(self._box(request), request.match_info["token"])
        return web.Response()

    async def _ssh_access(self, request: web.Request) -> web.Response:
        box = self._box(request)
        now, token = self._clock.now(), secrets.token_hex(8)
        expires = now + 60 * float(request.query.get("expiresInMinutes", SSH_MINUTES))
        self._ssh[token] = (box.id, expires)
        times = {"createdAt": iso(now), "updatedAt": iso(now), "expiresAt": iso(expires)}
        command = shlex.join(["ssh", f"{token}@127.0.0.1"])
        document = {"id": secrets.token_hex(8), "sandboxId": box.id, "token": token, "sshCommand": command}
        return web.json_response(document | times)

    async def _revoke_ssh(self, request: web.Request) -> web.Response:
        box = self._box(request)
        wanted = request.query.get("token", "")
        for token in [token for token, (owner, _) in self._ssh.items() if owner == box.id and wanted in ("", token)]:
            del self._ssh[token]
        return self._answer(box)

    async def _validate_ssh(self, request: web.Request) -> web.Response:
        owner, expires = self._ssh.get(request.query["token"], ("", 0.0))
        return web.json_response({"valid": self._clock.now() < expires, "sandboxId": owner})

    def _box(self, request: web.Request) -> Box:
        return self._boxes.find(request.match_info["id"])

    def _answer(self, box: Box) -> web.Response:
        return web.json_response(box.document(self.proxy))

    def _acting(self, act: Callable[[Box], None]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            box = self._box(request)
            act(box)
            return self._answer(box)

        return handle

    def _setting(self, field: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            box = self._box(request)
            setattr(box, field, int(request.match_info["value"]))
            return self._answer(box)

        return handle


def _after(found: list[Box], cursor: str) -> int:
    places: dict[str, Any] = {box.id: place for place, box in enumerate(found, 1)}
    if cursor and cursor not in places:
        raise Problem(400, "Invalid cursor")
    return int(places.get(cursor, 0))
