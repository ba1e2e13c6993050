"""An agent behind a real bridge: stdio, control, drops, refusals, the end (DESIGN 3.10)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from runner.acp.transport import ExitInfo
from runner.acp.websocket import Address
from runner.errors import RunnerError
from runner.sandbox.remote import RemoteSandbox
from tests.sandbox import bed
from tests.sandbox.bridge_bed import BridgeProcess, sandbox, unpack

ENV = {"PATH": "/usr/bin:/bin"}
ECHO = (sys.executable, "-I", "-c", "import sys\nfor line in sys.stdin: print(line, end='', flush=True)")


@pytest.fixture
async def bridge(tmp_path: Path) -> AsyncIterator[BridgeProcess]:
    made = await BridgeProcess(unpack(tmp_path / "inside"), f"{tmp_path.name}:x:y", orphan_seconds=3.0).start()
    yield made
    await made.stop()
    assert bed.carriers(tmp_path.name) == {}


@pytest.fixture
async def place(bridge: BridgeProcess, tmp_path: Path) -> AsyncIterator[RemoteSandbox]:
    made = sandbox(bridge, tmp_path)
    yield made
    assert (await made.destroy(0.0)).proven


def behind_a_door(bridge: BridgeProcess, tmp_path: Path) -> tuple[RemoteSandbox, asyncio.Event]:
    """A sandbox whose bridge is found while the door is open, as it is now."""
    door = asyncio.Event()
    door.set()

    async def find(refused: bool) -> Address:
        await door.wait()
        return await bridge.find(refused)

    return sandbox(bridge, tmp_path, find=find), door


async def begun(place: RemoteSandbox, *argv: str) -> bed.Talk:
    await place.begin(argv or ECHO, ENV, bed.SECONDS)
    return bed.Talk(place)


async def test_an_agent_talks_and_its_exit_is_told(bridge: BridgeProcess, place: RemoteSandbox) -> None:
    talk = await begun(place)
    assert await talk.say("hello") == "hello"
    await bed.until(lambda: place.transport.unsent == 0)
    place.transport.close_stdin()
    assert (await talk.ended()).code == 0
    assert talk.told[-2:][0] == "eof"


async def test_the_last_words_come_before_the_exit(place: RemoteSandbox) -> None:
    program = "import sys; sys.stdout.write('x' * 3_000_000 + '\\n'); sys.stderr.write('bye'); sys.exit(7)"
    talk = await begun(place, sys.executable, "-I", "-c", program)
    assert len(await talk.line()) == 3_000_000
    assert (await talk.ended()).code == 7
    assert ("stderr", b"bye") in talk.told


class Parts:
    """A receiver that keeps what it hears in parts: joining 64 MiB again and again would be the test's own time."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.writables = 0

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.size += len(data)

    def stderr_received(self, data: bytes) -> None:
        pass

    def eof_received(self) -> None:
        pass

    def exited(self, info: ExitInfo) -> None:
        pass

    def writable(self) -> None:
        self.writables += 1


async def test_a_message_of_64_mib_goes_there_and_back(place: RemoteSandbox) -> None:
    await place.begin(ECHO, ENV, bed.SECONDS)
    parts = Parts()
    place.transport.connect(parts)
    size = 64 << 20
    assert place.transport.send(b"m" * size + b"\n") is False
    async with asyncio.timeout(40):
        while parts.size <= size:
            await asyncio.sleep(0.01)
    assert b"".join(parts.parts) == b"m" * size + b"\n"
    await bed.until(lambda: place.transport.unsent == 0)
    assert parts.writables in (1, 2)


async def test_who_waits_until_all_is_taken_is_told(place: RemoteSandbox) -> None:
    """Once for each time, however little it was: an answer to a question is confirmed by that."""
    await place.begin(ECHO, ENV, bed.SECONDS)
    parts = Parts()
    place.transport.connect(parts)
    assert place.transport.send(b"small\n") is True
    await bed.until(lambda: parts.writables == 1)
    assert place.transport.unsent == 0
    assert place.transport.send(b"again\n") is True
    await bed.until(lambda: parts.writables == 2)
    assert place.transport.unsent == 0


async def test_a_drop_loses_nothing_and_repeats_nothing(bridge: BridgeProcess, place: RemoteSandbox) -> None:
    talk = await begun(place)
    for n in range(60):
        place.transport.send(b"%d %s\n" % (n, b"x" * 50_000))
        if n % 10 == 5:
            place.transport.connection.drop()
        await asyncio.sleep(0.005)
    lines = [await talk.line() for _ in range(60)]
    assert [int(line.split()[0]) for line in lines] == list(range(60))
    assert place.transport.connection.connections > 1


