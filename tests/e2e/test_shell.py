"""A command in a session's sandbox, over HTTP with real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runner.client import ApiError, Client
from tests.agents import AgentScript, steps
from tests.e2e.conftest import Scripted, Serve, scripted_talk
from tests.e2e.server import SECONDS, alive, until
from tests.e2e.talk import Talk, gone


def texts(script: AgentScript, nth: int) -> list[str]:
    """The blocks of the nth prompt frame that the agents received."""
    return [block["text"] for block in script.log.frames("session/prompt")[nth]["params"]["prompt"]]


async def pid_in(talk: Talk, name: str) -> int:
    """The pid on this machine of a live command that wrote its own into a file of its workspace."""
    path = talk.server.workspace(talk.session) / name
    await until(lambda: path.exists() and path.read_text().strip(), name)
    return talk.outside(int(path.read_text()))


async def started(talk: Talk, script: AgentScript) -> int:
    """A first turn; the agent's pid."""
    script.on_prompt(steps.text("ok"), steps.reply())
    assert (await talk.prompt("hi"))["ok"]
    return await talk.agent_pid()


async def test_a_command_runs_where_the_agent_works_and_is_told(scripted: Scripted, client: Client) -> None:
    talk, script = scripted()
    agent = await started(talk, script)
    (talk.server.workspace(talk.session) / "given").write_text("here")
    reply = await client.shell(talk.session, "cat given; echo; echo wrong >&2; exit 4")
    assert reply == {"turn_id": reply["turn_id"], "exit_code": 4, "output": "here\nwrong\n", "truncated": False}
    result = await talk.prompt("go on")
    assert (result["start"], await talk.agent_pid()) == ("hit", agent)
    told = texts(script, 1)
    assert len(told) == 2
    assert "cat given" in told[0]
    assert told[0].endswith("Exit code: 4.\nIts output:\nhere\nwrong\n")
    assert told[1] == "go on"


async def test_a_session_may_begin_with_a_command(scripted: Scripted, client: Client) -> None:
    talk, script = scripted()
    reply = await client.shell(talk.session, "true")
    assert reply["exit_code"] == 0
    assert script.log.frames("session/prompt") == []


async def test_a_stop_kills_all_that_a_command_started_and_not_the_agent(scripted: Scripted, client: Client) -> None:
    """Case D4: whoever left its group goes too."""
    talk, script = scripted()
    agent = await started(talk, script)
    command = "echo half; setsid sh -c 'echo $$ > far; exec sleep 600' & echo $$ > near; trap '' TERM; sleep 601"
    shell = asyncio.create_task(client.shell(talk.session, command))
    pids = [await pid_in(talk, "near"), await pid_in(talk, "far")]
    with pytest.raises(ApiError) as caught:
        await client.shell(talk.session, "true")
    assert caught.value.code == "session_turn_in_use"
    waits = talk.dispatch("P", prompt_id="P", on_busy="queue")
    await waits.event("turn_queued")
    stopped = await talk.stop()
    assert (stopped["outcome"], stopped["cancelled_prompts"]) == ("stopped", ["P"])
    assert [pid for pid in pids if alive(pid)] == []
    reply = await shell
    assert (reply["exit_code"], reply["output"], reply["aborted"]) == (None, "half\n", True)
    assert (await waits.result())["outcome"] == "cancelled"
    assert await talk.agent_pid() == agent
    script.on_prompt(steps.text("ok"), steps.reply())
    assert (await talk.prompt("D"))["start"] == "hit"
    assert "aborted by the user" in texts(script, 1)[0]


async def test_its_end_takes_what_it_left_behind(scripted: Scripted, client: Client) -> None:
    talk, script = scripted()
    agent = await started(talk, script)
    before = talk.server.processes(talk.session)
    reply = await client.shell(talk.session, "sleep 600 & echo $!")
    assert reply["exit_code"] == 0
    assert int(reply["output"])
    assert talk.server.processes(talk.session) == before
    assert await talk.agent_pid() == agent


