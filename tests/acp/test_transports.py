"""One contract for every transport (``runner.acp.transport``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import orjson
import pytest

from runner.acp.transport import ExitInfo
from tests.acp.far_end import BridgeEnd, FarEnd, MemoryEnd, PipeEnd, Recorder


@pytest.fixture(params=[MemoryEnd, PipeEnd, BridgeEnd], ids=["memory", "stdio", "bridge"])
async def far(request: pytest.FixtureRequest) -> AsyncIterator[FarEnd]:
    end: FarEnd = request.param()
    yield end
    end.transport.close()
    end.end()


@pytest.fixture
def recorder(far: FarEnd) -> Recorder:
    made = Recorder()
    made.transport = far.transport
    return made


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.001)


async def test_bytes_that_came_before_are_delivered_first(far: FarEnd, recorder: Recorder) -> None:
    far.write(b"early ")
    far.transport.connect(recorder)
    far.write(b"late")
    await until(lambda: recorder.data == b"early late")
    assert recorder.story == ["data"]


async def test_an_exit_before_anybody_listens_is_told(far: FarEnd, recorder: Recorder) -> None:
    far.write(b"last")
    far.exit(ExitInfo(code=4))
    far.transport.connect(recorder)
    await until(lambda: recorder.exit)
    assert (recorder.data, recorder.exit, recorder.story) == (b"last", ExitInfo(code=4), ["data", "eof", "exited"])


async def test_the_end_comes_once_and_behind_the_data(far: FarEnd, recorder: Recorder) -> None:
    far.transport.connect(recorder)
    far.write(b"x" * 5000)
    far.write_stderr(b"bye")
    far.exit(ExitInfo(signal=9))
    await until(lambda: recorder.exit)
    await asyncio.sleep(0.1)
    assert recorder.story == ["data", "eof", "exited"]
    assert (len(recorder.data), recorder.stderr, recorder.exit) == (5000, b"bye", ExitInfo(signal=9))


async def test_a_pause_holds_the_data_back(far: FarEnd, recorder: Recorder) -> None:
    far.transport.connect(recorder)
    far.transport.pause_reading()
    far.transport.pause_reading()
    far.write(b"held")
    far.write_stderr(b"flows")
    await asyncio.sleep(0.02)
    assert recorder.data == b""
    far.transport.resume_reading()
    far.transport.resume_reading()
    await until(lambda: recorder.data == b"held")


async def test_stderr_flows_during_a_pause(far: FarEnd, recorder: Recorder) -> None:
    """Case E6: an agent that we do not read must still be able to complain."""
    far.transport.connect(recorder)
    far.transport.pause_reading()
    far.write(b"held")
    far.write_stderr(b"flows")
    await until(lambda: recorder.stderr == b"flows")


async def test_an_exit_during_a_pause_delivers_what_is_left(far: FarEnd, recorder: Recorder) -> None:
    recorder.pause_after = 1
    far.transport.connect(recorder)
    far.write(b"x" * 30_000)
    await until(lambda: recorder.data)
    far.write(b"y" * 20_000)
    far.exit(ExitInfo(code=0))
    await until(lambda: recorder.exit)
    assert len(recorder.data) == 50_000
    assert recorder.story == ["data", "eof", "exited"]


async def test_frames_arrive_whole_and_in_order_however_slowly_they_are_read(far: FarEnd, recorder: Recorder) -> None:
    far.transport.connect(recorder)
    frames = [{"n": n, "x": "x" * (50_000 if n % 7 == 0 else 10)} for n in range(60)]
    accepted = [far.transport.send(orjson.dumps(frame) + b"\n") for frame in frames]
    assert False in accepted
    assert far.transport.unsent > 0
    assert await far.read() == frames
    assert far.transport.unsent == 0
    assert recorder.story == ["writable"]
    assert far.transport.send(b"{}\n") in (True, False)


async def test_stdin_ends_behind_what_is_queued(far: FarEnd, recorder: Recorder) -> None:
    far.transport.connect(recorder)
    far.transport.send(b'{"x":"%b"}\n' % (b"x" * 300_000))
    far.transport.close_stdin()
    far.transport.close_stdin()
    with pytest.raises(ConnectionError):
        far.transport.send(b"{}\n")
    frames = await far.read()
    assert [len(frame["x"]) for frame in frames] == [300_000]


async def test_close_tells_the_end_once(far: FarEnd, recorder: Recorder) -> None:
    far.transport.connect(recorder)
    far.write(b"x")
    await until(lambda: recorder.data)
    far.transport.close()
    far.transport.close()
    await until(lambda: recorder.exit)
    assert recorder.exit is not None and recorder.exit.reason == "its streams were closed"
    with pytest.raises(ConnectionError):
        far.transport.send(b"{}\n")
    far.transport.pause_reading()
    far.transport.resume_reading()
    await asyncio.sleep(0.1)


async def test_close_after_the_exit_is_quiet(far: FarEnd, recorder: Recorder) -> None:
    far.transport.connect(recorder)
    far.exit(ExitInfo(code=0))
    await until(lambda: recorder.exit)
    far.transport.close()
    await asyncio.sleep(0.1)
    assert recorder.exit == ExitInfo(code=0)


async def test_close_without_a_listener_is_quiet(far: FarEnd) -> None:
    far.transport.close()
    with pytest.raises(ConnectionError):
        far.transport.send(b"{}\n")


async def test_a_descendant_that_writes_as_fast_as_we_read_cannot_hold_the_end_back() -> None:
    """What is read behind the exit is bounded by what the pipe could hold at that moment."""
    far = PipeEnd()
    try:
        recorder = Recorder()
        received = recorder.data_received

        def flooded(data: bytes) -> None:
            received(data)
            if len(recorder.data) < 10 << 20:
                far.write(b"z" * 4096)

        recorder.data_received = flooded  # type: ignore[method-assign]
        far.transport.connect(recorder)
        far.write(b"z" * 4096)
        far.transport.process_exited(ExitInfo(code=0))
        assert recorder.exit == ExitInfo(code=0)
        assert len(recorder.data) <= 1 << 20
    finally:
        far.transport.close()
        far.end()
