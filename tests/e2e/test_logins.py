"""Logins of this machine: private homes, one owner of the refresh token (case K4)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from runner.client import Client
from runner.harness.catalogue import Catalogue
from runner.harness.signing_in import shelf_of
from runner.resources import resource_path
from tests.e2e.conftest import Serve
from tests.e2e.server import Server, until
from tests.harness import signing
from tests.harness_fixture import InstalledHarnesses
from tests.model_server import ModelServer

FILE = ".mine/auth.json"
DEMO = str(resource_path("sandboxes", "inside", "demo_agent.py"))


def tokens(number: int) -> dict[str, Any]:
    expires = int((time.time() + 3600) * 1000)
    return {"access": f"access-token-{number}", "refresh": f"refresh-token-{number}", "expires": expires}


def config(login: dict[str, Any]) -> str:
    return f"""
[harness.mine]
command = [{json.dumps(sys.executable)}, "-I", "-S", {json.dumps(DEMO)}]
read = [{json.dumps(str(Path(DEMO).parent))}]
[harness.mine.login]
command = [{json.dumps(sys.executable)}, {json.dumps(signing.__file__)}, "store", {json.dumps(json.dumps(login))}]
file = "{FILE}"
secrets = ["access", "refresh"]
refresh = "refresh"
expires = "expires"
"""


def log_in(server: Server, *words: str, name: str = "mine", key: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner.cli.main", "harness", "login", name, *words]
    return subprocess.run(
        [*command, "--state-dir", str(server.state_dir), "--config", str(server.config)],
        capture_output=True,
        text=True,
        input=key,
        timeout=60,
        check=False,
    )


def kept(server: Server) -> Any:
    return json.loads((server.state_dir / "logins" / "mine" / "login").read_text())


def home(server: Server, session: str) -> Path:
    return server.state_dir / "homes" / "default" / session / "home"


def copy_of(server: Server, session: str) -> Any:
    return json.loads((home(server, session) / FILE).read_text())


async def say(client: Client, session: str, text: str, **more: Any) -> dict[str, Any]:
    fields = {"harness": "mine", "permissions": {"default": "allow"}, "keep_on_disconnect": True, **more}
    lines = [line async for line in client.dispatch(session, text, **fields)]
    return dict(lines[-1]["result"])


def refresh(number: int) -> str:
    """What an agent does that refreshes its login; other tokens than it ever showed."""
    return f"/tool echo '{json.dumps(tokens(number))}' > $HOME/{FILE}"


@pytest.fixture
def logged_in(serve: Serve) -> Server:
    server = serve(config(tokens(1)))
    done = log_in(server)
    assert done.returncode == 0, done.stderr
    return server


async def test_one_sandbox_may_refresh_and_all_get_what_it_refreshed_case_k4(logged_in: Server) -> None:
    server = logged_in
    async with server.client() as client:
        assert (await say(client, "one", "hello"))["ok"]
        assert (await say(client, "two", "hello"))["ok"]
        assert copy_of(server, "one")["refresh"] == "refresh-token-1"
        assert (copy_of(server, "two")["access"], copy_of(server, "two")["refresh"]) == ("access-token-1", "")
        assert (home(server, "two") / FILE).stat().st_mode & 0o777 == 0o600
        assert not (home(server, "one") / ".mine" / "history").exists()

        assert (await say(client, "one", refresh(2)))["ok"]
        await until(lambda: kept(server)["refresh"] == "refresh-token-2", "the refreshed login was adopted")
        await until(lambda: copy_of(server, "two")["access"] == "access-token-2", "the other agent got it")
        assert copy_of(server, "two")["refresh"] == ""

        result = await say(client, "two", f"/tool cat $HOME/{FILE}")
        assert (result["ok"], result["start"]) == (True, "hit")
        records = json.dumps(await client.records("two"))
        assert "[secret]" in records
        assert "access-token-2" not in records

        await client.kill("one")
        assert not (home(server, "one") / FILE).exists()
        assert kept(server)["refresh"] == "refresh-token-2"
        assert (await say(client, "three", "hello"))["ok"]
        assert copy_of(server, "three")["refresh"] == "refresh-token-2"


async def all_have(server: Server, names: Iterable[str], access: str) -> None:
    await until(lambda: {copy_of(server, name)["access"] for name in names} == {access}, f"all have {access}")


REFRESH = """
import json, os, sys, urllib.request
path = os.path.expanduser("~/" + sys.argv[2])
login = json.load(open(path))
if login["refresh"]:
    answer = urllib.request.urlopen(sys.argv[1], login["refresh"].encode(), timeout=20).read()
    with open(path + ".new", "wb") as file:
        file.write(answer)
    os.replace(path + ".new", path)