async def test_its_time_and_its_output_are_bounded(scripted: Scripted, client: Client) -> None:
    talk, script = scripted()
    await started(talk, script)
    reply = await client.shell(talk.session, "head -c 3000000 /dev/zero | tr '\\0' x; sleep 600", timeout_seconds=2)
    assert (reply["exit_code"], reply["timed_out"], reply["truncated"]) == (None, True, True)
    assert reply["output"] == "x" * 1024 * 1024
    script.on_prompt(steps.text("ok"), steps.reply())
    await talk.prompt("go on")
    assert len(texts(script, 1)[0]) < 70_000


async def test_one_that_never_returns_is_ended_and_one_that_reads_gets_the_end_at_once(
    scripted: Scripted, client: Client
) -> None:
    """Case I5: no command waits for input, a heredoc and children that stay hold nobody up, the agent stays."""
    talk, script = scripted()
    agent = await started(talk, script)
    for command, output in (
        ("cat; read line; echo read $?", "read 1\n"),
        ("cat <<END\nheredoc\nEND", "heredoc\n"),
        ("sleep 600 & (sleep 600 &) ; echo left", "left\n"),
    ):
        reply = await client.shell(talk.session, command, timeout_seconds=SECONDS)
        assert (reply["output"], reply.get("timed_out")) == (output, None), command
    before = talk.server.processes(talk.session)
    reply = await client.shell(talk.session, "trap '' TERM INT HUP; sleep 600 & wait; sleep 600", timeout_seconds=1)
    assert (reply["exit_code"], reply["timed_out"]) == (None, True)
    assert talk.server.processes(talk.session) == before
    assert await talk.agent_pid() == agent


async def test_a_secret_is_masked_in_its_output(serve: Serve, tmp_path: Path) -> None:
    """Case K2."""
    script = AgentScript(tmp_path, "s")
    server = serve()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        talk.fields["secrets"] = {"TOKEN_OF_MINE": "hush-hush-1234"}
        await started(talk, script)
        reply = await client.shell("s", 'echo "[$TOKEN_OF_MINE]"; env')
        assert "hush-hush-1234" not in reply["output"]
        assert "hush-hush-1234" not in str(await talk.records())


async def test_a_client_that_leaves_ends_nothing(scripted: Scripted, client: Client) -> None:
    talk, script = scripted()
    await started(talk, script)
    shell = asyncio.create_task(client.shell(talk.session, "echo $$ > pid; while [ ! -e go ]; do sleep 0.05; done"))
    pid = await pid_in(talk, "pid")
    shell.cancel()
    await asyncio.wait({shell})
    waits = talk.dispatch("P", prompt_id="P", on_busy="queue", keep_on_disconnect=True)
    await waits.event("turn_queued")
    assert alive(pid)
    script.on_prompt(steps.text("ok"), steps.reply())
    (talk.server.workspace(talk.session) / "go").write_text("")
    assert (await waits.result())["ok"]


async def test_a_killed_runner_leaves_no_command_and_goes_on(serve: Serve, tmp_path: Path) -> None:
    script = AgentScript(tmp_path, "s")
    server = serve()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        await started(talk, script)
        shell = asyncio.create_task(client.shell("s", "echo $$ > pid; exec sleep 600"))
        pid = await pid_in(talk, "pid")
        server.kill()
        await asyncio.wait({shell}, timeout=SECONDS)
        assert isinstance(shell.exception(), ApiError)
        await gone(pid, "the command")
    server.start()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        script.on_prompt(steps.text("ok"), steps.reply())
        result: dict[str, Any] = await talk.prompt("again")
        assert result["ok"]
        ended = [record["data"]["outcome"] for record in await talk.records() if record["type"] == "done"]
        assert ended == ["completed", "lost", "completed"]
        await talk.check()