async def test_what_was_said_without_a_connection_is_heard_later(bridge: BridgeProcess, tmp_path: Path) -> None:
    """The agent goes on while the runner is away, and is held back when the ring is full."""
    place, door = behind_a_door(bridge, tmp_path)
    program = "import sys\nsys.stdin.readline()\nfor n in range(400): print(n, 'y' * 100_000, flush=True)"
    talk = await begun(place, sys.executable, "-I", "-c", program)
    place.transport.send(b"go\n")
    await talk.line()
    door.clear()
    place.transport.connection.drop()
    await asyncio.sleep(0.5)
    door.set()
    lines = [await talk.line() for _ in range(399)]
    assert [int(line.split()[0]) for line in lines] == list(range(1, 400))
    assert (await talk.ended()).code == 0
    assert (await place.destroy(0.0)).proven


async def test_what_an_agent_said_last_comes_before_its_exit_over_a_drop_too(
    bridge: BridgeProcess, tmp_path: Path
) -> None:
    """It answers and leaves while the runner is away."""
    place, door = behind_a_door(bridge, tmp_path)
    program = "import sys\nsys.stdin.readline()\nprint(1, flush=True)\nsys.stdin.readline()\nprint('y' * 1_000_000)"
    talk = await begun(place, sys.executable, "-I", "-c", program)
    assert await talk.say("go") == "1"
    door.clear()
    place.transport.send(b"on\n")
    await bed.until(lambda: place.transport.unsent == 0)
    place.transport.connection.drop()
    await asyncio.sleep(0.5)
    door.set()
    assert len(await talk.line()) == 1_000_000
    assert (await talk.ended()).code == 0
    kinds = [item if isinstance(item, str | ExitInfo) else item[0] for item in talk.told]
    assert kinds[-1] == talk.exits[0]
    assert (await place.destroy(0.0)).proven


async def test_a_pause_holds_the_agent_back_but_not_its_stderr_nor_its_control(place: RemoteSandbox) -> None:
    program = (
        "import sys,time\nsys.stdin.readline()\nsys.stderr.write('a')\nsys.stderr.flush()\n"
        "for n in range(300): print('z' * 100_000, flush=True)\nsys.stderr.write('b')"
    )
    talk = await begun(place, sys.executable, "-I", "-c", program)
    place.transport.pause_reading()
    place.transport.send(b"go\n")
    await bed.until(lambda: ("stderr", b"a") in talk.told)
    await place.mark("turn").set(5.0)
    assert ("stderr", b"b") not in talk.told
    place.transport.resume_reading()
    for _ in range(300):
        await talk.line()
    assert (await talk.ended()).code == 0


async def test_turns_are_killed_and_commands_run(place: RemoteSandbox) -> None:
    talk = await begun(place)
    await place.mark("t1").set(5.0)
    heard: list[bytes] = []
    ran = await place.run("r1", ["/bin/sh", "-c", "echo out; sleep 60 & exit 3"], heard.append)
    assert (ran.code, b"".join(heard)) == (3, b"out\n")
    reaped = await place.kill_turn("t1", 1.0)
    assert (reaped.killed, reaped.survivors) == (1, ())
    assert await talk.say("still there") == "still there"


async def test_a_program_that_is_not_there_is_the_harness_fault(place: RemoteSandbox) -> None:
    with pytest.raises(RunnerError, match="ENOENT") as caught:
        await place.begin(["/no/such/program"], ENV, 5.0)
    assert caught.value.code == "harness_start_failed"


async def test_nobody_enters_without_the_secret(bridge: BridgeProcess, tmp_path: Path) -> None:
    stranger = sandbox(bridge, tmp_path, secret="f" * 32)
    with pytest.raises(RunnerError, match="4401"):
        await stranger.begin(ECHO, ENV, 5.0)
    await stranger.destroy(0.0)
    for first in ("", "{}", "[]", json.dumps({"secret": 1, "boot_id": None, "received": 0}), "[" * 5000):
        async with connect(f"ws://127.0.0.1:{bridge.port}/", compression=None) as peer:
            await peer.send(first)
            with pytest.raises(ConnectionClosed):
                await peer.recv()
            assert peer.close_code == 4401


async def test_another_boot_is_no_resumption(bridge: BridgeProcess, place: RemoteSandbox, tmp_path: Path) -> None:
    """The same address answers, but the agent behind it is another: the sandbox is lost, not mixed up."""
    talk = await begun(place)
    other = await BridgeProcess(tmp_path / "inside", f"{tmp_path.name}:x:y").start()
    other_secret, bridge_port = other.secret, bridge.port
    place.transport.connection._secret = other_secret
    bridge.port = other.port
    place.transport.connection.drop()
    assert (await talk.ended()).reason == "the sandbox is gone"
    with pytest.raises(RunnerError, match="4404"):
        await place.kill_turn("t", 1.0)
    bridge.port = bridge_port
    await other.stop()