"""


async def test_sessions_that_all_refresh_at_once_spend_each_token_once_case_k4(logged_in: Server) -> None:
    """The vendor's rule: a refresh token that is spent twice logs everybody out."""
    spent: list[str] = []

    async def token(request: web.Request) -> web.Response:
        given = await request.text()
        spent.append(given)
        await asyncio.sleep(0.2)
        assert given == f"refresh-token-{len(spent)}"
        return web.json_response(tokens(len(spent) + 1))

    app = web.Application()
    app.router.add_post("/token", token)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/token"
    files = {"files": [{"path": "refresh.py", "content": REFRESH}]}
    names = ("one", "two", "three")
    try:
        async with logged_in.client() as client:
            for count in (1, 2):
                text = f"/tool {sys.executable} -I refresh.py {url} {FILE}"
                results = await asyncio.gather(*(say(client, name, text, workspace=files) for name in names))
                assert all(result["ok"] for result in results), results
                assert spent == [f"refresh-token-{number + 1}" for number in range(count)]
                await all_have(logged_in, names, f"access-token-{count + 1}")
    finally:
        await runner.cleanup()


async def test_what_was_refreshed_right_before_the_runner_was_killed_counts_case_k4(logged_in: Server) -> None:
    server = logged_in
    async with server.client() as client:
        assert (await say(client, "one", refresh(2)))["ok"]
    server.kill()
    server.start()
    assert kept(server)["refresh"] == "refresh-token-2"
    assert not (home(server, "one") / FILE).exists()
    async with server.client() as client:
        assert (await say(client, "two", "hello"))["ok"]
    assert copy_of(server, "two")["refresh"] == "refresh-token-2"


async def test_a_new_login_is_taken_by_the_next_turn(logged_in: Server) -> None:
    server = logged_in
    async with server.client() as client:
        await say(client, "one", "hello")
        assert log_in(server).returncode == 0
        result = await say(client, "one", "hello")
        assert (result["ok"], result["reason"]) == (True, "changed:secrets")
        assert (await say(client, "one", "hello"))["start"] == "hit"


async def test_without_key_and_login_a_turn_says_which_command_helps(serve: Serve) -> None:
    server = serve(config(tokens(1)))
    async with server.client() as client:
        result = await say(client, "one", "hello")
        assert (result["outcome"], result["error"]["code"]) == ("failed", "harness_auth_required")
        assert result["error"]["message"].count("acp-runner harness login mine") == 1
        told = {item["name"]: item["logged_in"] for item in (await client.health())["harnesses"]}
        assert (told["mine"], told["codex"], told["demo"]) == (False, False, None)


async def test_only_named_projects_get_the_logins_of_the_machine_case_j5(serve: Serve) -> None:
    server = serve(config(tokens(1)) + '[logins]\nprojects = ["other"]\n')
    assert log_in(server).returncode == 0
    async with server.client() as client:
        result = await say(client, "one", "hello")
    assert result["error"]["code"] == "harness_auth_required"
    assert "acp-runner harness login" not in result["error"]["message"]
    assert not (home(server, "one") / FILE).exists()


