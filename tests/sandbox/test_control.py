"""The runner's end of the control channel against an init that misbehaves."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.sandbox import control
from runner.sandbox.control import ControlChannel
from runner.sandbox.init_calls import answer


class Peer:
    """A channel and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.end = socket.socketpair()
        self.end.settimeout(10)
        self.events: list[dict[str, Any]] = []
        self.ends = 0
        self.channel = ControlChannel(ours, self.events.append, self._ended)

    def _ended(self) -> None:
        self.ends += 1

    def say(self, *messages: Any) -> None:
        self.end.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    yield made
    made.channel.close()
    made.end.close()


async def test_replies_are_matched_by_id_in_any_order_and_any_pieces(peer: Peer) -> None:
    first, second = peer.channel.request("mark", turn="a"), peer.channel.request("mark", turn="b")
    asked = [json.loads(line) for line in peer.end.recv(65536).splitlines()]
    assert [(item["op"], item["turn"]) for item in asked] == [("mark", "a"), ("mark", "b")]
    data = "".join(json.dumps({"id": item["id"], "ok": item["turn"]}) + "\n" for item in reversed(asked)).encode()
    for byte in data:
        peer.end.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await answer(first, 5.0) or {})["ok"] == "a"
    assert (await answer(second, 5.0) or {})["ok"] == "b"


async def test_a_wait_is_bounded_and_a_late_reply_harmless(peer: Peer) -> None:
    """Case D6."""
    late = peer.channel.request("mark", turn="a")
    with pytest.raises(TimeoutError):
        await answer(late, 0.01)
    peer.say({"id": 1, "ok": True}, {"id": 1, "ok": True}, {"id": 99, "ok": True}, {"id": [1], "ok": True})
    next_one = peer.channel.request("mark", turn="b")
    peer.say({"id": 2, "ok": True})
    assert await answer(next_one, 5.0) == {"id": 2, "ok": True}
    assert peer.ends == 0


async def test_the_end_answers_everybody_and_is_told_once(peer: Peer) -> None:
    """Case A1."""
    waiting = peer.channel.request("mark", turn="a")
    peer.end.close()
    assert await answer(waiting, 5.0) is None
    assert await answer(peer.channel.request("mark", turn="b"), 5.0) is None
    peer.channel.drain()
    assert peer.ends == 1


async def test_what_was_said_before_the_end_counts(peer: Peer) -> None:
    waiting = peer.channel.request("teardown")
    peer.say({"event": "exited", "pid": 1, "code": 0, "signal": None}, {"id": 1, "ok": True, "proof": "echild"})
    peer.end.close()
    peer.channel.drain()
    assert (await answer(waiting, 0.0) or {})["proof"] == "echild"
    assert [event["event"] for event in peer.events] == ["exited"]
    assert peer.ends == 1


@pytest.mark.parametrize("noise", [b"not json\n", b"[1]\n", b"\xff\n", b"x" * 40])
async def test_noise_ends_the_channel(peer: Peer, monkeypatch: pytest.MonkeyPatch, noise: bytes) -> None:
    """An init that says what no init says is not an init any more; lines are bounded."""
    monkeypatch.setattr(control, "MAX_LINE", 32)
    waiting = peer.channel.request("mark", turn="a")
    peer.end.sendall(noise)
    assert await answer(waiting, 5.0) is None
    assert peer.ends == 1


async def test_a_peer_that_does_not_read_does_not_block(peer: Peer) -> None:
    big = peer.channel.request("spawn", env={"BIG": "x" * 2_000_000})
    small = peer.channel.request("mark", turn="a")
    assert not big.done()
    peer.end.setblocking(False)
    data = b""
    while data.count(b"\n") < 2:
        try:
            data += peer.end.recv(65536)
        except BlockingIOError:
            await asyncio.sleep(0)
    assert [json.loads(line)["op"] for line in data.splitlines()] == ["spawn", "mark"]
    peer.say({"id": 1, "ok": True}, {"id": 2, "ok": True})
    assert await answer(small, 5.0) == {"id": 2, "ok": True}
    assert peer.channel._unsent == b""


async def test_close_is_quiet_and_final(peer: Peer) -> None:
    waiting = peer.channel.request("mark", turn="a")
    peer.channel.close()
    peer.channel.close()
    assert await answer(waiting, 5.0) is None
    assert peer.ends == 0
    assert peer.end.recv(65536)
    assert peer.end.recv(65536) == b""
