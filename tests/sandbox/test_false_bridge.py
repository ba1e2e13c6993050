"""A bridge that an agent put in the place of the real one: whatever it says, the turn ends and the runner goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from runner.acp import link
from runner.acp.websocket import Address
from runner.errors import RunnerError
from runner.sandbox import remote
from runner.sandbox.remote import RemoteSandbox
from tests.sandbox import bed
from tests.sandbox.bridge_bed import asleep

Frame = tuple[bytes, bytes]


class FalseBridge:
    """Keeps the rules of the link; starts what it is asked for and answers a mark with ``says``."""

    answer: dict[str, Any] | None = None

    def __init__(self, says: Frame) -> None:
        self.says = says
        self.connections = 0
        self.link = link.Link()

    async def __call__(self, peer: ServerConnection) -> None:
        self.connections += 1
        hello = json.loads(await peer.recv())
        self.link.resume(hello["received"])
        await peer.send(json.dumps({"boot_id": "b", "received": self.link.received}))
        try:
            await self._speak(peer)
            async for message in peer:
                assert isinstance(message, bytes)
                found = self.link.take(message)
                if found is not None and found[0] == link.CONTROL:
                    request = json.loads(found[1])
                    if request["op"] == "spawn":
                        self.link.send(link.CONTROL, json.dumps({"id": request["id"], "ok": True}).encode())
                    elif request["op"] == "mark":
                        self.link.send(*self.says)
                    elif request["op"] in ("kill_turn", "run") and self.answer is not None:
                        answer = {"id": request["id"], "ok": True, **self.answer}
                        self.link.send(link.CONTROL, json.dumps(answer).encode())
                await self._speak(peer)
        except ConnectionClosed:
            pass
        finally:
            self.link.drop()

    async def _speak(self, peer: ServerConnection) -> None:
        while (frame := self.link.next_frame()) is not None:
            await peer.send(frame)


SAID: list[Frame] = [
    (link.CONTROL, b"[" * 100_000 + b"]" * 100_000),
    (link.CONTROL, b'{"id":[]}'),
    (link.CONTROL, b'{"id":2,"ok":"no"}'),
    (link.CONTROL, b'{"event":"output","run":{},"data":7}'),
    (link.CONTROL, b'{"event":"exited","code":"x","signal":[]}'),
    (link.OVER, b"\xff"),
    (b"?", b"of no kind"),
]


@pytest.fixture
async def place(tmp_path: Path, said: Frame, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RemoteSandbox]:
    monkeypatch.setattr(remote, "REPLY_SECONDS", 0.2)
    monkeypatch.setattr(remote, "LAST_SECONDS", 0.2)
    async with serve(FalseBridge(said), "127.0.0.1", 0, compression=None, close_timeout=0.2) as server:
        port = next(iter(server.sockets)).getsockname()[1]

        async def find(refused: bool) -> Address:
            return Address(f"ws://127.0.0.1:{port}/")

        yield RemoteSandbox("place", str(tmp_path), find, "secret", resume_seconds=1.0, end=asleep)


@pytest.mark.parametrize("said", SAID)
async def test_it_cannot_hold_a_turn(place: RemoteSandbox) -> None:
    await place.begin(["agent"], {}, bed.SECONDS)
    talk = bed.Talk(place)
    with suppress(RunnerError):
        await place.mark("t").set(0.2)
    with pytest.raises(RunnerError) as caught:
        await place.kill_turn("t", 0.1)
    assert caught.value.code == "sandbox_lost"
    assert (await place.destroy(0.0, 0.1)).proven
    async with asyncio.timeout(bed.SECONDS):
        await talk.ended()


@pytest.mark.parametrize("said", SAID[:1])
async def test_what_cannot_be_read_ends_the_link(place: RemoteSandbox) -> None:
    """A link that nobody keeps is told as lost, not waited for until the turn's own limit."""
    await place.begin(["agent"], {}, bed.SECONDS)
    talk = bed.Talk(place)
    with pytest.raises(RunnerError):
        await place.mark("t").set(5.0)
    assert (await talk.ended()).lost
    assert (await place.destroy(0.0)).proven


@pytest.mark.parametrize("said", [(link.STDERR, b"")])
@pytest.mark.parametrize("answer", [{}, {"killed": [], "survivors": 1}, {"code": {}, "signal": None, "truncated": 0}])
async def test_an_answer_without_what_it_is_for_is_a_lost_sandbox(
    place: RemoteSandbox, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    monkeypatch.setattr(FalseBridge, "answer", answer)
    await place.begin(["agent"], {}, bed.SECONDS)
    for work in (place.kill_turn("t", 0.1), place.run("r", ["ls"], lambda data: None)):
        with pytest.raises(RunnerError) as caught:
            await work
        assert caught.value.code == "sandbox_lost"
    assert (await place.destroy(0.0, 0.1)).proven
