"""What agents do to their pipes and their start, through the real server and a real sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.rules.bounds import BLOCK_CHARS
from runner.sandbox.namespace import inner_pid
from tests.agents import AgentScript, directive, steps
from tests.agents.steps import Step
from tests.e2e.conftest import Scripted, Serve, scripted_talk
from tests.e2e.server import LINE_MIB, Server, until
from tests.e2e.talk import Talk, gone

MIB = 1024 * 1024
FLOOD_FACTOR = 8
"""A line without an end is given up at so many times the cap."""


def failed(result: dict[str, Any]) -> tuple[str, str]:
    """Code and message of a failed turn."""
    assert result["outcome"] == "failed", result
    return result["error"]["code"], result["error"]["message"]


async def works(talk: Talk, start: str) -> None:
    """The session's next message succeeds; ``start`` says how."""
    result = await talk.prompt(directive(steps.text("next"), steps.reply()))
    assert (result["ok"], result["text"], result["start"]) == (True, "next", start), result


async def works_with(talk: Talk, script: AgentScript) -> None:
    """The session's next message succeeds with another agent."""
    talk.fields["env"] = script.env
    await works(talk, "cold")


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, MIB, 15 * MIB])
async def test_lines_of_every_size_arrive_whole(scripted: Scripted, size: int) -> None:
    """Case E1: in one write and in many."""
    talk, script = scripted()
    script.on_prompt(steps.line(size), steps.reply()).on_prompt(steps.line(size, pieces=97), steps.reply())
    for start in ("cold", "hit"):
        turn = talk.dispatch("say much")
        result = await turn.result()
        assert (result["outcome"], result["start"]) == ("completed", start), result.get("error")
        assert size - 300 < len(result["text"]) < size
        assert turn.streamed == result["text"] == "x" * len(result["text"])


async def test_a_line_of_20_mib_is_streamed_and_recorded_whole(scripted: Scripted) -> None:
    """Case E1; the text of a result is bounded to 16 MiB, those of events and records are not."""
    talk, _ = scripted()
    size = 20 * MIB
    turn = talk.dispatch(directive(steps.line(size), steps.reply()))
    result = await turn.result()
    assert result["outcome"] == "completed", result.get("error")
    assert size - 300 < len(turn.streamed) < size
    assert turn.streamed.startswith(result["text"])
    assert len(result["text"]) == 16 * MIB
    records = [record["data"]["text"] for record in await talk.records() if record["type"] == "message"]
    assert max(map(len, records)) <= BLOCK_CHARS
    assert "".join(records) == turn.streamed
    await works(talk, "hit")


async def test_a_line_above_the_limit_is_one_lost_frame(scripted: Scripted) -> None:
    """Case E1: the frame fails, what stands around it arrives, the agent stays."""
    talk, script = scripted()
    script.on_prompt(steps.text("before "), steps.line(LINE_MIB * MIB + 1), steps.text("after"), steps.reply())
    result = await talk.prompt()
    assert (result["outcome"], result["text"]) == ("completed", "before after")
    await works(talk, "hit")


async def test_a_flood_without_a_newline_is_a_bounded_failure(scripted: Scripted, server: Server) -> None:
    """Case E3: the turn fails, the agent goes, and the server never held more than a few lines of the largest kind."""
    talk, script = scripted()
    script.on_prompt(steps.text("hm"), steps.flood(10 * FLOOD_FACTOR * LINE_MIB * MIB), steps.reply())
    await works(talk, "cold")
    agent = await talk.agent_pid()
    server.forget_peak()
    before = server.rss_peak()
    code, message = failed(await talk.prompt())
    assert code == "harness_protocol_error"
    assert str(FLOOD_FACTOR * LINE_MIB * MIB) in message
    assert server.rss_peak() - before < 4 * LINE_MIB * MIB
    await gone(agent, "the agent")
    await works(talk, "cold")


async def test_noise_on_stdout_is_no_protocol(scripted: Scripted) -> None:
    """Case E4: before, between and after frames."""
    talk, script = scripted()
    script.on_start(steps.noise()).on_new(steps.noise(), steps.reply(), steps.noise())
    script.on_prompt(steps.noise(), steps.text("a"), steps.noise(), steps.text("b"), steps.noise(), steps.reply())
    result = await talk.prompt()
    assert (result["outcome"], result["text"]) == ("completed", "ab")
    await works(talk, "hit")


async def test_1_mib_of_stderr_before_the_first_frame(scripted: Scripted) -> None:
    """Case E6."""
    talk, script = scripted()
    script.on_start(steps.stderr(MIB))
    result = await talk.prompt()
    assert (result["outcome"], result["start"]) == ("completed", "cold")
    assert script.log.events("stderr_written")


LAST_WORDS = steps.exit_with(7, "these are my last words")
ASK_AND_DIE = (steps.tool("call-1", "in_progress"), steps.ask(allowed=[LAST_WORDS]), steps.reply())


@pytest.mark.parametrize(
    ("method", "dying"),
    [
        ("initialize", (LAST_WORDS,)),
        ("session/new", (LAST_WORDS,)),
        ("session/prompt", (LAST_WORDS,)),
        ("session/prompt", (steps.tool("call-1", "in_progress"), LAST_WORDS)),
        ("session/prompt", ASK_AND_DIE),
    ],
    ids=["initialize", "new", "prompt", "tool", "answer"],
)
async def test_an_exit_fails_what_is_open_with_its_cause(
    scripted: Scripted, tmp_path: Path, method: str, dying: tuple[Step, ...]
) -> None:
    """Case E5: exit code and last words are in the error; the next message has a new agent."""
    talk, script = scripted()
    script.on(method, *dying)
    code, message = failed(await talk.prompt(permissions={"default": "allow"}))
    assert code == "harness_exited"
    assert "7" in message
    assert "these are my last words" in message
    assert len(script.log.pids()) == 1
    await until(lambda: not talk.server.processes(talk.session), "its sandbox is gone")
    await works_with(talk, AgentScript(tmp_path, "polite"))


