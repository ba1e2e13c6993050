"""Real processes at the other end of real pipes (cases E1, E3, E4, E5, E6, E9)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest

from runner.acp.connection import Closed, Inbox, Item, PermissionAsked, PromptAnswered
from runner.errors import RunnerError
from tests.acp.bed import SESSION, text_update, texts
from tests.acp.child import Child

BLOCKS = [{"type": "text", "text": "go"}]


async def until_closed(inbox: Inbox) -> list[Item]:
    got: list[Item] = []
    async with asyncio.timeout(30):
        while not (got and isinstance(got[-1], Closed)):
            await inbox.wait()
            got.extend(inbox.drain())
    return got


async def until_answered(inbox: Inbox) -> list[Item]:
    got: list[Item] = []
    async with asyncio.timeout(30):
        while not any(isinstance(item, PromptAnswered) for item in got):
            await inbox.wait()
            got.extend(inbox.drain())
    return got


@pytest.mark.parametrize("piece", [1 << 30, 4096])
async def test_long_lines_over_a_pipe(piece: int) -> None:
    """Case E1: 65,535 bytes to 20 MiB, also split over many writes."""
    sizes = [65_535, 65_536, 65_537, 1 << 20, 20 << 20]
    script = f"""
handshake()
frame = read()
for size in {sizes}:
    data = chunk("x" * (size + 1 - len(chunk(""))))
    assert len(data) == size + 1
    for start in range(0, len(data), {piece}):
        write(data[start:start + {piece}])
send({{"id": frame["id"], "result": {{"stopReason": "end_turn"}}}})
read()
"""
    async with Child(script) as child:
        await child.handshake()
        child.connection.prompt(SESSION, BLOCKS)
        items = await until_answered(child.connection.inbox(SESSION))
    whole = texts(items)
    around = len(json.dumps(text_update("")))
    assert [len(text) for text in whole] == [size - around for size in sizes]
    assert set("".join(whole)) == {"x"}


async def test_a_line_without_an_end_is_given_up_in_bounded_memory() -> None:
    """Case E3."""
    script = """
answer("initialize", {"protocolVersion": 1})
while True:
    write(b"x" * 65536)
"""
    async with Child(script, max_line_bytes=1 << 20) as child:
        before = _resident()
        await child.connection.initialize(seconds=20)
        with pytest.raises(RunnerError, match="more than 8388608 bytes") as caught:
            await child.connection.new_session("/", [], seconds=20)
        assert caught.value.code == "harness_protocol_error"
        assert _resident() - before < 32 << 20


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_noise_around_frames_over_a_pipe() -> None:
    """Case E4: before, between and after frames."""
    script = r"""
noise = [b"\n", b"\x1b[31mwarn\x1b[0m\n", b'"text"\n', b"42\n", b"[]\n", b"null\n", b"\xef\xbb\xbf\r\n", b"\xe2\x82\n"]
for part in noise: write(part)
handshake()
frame = read()
for n, part in enumerate(noise):
    write(chunk(str(n)).replace(b"\n", b"\r\n") + part)
send({"id": frame["id"], "result": {"stopReason": "end_turn"}})
for part in noise: write(part)
write(b"no newline")
"""
    async with Child(script) as child:
        await child.handshake()
        child.connection.prompt(SESSION, BLOCKS)
        items = await until_closed(child.connection.inbox(SESSION))
        assert texts(items) == [str(n) for n in range(8)]
        assert isinstance(items[-2], PromptAnswered)
        found = child.connection.diagnostics()
        assert (found["noise"], found["blank_lines"]) == (3 * 6 + 1, 3 * 2)
        assert found["noise_sample"][-1] == "no newline"


@pytest.mark.parametrize(
    ("script", "step"),
    [
        ("read()", "initialize"),
        ("", "initialize"),
        ('answer("initialize", {"protocolVersion": 1}); read()', "new"),
        ("handshake(); read()", "prompt"),
        (
            """
