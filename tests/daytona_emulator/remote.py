"""``/__emu/``: the emulator's own controls over HTTP, for a process that is not the test's."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.daytona_emulator.faults import Fault
from tests.daytona_emulator.problems import Problem
from tests.daytona_emulator.scenarios import play

if TYPE_CHECKING:
    from tests.daytona_emulator.server import DaytonaEmulator


class Remote:
    """The control routes; JSON in and out, 400 with a text for nonsense."""

    def __init__(self, emulator: DaytonaEmulator) -> None:
        self._emulator = emulator

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/__emu/fault", self._fault),
            web.delete("/__emu/fault", self._clear),
            web.post("/__emu/scenario", self._scenario),
            web.post("/__emu/clock", self._clock),
            web.post("/__emu/bake", self._bake),
            web.get("/__emu/state", self._state),
            web.get("/__emu/snapshots", self._snapshots),
            web.get("/__emu/sandboxes", self._sandboxes),
            web.get("/__emu/exchanges", self._exchanges),
        ]

    async def _fault(self, request: web.Request) -> web.Response:
        try:
            self._emulator.faults.add(Fault.parse(await request.json()))
        except (TypeError, ValueError) as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        return web.json_response({})

    async def _clear(self, request: web.Request) -> web.Response:
        self._emulator.faults.clear()
        return web.json_response({})

    async def _scenario(self, request: web.Request) -> web.Response:
        asked = await request.json()
        try:
            await play(self._emulator, str(asked.pop("name", "")), asked)
        except Problem as problem:
            raise web.HTTPBadRequest(text=problem.message) from problem
        return web.json_response({})

    async def _clock(self, request: web.Request) -> web.Response:
        await self._emulator.advance(float((await request.json())["advance"]))
        return web.json_response({"now": self._emulator.clock.now()})

    async def _bake(self, request: web.Request) -> web.Response:
        """``{"snapshot": name, "files": {path: base64}}``: the snapshot exists and holds these files."""
        asked = await request.json()
        files = {name: base64.b64decode(data) for name, data in asked["files"].items()}
        self._emulator.bake(str(asked["snapshot"]), files)
        return web.json_response({})

    async def _state(self, request: web.Request) -> web.Response:
        """Sandboxes, listeners of events, requests that met a fault, processes."""
        emulator = self._emulator
        alive = await emulator.processes.look()
        told = {"faults": emulator.faults.hits, "listeners": emulator.events.listeners}
        return web.json_response({"sandboxes": self._boxes(), "processes": alive, **told})

    async def _sandboxes(self, request: web.Request) -> web.Response:
        """The sandboxes alone, without a look at every process of the machine."""
        return web.json_response(self._boxes())

    def _boxes(self) -> list[dict[str, Any]]:
        return [
            {"id": box.id, "name": box.name, "state": box.state, "labels": box.labels, "home": str(box.home)}
            for box in self._emulator.boxes.all()
        ]

    async def _snapshots(self, request: web.Request) -> web.Response:
        return web.json_response(self._emulator.catalogue.states())

    async def _exchanges(self, request: web.Request) -> web.Response:
        return web.json_response([exchange.document() for exchange in self._emulator.recording.all()])
