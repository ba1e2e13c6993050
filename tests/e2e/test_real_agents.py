"""Codex and Claude Code, through the real server, against the model server (tests/model_server)."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.client import Client
from runner.harness.installer import check
from tests.e2e.server import Server, alive, until
from tests.e2e.talk import Dispatched, Talk, gone
from tests.harness_fixture import REAL_HARNESSES, InstalledHarnesses, model_variables
from tests.model_server import HELD_TEXT, RELEASED_TEXT, ModelServer, RecordedRequest

ADAPTERS = {
    "claude": ("@agentclientprotocol/claude-agent-acp", "0.101.0"),
    "codex": ("codex-acp", "0.16.0"),
}
PACKAGES = {"claude": "@agentclientprotocol/claude-agent-acp", "codex": "@zed-industries/codex-acp"}
SLEEP = "python3 -c \"import os,time;open('{file}','w').write(str(os.getpid()));time.sleep(300)\""
FILTERS = "grep Seccomp_filters /proc/self/status > filters.txt"
"""How many filters hold a command in."""

# The model of a test is another one than the harness's own: only where the operator lists it does its key stay outside.
PROXIED = '[credentials]\nhosts = ["127.0.0.1"]\n'

Open = Callable[..., Talk]
_numbers = itertools.count(1)


both_levels = pytest.mark.parametrize("server", ["cell", "landlock"], indirect=True)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, installed_harnesses: InstalledHarnesses
) -> Iterator[Server]:
    """Its parameter is a level of isolation; without one it is chosen as always."""
    level = {"ACP_RUNNER_LOCAL__ISOLATION": getattr(request, "param", "auto")}
    made = Server(tmp_path_factory.mktemp("server"), PROXIED, env=level)
    installed_harnesses.link_into(made.state_dir)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(params=REAL_HARNESSES)
def name(request: pytest.FixtureRequest) -> str:
    """A harness."""
    return str(request.param)


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as model:
        yield model


@pytest.fixture
async def opens(server: Server, client: Client, name: str, model: ModelServer) -> AsyncIterator[Open]:
    """Makes sessions of the harness whose model is the test's; behind the test each is checked and its seat freed."""
    talks: list[Talk] = []
    variables = model_variables(name, model)
    secrets = {key: variables.pop(key) for key in list(variables) if key.endswith("_KEY")}

    def make(**fields: Any) -> Talk:
        session = f"{name}-{next(_numbers)}"
        given: dict[str, Any] = {"harness": name, "env": variables, "secrets": secrets} | fields
        talks.append(Talk(server, client, session, **given))
        return talks[-1]

    yield make
    for talk in talks:
        await talk.check()
        await client.kill(talk.session)


@pytest.fixture
def talk(opens: Open) -> Talk:
    """A session in which no command is asked about."""
    return opens(permissions={"default": "allow"})


def file_of(talk: Talk, name: str) -> Path:
    return talk.server.workspace(talk.session) / name


async def pid_in(talk: Talk, name: str) -> int:
    """The pid, as this machine numbers it, of a tool that wrote its own into a file of the workspace."""
    path = file_of(talk, name)
    told = int(await until(lambda: path.exists() and path.read_text(), f"the tool wrote {name}"))
    return talk.server.outside(talk.session, told)


async def warm(talk: Talk) -> int:
    """A first turn; the agent's pid."""
    first = await talk.prompt("[[text:warm]]")
    assert (first["ok"], first["start"]) == (True, "cold"), first
    assert len((await talk.view())["proxied_keys"]) == 1
    return await talk.agent_pid()


def said(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["data"] for record in records if record["type"] == "message"]


async def stopped(talk: Talk, turn: Dispatched) -> None:
    """Stop the turn; the harness settles."""
    outcome = (await talk.stop())["outcome"]
    result = await turn.result()
    assert outcome == "stopped", result
    assert (result["outcome"], result["stop_reason"]) == ("cancelled", "cancelled")
    assert result["cancel_settled"] is True


async def same_agent_answers(talk: Talk, agent: int) -> None:
    """The next prompt is answered by the process that was there before."""
    result = await talk.prompt("[[text:next answer]]")
    assert (result["ok"], result["start"]) == (True, "hit"), result
    assert "next answer" in result["text"]
    assert await talk.agent_pid() == agent


