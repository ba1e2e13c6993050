"""The daemon's files: below the sandbox's disk, in bulk and one by one."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import stat
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import BodyPartReader, web

from tests.daytona_emulator.box import Box
from tests.daytona_emulator.clock import iso
from tests.daytona_emulator.problems import DAEMON, Problem

CHUNK = 1 << 20


class Files:
    """The file routes.

    Args:
        reach: the sandbox of a request when its daemon answers.
    """

    def __init__(self, reach: Callable[[web.Request], Box]) -> None:
        self._reach = reach

    def routes(self, prefix: str) -> list[web.RouteDef]:
        return [
            web.get(f"{prefix}/files", self._list),
            web.delete(f"{prefix}/files", self._delete),
            web.get(f"{prefix}/files/info", self._info),
            web.get(f"{prefix}/files/download", self._download),
            web.get(f"{prefix}/files/search", self._search),
            web.post(f"{prefix}/files/folder", self._folder),
            web.post(f"{prefix}/files/move", self._move),
            web.post(f"{prefix}/files/permissions", self._permissions),
            web.post(f"{prefix}/files/bulk-upload", self._upload),
            web.post(f"{prefix}/files/bulk-download", self._bulk_download),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        folder = self._path(request, request.query.get("path", ""))
        if not folder.is_dir():
            raise _missing(folder)
        depth = int(request.query.get("depth", "1"))
        return web.json_response([_info(path) for path in _below(folder, depth)])

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(_info(self._existing(request, request.query["path"])))

    async def _download(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._existing(request, request.query["path"]))

    async def _delete(self, request: web.Request) -> web.Response:
        path = self._existing(request, request.query["path"])
        if not path.is_dir():
            path.unlink()
        elif request.query.get("recursive") == "true":
            shutil.rmtree(path)
        else:
            raise Problem(400, "cannot delete directory without recursive flag", DAEMON)
        return web.Response(status=204)

    async def _search(self, request: web.Request) -> web.Response:
        folder = self._existing(request, request.query["path"])
        found = [str(path) for path in _below(folder, 64) if fnmatch.fnmatch(path.name, request.query["pattern"])]
        return web.json_response({"files": found})

    async def _folder(self, request: web.Request) -> web.Response:
        path = self._path(request, request.query["path"])
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(int(request.query.get("mode") or "755", 8))
        return web.Response(status=201)

    async def _move(self, request: web.Request) -> web.Response:
        source = self._existing(request, request.query["source"])
        source.rename(self._path(request, request.query["destination"]))
        return web.Response()

    async def _permissions(self, request: web.Request) -> web.Response:
        path = self._existing(request, request.query["path"])
        if mode := request.query.get("mode"):
            path.chmod(int(mode, 8))
        return web.Response()

    async def _upload(self, request: web.Request) -> web.Response:
        box = self._reach(request)
        wanted: dict[str, str] = {}
        written: list[dict[str, Any]] = []
        errors: list[str] = []
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or not part.name:
                continue
            index, _, kind = part.name.partition("].")
            if kind == "path":
                wanted[index] = await part.text()
                continue
            if index not in wanted:
                errors.append(f"{part.name}: path is missing")
                await part.release()
                continue
            try:
                path = _confined(box, wanted[index])
                await _save(part, path)
            except (OSError, Problem) as error:
                errors.append(f"{wanted[index]}: {error}")
                await part.release()
            else:
                written.append({"path": wanted[index], "bytes": path.stat().st_size})
        if errors:
            return web.json_response({"errors": errors}, status=400)
        return web.json_response({"files": written})

    async def _bulk_download(self, request: web.Request) -> web.StreamResponse:
        box = self._reach(request)
        paths = (await request.json()).get("paths") or []
        if not paths:
            raise Problem(400, "request body must be {paths: [...]} and non-empty", DAEMON)
        boundary = uuid4().hex
        answer = web.StreamResponse(headers={"Content-Type": f"multipart/form-data; boundary={boundary}"})
        await answer.prepare(request)
        for text in paths:
            await self._part(answer, boundary, box, text)
        await answer.write(f"--{boundary}--\r\n".encode())
        await answer.write_eof()
        return answer

    async def _part(self, answer: web.StreamResponse, boundary: str, box: Box, text: str) -> None:
        label = f"filename*=UTF-8''{urllib.parse.quote(text, safe='')}"
        try:
            path = _confined(box, text)
            if path.is_dir():
                raise Problem(400, f"{text} is a directory", DAEMON, "INVALID_FILE_PATH")
            source = path.open("rb")
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            code, status = ("FILE_NOT_FOUND", 404) if missing else ("FILE_ACCESS_DENIED", 403)
            problem = Problem(status, f"file not found: {text}" if missing else str(error), DAEMON, code)
        except Problem as refused:
            problem = refused
        else:
            with source:
                head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; {label}\r\n'
                await answer.write(f"{head}Content-Type: application/octet-stream\r\n\r\n".encode())
                while data := source.read(CHUNK):
                    await answer.write(data)
                await answer.write(b"\r\n")
            return
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="error"; {label}\r\n'
        await answer.write(f"{head}Content-Type: application/json\r\n\r\n".encode())
        await answer.write(json.dumps(problem.document("POST", text)).encode() + b"\r\n")

    def _path(self, request: web.Request, text: str) -> Path:
        return _confined(self._reach(request), text)

    def _existing(self, request: web.Request, text: str) -> Path:
        path = self._path(request, text)
        if not os.path.lexists(path):
            raise _missing(path)
        return path


def _confined(box: Box, text: str) -> Path:
    """A path of the sandbox's disk; relative ones begin at its home. The machine's other files are not its own."""
    path = Path(os.path.abspath(box.home / text))
    if not path.parent.resolve().joinpath(path.name).is_relative_to(box.root.resolve()):
        raise Problem(403, f"permission denied: {text}", DAEMON, "FILE_ACCESS_DENIED")
    return path


def _missing(path: Path) -> Problem:
    return Problem(404, f"file not found: {path}", DAEMON, "FILE_NOT_FOUND")


def _below(folder: Path, depth: int) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir()):
        found.append(path)
        if depth > 1 and path.is_dir() and not path.is_symlink():
            found += _below(path, depth - 1)
    return found


def _info(path: Path) -> dict[str, Any]:
    found = path.lstat()
    return {
        "name": path.name,
        "path": str(path),
        "isDir": stat.S_ISDIR(found.st_mode),
        "size": found.st_size,
        "mode": stat.filemode(found.st_mode),
        "permissions": format(stat.S_IMODE(found.st_mode), "04o"),
        "owner": str(found.st_uid),
        "group": str(found.st_gid),
        "modTime": iso(found.st_mtime),
        "modifiedAt": iso(found.st_mtime),
    }


async def _save(part: BodyPartReader, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        while data := await part.read_chunk(CHUNK):
            target.write(data)
