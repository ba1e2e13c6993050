"""Nobody is left: agents, tools, inits and servers that die or will not die, in a real sandbox."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.agents import AgentScript, Gate, directive, steps
from tests.agents.steps import Step
from tests.e2e.conftest import Scripted, Serve, scripted_talk
from tests.e2e.server import Server, alive, until
from tests.e2e.talk import Talk, gone

BARE = {"ACP_RUNNER_LOCAL__ISOLATION": "none"}
SETTLE_SECONDS = 1.0
SLACK_SECONDS = 10.0
"""What the scheduler of a busy machine may add to a bound of the contract."""
KINDS = ("plain", "setsid", "nohup", "deaf", "daemon", "holds_stdout")
POLITE = directive(steps.text("next"), steps.reply())


async def works(talk: Talk, start: str) -> None:
    result = await talk.prompt(POLITE)
    assert (result["ok"], result["text"], result["start"]) == (True, "next", start), result


WRITER = """
import os, sys, time
with open(sys.argv[1] + ".pid", "w") as file:
    file.write(str(os.getpid()))
while True:
    with open(sys.argv[1] + ".out", "a") as file:
        file.write("x")
    time.sleep(0.02)
"""


def writer(folder: Path, name: str) -> str:
    """A command that tells its pid and then writes on and on (case D4)."""
    return shlex.join(["exec", sys.executable, "-I", "-S", "-c", WRITER, str(folder / name)])


async def writing(talk: Talk, folder: Path, name: str) -> int:
    """Wait until the writer of this name writes; its pid on this machine."""
    out, pid = folder / f"{name}.out", folder / f"{name}.pid"
    await until(lambda: out.exists() and pid.read_text().strip(), f"{name} writes")
    return talk.server.outside(talk.session, int(pid.read_text()))


def size(folder: Path, name: str) -> int:
    return (folder / f"{name}.out").stat().st_size


async def grows(folder: Path, name: str) -> None:
    before = size(folder, name)
    await until(lambda: size(folder, name) > before, f"{name} still writes")


def init_of(server: Server, agent: int) -> int:
    """The cell's init: the agent's parent, and the server's child or its wrapper's."""
    parents = {info.pid: info.parent for info in server.census()}
    init = parents[agent]
    assert server.pid in (parents[init], parents.get(parents[init]))
    return init


# -- tools -------------------------------------------------------------------------------------------------------------


async def test_a_stop_ends_what_the_turn_started_and_nothing_else(scripted: Scripted, tmp_path: Path) -> None:
    """Cases D4 and D9: whatever way a tool detached; a helper of the start and a job of an earlier turn stay."""
    talk, script = scripted()
    script.on_start(steps.spawn(writer(tmp_path, "helper"), "setsid"))
    script.on_prompt(steps.spawn(writer(tmp_path, "job"), "nohup"), steps.reply_with({"stopReason": "max_tokens"}))
    script.on_prompt(*[steps.spawn(writer(tmp_path, kind), kind) for kind in KINDS], steps.text("hm"), steps.hang())
    assert (await talk.prompt())["outcome"] == "completed"
    kept = {name: await writing(talk, tmp_path, name) for name in ("helper", "job")}
    agent = await talk.agent_pid()
    turn = talk.dispatch("hang")
    tools = {kind: await writing(talk, tmp_path, kind) for kind in KINDS}
    await turn.text("hm")
    assert (await talk.stop())["outcome"] == "stopped"
    result = await turn.result()
    assert (result["outcome"], result["cancel_settled"]) == ("cancelled", True)
    assert [kind for kind, pid in tools.items() if alive(pid)] == []
    written = {kind: size(tmp_path, kind) for kind in KINDS}
    for name, pid in kept.items():
        assert alive(pid)
        await grows(tmp_path, name)
    assert {kind: size(tmp_path, kind) for kind in KINDS} == written
    await works(talk, "hit")
    assert await talk.agent_pid() == agent


async def test_an_agent_that_its_tool_blocks_is_freed_by_the_stop(scripted: Scripted) -> None:
    """DESIGN 3.3.4: it cannot answer the cancel because its tool blocks; the tool is killed, the agent stays."""
    talk, script = scripted()
    script.on_prompt(steps.text("hm"), steps.run("trap '' TERM INT; sleep 600 & wait; sleep 600"), steps.reply())
    script.on_cancel()
    script.on_prompt(steps.text("next"), steps.reply())
    turn = talk.dispatch("block")
    (tool,) = [talk.outside(pid) for pid in await script.log.wait_for(lambda log: log.spawned())]
    agent = await talk.agent_pid()
    assert (await talk.stop())["outcome"] == "stopped"
    result = await turn.result()
    assert (result["outcome"], result["cancel_settled"], result["late_completion"]) == ("cancelled", True, True)
    assert not alive(tool)
    await works(talk, "hit")
    assert await talk.agent_pid() == agent


# -- agents ------------------------------------------------------------------------------------------------------------


async def test_a_wrapper_and_the_real_agent_both_go(scripted: Scripted) -> None:
    """Case D2: the wrapper dies by SIGTERM alone, what it forked ignores signals and the end of stdin."""
    talk, script = scripted(wrap=True, ignore_signals=("TERM", "HUP", "INT"), stay=True)
    script.on_prompt(steps.text("hm"), steps.hang())
    turn = talk.dispatch("hang")
    await turn.text("hm")
    (told,) = script.log.pids()
    wrapper, agent = await talk.agent_pid(), talk.outside(told)
    assert wrapper != agent
    assert (await talk.stop())["outcome"] == "stopped"
    assert (await turn.result())["cancel_settled"] is True
    await works(talk, "hit")
    assert script.log.pids() == [told]
    await talk.client.kill(talk.session)
    assert not alive(agent)
    assert not alive(wrapper)


async def test_an_expired_seat_leaves_nobody(serve: Serve, tmp_path: Path) -> None:
    """Cases C10 and D2: the window counts from the end of the turn; a seat that ran out takes its whole tree along."""
    server = serve("[pool]\nidle_seconds = 1\n")
    script = AgentScript(tmp_path, wrap=True, ignore_signals=("TERM", "HUP", "INT"), stay=True)
    script.on_prompt(steps.spawn(how="nohup"), steps.text("a"), steps.sleep(1.5), steps.reply())
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        assert (await talk.prompt())["outcome"] == "completed"
        await until(lambda: not server.census(), "the seat expired")
        assert (await talk.view())["pool"]["reason"] == "expired"
        again = await talk.prompt(POLITE)
        assert (again["start"], again["reason"], again["context_lost"]) == ("cold", "expired", True)
        await until(lambda: not server.census(), "the second seat expired")


async def test_an_agent_that_ignores_a_stop_is_gone_within_settle_and_a_second(serve: Serve, tmp_path: Path) -> None:
    """Case A6: it keeps talking; its pid is gone within the settle budget + 1 s, and the next prompt works."""
    server = serve(instead={"drain_seconds = 1": f"drain_seconds = 1\nsettle_seconds = {SETTLE_SECONDS}"})
    script = AgentScript(tmp_path, ignore_signals=("TERM", "INT", "HUP"), stay=True)
    chatter: list[Step] = [steps.text("still here "), steps.sleep(0.05)]
    script.on_prompt(steps.text("hm"), *(chatter * 400), steps.reply()).on_cancel()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        turn = talk.dispatch("talk")
        await turn.text("still here")
        agent = await talk.agent_pid()
        asked = time.monotonic()
        stopped = await talk.stop()
        await gone(agent, "the agent", SETTLE_SECONDS + 1 + SLACK_SECONDS - (time.monotonic() - asked))
        result = await turn.result()
        assert (stopped["outcome"], result["outcome"], result["cancel_settled"]) == ("stopped", "cancelled", False)
        assert len(script.log.frames("session/cancel")) >= 1
        again = await talk.prompt(POLITE)
        assert (again["ok"], again["start"], again["reason"]) == (True, "cold", "not_settled")
        assert again["context_lost"] is True
        await talk.check()


@pytest.mark.parametrize("victim", ["agent", "init"])
async def test_a_sandbox_that_dies_under_a_turn_ends_it_at_once(
    scripted: Scripted, server: Server, tmp_path: Path, victim: str
) -> None:
    """Case A1: with an open tool call, which disarms the short limits; leases and seat are free again."""
    talk, script = scripted()
    script.on_prompt(
        steps.tool("call-1", "in_progress"),
        steps.spawn(writer(tmp_path, "tool"), "nohup"),
        steps.text("hm"),
        steps.hang(),
    )
    turn = talk.dispatch("hang")
    tool = await writing(talk, tmp_path, "tool")
    agent = await talk.agent_pid()
    init = init_of(server, agent)
    os.kill(agent if victim == "agent" else init, signal.SIGKILL)
    result = await turn.result()
    assert result["outcome"] == "failed"
    assert result["error"]["code"] in ("harness_exited", "sandbox_lost")
    assert turn.of("tool_call_update")[-1]["status"] == "failed"
    for name, pid in (("agent", agent), ("tool", tool), ("init", init)):
        await gone(pid, name)
    again = await talk.prompt(POLITE)
    assert (again["ok"], again["start"], again["context_lost"]) == (True, "cold", True)


@pytest.mark.parametrize("victim", ["agent", "init"])
async def test_a_sandbox_that_dies_while_idle_frees_its_seat(scripted: Scripted, server: Server, victim: str) -> None:
    """Case L3: nobody meets the dead agent; the next prompt says why it is cold."""
    talk, _ = scripted()
    await works(talk, "cold")
    agent = await talk.agent_pid()
    init = init_of(server, agent)
    os.kill(agent if victim == "agent" else init, signal.SIGKILL)
    await gone(agent, "agent")
    await gone(init, "init")
    again = await talk.prompt(POLITE)
    assert (again["ok"], again["start"], again["reason"]) == (True, "cold", "agent_exited")


async def test_an_init_that_hangs_cannot_hold_a_stop(scripted: Scripted, server: Server, tmp_path: Path) -> None:
    """Case D10: nobody can prove that the tool is gone, so the whole sandbox goes, by the other way."""
    talk, script = scripted()
    script.on_prompt(steps.spawn(writer(tmp_path, "tool"), "setsid"), steps.text("hm"), steps.hang())
    turn = talk.dispatch("hang")
    await turn.text("hm")
    tool, agent = await writing(talk, tmp_path, "tool"), await talk.agent_pid()
    init = init_of(server, agent)
    os.kill(init, signal.SIGSTOP)
    assert (await talk.stop())["outcome"] == "stopped"
    result = await turn.result()
    assert (result["outcome"], result["cancel_settled"]) == ("cancelled", True)
    for name, pid in (("agent", agent), ("tool", tool), ("init", init)):
        await gone(pid, name)
    again = await talk.prompt(POLITE)
    assert (again["ok"], again["start"], again["reason"]) == (True, "cold", "survivors")


# -- servers -----------------------------------------------------------------------------------------------------------


async def test_a_killed_server_leaves_nobody_and_its_successor_tells_what_was_lost(
    serve: Serve, tmp_path: Path
) -> None:
    """Cases A1 and L2: the cells tear themselves down; lost turns and expired questions get their ending at boot."""
    server = serve()
    busy, idle, asks = (
        AgentScript(tmp_path, name, wrap=True, ignore_signals=("TERM", "HUP", "INT"), stay=True)
        for name in ("busy", "idle", "asks")
    )
    busy.on_prompt(
        steps.tool("call-1", "in_progress"),
        steps.spawn(writer(tmp_path, "tool"), "daemon"),
        steps.text("hm"),
        steps.hang(),
    )
    asks.on_prompt(steps.tool("call-1", "in_progress"), steps.ask(), steps.reply())
    async with server.client() as client:
        talks = {script: scripted_talk(server, client, script.path.name[:4], script) for script in (busy, idle, asks)}
        await works(talks[idle], "cold")
        assert (await talks[asks].prompt(prompt_id="asks"))["outcome"] == "paused"
        turn = talks[busy].dispatch("hang", prompt_id="lost")
        await turn.text("hm")
        await writing(talks[busy], tmp_path, "tool")
        (admitted,) = turn.of("turn_admitted")
        assert len(server.seats()) == 3
        shown = {record["type"] for record in await talks[busy].records()}
        assert "user_message" in shown, "durable from here on: that an agent had the prompt is not forgotten"
        server.kill()
        await turn.drop()
    await until(lambda: not server.census() and not server.everybody(), "the cells are gone")
    server.start()
    async with server.client() as client:
        for script, talk in talks.items():
            talk.client = client
            waits = script is asks
            assert (await talk.view())["state"] == ("awaiting_approval" if waits else "idle"), script.path
        view = await talks[busy].view()
        assert (view["last_turn"]["turn_id"], view["last_turn"]["outcome"]) == (admitted["turn_id"], "lost")
        result = await talks[busy].prompt("hang", prompt_id="lost")
        assert (result["outcome"], result["error"]["code"]) == ("lost", "execution_lost")
        assert len(busy.log.prompts()) == 1
        assert len(await talks[asks].questions()) == 1, "a paused chain outlives its server"
        for talk in talks.values():
            again = await talk.prompt(POLITE)
            assert (again["ok"], again["start"], again["context_lost"]) == (True, "cold", True)
        assert [item["status"] for item in (await client.interactions(talks[asks].session))["items"]] == ["cancelled"]
        for talk in (talks[idle], talks[asks]):
            await talk.check()


async def test_a_boot_reaps_what_a_dead_server_left(serve: Serve, tmp_path: Path) -> None:
    """Case D2, last half: an init that hangs tears nothing down; the next server finds its cell by the marker."""
    server = serve(env=BARE)
    script = AgentScript(tmp_path, wrap=True, ignore_signals=("TERM", "HUP", "INT"), stay=True)
    script.on_prompt(steps.spawn(writer(tmp_path, "job"), "daemon"), steps.text("hm"), steps.reply())
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        assert (await talk.prompt())["outcome"] == "completed"
        job, agent = await writing(talk, tmp_path, "job"), await talk.agent_pid()
    os.kill(init_of(server, agent), signal.SIGSTOP)
    server.kill()
    assert alive(job)
    server.start()
    assert not server.census()
    assert not alive(job)
    assert not alive(agent)
    async with server.client() as client:
        talk.client = client
        await works(talk, "cold")
        await talk.check()


async def test_a_cell_whose_init_hangs_goes_with_its_server(serve: Serve, tmp_path: Path) -> None:
    """Case D2: the kernel ends process 1 with the wrapper, and everybody with process 1."""
    server = serve()
    script = AgentScript(tmp_path, wrap=True, ignore_signals=("TERM", "HUP", "INT"), stay=True)
    script.on_prompt(steps.spawn(writer(tmp_path, "job"), "daemon"), steps.text("hm"), steps.reply())
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        assert (await talk.prompt())["outcome"] == "completed"
        job, agent = await writing(talk, tmp_path, "job"), await talk.agent_pid()
    init = init_of(server, agent)
    os.kill(init, signal.SIGSTOP)
    server.kill()
    for name, pid in (("agent", agent), ("job", job), ("init", init)):
        await gone(pid, name)
    server.assert_nobody()


def test_a_stop_right_behind_the_ready_line_is_a_drain(serve: Serve) -> None:
    """The ready line says that requests are served: from then on SIGTERM ends none of them by force."""
    for _ in range(3):
        serve().stop()


async def test_a_drain_lets_a_turn_finish_and_admits_no_other(serve: Serve, tmp_path: Path) -> None:
    """Case M4: SIGTERM; the turn under way gets its result, the next one 429."""
    server = serve(instead={"drain_seconds = 1": "drain_seconds = 60"})
    gate = Gate(tmp_path / "gate")
    script = AgentScript(tmp_path)
    script.on_prompt(steps.text("a"), steps.gate(gate), steps.text("b"), steps.reply())
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        turn = talk.dispatch("finish")
        await gate.reached()
        server.terminate()
        while not (await client.ready())["draining"]:
            assert server.running
        refused = await talk.refused(POLITE)
        assert (refused.status, refused.code, refused.retryable) == (429, "runner_at_capacity", True)
        gate.open()
        result = await turn.result()
        assert (result["outcome"], result["text"]) == ("completed", "ab")
    assert server.exit_code() == 0
    server.assert_nobody()


async def test_a_drain_ends_what_does_not_finish(serve: Serve, tmp_path: Path) -> None:
    """Cases M4 and D1: a hanging turn, a deaf one and a paused one; each has its result; exit 0."""
    server = serve(instead={"drain_seconds = 1": f"drain_seconds = 1\nsettle_seconds = {SETTLE_SECONDS}"})
    deaf = AgentScript(tmp_path, "deaf", ignore_signals=("TERM", "HUP", "INT"), stay=True)
    deaf.on_prompt(steps.spawn(writer(tmp_path, "tool"), "nohup"), steps.text("hm"), steps.hang()).on_cancel()
    hangs = AgentScript(tmp_path, "hangs").on_prompt(steps.text("hm"), steps.hang())
    asks = AgentScript(tmp_path, "asks").on_prompt(steps.tool("call-1", "in_progress"), steps.ask(), steps.reply())
    async with server.client() as client:
        talks = [scripted_talk(server, client, script.path.name[:4], script) for script in (deaf, hangs)]
        assert (await scripted_talk(server, client, "asks", asks).prompt())["outcome"] == "paused"
        turns = [talk.dispatch("hang") for talk in talks]
        for turn in turns:
            await turn.text("hm")
        server.terminate()
        results = [await turn.result() for turn in turns]
        assert [result["outcome"] for result in results] == ["failed", "failed"]
        assert [result["error"]["code"] for result in results] == ["execution_lost", "execution_lost"]
        assert all(result["error"]["retryable"] is False for result in results)
    assert server.exit_code() == 0
    server.assert_nobody()
