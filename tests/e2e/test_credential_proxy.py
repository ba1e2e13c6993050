"""Model keys that stay outside of real cells, and answers of a model that saw them all the same."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from runner.client import Client
from tests.agents import SCRIPTED
from tests.e2e.conftest import Serve
from tests.e2e.searching import places_of
from tests.e2e.server import Server
from tests.e2e.talk import Talk
from tests.model_server import ModelServer

OPERATORS = "sk-operators-key-5f1c"
CALLERS = "sk-callers-own-key-77aa"
LEVELS = ("cell", "landlock", "none")
HARNESS = """
[harness.mine]
command = [{python}, {agent}]
pass_env = ["MODEL_KEY"]
keys = [{{ key = "MODEL_KEY", base_url = "MODEL_URL", upstream = "{upstream}" }}]
[secrets]
SHARED = "{shared}"
"""


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as model:
        yield model


def config(model: ModelServer, more: str = "") -> str:
    python, agent = json.dumps(sys.executable), json.dumps(str(SCRIPTED.with_name("asks_model.py")))
    return HARNESS.format(python=python, agent=agent, upstream=model.openai_url, shared=OPERATORS) + more


def started(serve: Serve, model: ModelServer, level: str = "auto", more: str = "") -> Server:
    return serve(config(model, more), env={"MODEL_KEY": OPERATORS, "ACP_RUNNER_LOCAL__ISOLATION": level})


def talk_of(server: Server, client: Client, session: str = "s", **fields: Any) -> Talk:
    return Talk(server, client, session, harness="mine", **fields)


def token_of(server: Server, session: str) -> str:
    """What the agent has instead of the key; no answer of the runner shows it."""
    return (server.workspace(session) / "token.txt").read_text()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("key", "fields"),
    [
        (OPERATORS, {}),
        (OPERATORS, {"secrets": {"MODEL_KEY": {"ref": "SHARED"}}}),
        (CALLERS, {"secrets": {"MODEL_KEY": CALLERS}}),
    ],
    ids=["of the runner's environment", "of [secrets]", "of the caller"],
)
async def test_the_key_is_nowhere_in_the_cell_case_k1(
    serve: Serve, model: ModelServer, level: str, key: str, fields: dict[str, Any]
) -> None:
    """Not in a variable, a command line, memory, an open file or a folder, of no process; the model saw it."""
    server = started(serve, model, level)
    async with server.client() as client:
        talk = talk_of(server, client, **fields)
        assert (await talk.prompt("[[text:hello]]"))["text"] == "hello"
        assert {request.api_key for request in model.requests} == {key}
        view = await talk.view()
        assert (view["isolation"], view["proxied_keys"]) == (level, ["MODEL_KEY"])
        assert places_of(server, "s", key) == []
        token = token_of(server, "s")
        assert places_of(server, "s", token), "the search finds what is there"
        for shown in (key, token):
            assert shown not in json.dumps(await talk.records())
        shell = await client.shell("s", "env; cat token.txt")
        assert "MODEL_KEY=[secret]" in shell["output"]
        assert token not in shell["output"]
        await talk.check()
    said = server.log.read_text()
    assert key not in said
    assert token not in said


async def test_a_warm_sandbox_keeps_its_token_and_another_key_needs_another_sandbox(
    serve: Serve, model: ModelServer
) -> None:
    server = started(serve, model)
    async with server.client() as client:
        talk = talk_of(server, client)
        assert (await talk.prompt("[[text:a]]", secrets={"MODEL_KEY": CALLERS}))["start"] == "cold"
        first = token_of(server, "s")
        assert (await talk.prompt("[[text:b]]"))["start"] == "hit"
        assert token_of(server, "s") == first
        changed = await talk.prompt("[[text:c]]", secrets={"MODEL_KEY": CALLERS + "-2"})
        assert (changed["start"], changed["reason"], changed["text"]) == ("cold", "changed:secrets", "c")
        assert token_of(server, "s") != first
        assert [request.api_key for request in model.requests] == [CALLERS, CALLERS, CALLERS + "-2"]
        await talk.check()


async def test_a_token_is_worth_nothing_without_its_sandbox(serve: Serve, model: ModelServer) -> None:
    """Nor at another address of the runner, nor for another session."""
    server = started(serve, model)
    async with server.client() as client, ClientSession() as http:
        talk = talk_of(server, client)
        assert (await talk.prompt("[[text:a]]"))["ok"]
        (port,) = own_ports(server)
        body = {"messages": [{"role": "user", "content": "[[text:from outside]]"}]}
        headers = {"Authorization": f"Bearer {token_of(server, 's')}"}
        url = f"http://127.0.0.1:{port}/model_url/chat/completions"
        async with http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200
        async with http.get(f"{server.url}/v1/sessions", headers=headers) as answer:
            assert answer.status == 401
        await client.kill("s")
        async with http.post(url, json=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (401, "authentication_error")
        assert len(model.requests) == 2


def own_ports(server: Server) -> list[int]:
    """Ports of this machine at which the server listens, but its API's."""
    inodes = {link.name for link in _sockets(server.pid)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}
    assert all(row[1].startswith("0100007F:") for row in rows if row[3] == "0A" and row[9] in inodes), "loopback only"
    return sorted(ports - {server.address[1]})