async def test_a_closed_stdout_is_an_end(scripted: Scripted) -> None:
    """Case E5: the agent lives on without a stdout; the turn does not wait for it, and it is not left behind."""
    talk, script = scripted(stay=True)
    script.on_prompt(steps.text("half"), steps.close_stdout(), steps.hang())
    turn = talk.dispatch("close")
    await turn.text("half")
    agent = await talk.agent_pid()
    code, _ = failed(await turn.result())
    assert code == "harness_exited"
    await gone(agent, "the agent without a stdout")
    await works(talk, "cold")


async def test_an_agent_that_does_not_read_cannot_block_a_stop(serve: Serve, tmp_path: Path) -> None:
    """Case E3's other direction: the prompt fills the pipe, the cancel stands behind it, the Stop still stops."""
    server = serve(instead={"drain_seconds = 1": "drain_seconds = 1\nsettle_seconds = 1"})
    script = AgentScript(tmp_path, stop_reading_after="session/new", ignore_signals=("TERM",), stay=True)
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        turn = talk.dispatch("x" * MIB)
        await turn.event("user_message")
        agent = await talk.agent_pid()
        assert (await talk.stop())["outcome"] == "stopped"
        result = await turn.result()
        assert (result["outcome"], result["cancel_settled"]) == ("cancelled", False)
        assert script.log.prompts() == []
        await gone(agent, "the agent that did not read")
        await works_with(talk, AgentScript(tmp_path, "polite"))
        await talk.check()


MARKERS = {
    "DATABASE_URL": "marker-of-the-database",
    "SIGNING_KEY": "marker-of-the-signature",
    "ANTHROPIC_API_KEY": "marker-of-the-model",
    "LD_LIBRARY_PATH": "/marker-of-the-linker",
    "ACP_RUNNER_TOKEN": "marker-of-the-token",
}
LOOK = """
p=$$
while [ "$p" -gt 0 ] && [ "$p" != {server} ]; do
  echo "[$p]" >> {found}; cat /proc/$p/environ >> {found}; echo >> {found}
  p=$(sed -n 's/^PPid:[^0-9]*//p' /proc/$p/status)
done
env >> {found}; cat /proc/self/environ >> {found}
"""


async def test_nothing_of_the_servers_environment_is_in_a_cell(serve: Serve, tmp_path: Path) -> None:
    """Case K1, the allow-list half: a tool looks into its own environment, its agent's and the init's."""
    server = serve(env=MARKERS)
    assert all(marker.encode() in server.environ() for marker in MARKERS.values())
    found = tmp_path / "found"
    script = AgentScript(tmp_path)
    script.on_prompt(steps.run(LOOK.format(server=server.pid, found=found)), steps.text("looked"), steps.reply())
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        assert (await talk.prompt())["text"] == "looked"
        parents = {info.pid: info.parent for info in server.census()}
        agent = await talk.agent_pid()
        line = [inner_pid(pid) for pid in (agent, parents[agent])]
        await talk.check()
    seen = found.read_bytes()
    assert all(f"[{pid}]".encode() in seen for pid in line)
    assert b"FRAME_LOG=" in seen
    assert b"marker-of-the" not in seen
    assert not [name for name in MARKERS if f"{name}=".encode() in seen]


async def test_a_start_has_a_deadline_and_a_reason(serve: Serve, tmp_path: Path) -> None:
    """Cases C14, L6 and E9: alive but silent, or talking something else; the step and what it said are told."""
    server = serve(instead={"[acp]": "[acp]\nstart_seconds = 3"})
    silent = AgentScript(tmp_path, "silent", ignore_signals=("TERM",), stay=True).on_initialize()
    babbling = AgentScript(tmp_path, "babbling", stay=True)
    babbling.on_initialize(steps.raw(b"Please log in at the website\n"))
    late = AgentScript(tmp_path, "late").on_new()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", silent)
        told = (
            (silent, "3 s: no answer to initialize"),
            (babbling, "Please log in"),
            (late, "no answer to session/new"),
        )
        for script, words in told:
            code, message = failed(await talk.prompt(env=script.env))
            assert code == "harness_unresponsive"
            assert words in message
            assert len(script.log.pids()) == 1
            assert server.processes("s") == []
            assert script.log.prompts() == []
        await works_with(talk, AgentScript(tmp_path, "polite"))
        await talk.check()


@pytest.mark.parametrize("method", ["initialize", "session/new"])
async def test_a_stop_while_the_agent_starts_is_one_cancelled_turn(
    scripted: Scripted, tmp_path: Path, method: str
) -> None:
    """Cases A12, L5 and L6: the Stop is not refused, the start is undone, no prompt is ever sent."""
    talk, script = scripted(ignore_signals=("TERM",), stay=True)
    script.on(method)
    turn = talk.dispatch("never sent")
    await script.log.wait_for_method(method)
    (agent,) = (talk.outside(pid) for pid in script.log.pids())
    stopped = await talk.stop()
    result = await turn.result()
    assert (stopped["outcome"], stopped["turn_id"]) == ("stopped", result["turn_id"])
    assert (result["outcome"], result["stop_reason"]) == ("cancelled", "cancelled")
    await gone(agent, "the agent that was starting")
    assert script.log.prompts() == []
    await works_with(talk, AgentScript(tmp_path, "polite"))
