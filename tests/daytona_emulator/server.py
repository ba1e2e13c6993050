"""The emulator as one object: listens, answers, records, and ends all it started."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType

from aiohttp import web

from runner.sandbox.census import MARKER
from tests.daytona_emulator.box import Box
from tests.daytona_emulator.building import Workshop
from tests.daytona_emulator.catalogue import Catalogue
from tests.daytona_emulator.clock import MovableClock
from tests.daytona_emulator.control import Control
from tests.daytona_emulator.events import Events
from tests.daytona_emulator.faults import Fault, Faults
from tests.daytona_emulator.files import Files
from tests.daytona_emulator.lifecycle import Boxes
from tests.daytona_emulator.preview import Previews
from tests.daytona_emulator.problems import API, PROXY, Problem
from tests.daytona_emulator.processes import Processes
from tests.daytona_emulator.recording import Exchange, Recording, parsed
from tests.daytona_emulator.remote import Remote
from tests.daytona_emulator.toolbox import Toolbox

MAX_BODY_BYTES = 256 * 1024 * 1024
SWEEP_SECONDS = 0.1
API_KEY = "emulator-key"
UNCHECKED = ("/__emu/", "/api/socket.io/", "/api/build-logs/")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DaytonaEmulator:
    """A Daytona on 127.0.0.1. Use it as an async context manager.

    Args:
        step: real seconds that each state of a change takes.
        path: ``PATH`` of the sandboxes; by default this Python's and the system's.
        port: of the control API; 0 takes a free one.

    Attributes:
        root: directory of the disks.
        boxes: the sandboxes. catalogue: snapshots, volumes, secrets. faults: the rules in force.
        previews, toolbox, events, clock, processes, recording: the other parts, for tests in the same process.
    """

    def __init__(self, step: float = 0.02, path: str = "", port: int = 0) -> None:
        self.api_key = API_KEY
        self.clock = MovableClock()
        self.faults = Faults()
        self.recording = Recording()
        self.processes = Processes(path)
        self.events = Events(lambda token: token == self.api_key)
        self._port = port
        self.root = Path(tempfile.mkdtemp(prefix="daytona-emulator-"))
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self.boxes = Boxes(self.root, self.clock, self.processes, step, self._changed, self._halted)
        workshop = Workshop({MARKER: f"{self.processes.prefix}build", "LANG": "C.UTF-8"})
        self.catalogue = Catalogue(self.clock, step, lambda: self.origin, workshop)
        self.previews = Previews(self.api_key, self.clock, self.faults, self.boxes.find, self.boxes.refresh)
        self.toolbox = Toolbox(self.processes, self.boxes.find, self.boxes.refresh)
        self._control = Control(self.boxes, self.catalogue, self.previews, self.clock, lambda: self.origin)

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def api_url(self) -> str:
        """For ``DaytonaConfig.api_url``."""
        return f"{self.origin}/api"

    async def __aenter__(self) -> DaytonaEmulator:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen and begin the cron."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._outer])
        app.router.add_routes(
            [
                *self._control.routes(),
                *self.catalogue.routes(),
                *self.toolbox.routes("/toolbox/{id}"),
                *Files(self.toolbox.reach).routes("/toolbox/{id}"),
                *Remote(self).routes(),
                web.get("/api/socket.io/", self.events.handle),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self._spawn(self._cron())

    async def stop(self) -> None:
        """Stop listening, kill every process, remove every disk."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.catalogue.close()
        await self.boxes.close()
        await self.previews.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.processes.close()
        shutil.rmtree(self.root, ignore_errors=True)

    async def advance(self, seconds: float) -> None:
        """Move the clock and do what is due."""
        self.clock.advance(seconds)
        self.previews.keep_alive()
        await self.boxes.sweep()

    def bake(self, snapshot: str, files: dict[str, bytes]) -> None:
        """A snapshot exists, and every sandbox of it has these executable files in its home from the start."""
        self.catalogue.add(snapshot)
        self.boxes.bake(snapshot, files)

    def fault(self, match: str, **fields: object) -> None:
        """Add one rule; see ``Fault``."""
        self.faults.add(Fault.parse({"match": match, **fields}))

    def operations(self) -> set[tuple[str, str]]:
        """Method and path template of everything the service's contract covers."""
        assert self._runner is not None
        return {
            (route.method, route.resource.canonical)
            for route in self._runner.app.router.routes()
            if route.resource is not None
            and route.method != "HEAD"
            and not route.resource.canonical.startswith(UNCHECKED)
        }

    async def _cron(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.previews.keep_alive()
            with contextlib.suppress(Problem):
                await self.boxes.sweep()

    def _changed(self, box: Box, old: str, new: str) -> None:
        document = box.document(self._control.proxy)
        if old:
            self._spawn(
                self.events.tell("sandbox.state.updated", {"sandbox": document, "oldState": old, "newState": new})
            )
        else:
            self._spawn(self.events.tell("sandbox.created", document))

    async def _halted(self, box: Box) -> None:
        await self.toolbox.halt(box)
        self.previews.cut(box)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @web.middleware
    async def _outer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Faults, authorization, the body of a refusal, and the record of it all."""
        if request.path.startswith("/__emu/"):
            return await handler(request)
        fault = self.faults.take(f"{request.method} {request.path}")
        if fault is not None:
            await asyncio.sleep(fault.delay)
            if fault.drop == "before":
                return _cut(request)
        try:
            if fault is not None and fault.status:
                raise _problem(fault, request)
            if not request.path.startswith("/api/socket.io/"):
                self._authorize(request)
            answer = await handler(request)
        except Problem as problem:
            answer = _refusal(request, problem)
        except web.HTTPNotFound:
            answer = _refusal(request, Problem(404, f"Cannot {request.method} {request.path}"))
        await self._record(request, answer, fault is not None and bool(fault.status))
        return _cut(request) if fault is not None and fault.drop == "after" else answer

    def _authorize(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.api_key}":
            source = PROXY if request.path.startswith("/toolbox/") else API
            raise Problem(401, "Invalid credentials", source)

    async def _record(self, request: web.Request, answer: web.StreamResponse, faulted: bool) -> None:
        resource = request.match_info.route.resource
        template = resource.canonical if resource is not None else ""
        if template.startswith(UNCHECKED):
            return
        asked = parsed(await request.read()) if request.content_type == "application/json" else None
        body = answer.body if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else b""
        is_json = answer.content_type == "application/json" and bool(body)
        self.recording.add(
            Exchange(
                request.method,
                template,
                request.path,
                answer.status,
                asked,
                parsed(body) if is_json else None,
                is_json,
                faulted,
            )
        )


def _cut(request: web.Request) -> web.Response:
    """Break the connection; what is returned reaches nobody."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _problem(fault: Fault, request: web.Request) -> Problem:
    source = fault.source or (PROXY if request.path.startswith("/toolbox/") else API)
    body = fault.body.encode() if fault.body is not None else None
    return Problem(fault.status, fault.message or "Injected", source, fault.code, fault.headers, body)


def _refusal(request: web.Request, problem: Problem) -> web.Response:
    if problem.body is not None:
        return web.Response(status=problem.status, body=problem.body, headers=problem.headers)
    document = problem.document(request.method, request.path)
    return web.json_response(document, status=problem.status, headers=problem.headers)
