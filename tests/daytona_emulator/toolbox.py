"""The daemon inside a sandbox: commands and sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.daytona_emulator.box import Box
from tests.daytona_emulator.problems import DAEMON, PROXY, Problem, bare_502, not_started
from tests.daytona_emulator.processes import Processes
from tests.daytona_emulator.sessions import STDERR, STDOUT, Command, Session

NO_CONTAINER = "not found: sandbox container not found: Error response from daemon: No such container: {}"


class Toolbox:
    """What runs in the started sandboxes, and the routes that reach it.

    Args:
        find: a sandbox by id; refuses an unknown one.
        used: told of every request that reaches a daemon.
    """

    def __init__(self, processes: Processes, find: Callable[[str], Box], used: Callable[[Box], None]) -> None:
        self._processes = processes
        self._find = find
        self._used = used
        self._sessions: dict[str, dict[str, Session]] = {}
        self._env: dict[str, dict[str, str]] = {}
        self._followers: dict[str, set[web.WebSocketResponse]] = {}
        self._running: dict[str, set[asyncio.Task[Any]]] = {}

    def routes(self, prefix: str) -> list[web.RouteDef]:
        session = f"{prefix}/process/session"
        return [
            web.post(f"{prefix}/process/execute", self._execute),
            web.post(session, self._create_session),
            web.get(session, self._list_sessions),
            web.get(f"{session}/{{session}}", self._get_session),
            web.delete(f"{session}/{{session}}", self._delete_session),
            web.post(f"{session}/{{session}}/exec", self._run),
            web.get(f"{session}/{{session}}/command/{{command}}", self._get_command),
            web.get(f"{session}/{{session}}/command/{{command}}/logs", self._logs),
            web.post(f"{session}/{{session}}/command/{{command}}/input", self._input),
            web.post(f"{prefix}/env", self._update_env),
            web.get(f"{prefix}/user-home-dir", self._directory),
            web.get(f"{prefix}/work-dir", self._directory),
        ]

    def reach(self, request: web.Request) -> Box:
        """The sandbox of a request, when its daemon answers."""
        try:
            box = self._find(request.match_info["id"])
        except Problem as problem:
            raise Problem(404, f"not found: {problem.message}", PROXY) from None
        if box.state != "started":
            raise not_started()
        if box.traits.container_gone:
            raise Problem(404, NO_CONTAINER.format(box.id), PROXY)
        if box.traits.daemon_dead:
            raise bare_502()
        self._used(box)
        return box

    async def halt(self, box: Box) -> None:
        """The sandbox stops: sessions and what waits for them are over."""
        for task in self._running.pop(box.id, set()):
            task.cancel()
        for socket in list(self._followers.pop(box.id, set())):
            await socket.close(code=1011, message=b"sandbox is gone")
        for session in self._sessions.pop(box.id, {}).values():
            await session.end(graceful=False)
        self._env.pop(box.id, None)

    async def drop_followers(self, box: Box) -> None:
        """Cut every log stream as a proxy does that lost patience; the commands run on."""
        for socket in list(self._followers.get(box.id, set())):
            await socket.close(code=1011, message=b"keepalive ping timeout")

    async def _execute(self, request: web.Request) -> web.Response:
        box = self.reach(request)
        asked = await request.json()
        work = asyncio.get_running_loop().create_task(self._executed(box, asked))
        running = self._running.setdefault(box.id, set())
        running.add(work)
        try:
            return web.json_response(await asyncio.shield(work))
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            raise bare_502() from None
        finally:
            running.discard(work)

    async def _executed(self, box: Box, asked: dict[str, Any]) -> dict[str, Any]:
        cwd = self._path(box, asked.get("cwd") or "")
        if not cwd.is_dir():
            raise Problem(400, f"working directory {cwd} does not exist", DAEMON)
        extra = {**self._env.get(box.id, {}), **(asked.get("envs") or {})}
        process = await self._processes.shell(box, "-c", str(asked["command"]), cwd=cwd, extra=extra, merged=True)
        try:
            output, _ = await asyncio.wait_for(process.communicate(), asked.get("timeout") or None)
        except TimeoutError:
            raise Problem(408, "command execution timeout", DAEMON, "PROCESS_EXECUTION_TIMEOUT") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        code = process.returncode or 0
        return {"exitCode": code if code >= 0 else 128 - code, "result": output.decode("utf-8", "replace")}

    async def _create_session(self, request: web.Request) -> web.Response:
        box = self.reach(request)
        name = str((await request.json())["sessionId"])
        sessions = self._sessions.setdefault(box.id, {})
        if name in sessions:
            raise Problem(409, "session already exists", DAEMON)
        sessions[name] = session = Session(name, box.run / "sessions" / str(len(list(sessions))))
        await session.start(self._processes, box, self._env.get(box.id, {}))
        return web.Response(status=201)

    async def _list_sessions(self, request: web.Request) -> web.Response:
        box = self.reach(request)
        return web.json_response([_session(session) for session in self._sessions.get(box.id, {}).values()])

    async def _get_session(self, request: web.Request) -> web.Response:
        return web.json_response(_session(self._session(request)))

    async def _delete_session(self, request: web.Request) -> web.Response:
        session = self._session(request)
        del self._sessions[request.match_info["id"]][session.name]
        await session.end()
        return web.Response(status=204)

    async def _run(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = await request.json()
        command = session.run(str(asked["command"]), not asked.get("suppressInputEcho", False))
        if asked.get("runAsync") or asked.get("async"):
            return web.json_response({"cmdId": command.id}, status=202)
        code = await command.ended()
        return web.json_response({"cmdId": command.id, "exitCode": code, **_outputs(command)})

    async def _get_command(self, request: web.Request) -> web.Response:
        return web.json_response(_command(self._command(request)))

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        command = self._command(request)
        if request.query.get("follow") != "true" or request.headers.get("Upgrade", "").lower() != "websocket":
            return web.json_response(_outputs(command))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        followers = self._followers.setdefault(request.match_info["id"], set())
        followers.add(socket)
        reader = asyncio.get_running_loop().create_task(_read_until_closed(socket))
        sender = asyncio.get_running_loop().create_task(_send_frames(socket, command))
        try:
            await asyncio.wait({reader, sender}, return_when=asyncio.FIRST_COMPLETED)
            await socket.close()
        finally:
            reader.cancel()
            sender.cancel()
            followers.discard(socket)
        return socket

    async def _input(self, request: web.Request) -> web.Response:
        command = self._command(request)
        data = str((await request.json())["data"])
        await command.write((data if data.endswith("\n") else data + "\n").encode())
        return web.Response(status=204)

    async def _update_env(self, request: web.Request) -> web.Response:
        box = self.reach(request)
        asked = await request.json()
        env = self._env.setdefault(box.id, {})
        env.update(asked.get("set") or {})
        for name in asked.get("unset") or []:
            env.pop(name, None)
        return web.json_response(env)

    async def _directory(self, request: web.Request) -> web.Response:
        return web.json_response({"dir": str(self.reach(request).home)})

    def _session(self, request: web.Request) -> Session:
        box = self.reach(request)
        session = self._sessions.get(box.id, {}).get(request.match_info["session"])
        if session is None:
            raise Problem(404, "session not found", DAEMON, "PROCESS_NOT_FOUND")
        return session

    def _command(self, request: web.Request) -> Command:
        command = self._session(request).commands.get(request.match_info["command"])
        if command is None:
            raise Problem(404, "command not found", DAEMON, "PROCESS_NOT_FOUND")
        return command

    @staticmethod
    def _path(box: Box, text: str) -> Path:
        return (box.home / text).resolve()


async def _send_frames(socket: web.WebSocketResponse, command: Command) -> None:
    async for frame in command.follow():
        await socket.send_bytes(frame)


async def _read_until_closed(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        pass


def _outputs(command: Command) -> dict[str, str]:
    return {
        "output": command.text_of(STDOUT, STDERR),
        "stdout": command.text_of(STDOUT),
        "stderr": command.text_of(STDERR),
    }


def _command(command: Command) -> dict[str, Any]:
    document: dict[str, Any] = {"id": command.id, "command": command.text}
    return document if command.exit_code is None else document | {"exitCode": command.exit_code}


def _session(session: Session) -> dict[str, Any]:
    return {"sessionId": session.name, "commands": [_command(command) for command in session.commands.values()]}
