"""Client calls: negotiation, deadlines, and what an agent's end does to them (cases E5, E9, E11)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from runner.acp.connection import AgentConnection, AgentError, Closed
from runner.acp.transport import ExitInfo
from runner.errors import RunnerError
from runner.redaction import Redactor
from tests.acp.bed import SESSION, Bed
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

CALLS: dict[str, Callable[[AgentConnection], Coroutine[Any, Any, Any]]] = {
    "initialize": lambda connection: connection.initialize(seconds=10),
    "session/new": lambda connection: connection.new_session("/w", [], seconds=10),
    "session/close": lambda connection: connection.close_session(SESSION, seconds=10),
    "session/set_mode": lambda connection: connection.set_mode(SESSION, "plan", seconds=10),
    "session/set_config_option": lambda connection: connection.set_config_option(SESSION, "model", "m", seconds=10),
}


def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def test_initialize_says_who_we_are_and_what_we_cannot(bed: Bed) -> None:
    call = started(bed.connection.initialize())
    answer = {
        "protocolVersion": 1,
        "agentInfo": {"name": "a", "version": "2"},
        "agentCapabilities": {"loadSession": True},
        "authMethods": [{"id": "m", "name": "M"}],
    }
    frame = await bed.answers("initialize", answer)
    info = await call
    assert frame["params"]["protocolVersion"] == 1
    assert frame["params"]["clientCapabilities"] == {
        "fs": {"readTextFile": False, "writeTextFile": False},
        "terminal": False,
        "elicitation": {"form": {}, "url": {}},
    }
    assert (info.protocol_version, info.name, info.version) == (1, "a", "2")
    assert info.capabilities == {"loadSession": True}
    assert info.auth_methods == [{"id": "m", "name": "M"}]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"protocolVersion": "1"}, "The agent speaks protocol version '1'; this runner speaks 1."),
        ({"protocolVersion": 2}, "The agent speaks protocol version 2; this runner speaks 1."),
        ({"protocolVersion": 0}, "The agent speaks protocol version 0; this runner speaks 1."),
        ({"protocolVersion": 1.5}, "The agent speaks protocol version 1.5; this runner speaks 1."),
        ({"protocolVersion": True}, "The agent speaks protocol version True; this runner speaks 1."),
        ({"protocolVersion": None}, "The agent did not say which protocol version it speaks; this runner speaks 1."),
        ({}, "The agent did not say which protocol version it speaks; this runner speaks 1."),
        (None, "The agent answered initialize without an object."),
        ([1], "The agent answered initialize without an object."),
    ],
)
async def test_another_version_is_a_clear_error(bed: Bed, answer: Any, said: str) -> None:
    """Case E11."""
    call = started(bed.connection.initialize())
    await bed.answers("initialize", answer)
    with pytest.raises(RunnerError) as caught:
        await call
    assert (caught.value.code, caught.value.message) == ("harness_protocol_error", said)


@pytest.mark.parametrize(
    "rest", [{}, {"agentCapabilities": None, "agentInfo": None, "authMethods": None}, {"agentCapabilities": 5}]
)
async def test_missing_capabilities_are_defaults(bed: Bed, rest: dict[str, Any]) -> None:
    """Case E11."""
    call = started(bed.connection.initialize())
    await bed.answers("initialize", {"protocolVersion": 1, **rest})
    info = await call
    assert (info.capabilities, info.auth_methods, info.name, info.version) == ({}, [], None, None)


async def test_new_session_gives_what_the_agent_offers(bed: Bed) -> None:
    servers = [{"name": "m", "command": "/bin/m", "args": [], "env": []}]
    call = started(bed.connection.new_session("/w", servers))
    modes = {"currentModeId": "ask", "availableModes": [{"id": "ask", "name": "Ask"}]}
    options = [{"id": "model", "currentValue": "x"}]
    answer = {"sessionId": SESSION, "modes": modes, "configOptions": [*options, 3], "extra": 1}
    frame = await bed.answers("session/new", answer)
    session = await call
    assert frame["params"] == {"cwd": "/w", "mcpServers": servers}
    assert (session.agent_session_id, session.modes, session.config_options) == (SESSION, modes, options)
    assert session.raw["extra"] == 1


@pytest.mark.parametrize("answer", [{}, {"sessionId": ""}, {"sessionId": 5}, None, "s"])
async def test_a_session_without_an_id_is_a_protocol_error(bed: Bed, answer: Any) -> None:
    call = started(bed.connection.new_session("/w", []))
    await bed.answers("session/new", answer)
    with pytest.raises(RunnerError, match="without a session id") as caught:
        await call
    assert caught.value.code == "harness_protocol_error"


@pytest.mark.parametrize("method", ["initialize", "session/new"])
async def test_auth_required_has_its_own_code(bed: Bed, method: str) -> None:
    call = started(CALLS[method](bed.connection))
    frame = await bed.reads(method)
    bed.says({"jsonrpc": "2.0", "id": frame["id"], "error": {"code": -32000, "message": "Authentication required"}})
    with pytest.raises(RunnerError, match="Authentication required") as caught:
        await call
    assert caught.value.code == "harness_auth_required"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ({"code": -32603, "message": "no", "data": {"x": 1}}, -32603, "no"),
        ({"code": "5", "message": 7}, -32603, "{'code': '5', 'message': 7}"),
        ("boom", -32603, "boom"),
        ({"code": 1, "message": "x" * 10_000}, 1, "x" * 4000 + "…[truncated: 10000 characters]"),
        ({"code": 1, "message": "a\0b"}, 1, "a\ufffdb"),
    ],
)
async def test_an_error_response_raises_whatever_it_holds(bed: Bed, error: Any, code: int, message: str) -> None:
    call = started(bed.connection.new_session("/w", []))
    frame = await bed.reads()
    bed.says({"jsonrpc": "2.0", "id": frame["id"], "error": error})
    with pytest.raises(AgentError) as caught:
        await call
    assert (caught.value.code, caught.value.message) == (code, message)


async def test_an_id_that_became_a_string_still_matches(bed: Bed) -> None:
    call = started(bed.connection.set_mode(SESSION, "plan"))
    frame = await bed.reads("session/set_mode")
    bed.says({"jsonrpc": "2.0", "id": str(frame["id"]), "result": None})
    await call


@pytest.mark.parametrize("value", [True, "gpt"])
async def test_config_options_send_their_type_and_return_the_new_list(bed: Bed, value: str | bool) -> None:
    call = started(bed.connection.set_config_option(SESSION, "o", value))
    frame = await bed.answers("session/set_config_option", {"configOptions": [{"id": "o", "currentValue": value}]})
    assert await call == [{"id": "o", "currentValue": value}]
    assert frame["params"].get("type") == ("boolean" if value is True else None)


async def test_no_answer_in_time_withdraws_the_request_and_forgets_it(bed: Bed, clock: LoopClock) -> None:
    """Case E9: the handshake has its own deadline."""
    began = clock.monotonic()
    with pytest.raises(TimeoutError):
        await bed.connection.initialize(seconds=10)
    assert clock.monotonic() - began == pytest.approx(10)
    frame = await bed.reads("initialize")
    withdrawn = await bed.reads("$/cancel_request")
    assert withdrawn["params"] == {"requestId": frame["id"]}
    bed.says({"jsonrpc": "2.0", "id": frame["id"], "result": {"protocolVersion": 1}})
    await asyncio.sleep(0.1)
    assert bed.connection.counts["duplicate_terminals"] == 1


async def test_a_cancelled_caller_withdraws_its_request(bed: Bed) -> None:
    call = started(bed.connection.new_session("/w", []))
    frame = await bed.reads("session/new")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await bed.reads("$/cancel_request"))["params"] == {"requestId": frame["id"]}


async def test_noise_instead_of_an_answer_is_shown_as_the_cause(bed: Bed) -> None:
    """Case E9: text and no answer to initialize."""
    bed.agent.send_bytes(b"\nUsage: agent [options]\nunknown flag --acp, token hunter2-secret\n")
    with pytest.raises(TimeoutError):
        await bed.connection.initialize(seconds=5)
    assert bed.connection.last_words() == (" Last output: Usage: agent [options] | unknown flag --acp, token [secret]")
    assert bed.connection.diagnostics()["noise"] == 2


@pytest.mark.parametrize("method", CALLS)
async def test_an_exit_fails_every_open_call_at_once(bed: Bed, clock: LoopClock, method: str) -> None:
    """Case E5: with the exit code and the masked end of stderr."""
    calls = [started(CALLS[method](bed.connection)) for _ in range(3)]
    await bed.reads(method)
    bed.agent.send_stderr(b"Traceback: bad key hunter2-")
    bed.agent.send_stderr(b"secret\n")
    bed.agent.exit(ExitInfo(code=3))
    began = clock.monotonic()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert clock.monotonic() == began
    for error in errors:
        assert isinstance(error, RunnerError)
        assert error.code == "harness_exited"
        assert error.message == "The agent ended: exit code 3. Last stderr: Traceback: bad key [secret]"
        assert error.extra["exit_code"] == 3
        assert error.extra["stderr_tail"] == "Traceback: bad key [secret]\n"
    assert len({id(error) for error in errors}) == 3


async def test_a_call_after_the_end_fails_at_once_with_the_same_cause(bed: Bed) -> None:
    """Case L3: the first error carries the exit status."""
    bed.agent.exit(ExitInfo(signal=9))
    await asyncio.sleep(0)
    for _ in range(2):
        with pytest.raises(RunnerError, match="The agent ended: signal 9") as caught:
            await bed.connection.initialize()
        assert caught.value.extra["signal"] == 9
    with pytest.raises(ConnectionError):
        bed.connection.prompt(SESSION, [{"type": "text", "text": "x"}])
    with pytest.raises(ConnectionError):
        bed.connection.cancel(SESSION)
    items = bed.inbox("later").drain()
    assert len(items) == 1 and isinstance(items[0], Closed)
    assert bed.inbox("later").drain() == []


async def test_a_call_whose_frame_cannot_be_written_waits_for_the_exit_report(bed: Bed, clock: LoopClock) -> None:
    """Case E5: an agent that dies before initialize breaks the pipe before its exit is known."""
    bed.transport.close_stdin()
    call = started(bed.connection.initialize())
    await asyncio.sleep(0.2)
    bed.agent.exit(ExitInfo(code=127))
    with pytest.raises(RunnerError, match="exit code 127"):
        await call
    assert clock.monotonic() < 0.5


async def test_a_call_whose_frame_cannot_be_written_does_not_wait_for_ever(bed: Bed, clock: LoopClock) -> None:
    bed.transport.close_stdin()
    with pytest.raises(RunnerError, match="closed its stdin") as caught:
        await bed.connection.initialize(seconds=90)
    assert caught.value.code == "harness_exited"
    assert clock.monotonic() <= 1.5


async def test_the_answer_behind_which_the_agent_exits_is_not_lost(bed: Bed) -> None:
    call = started(bed.connection.new_session("/w", []))
    await bed.answers("session/new", {"sessionId": SESSION})
    bed.agent.exit(ExitInfo(code=0))
    assert (await call).agent_session_id == SESSION


async def test_an_endless_stream_of_noise_ends_the_connection_with_its_last_lines(bed: Bed) -> None:
    """Case E4."""
    call = started(bed.connection.initialize())
    await bed.reads("initialize")
    bed.agent.send_bytes(b"".join(b"log %d hunter2-secret\n" % n for n in range(1000)))
    with pytest.raises(RunnerError) as caught:
        await call
    assert caught.value.code == "harness_protocol_error"
    assert caught.value.message.startswith("It wrote 1000 lines in a row that are no messages. Last output: log 995 [s")
    assert caught.value.message.endswith("log 999 [secret]")


async def test_diagnostics_are_bounded_and_masked_also_at_a_cut(bed: Bed) -> None:
    """Case K2: half a secret at the cut of a noise line is not shown."""
    bed.agent.send_bytes((b"y" * 290 + b" hunter2-secret " + b"z" * 100_000 + b"\n") * 50)
    bed.agent.send_bytes(b"x" * 1018 + b"hunter2-secret\n")
    await asyncio.sleep(0)
    found = bed.connection.diagnostics()
    assert found["noise"] == 51
    assert len(found["noise_sample"]) == 10
    assert all(len(line) <= 300 for line in found["noise_sample"])
    assert "hunter" not in str(found)


async def test_a_secret_longer_than_what_is_kept_of_a_line_is_not_shown_in_part(beds: Callable[..., Bed]) -> None:
    """Case K2: a key of several thousand characters on a line of noise."""
    key = "".join(f"{n:04d}-" for n in range(600))
    bed = beds(redactor=Redactor([key]))
    bed.agent.send_bytes(b"key: " + key.encode() + b"\n")
    await asyncio.sleep(0)
    assert bed.connection.diagnostics()["noise_sample"] == ["key: "]
    assert bed.connection.last_words() == " Last output: key: "


@pytest.mark.parametrize("cut", range(1, 14))
async def test_the_stderr_tail_is_bounded_and_masked_across_chunks(bed: Bed, cut: int) -> None:
    """Cases E6 and K2."""
    bed.agent.send_stderr("é".encode() * 20_000 + b"\0")
    secret = b"hunter2-secret"
    bed.agent.send_stderr(b" key " + secret[:cut])
    await asyncio.sleep(0)
    assert "hunt" not in bed.connection.stderr_tail()
    bed.agent.send_stderr(secret[cut:] + b" end\n")
    await asyncio.sleep(0)
    tail = bed.connection.stderr_tail()
    assert tail.endswith("é\ufffd key [secret] end\n")
    assert 8 * 1024 - 4 <= len(tail.encode()) <= 8 * 1024