handshake(); read()
send({"id": 0, "method": "session/request_permission", "params": {"sessionId": "s1",
      "toolCall": {"toolCallId": "t"}, "options": []}})
read()""",
            "answer",
        ),
    ],
    ids=["initialize", "before initialize", "new", "prompt", "permission answer"],
)
async def test_an_exit_at_any_step_is_told_at_once(script: str, step: str) -> None:
    """Case E5: with exit code and stderr, to whoever waits."""
    fatal = script + '\nsys.stderr.write("cannot go on\\n"); sys.stderr.flush(); os._exit(1)'
    async with Child(fatal) as child:
        began = time.monotonic()
        error = await _error_of(child, step)
        assert time.monotonic() - began < 10
    assert error.code == "harness_exited"
    assert error.message == "The agent ended: exit code 1. Last stderr: cannot go on"
    assert error.extra["exit_code"] == 1


async def _error_of(child: Child, step: str) -> RunnerError:
    try:
        await child.connection.initialize(seconds=20)
        await child.connection.new_session("/", [], seconds=20)
    except RunnerError as error:
        return error
    inbox = child.connection.inbox(SESSION)
    child.connection.prompt(SESSION, BLOCKS)
    while True:
        async with asyncio.timeout(20):
            await inbox.wait()
        for item in inbox.drain():
            if isinstance(item, PermissionAsked):
                assert step == "answer"
                child.connection.respond(item.key, {"outcome": {"outcome": "cancelled"}})
            elif isinstance(item, Closed):
                return item.error


async def test_a_megabyte_of_stderr_before_the_first_frame() -> None:
    """Case E6: the pipe is drained, the tail kept."""
    script = """
for n in range(1 << 14):
    os.write(2, b"%06d %s\\n" % (n, b"e" * 56))
os.write(2, b"done")
handshake()
read()
"""
    async with Child(script) as child:
        await child.handshake()
        tail = child.connection.stderr_tail()
    assert len(tail) == 8 * 1024
    assert tail.endswith("\ndone")


async def test_a_kill_is_told_with_its_signal() -> None:
    """Case A1, the half of the connection: the end is told within moments."""
    async with Child("handshake(); read(); write(chunk('a')); time.sleep(60)") as child:
        await child.handshake()
        child.connection.prompt(SESSION, BLOCKS)
        inbox = child.connection.inbox(SESSION)
        await asyncio.wait_for(inbox.wait(), 20)
        os.kill(child.process.pid, signal.SIGKILL)
        items = await until_closed(inbox)
    assert texts(items) == ["a"]
    assert isinstance(items[-1], Closed)
    assert items[-1].error.extra["signal"] == signal.SIGKILL


async def test_a_descendant_that_holds_stdout_does_not_hide_the_exit() -> None:
    """Case E5: what the agent wrote arrives, then its end."""
    script = """
handshake(); read()
write(b"".join(chunk(str(n)) for n in range(300)))
pid = os.fork()
if pid == 0:
    os.close(0)
    for _ in range(600):
        time.sleep(0.05)
    os._exit(0)
os.write(2, b"%d" % pid)
os._exit(5)
"""
    async with Child(script) as child:
        await child.handshake()
        child.connection.prompt(SESSION, BLOCKS)
        items = await until_closed(child.connection.inbox(SESSION))
        os.kill(int(child.connection.stderr_tail()), signal.SIGKILL)
    assert texts(items) == [str(n) for n in range(300)]
    assert isinstance(items[-1], Closed)
    assert items[-1].error.extra["exit_code"] == 5


async def test_a_descendant_that_floods_does_not_delay_the_end() -> None:
    script = """
handshake(); read()
pid = os.fork()
if pid == 0:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        write(chunk("flood"))
    os._exit(0)