async def test_a_refused_address_is_asked_for_again(bridge: BridgeProcess, tmp_path: Path) -> None:
    """Any answer that is not 101 means that the link has to be renewed; no redirect is followed with the token."""
    seen: list[str] = []

    async def login(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode().partition(" HTTP")[0])
        page = (
            f"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:{port}/login\r\nContent-Length: 0\r\n\r\n"
        )
        writer.write(page.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(login, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def find(refused: bool) -> Address:
        address = await bridge.find(refused)
        return address if refused else Address(f"ws://127.0.0.1:{port}/old", {"X-Token": "t"})

    place = sandbox(bridge, tmp_path, find=find)
    talk = await begun(place)
    assert await talk.say("in") == "in"
    assert bridge.asked == [False, True]
    assert seen == ["GET /old"]
    assert (await place.destroy(0.0)).proven
    server.close()
    await server.wait_closed()


async def test_a_link_without_a_connection_is_lost_in_time(bridge: BridgeProcess, tmp_path: Path) -> None:
    gone = False

    async def find(refused: bool) -> Address:
        if gone:
            raise ConnectionError("no route")
        return await bridge.find(refused)

    place = sandbox(bridge, tmp_path, find=find, resume_seconds=0.3)
    talk = await begun(place)
    gone = True
    place.transport.connection.drop()
    assert (await talk.ended()).reason == "the sandbox is gone"
    with pytest.raises(ConnectionError):
        place.transport.send(b"x\n")
    assert (await place.destroy(0.0)).proven


async def test_a_cell_that_nobody_asks_for_is_torn_down(tmp_path: Path) -> None:
    """Case C3: a runner that was killed leaves nothing behind."""
    bridge = await BridgeProcess(unpack(tmp_path / "inside"), f"{tmp_path.name}:x:y", orphan_seconds=0.4).start()
    place = sandbox(bridge, tmp_path, resume_seconds=0.1)
    await begun(place, "/bin/sh", "-c", "trap '' TERM HUP; setsid sleep 1000 & while :; do sleep 1; done")
    await place.transport.aclose()
    assert await bridge.gone() == 0
    assert bed.carriers(tmp_path.name) == {}
    await place.destroy(0.0)
    await bridge.stop()


async def test_a_teardown_ends_the_bridge(bridge: BridgeProcess, tmp_path: Path) -> None:
    place = sandbox(bridge, tmp_path)
    await begun(place, "/bin/sh", "-c", "setsid sleep 1000 & sleep 1000")
    gone = await place.destroy(0.0)
    assert (gone.proven, gone.proof) == (True, "echild")
    await bed.until(lambda: len(bed.carriers(tmp_path.name)) <= 1)


async def test_a_round_trip_is_short(place: RemoteSandbox) -> None:
    """Not a bound of the speed goals, which ``scripts/bench`` measures; it tells a mistake of a whole magnitude."""
    talk = await begun(place)
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(100):
        began = loop.time()
        await talk.say("x" * 200)
        times.append(loop.time() - began)
    print(f"p50 {median(times) * 1000:.2f} ms")
    began = loop.time()
    await talk.say("x" * (1 << 20))
    print(f"1 MiB {(loop.time() - began) * 1000:.1f} ms")


async def test_a_bridge_too_busy_for_pings_is_resumed(
    bridge: BridgeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case E12: the connection is given up and made anew; the same agent goes on, and hears each message once."""
    monkeypatch.setattr("runner.acp.websocket.PING_SECONDS", 0.2)
    place = sandbox(bridge, tmp_path)
    program = "import os, sys\nfor line in sys.stdin: print(os.getpid(), len(line), line[:6], end='\\n', flush=True)"
    talk = await begun(place, sys.executable, "-I", "-c", program)
    big = b"x" * (3 << 19)
    first = (await talk.say("before")).split()
    os.kill(bridge.process.pid, signal.SIGSTOP)
    place.transport.send(b"unread" + big + b"\n")
    await bed.until(lambda: place.transport.connection._peer is None, "the ping is missed")
    place.transport.send(b"behind" + big + b"\n")
    os.kill(bridge.process.pid, signal.SIGCONT)
    heard = [(await talk.line()).split() for _ in range(2)]
    assert heard == [[first[0], str(len(big) + 7), word] for word in ("unread", "behind")]
    assert (await talk.say("after")).split() == [first[0], "6", "after"]
    assert place.transport.connection.connections > 1
    assert (await place.destroy(0.0)).proven
