"""The bridge: a cell init behind a WebSocket, for a sandbox that the runner reaches by network only (DESIGN 3.10).

``python3 -I bridge.py --secret-file FILE [--host H] [--port N] [--orphan-seconds S]``, beside ``init.py``, ``cell/``,
``link.py`` (a copy of ``runner/acp/link.py``) and ``websockets.zip``. The file of the secret is removed at once. One
JSON line on stdout tells ``port`` and ``boot_id``. It starts the init, carries its channel and the agent's stdio, and
tears the cell down when nobody resumed the link in time.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "websockets.zip"))
sys.path.insert(0, HERE)

from websockets.asyncio.server import serve  # noqa: E402
from websockets.exceptions import ConnectionClosed  # noqa: E402

from cell.descriptors import Reader, Writer  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection

    from runner.acp import link
    from runner.acp.link import Link, LinkError
else:
    import link
    from link import Link, LinkError

HELLO_SECONDS = 10.0
PING_SECONDS = 20.0
TEARDOWN_SECONDS = 5.0
OF_INIT = ("PATH", "LANG", "ACP_RUNNER_CELL", "DAYTONA_SANDBOX_ID")
TOLD_TO_GO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_DUMPABLE = 4


class Bridge:
    """One init, one agent, one link; connections come and go."""

    def __init__(self, secret: bytes, orphan_seconds: float) -> None:
        self.boot_id = secrets.token_hex(16)
        self.ended = asyncio.Event()
        self._secret = secret
        self._orphan_seconds = orphan_seconds
        self._link = Link()
        self._peer: ServerConnection | None = None
        self._wake = asyncio.Event()
        self._line = bytearray()
        self._orphan: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._over = False
        self._leaving = False
        self._process, control, stdin, stdout, stderr = start_init()
        self._control = Reader(control, self._from_init)
        self._to_init = Writer(os.dup(control), lambda count: None, lambda: None)
        self._stdin = Writer(stdin, self._link_consumed, self._deaf)
        self._stdout = Reader(stdout, self._said)
        self._stderr = Reader(stderr, self._complained)
        self._control.set(True)
        self._gate()
        self._await_resume()

    # -- the cell ----------------------------------------------------------------------------------------------------

    def _gate(self) -> None:
        """Hold the agent back while the runner does not take what it says."""
        self._stdout.set(self._link.has_room())
        self._stderr.set(self._link.backlog < link.RING_BYTES)
        self._control.set(self._link.backlog < 2 * link.RING_BYTES)
        self._wake.set()

    def _said(self, data: bytes) -> None:
        if data:
            self._link.send_stream(data)
        else:
            self._link.end_stream()
        self._gate()

    def _complained(self, data: bytes) -> None:
        if data:
            self._link.send(link.STDERR, data)
            self._gate()

    def _link_consumed(self, count: int) -> None:
        self._link.consume(count)
        self._wake.set()

    def _deaf(self) -> None:
        self._link.send(link.DEAF, b"")
        self._wake.set()

    def _from_init(self, data: bytes) -> None:
        if not data:
            self._init_over()
            return
        *lines, rest = (bytes(self._line) + data).split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            if line.startswith(b'{"event":"exited"'):
                self._drain()
                self._link.send_behind(link.CONTROL, line)
            else:
                self._link.send(link.CONTROL, line)
        self._gate()

    def _drain(self) -> None:
        self._stdout.drain()
        self._stderr.drain()

    def _init_over(self) -> None:
        """Its channel ended: it is gone, or will be as soon as nobody is left in the cell."""
        if self._over:
            return
        self._over = True
        self._drain()
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._link.send_behind(link.OVER, str(code).encode())
        self._gate()
        if self._leaving and self._peer is None:
            self.ended.set()
        else:
            asyncio.get_running_loop().call_later(self._orphan_seconds, self.ended.set)

    def tear_down(self) -> None:
        """Nobody resumed the link, or the bridge was told to go: the init kills all and ends its channel."""
        self._leaving = True
        if self._over:
            self.ended.set()
        else:
            self._process.terminate()
            asyncio.get_running_loop().call_later(TEARDOWN_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._process.kill()
        self.ended.set()

    # -- the link ----------------------------------------------------------------------------------------------------

    def _await_resume(self) -> None:
        self._orphan = asyncio.get_running_loop().call_later(self._orphan_seconds, self.tear_down)

    async def connection(self, peer: ServerConnection) -> None:
        """Serve one connection of the runner until it ends or another one takes its place."""
        code = await self._greeted(peer)
        if code is not None:
            await peer.close(code)
            return
        hello = json.dumps({"boot_id": self.boot_id, "received": self._link.received})
        sending = asyncio.create_task(self._send(peer, hello))
        try:
            async for message in peer:
                if self._peer is not peer or not isinstance(message, bytes):
                    break
                self._take(message)
        except ConnectionClosed:
            pass
        except LinkError as error:
            sys.stderr.write(f"bridge: {error}\n")
            await peer.close(link.CLOSE_GAP)
        finally:
            sending.cancel()
            if self._peer is peer:
                self._peer = None
                self._link.drop()
                self._await_resume()

    async def _greeted(self, peer: ServerConnection) -> int | None:
        """Check the first frame; a close code when the connection may not go on."""
        try:
            hello = json.loads(await asyncio.wait_for(peer.recv(), HELLO_SECONDS))
            secret, boot_id, received = hello["secret"], hello["boot_id"], hello["received"]
        except (ValueError, KeyError, TypeError, RecursionError, TimeoutError, ConnectionClosed):
            return link.CLOSE_SECRET
        if not isinstance(secret, str) or not hmac.compare_digest(secret.encode(), self._secret):
            return link.CLOSE_SECRET
        if boot_id not in (None, self.boot_id):
            return link.CLOSE_UNKNOWN
        try:
            self._link.resume(int(received))
        except (LinkError, ValueError, TypeError):
            return link.CLOSE_GAP
        old, self._peer = self._peer, peer
        if old is not None:
            self._closing.add(closing := asyncio.create_task(old.close(link.CLOSE_SUPERSEDED)))
            closing.add_done_callback(self._closing.discard)
        if self._orphan is not None:
            self._orphan.cancel()
        return None

    async def _send(self, peer: ServerConnection, hello: str) -> None:
        try:
            await peer.send(hello)
            while self._peer is peer:
                self._wake.clear()
                frame = self._link.next_frame()
                if frame is not None:
                    await peer.send(frame)
                else:
                    await self._wake.wait()
        except ConnectionClosed:
            pass

    def _take(self, message: bytes) -> None:
        found = self._link.take(message)
        if found is not None:
            kind, payload = found
            if kind == link.STREAM:
                self._stdin.write(payload)
            elif kind == link.STREAM_END:
                self._stdin.close()
            elif kind == link.CONTROL:
                self._to_init.write(payload + b"\n")
        self._gate()
        if self._over and self._link.settled:
            self.ended.set()


def start_init() -> tuple[subprocess.Popen[bytes], int, int, int, int]:
    """The cell's init, the bridge's end of its control channel, and of the agent's stdin, stdout and stderr."""
    ours, theirs = socket.socketpair()
    stdin, our_stdin = os.pipe()
    our_stdout, stdout = os.pipe()
    our_stderr, stderr = os.pipe()
    command = [sys.executable, "-I", "-S", os.path.join(HERE, "init.py"), "--control-fd", str(theirs.fileno())]
    env = {name: os.environ[name] for name in OF_INIT if name in os.environ}
    process = subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=[theirs.fileno()], env=env, start_new_session=True
    )
    theirs.close()
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    return process, ours.detach(), our_stdin, our_stdout, our_stderr