os.write(2, b"%d" % pid)
os._exit(5)
"""
    async with Child(script) as child:
        await child.handshake()
        child.connection.prompt(SESSION, BLOCKS)
        items = await until_closed(child.connection.inbox(SESSION))
        os.kill(int(child.connection.stderr_tail()), signal.SIGKILL)
    assert isinstance(items[-1], Closed)


async def test_a_closed_stdout_without_an_exit_is_an_end() -> None:
    """Case E5: the process may stay; for us it is gone."""
    async with Child("handshake(); read(); os.close(1); time.sleep(60)") as child:
        await child.handshake()
        child.connection.prompt(SESSION, BLOCKS)
        began = time.monotonic()
        items = await until_closed(child.connection.inbox(SESSION))
        assert 0.4 < time.monotonic() - began < 20
    assert isinstance(items[-1], Closed)
    assert items[-1].error.message == "The agent ended: its streams were closed."


async def test_text_and_no_answer_to_initialize() -> None:
    """Case E9: the handshake's own deadline, and the cause."""
    async with Child('write(b"usage: agent [--help]\\n"); read(); time.sleep(60)') as child:
        await _noise(child)
        with pytest.raises(TimeoutError):
            await child.connection.initialize(seconds=0.2)
        assert child.connection.last_words() == " Last output: usage: agent [--help]"


async def _noise(child: Child) -> None:
    async with asyncio.timeout(20):
        while not child.connection.diagnostics()["noise"]:
            await asyncio.sleep(0.01)


async def test_an_agent_that_stops_reading_cannot_block_a_cancel() -> None:
    """The kernel's pipe is full: the cancel is queued at once, and the loop stays free."""
    async with Child("handshake(); write(chunk('deaf')); time.sleep(60)") as child:
        await child.handshake()
        inbox = child.connection.inbox(SESSION)
        child.connection.prompt(SESSION, [{"type": "text", "text": "x" * (4 << 20)}])
        began = time.monotonic()
        assert child.connection.cancel(SESSION) is False
        assert time.monotonic() - began < 5
        assert await child.connection.flush(0.2) is False
        assert child.transport.unsent > 3 << 20
        await asyncio.wait_for(inbox.wait(), 20)


async def test_a_slow_reader_gets_every_byte_and_flush_says_when() -> None:
    script = """
handshake()
time.sleep(0.2)
frame = read()
assert read()["method"] == "session/cancel"
size = len(frame["params"]["prompt"][0]["text"])
send({"id": frame["id"], "result": {"stopReason": "cancelled", "_meta": {"n": size}}})
read()
"""
    async with Child(script) as child:
        await child.handshake()
        child.connection.prompt(SESSION, [{"type": "text", "text": "\u00e9" * (4 << 20)}])
        child.connection.cancel(SESSION)
        assert await child.connection.flush(20) is True
        [item] = await until_answered(child.connection.inbox(SESSION))
    assert isinstance(item, PromptAnswered) and item.result is not None
    assert item.result["_meta"] == {"n": 4 << 20}


async def test_reading_stops_when_nobody_takes_what_comes() -> None:
    """Backpressure reaches the agent: it blocks instead of filling our memory, and nothing is lost."""
    script = """
handshake(); frame = read()
for n in range(2000):
    write(chunk(str(n) + " " + "x" * 2000))
    if n % 100 == 0:
        os.write(2, b"%d\\n" % n)
send({"id": frame["id"], "result": {"stopReason": "end_turn"}})
read()
"""
    async with Child(script, inbox_bytes=200_000) as child:
        await child.handshake()
        inbox = child.connection.inbox(SESSION)
        child.connection.prompt(SESSION, BLOCKS)
        async with asyncio.timeout(20):
            while inbox.queued_bytes < 200_000:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert inbox.queued_bytes < 200_000 + 300_000
        assert int(child.connection.stderr_tail().split()[-1]) < 500
        got = texts(await until_answered(inbox))
    assert [text.split()[0] for text in got] == [str(n) for n in range(2000)]
