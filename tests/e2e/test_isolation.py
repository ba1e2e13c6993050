"""What isolation means to those who use a server: told everywhere, hiding what it must, strong enough or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.server import Server, until
from tests.e2e.talk import Talk

LIMITS = "[local]\nmemory_bytes = 2147483648\npids = 300\n"
TWO_PROJECTS = "".join(
    f'[[auth.tokens]]\ntoken = "token-of-{name}"\nproject = "{name}"\nscopes = ["dispatch", "read"]\n' for name in "ab"
)
LOOK = "(cat {path} || ls -A {path}/ | grep -q .) >/dev/null 2>&1 && echo seen || echo hidden"
LIST = "ls -A {state} {state}/workspaces {state}/workspaces/* {state}/homes/* 2>/dev/null | grep -v :"
DESTROY = """cat {state}/workspaces/default/*/* {here}/../*/* /proc/*/environ
rm -rf {here}/../* {state}/* {here}/../../../homes; true"""


async def test_level_and_limits_are_told_in_health_and_in_the_session(serve: Serve) -> None:
    server = serve(LIMITS)
    async with server.client() as client:
        talk = Talk(server, client, "s", harness="demo")
        assert (await talk.prompt("hello"))["ok"]
        health, view = await client.health(), await talk.view()
        await talk.check()
    assert health["isolation"] == view["isolation"] == "cell"
    assert health["network"] == "shared"
    assert health["limits"]["memory_bytes"] == view["limits"]["memory_bytes"]
    assert health["limits"]["memory_bytes"]["limit"] == 2 << 30
    assert health["limits"]["pids"]["limit"] == 300
    assert {bound["by"] for bound in health["limits"].values()} <= {"cgroup", "init", "rlimit", "off"}


@pytest.mark.parametrize("level", ["cell", "landlock"])
async def test_a_session_reaches_neither_its_neighbour_nor_the_runner(serve: Serve, level: str) -> None:
    """Cases J1 and K1: another session's files, the state directory, the store, the runner's environment."""
    server = serve(env={"ACP_RUNNER_LOCAL__ISOLATION": level, "MARKER": "marker-of-the-runner"})
    assert b"marker-of-the-runner" in server.environ()
    async with server.client() as client:
        a, b = (Talk(server, client, name, harness="demo") for name in "ab")
        for talk in (a, b):
            talk.fields["secrets"] = {"OWN_SECRET": f"secret-of-{talk.session}"}
            assert (await talk.prompt(f"/write secret.txt of {talk.session}"))["ok"]
        assert (await a.view())["isolation"] == level
        secret, home = server.workspace("b") / "secret.txt", server.state_dir / "homes" / "default" / "b"
        store = sorted(server.state_dir.glob("store.sqlite3*"))
        hidden = [secret, home, *home.glob("*"), *store, server.config]
        hidden += [server.state_dir / name for name in ("token", "lock", "live", "replicas")]
        processes = [server.pid, await b.agent_pid()]
        for path in [*hidden, *(Path(f"/proc/{pid}/environ") for pid in processes)]:
            assert path.exists(), path
            shell = await client.shell("a", LOOK.format(path=path))
            assert shell["output"].split() == ["hidden"], path
        shell = await client.shell("a", LIST.format(state=server.state_dir))
        assert set(shell["output"].split()) <= {"workspaces", "homes", "default", "a"}
        shell = await client.shell("a", DESTROY.format(here=server.workspace("a"), state=server.state_dir))
        assert b"of b" in secret.read_bytes()
        assert "secret-of-b" not in shell["output"]
        assert "marker-of-the-runner" not in shell["output"]
        for talk in (a, b):
            await talk.check()


async def test_without_bubblewrap_the_next_level_serves_and_a_cell_is_refused(serve: Serve, tmp_path: Path) -> None:
    """What is chosen is told; a level that is named is never weakened."""
    bare = {"PATH": str(tmp_path / "empty")}
    server = serve(env=bare)
    async with server.client() as client:
        assert (await client.health())["isolation"] == "landlock"
        talk = Talk(server, client, "s", harness="demo")
        assert (await talk.prompt("hello"))["ok"]
        assert (await talk.view())["isolation"] == "landlock"
        await talk.check()
    assert "landlock" in server.said()
    named = Server(tmp_path / "named", env={**bare, "ACP_RUNNER_LOCAL__ISOLATION": "cell"})
    with pytest.raises(AssertionError, match="bubblewrap is not installed"):
        named.start()
    named._reaped()


def test_two_projects_need_a_cell(tmp_path: Path) -> None:
    """Case K1, DESIGN 3.10: refused below it before anything is served, and served in it."""
    weak = Server(tmp_path / "weak", TWO_PROJECTS, env={"ACP_RUNNER_LOCAL__ISOLATION": "none"})
    with pytest.raises(AssertionError, match=r"needs isolation cell.*allow_weak"):
        weak.start()
    weak._reaped()
    strong = Server(tmp_path / "strong", TWO_PROJECTS)
    strong.start()
    strong.stop()


async def test_a_harness_of_the_configuration_sees_its_own_files(serve: Serve, tmp_path: Path) -> None:
    """The script by itself; what lies beside it only by ``read``."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "beside.py").write_text("WORD = 'beside'\n")
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    config = f'[harness.{{}}]\ncommand = ["python", {json.dumps(str(agent))}]\n'
    more = f"read = [{json.dumps(str(folder))}]\n"
    server = serve(config.format("alone") + config.format("more") + more)
    async with server.client() as client:
        for name, word in (("alone", "alone"), ("more", "beside")):
            talk = Talk(server, client, name, harness=name)
            assert (await talk.prompt("hello"))["text"] == word
            await talk.check()


AGENT = """
import json, sys
try:
    from beside import WORD
except ImportError:
    WORD = "alone"
for line in sys.stdin:
    frame = json.loads(line)
    method, session = frame.get("method"), "session-of-the-test"
    if method == "session/prompt":
        update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": WORD}}
        told = {"sessionId": session, "update": update}
        print(json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": told}), flush=True)
    result = {
        "initialize": {"protocolVersion": 1, "agentCapabilities": {}, "authMethods": []},
        "session/new": {"sessionId": session},
        "session/prompt": {"stopReason": "end_turn"},
    }.get(method)
    if result is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": frame["id"], "result": result}), flush=True)
"""


SECRET = "marker-of-a-secret-1234"


def told(server: Server) -> list[str]:
    """Where the secret stands: files of the server with its log, command lines of this machine."""
    files = [path for path in server.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    lines = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    return [str(path) for path in (*files, *lines) if SECRET.encode() in content(path)]


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_a_secret_is_in_no_command_line_file_or_log(serve: Serve) -> None:
    """Case K3: while it is used, behind a kill of the runner, and behind the end of its session."""
    server = serve()
    async with server.client() as client:
        talk = Talk(server, client, "s", harness="demo", secrets={"TOKEN_OF_MINE": SECRET})
        has = f'test "$TOKEN_OF_MINE" = {SECRET[:10]}$(echo {SECRET[10:]}) && echo has > has'
        turn = talk.dispatch(f"/tool {has} && sleep 600")
        await until((server.workspace("s") / "has").exists, "the tool has the secret")
        assert told(server) == []
        server.kill()
        await turn.drop()
    server.assert_nobody()
    assert told(server) == []
    server.start()
    async with server.client() as client:
        talk.client = client
        assert (await talk.prompt(f"/tool {has}"))["text"] == "exit code 0"
        assert told(server) == []
        await client.kill("s")
        await client.delete("s")
    assert told(server) == []