async def test_the_command_tells_and_forgets(logged_in: Server) -> None:
    assert "logged in, refreshed by the agent at 2" in log_in(logged_in, "--check").stderr
    assert log_in(logged_in, "--check", name="codex").returncode == 1
    assert log_in(logged_in, "--forget").returncode == 0
    assert log_in(logged_in, "--check").returncode == 1
    assert log_in(logged_in, name="demo").returncode == 1


async def test_codex_works_with_the_key_that_it_was_logged_in_with(
    serve: Serve, installed_harnesses: InstalledHarnesses
) -> None:
    server = serve()
    installed_harnesses.link_into(server.state_dir)
    assert log_in(server, "--with-api-key", name="codex", key="sk-of-codex-1\n").returncode == 0
    async with ModelServer() as model, server.client() as client:
        env = {"OPENAI_BASE_URL": model.openai_url, "CODEX_MODEL": "gpt-5.4", "CODEX_MAX_RETRIES": "0"}
        result = await say(client, "one", "[[text:with a login]]", harness="codex", env=env)
        assert (result["ok"], result["text"]) == (True, "with a login"), result
        assert {request.api_key for request in model.requests} == {"sk-of-codex-1"}


async def test_prompt_forwards_the_declared_key_and_nobody_writes_it_down_case_k1(
    serve: Serve, installed_harnesses: InstalledHarnesses
) -> None:
    server, key = serve(), "sk-forwarded-123"
    installed_harnesses.link_into(server.state_dir)
    async with ModelServer() as model:
        own = {"ACP_RUNNER_URL": server.url, "ACP_RUNNER_TOKEN": server.token, "OPENAI_API_KEY": key}
        own |= {"OPENAI_BASE_URL": model.openai_url, "CODEX_MODEL": "gpt-5.4", "OTHER_KEY": "sk-not-forwarded"}
        words = ["prompt", "--session", "s", "--harness", "codex"]
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "runner.cli.main", *words, "[[text:forwarded]]"],
            env={**os.environ, **own},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, "forwarded" in out.decode()) == (0, True), err
        assert {request.api_key for request in model.requests} == {key}
    # An agent's home is its own: Codex writes its environment into a shell snapshot there.
    ours = (path for path in server.state_dir.rglob("*") if not {"harnesses", "homes"} & set(path.parts))
    kept = [server.log, *ours]
    assert not [path for path in kept if path.is_file() and b"sk-forwarded" in path.read_bytes()]
    assert b"sk-not-forwarded" not in server.log.read_bytes()


async def test_claude_works_with_a_login_that_it_may_not_refresh_case_k4(
    serve: Serve, installed_harnesses: InstalledHarnesses
) -> None:
    server = serve()
    installed_harnesses.link_into(server.state_dir)
    login = {"accessToken": "sk-ant-oat01-abc", "refreshToken": "sk-ant-ort01-abc", "scopes": ["user:inference"]}
    login |= {"expiresAt": tokens(0)["expires"], "subscriptionType": "max"}
    shelf = shelf_of(Catalogue.build({}, server.state_dir).get("claude"), server.state_dir)
    with shelf.locked():
        shelf.put(json.dumps({"claudeAiOauth": login}).encode())
    async with ModelServer() as model, server.client() as client:
        env = {"ANTHROPIC_BASE_URL": model.url}
        for session in ("holder", "one"):
            result = await say(client, session, "[[text:with a login]]", harness="claude", env=env)
            assert (result["ok"], result["text"]) == (True, "with a login"), result
        assert {request.api_key for request in model.requests} == {"sk-ant-oat01-abc"}
    held = [json.loads((home(server, name) / ".claude/.credentials.json").read_text()) for name in ("holder", "one")]
    assert [copy["claudeAiOauth"]["refreshToken"] for copy in held] == ["sk-ant-ort01-abc", ""]