def _sockets(pid: int) -> list[Path]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink()) if link.is_symlink() else ""
        if target.startswith("socket:["):
            found.append(Path(target[len("socket:[") : -1]))
    return found


@pytest.mark.parametrize("secrets", [{}, {"MODEL_KEY": {"ref": "SHARED"}}], ids=["environment", "ref"])
async def test_an_operators_key_goes_to_no_server_of_a_caller(
    serve: Serve, model: ModelServer, secrets: dict[str, Any]
) -> None:
    """Case J3: refused before anything is started, naming the field; a listed server is none of the caller's."""
    server = started(serve, model)
    async with ModelServer() as other, server.client() as client:
        talk = talk_of(server, client, env={"MODEL_URL": other.openai_url}, secrets=secrets)
        refused = await talk.refused("[[text:a]]")
        assert (refused.code, refused.status) == ("invalid_request", 400)
        assert "env.MODEL_URL" in str(refused)
        assert OPERATORS not in str(refused)
        own = talk_of(server, client, "own", env={"MODEL_URL": other.openai_url}, secrets={"MODEL_KEY": CALLERS})
        assert (await own.prompt("[[text:b]]"))["text"] == "b"
        assert (await own.view())["proxied_keys"] == [], "a caller's own key goes along to a caller's own server"
        assert {request.api_key for request in other.requests} == {CALLERS}
        await own.check()
    listed = started(serve, model, more='[credentials]\nhosts = ["http://127.0.0.1"]\n')
    async with ModelServer() as other, listed.client() as client:
        talk = talk_of(listed, client, env={"MODEL_URL": other.openai_url}, secrets=secrets)
        assert (await talk.prompt("[[text:a]]"))["text"] == "a"
        assert {request.api_key for request in other.requests} == {OPERATORS}
        await talk.check()


async def test_a_killed_runner_leaves_neither_key_nor_token_case_k3(serve: Serve, model: ModelServer) -> None:
    """Not on the disk, before and behind the kill; the next runner takes no token of the last one."""
    server = started(serve, model)
    async with server.client() as client:
        talk = talk_of(server, client, secrets={"MODEL_KEY": CALLERS})
        assert (await talk.prompt("[[text:a]]", keep_on_disconnect=True))["ok"]
    token = token_of(server, "s")
    (server.workspace("s") / "token.txt").unlink()
    assert holding(server.folder, CALLERS, token) == []
    server.kill()
    assert holding(server.folder, CALLERS, token) == []
    server.assert_nobody()
    server.start()
    async with server.client() as client, ClientSession() as http:
        talk = talk_of(server, client)
        failed = await talk.prompt("[[text:b]]")
        assert failed["error"]["code"] == "credentials_missing", "a literal does not survive its runner"
        (port,) = own_ports(server)
        url, headers = f"http://127.0.0.1:{port}/model_url/models", {"Authorization": f"Bearer {token}"}
        async with http.get(url, headers=headers) as answer:
            assert answer.status == 401


def holding(folder: Path, *texts: str) -> list[Path]:
    """The files below a folder that hold one of the texts."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if any(text.encode() in path.read_bytes() for text in texts)]


async def test_a_model_that_is_away_is_told_to_the_agent(serve: Serve, model: ModelServer) -> None:
    server = started(serve, model)
    await model.stop()
    async with server.client() as client:
        talk = talk_of(server, client)
        assert "502 The model's server http://127.0.0.1" in (await talk.prompt("[[text:a]]"))["text"]
        await talk.check()


async def test_requests_and_tokens_are_counted_by_harness(serve: Serve, model: ModelServer) -> None:
    server = started(serve, model)
    async with server.client() as client, ClientSession() as http:
        talk = talk_of(server, client)
        assert (await talk.prompt("[[text:a]]"))["ok"]
        async with http.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.token}"}) as answer:
            lines = (await answer.text()).splitlines()
    assert 'acp_runner_model_requests_total{harness="mine",result="2xx"} 1.0' in lines
    assert 'acp_runner_model_tokens_total{harness="mine",kind="input",project="default"} 11.0' in lines
    assert 'acp_runner_model_tokens_total{harness="mine",kind="output",project="default"} 7.0' in lines


async def test_switched_off_keys_enter_and_nothing_listens(serve: Serve, model: ModelServer) -> None:
    server = started(serve, model, more="[credentials]\nproxy = false\n")
    async with server.client() as client:
        talk = talk_of(server, client, env={"MODEL_URL": model.openai_url})
        assert (await talk.prompt("[[text:hello]]"))["text"] == "hello"
        assert (await talk.view())["proxied_keys"] == []
        assert token_of(server, "s") == OPERATORS
        assert own_ports(server) == []
        await talk.check()
