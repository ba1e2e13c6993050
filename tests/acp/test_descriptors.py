"""A transport over pipes owns three descriptors, and on every way to its end all three are closed once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from runner.acp.transport import ExitInfo
from tests.acp.far_end import PipeEnd, Recorder

BIG = b"x" * 1_000_000


class Closer(Recorder):
    """Closes its transport from inside one of its calls."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self._when = when

    def _tell(self, what: str) -> None:
        super()._tell(what)
        if what == self._when and self.transport is not None:
            self.transport.close()


def connected(end: PipeEnd, recorder: Recorder | None = None) -> Recorder:
    recorder = recorder or Recorder()
    recorder.transport = end.transport
    end.transport.connect(recorder)
    return recorder


async def told(recorder: Recorder) -> None:
    async with asyncio.timeout(5):
        while recorder.exit is None:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert recorder.story.count("exited") == 1
    assert recorder.story[-1] == "exited"


async def never_connected(end: PipeEnd) -> None:
    end.transport.close()


async def close_at_rest(end: PipeEnd) -> None:
    recorder = connected(end)
    end.transport.close()
    await told(recorder)


async def close_while_paused(end: PipeEnd) -> None:
    recorder = connected(end)
    end.transport.pause_reading()
    end.write(b"unread\n")
    end.transport.close()
    end.transport.resume_reading()
    await told(recorder)
    assert recorder.data == b""


async def close_with_frames_queued(end: PipeEnd) -> None:
    recorder = connected(end)
    end.transport.send(BIG)
    end.transport.close()
    with pytest.raises(ConnectionError):
        end.transport.send(b"{}\n")
    await told(recorder)


async def close_stdin_with_frames_queued(end: PipeEnd) -> None:
    recorder = connected(end)
    end.transport.send(BIG)
    end.transport.close_stdin()
    end.exit(ExitInfo(code=0))
    await told(recorder)


async def broken_stdin(end: PipeEnd) -> None:
    recorder = connected(end)
    end.transport.send(BIG)
    os.close(end.stdin)
    end.stdin = -1
    await told(recorder)


async def exit_then_close(end: PipeEnd) -> None:
    recorder = connected(end)
    end.write(b"last words\n")
    end.exit(ExitInfo(code=3))
    end.transport.close()
    await told(recorder)
    assert recorder.data == b"last words\n"


async def close_then_exit(end: PipeEnd) -> None:
    recorder = connected(end)
    end.transport.close()
    end.exit(ExitInfo(code=3))
    await told(recorder)
    assert recorder.exit == ExitInfo(code=3)


async def closed_by_the_reader_of_data(end: PipeEnd) -> None:
    recorder = connected(end, Closer("data"))
    end.write(b"a\n")
    await told(recorder)


async def closed_by_the_reader_of_last_data(end: PipeEnd) -> None:
    recorder = connected(end, Closer("data"))
    end.transport.pause_reading()
    end.write(b"a\n")
    end.exit(ExitInfo(code=0))
    await told(recorder)


async def closed_by_the_reader_of_the_end(end: PipeEnd) -> None:
    recorder = connected(end, Closer("eof"))
    end.end()
    await told(recorder)


async def closed_by_who_is_told_the_exit(end: PipeEnd) -> None:
    recorder = connected(end, Closer("exited"))
    end.exit(ExitInfo(code=0))
    await told(recorder)


WAYS: list[Callable[[PipeEnd], Awaitable[None]]] = [
    never_connected,
    close_at_rest,
    close_while_paused,
    close_with_frames_queued,
    close_stdin_with_frames_queued,
    broken_stdin,
    exit_then_close,
    close_then_exit,
    closed_by_the_reader_of_data,
    closed_by_the_reader_of_last_data,
    closed_by_the_reader_of_the_end,
    closed_by_who_is_told_the_exit,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_every_descriptor_is_closed(way: Callable[[PipeEnd], Awaitable[None]]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    end = PipeEnd()
    await way(end)
    end.transport.close()
    end.transport.close()
    end.end()
    assert set(os.listdir("/proc/self/fd")) == before
