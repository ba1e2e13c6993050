"""Sessions of the daemon: one shell that keeps its state over commands, whose outputs are kept apart and followed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

from tests.daytona_emulator.box import Box
from tests.daytona_emulator.problems import DAEMON, Problem
from tests.daytona_emulator.processes import Processes

STDOUT, STDERR = b"\x01\x01\x01", b"\x02\x02\x02"
TERM_SECONDS = 0.5
CHUNK = 65536
# The daemon marks the streams in band: the same bytes inside an output are lost, as they are there.
_MARKS = (STDOUT, STDERR)


class Command:
    """One command of a session: its outputs so far and, at its end, its exit code."""

    def __init__(self, text: str, echoes_input: bool) -> None:
        self.id = str(uuid4())
        self.text = text
        self.echoes_input = echoes_input
        self.exit_code: int | None = None
        self._chunks: list[tuple[bytes, bytes]] = []
        self._changed = asyncio.Event()
        self._fds: dict[str, int] = {}

    def open(self, folder: Path) -> None:
        """Make its four FIFOs; both ends are held, so nobody ever waits for an open."""
        loop = asyncio.get_running_loop()
        for name in ("in", "out", "err", "code"):
            os.mkfifo(folder / name)
            self._fds[name] = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)
        loop.add_reader(self._fds["out"], self._read, "out", STDOUT)
        loop.add_reader(self._fds["err"], self._read, "err", STDERR)
        loop.add_reader(self._fds["code"], self._ended)

    def close(self) -> None:
        """Stop reading; a command that did not end has no exit code but is over."""
        loop = asyncio.get_running_loop()
        for fd in self._fds.values():
            loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()
        self.finish(-1)

    async def write(self, data: bytes) -> None:
        """To its standard input; waits while the FIFO is full."""
        if self.exit_code is not None or "in" not in self._fds:
            raise Problem(410, "command has already completed", DAEMON, "COMMAND_ALREADY_COMPLETED")
        if self.echoes_input:
            self._add(STDOUT, data)
        while data and "in" in self._fds:
            try:
                data = data[os.write(self._fds["in"], data) :]
            except BlockingIOError:
                await asyncio.sleep(0.002)

    def text_of(self, *streams: bytes) -> str:
        """What came on these streams, in order."""
        return b"".join(data for stream, data in self._chunks if stream in streams).decode("utf-8", "replace")

    async def follow(self) -> AsyncIterator[bytes]:
        """Marked frames from the first byte until the command ended."""
        seen = 0
        while True:
            changed = self._changed
            while seen < len(self._chunks):
                stream, data = self._chunks[seen]
                seen += 1
                yield stream + data
            if self.exit_code is not None and seen == len(self._chunks):
                return
            await changed.wait()

    async def ended(self) -> int:
        """Wait for its exit code."""
        while self.exit_code is None:
            await self._changed.wait()
        return self.exit_code

    def _read(self, name: str, stream: bytes) -> None:
        with contextlib.suppress(BlockingIOError, KeyError):
            while data := os.read(self._fds[name], CHUNK):
                for mark in _MARKS:
                    data = data.replace(mark, b"")
                self._add(stream, data)

    def _ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            code = os.read(self._fds["code"], 64)
            self._read("out", STDOUT)
            self._read("err", STDERR)
            self.finish(int(code or b"-1"))

    def finish(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self._wake()

    def _add(self, stream: bytes, data: bytes) -> None:
        self._chunks.append((stream, data))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Session:
    """One shell."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.commands: dict[str, Command] = {}
        self._folder = folder
        self._shell: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, processes: Processes, box: Box, env: dict[str, str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._shell = await processes.shell(box, extra=env)
        self._watch = asyncio.get_running_loop().create_task(self._watched(self._shell))

    def run(self, text: str, echoes_input: bool) -> Command:
        """Hand a command to the shell, which takes it up when the one before has ended."""
        if self._shell is None or self._shell.returncode is not None or self._shell.stdin is None:
            raise Problem(410, f"session {self.name} has ended", DAEMON, "SESSION_ENDED")
        command = Command(text, echoes_input)
        folder = self._folder / command.id
        folder.mkdir()
        command.open(folder)
        (folder / "command").write_text(text + "\n", encoding="utf-8")
        line = f". '{folder}/command' <'{folder}/in' >'{folder}/out' 2>'{folder}/err'; echo $? >'{folder}/code'\n"
        self._shell.stdin.write(line.encode())
        self.commands[command.id] = command
        return command

    async def end(self, graceful: bool = True) -> None:
        """End the shell and its process group: SIGTERM, a grace, SIGKILL."""
        shell = self._shell
        if shell is not None and shell.returncode is None:
            for number, wait in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, 5.0)):
                if graceful or number == signal.SIGKILL:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(shell.pid, number)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(shell.wait(), wait)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
        if self._watch is not None:
            self._watch.cancel()
        for command in self.commands.values():
            command.close()

    async def _watched(self, shell: asyncio.subprocess.Process) -> None:
        code = await shell.wait()
        await asyncio.sleep(0)
        for command in self.commands.values():
            command.finish(code if code >= 0 else 128 - code)
