"""An agent that closes its stdin, or never reads it: each is an end that is told, and no memory fills."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest

from runner.acp.connection import AgentConnection, Closed, PermissionAsked
from runner.acp.transport import ExitInfo
from runner.errors import RunnerError
from tests.acp.bed import SESSION, Bed, line, permission, text_update, texts
from tests.acp.far_end import PipeEnd, Recorder

BLOCKS = [{"type": "text", "text": "x"}]


@pytest.fixture
async def pipes() -> AsyncIterator[PipeEnd]:
    end = PipeEnd()
    yield end
    end.transport.close()
    end.end()


async def closed(connection: AgentConnection, seconds: float = 5.0) -> Closed:
    inbox = connection.inbox(SESSION)
    async with asyncio.timeout(seconds):
        while True:
            await inbox.wait()
            for item in inbox.drain():
                if isinstance(item, Closed):
                    return item


def close_stdin_of(end: PipeEnd) -> None:
    os.close(end.stdin)
    end.stdin = -1


async def test_a_queued_frame_that_nobody_can_read_is_an_end(pipes: PipeEnd) -> None:
    """Case E5: the prompt was accepted and then lost, so its turn must hear of it."""
    connection = AgentConnection(pipes.transport)
    connection.inbox(SESSION)
    connection.prompt(SESSION, [{"type": "text", "text": "x" * 1_000_000}])
    assert pipes.transport.unsent > 0
    close_stdin_of(pipes)
    assert (await closed(connection)).error.message == "The agent ended: it closed its stdin."
    assert await connection.flush(1) is False


async def test_an_answer_that_nobody_can_read_is_an_end(pipes: PipeEnd) -> None:
    """Case E5: after what the agent had written, and with the reading stopped."""
    connection = AgentConnection(pipes.transport, inbox_bytes=50)
    inbox = connection.inbox(SESSION)
    pipes.write(line(permission(1)))
    await inbox.wait()
    [asked] = inbox.drain()
    assert isinstance(asked, PermissionAsked)
    pipes.write(line(text_update("a")))
    await inbox.wait()
    pipes.write(line(text_update("b")))
    close_stdin_of(pipes)
    with pytest.raises(ConnectionError):
        connection.respond(asked.key, {"outcome": {"outcome": "cancelled"}})
    async with asyncio.timeout(5):
        while not inbox.closed:
            await asyncio.sleep(0.01)
    items = inbox.drain()
    assert texts(items) == ["a", "b"]
    assert isinstance(items[-1], Closed)


async def test_the_exit_report_is_preferred_to_a_broken_pipe(pipes: PipeEnd) -> None:
    """Case E5: an agent that dies breaks its pipe before its exit is known."""
    connection = AgentConnection(pipes.transport)
    connection.inbox(SESSION)
    close_stdin_of(pipes)
    with pytest.raises(ConnectionError):
        connection.cancel(SESSION)
    pipes.exit(ExitInfo(code=7))
    error = (await closed(connection)).error
    assert error.extra["exit_code"] == 7


async def test_a_transport_that_was_closed_before_anybody_listened_tells_its_end(pipes: PipeEnd) -> None:
    recorder = Recorder()
    pipes.transport.close()
    pipes.transport.connect(recorder)
    async with asyncio.timeout(5):
        while recorder.exit is None:
            await asyncio.sleep(0.01)
    assert recorder.story == ["exited"]


@pytest.mark.virtual_time
async def test_what_a_client_sends_to_an_agent_that_never_reads_is_bounded(beds: Callable[..., Bed]) -> None:
    bed = beds(unread_bytes=10_000)
    bed.inbox()
    bed.agent.reading_stopped = True
    for _ in range(1000):
        if bed.transport.unsent <= 10_000:
            bed.connection.prompt(SESSION, BLOCKS)
    with pytest.raises(ConnectionError, match="does not read"):
        bed.connection.prompt(SESSION, BLOCKS)
    assert bed.transport.unsent < 11_000
    assert bed.connection.exit_error().code == "harness_unresponsive"
    items = await bed.items(lambda got: any(isinstance(item, Closed) for item in got))
    assert isinstance(items[-1], Closed)
    assert items[-1].error.code == "harness_unresponsive"
    bed.agent.read_again()


@pytest.mark.virtual_time
async def test_a_call_to_an_agent_that_never_reads_fails_at_once(beds: Callable[..., Bed]) -> None:
    bed = beds(unread_bytes=1_000)
    bed.agent.reading_stopped = True
    bed.connection.prompt(SESSION, [{"type": "text", "text": "x" * 2_000}])
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(RunnerError) as caught:
        await bed.connection.set_mode(SESSION, "plan", seconds=60)
    assert caught.value.code == "harness_unresponsive"
    assert loop.time() == began
    bed.agent.read_again()


@pytest.mark.virtual_time
async def test_a_failed_connection_reads_no_more(beds: Callable[..., Bed]) -> None:
    """Case E3: the flood goes on, and costs us nothing until the agent is gone."""
    bed = beds(max_line_bytes=1_000)
    bed.inbox()
    taken = 0
    received = bed.connection.data_received

    def counting(data: bytes) -> None:
        nonlocal taken
        taken += 1
        received(data)

    bed.connection.data_received = counting  # type: ignore[method-assign]
    bed.agent.chunk_bytes = 1_000
    bed.agent.send_bytes(b"x" * 100_000)
    items = await bed.items(lambda got: any(isinstance(item, Closed) for item in got))
    assert isinstance(items[-1], Closed) and items[-1].error.code == "harness_protocol_error"
    bed.inbox().drain()
    bed.agent.send_bytes(b"y" * 10_000)
    await asyncio.sleep(1)
    assert taken < 12


@pytest.mark.virtual_time
async def test_a_closed_session_leaves_no_question_open(bed: Bed) -> None:
    bed.inbox()
    bed.says(permission(1))
    await bed.items()
    closing = asyncio.get_running_loop().create_task(bed.connection.close_session(SESSION))
    await bed.answers("session/close", {})
    await closing
    frame = await bed.reads()
    assert frame == {"jsonrpc": "2.0", "id": 1, "result": {"outcome": {"outcome": "cancelled"}}}