def take_secret(path: str) -> bytes:
    """The secret; its file is gone, and other processes of this user cannot read this one's memory."""
    with open(path, "rb") as file:
        secret = file.read(1024).strip()
    os.unlink(path)
    if len(secret) < 16:
        raise SystemExit("the secret is too short")
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass
    return secret


async def main(arguments: argparse.Namespace) -> None:
    """Serve until the cell is gone and the runner heard of it, or nobody asked in time."""
    secret = take_secret(arguments.secret_file)
    bridge = Bridge(secret, arguments.orphan_seconds)
    for number in TOLD_TO_GO:
        asyncio.get_running_loop().add_signal_handler(number, bridge.tear_down)
    async with serve(
        bridge.connection,
        arguments.host,
        arguments.port,
        compression=None,
        max_size=link.MAX_FRAME_BYTES,
        ping_interval=PING_SECONDS,
        ping_timeout=PING_SECONDS,
        close_timeout=1.0,
    ) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        sys.stdout.write(json.dumps({"port": port, "boot_id": bridge.boot_id}) + "\n")
        sys.stdout.flush()
        await bridge.ended.wait()
    for number in TOLD_TO_GO:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--secret-file", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--orphan-seconds", type=float, default=120.0)
    asyncio.run(main(parser.parse_args()))