async def test_the_version_that_runs_is_the_pinned_one(
    talk: Talk, client: Client, name: str, installed_harnesses: InstalledHarnesses
) -> None:
    """By the server, by the agent's own words, and by what is really running."""
    agent, version = ADAPTERS[name]
    known = {item["name"]: item for item in (await client.health())["harnesses"]}[name]
    assert (known["available"], known["version"]) == (True, version)
    said = check(name, installed_harnesses.state_dir)
    assert (said.ok, said.agent, said.version) == (True, agent, version), said.detail
    pid = await warm(talk)
    assert package_of(talk.server, pid, name)["version"] == version


def package_of(server: Server, pid: int, name: str) -> dict[str, Any]:
    """package.json of the adapter that this process runs, and the process runs nothing else."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    root = server.state_dir / "harnesses"
    program = next(Path(word) for word in reversed(words) if word.startswith(str(root)))
    modules = next(parent for parent in program.parents if parent.name == "node_modules")
    return dict(json.loads((modules / PACKAGES[name] / "package.json").read_text()))


async def test_a_prompt_is_answered_while_the_model_speaks(talk: Talk, model: ModelServer) -> None:
    """The first delta is there before the model has said the second; all of it is in the result and the records."""
    agent = await warm(talk)
    turn = talk.dispatch("[[hold]]")
    (held,) = await model.wait_held()
    await turn.text(HELD_TEXT)
    assert not turn.over
    assert RELEASED_TEXT not in turn.streamed
    model.release(held)
    result = await turn.result()
    assert (result["outcome"], result["stop_reason"], result["start"]) == ("completed", "end_turn", "hit")
    assert result["text"] == turn.streamed
    assert HELD_TEXT + RELEASED_TEXT in result["text"]
    many = talk.dispatch("[[stream:200]]")
    assert "".join(f"{n} " for n in range(200)).strip() in (await many.result())["text"]
    assert len(many.of("message_delta")) > 20
    said = [record["data"]["text"] for record in await talk.records() if record["type"] == "message"]
    assert "".join(said).endswith(result["text"] + many.streamed)
    await same_agent_answers(talk, agent)
    assert "[[stream:200]]" in " ".join(model.turns[-1].user_texts), "the agent remembers the conversation"
    assert {request.api_key for request in model.turns} == {"key-of-the-test"}


@both_levels
async def test_a_shell_tool_runs_in_the_workspace(talk: Talk, model: ModelServer) -> None:
    turn = talk.dispatch("[[shell:echo made by $PWD > made.txt && cat made.txt]]")
    result = await turn.result()
    assert result["outcome"] == "completed", result
    assert file_of(talk, "made.txt").read_text() == f"made by {talk.server.workspace(talk.session)}\n"
    assert "TOOLDONE" in result["text"]
    assert any("made by" in text for text in model.turns[-1].tool_results)
    (call,) = {data["tool_call_id"] for data in turn.of("tool_call")}
    (record,) = [record["data"] for record in await talk.records() if record["type"] == "tool_call"]
    assert (record["tool_call_id"], record["status"]) == (call, "completed")


@pytest.mark.parametrize("name", ["codex"], indirect=True)
async def test_a_shell_tool_runs_in_a_sandbox_of_its_own_within_the_cell(opens: Open) -> None:
    """An agent may hold its commands in by filters of its own, behind the one that a cell has."""
    talk = opens(permissions={"default": "allow"})
    for mode, own in (("danger-full-access", False), ("workspace-write", True)):
        talk.fields["env"] = {**talk.fields["env"], "CODEX_SANDBOX_MODE": mode}
        result = await talk.prompt(f"[[shell:{FILTERS}]]")
        assert result["outcome"] == "completed", result
        assert (int(file_of(talk, "filters.txt").read_text().split()[1]) > 1) == own


@pytest.mark.parametrize("decision", ["allow", "deny"])
async def test_a_question_pauses_and_its_answer_resumes(opens: Open, client: Client, name: str, decision: str) -> None:
    """Answered over the API, not over the stream; the agent is the same one all along."""
    talk = opens()
    paused = await talk.prompt("[[shell:touch asked.txt]]", prompt_id="asks")
    assert (paused["outcome"], paused["stop_reason"], paused["ok"]) == ("paused", "paused", True), paused
    agent = await talk.agent_pid()
    assert (await talk.view())["state"] == "awaiting_approval"
    (question,) = await talk.questions()
    assert not file_of(talk, "asked.txt").exists()
    answered = await client.answer(talk.session, question["interaction_id"], decision=decision)
    assert answered["status"] == "consumed"
    result = await talk.prompt("[[shell:touch asked.txt]]", prompt_id="asks")
    assert result["outcome"] == "completed", result
    assert result["turn_id"] != paused["turn_id"]
    assert file_of(talk, "asked.txt").exists() == (decision == "allow")
    resumed = [record["data"] for record in await talk.records() if record["type"] == "turn_admitted"][-1]
    assert resumed["resumes"] == paused["turn_id"]
    await same_agent_answers(talk, agent)


@pytest.mark.parametrize("hold", ["hold", "hold0"])
async def test_a_stop_while_the_model_is_held(
    talk: Talk, opens: Open, model: ModelServer, name: str, hold: str
) -> None:
    """Behind the first chunk, and before the model answered at all; another session goes on unharmed."""
    agent = await warm(talk)
    other = opens(permissions={"default": "allow"})
    parallel = other.dispatch("[[hold:other]]")
    (others,) = await model.wait_held()
    turn = talk.dispatch(f"[[{hold}]]")
    held = next(one for one in await model.wait_held(2) if one is not others)
    if hold == "hold":
        await turn.text(HELD_TEXT)
    await stopped(talk, turn)
    await same_agent_answers(talk, agent)
    await model_call_over(model, held, kept_open=name == "codex" and hold == "hold")
    assert not parallel.over
    model.release(others)
    result = await parallel.result()
    assert result["outcome"] == "completed"
    assert "other" + RELEASED_TEXT in result["text"]


async def model_call_over(model: ModelServer, held: RecordedRequest, *, kept_open: bool) -> None:
    """The stopped turn's model call was closed by the agent.

    Codex 0.16 leaves it open once the first chunk came (its quirk ``model_stream_outlives_cancel``) and reads it to
    its end; when that changes this fails, and the quirk goes.
    """
    if not kept_open:
        await model.wait_closed(held)
        return
    assert held.held
    assert not held.closed_by_client
    model.release(held)
    await until(lambda: held.finished or held.closed_by_client, "the kept model call ended")


@both_levels
async def test_a_stop_while_a_tool_runs(talk: Talk, opens: Open) -> None:
    """DESIGN 3.3.7: the tool is gone within a second of settlement, which the result follows; the agent stays."""
    agent = await warm(talk)
    other = opens(permissions={"default": "allow"})
    parallel = other.dispatch(f"[[shell:{SLEEP.format(file='other.pid')}]]")
    turn = talk.dispatch(f"[[shell:{SLEEP.format(file='tool.pid')}]]")
    tool, others = await pid_in(talk, "tool.pid"), await pid_in(other, "other.pid")
    await stopped(talk, turn)
    assert not alive(tool), "the reap stands before the result"
    assert alive(others)
    assert not parallel.over
    assert {data["status"] for data in turn.of("tool_call_update") if "status" in data} >= {"cancelled"}
    await same_agent_answers(talk, agent)
    await stopped(other, parallel)
    assert not alive(others)


async def test_a_stop_right_behind_the_prompt(talk: Talk, model: ModelServer) -> None:
    """The cancel follows the frame at once: before the agent has asked its model anything (case A2's first half)."""
    agent = await warm(talk)
    for _ in range(3):
        turn = talk.dispatch("[[hold0]]")
        await turn.event("user_message")
        await stopped(talk, turn)
        await same_agent_answers(talk, agent)
    await until(lambda: not model.held, "no model call is open")


async def test_a_stop_while_a_question_waits(opens: Open, model: ModelServer) -> None:
    """The paused prompt is settled by the agent that asked; its command never runs."""
    talk = opens()
    paused = await talk.prompt("[[shell:touch asked.txt]]", prompt_id="asks")
    assert paused["outcome"] == "paused", paused
    agent = await talk.agent_pid()
    assert (await talk.stop())["outcome"] == "stopped"
    view = await talk.idle()
    assert (view["last_turn"]["outcome"], view["open_interactions"]) == ("cancelled", [])
    await same_agent_answers(talk, agent)
    assert not file_of(talk, "asked.txt").exists()


@both_levels
async def test_a_killed_agent_fails_its_turn_and_the_next_resumes(talk: Talk, model: ModelServer) -> None:
    """Cases A1, M6: told at once, not by a limit; nobody of the old cell is left, and the next process remembers."""
    agent = await warm(talk)
    turn = talk.dispatch(f"[[shell:{SLEEP.format(file='tool.pid')}]]")
    tool = await pid_in(talk, "tool.pid")
    await talk.kill_agent()
    result = await turn.result()
    assert (result["outcome"], result["error"]["code"]) == ("failed", "harness_exited")
    assert "SIGKILL" in result["error"]["message"] or "9" in result["error"]["message"]
    await gone(tool, "the killed agent's tool")
    again = await talk.prompt("[[text:same memory]]")
    assert (again["ok"], again["start"], again.get("context_lost")) == (True, "resumed", None)
    assert await talk.agent_pid() != agent
    assert "[[text:warm]]" in " ".join(model.turns[-1].user_texts), "what was said before the kill"
    records = await talk.records()
    assert [data["text"] for data in said(records) if "warm" in data["text"]] == ["warm"], "nothing is recorded twice"
    assert "same memory" in said(records)[-1]["text"]
    told = [record["data"]["content"][0]["text"] for record in records if record["type"] == "user_message"]
    assert (told[0], told[-1], len(told)) == ("[[text:warm]]", "[[text:same memory]]", 3)


FAILURES = {"[[http:400]]": "harness_protocol_error", "[[empty]]": "empty_turn"}


@pytest.mark.parametrize("directive", FAILURES)
async def test_a_failing_model_is_a_failed_turn(talk: Talk, directive: str) -> None:
    """Refused, or a clean end without any output (case L1); the session goes on."""
    result = await talk.prompt(directive)
    assert (result["outcome"], result["ok"]) == ("failed", False), result
    assert result["error"]["code"] == FAILURES[directive]
    after = await talk.prompt("[[text:well again]]")
    assert after["ok"], after
    assert "well again" in after["text"]


async def test_a_stop_while_the_agent_tries_its_model_again(opens: Open, model: ModelServer, name: str) -> None:
    """Both wait between their tries; a Stop does not wait with them."""
    talk = opens()
    talk.fields["env"] = {key: value for key, value in talk.fields["env"].items() if key != "CODEX_MAX_RETRIES"}
    agent = await warm(talk)
    turn = talk.dispatch("[[http:500]]")
    await model.wait_requests(3)
    assert not turn.over
    await stopped(talk, turn)
    await same_agent_answers(talk, agent)


async def test_a_killed_server_leaves_no_agent(
    tmp_path: Path, installed_harnesses: InstalledHarnesses, name: str, model: ModelServer
) -> None:
    """Codex ignores the end of its stdin, both run their tools in sessions of their own: the cell's end takes all."""
    server = Server(tmp_path / "own", PROXIED)
    installed_harnesses.link_into(server.state_dir)
    server.start()
    env = model_variables(name, model)
    async with server.client() as client:
        talk = Talk(server, client, "s", harness=name, env=env, permissions={"default": "allow"})
        turn = talk.dispatch(f"[[shell:{SLEEP.format(file='tool.pid')}]]")
        tool = await pid_in(talk, "tool.pid")
        agent = await talk.agent_pid()
        server.kill()
        await turn.drop()
    await gone(agent, "the agent")
    await gone(tool, "its tool")
    await until(lambda: not server.census() and not server.everybody(), "the cell is gone")
    server.start()
    server.stop()


@pytest.mark.parametrize("decision", ["allow", "deny"])
async def test_an_answer_behind_a_killed_server_reaches_an_agent_that_remembers(
    tmp_path: Path, installed_harnesses: InstalledHarnesses, name: str, model: ModelServer, decision: str
) -> None:
    """Case F9: the next server resumes the agent session; it asks for the same again, and that is answered."""
    server = Server(tmp_path / "own", PROXIED)
    installed_harnesses.link_into(server.state_dir)
    server.start()
    env = model_variables(name, model)
    try:
        async with server.client() as client:
            talk = Talk(server, client, "s", harness=name, env=env)
            paused = await talk.prompt("[[insist:touch asked.txt]]", prompt_id="asks")
            assert paused["outcome"] == "paused", paused
            (question,) = await talk.questions()
            server.kill()
        server.start()
        async with server.client() as client:
            talk = Talk(server, client, "s", harness=name, env=env)
            assert [item["interaction_id"] for item in await talk.questions()] == [question["interaction_id"]]
            await client.answer("s", question["interaction_id"], decision=decision)
            result = await talk.prompt("[[insist:touch asked.txt]]", prompt_id="asks")
            assert (result["outcome"], result["start"]) == ("completed", "resumed"), result
            assert file_of(talk, "asked.txt").exists() == (decision == "allow")
            rows = (await client.interactions("s"))["items"]
            assert [row["status"] for row in rows] == ["consumed"]
            await talk.check()
    finally:
        server.stop()
