"""Files over HTTP with real sandboxes: cells of this machine and an emulated Daytona (DESIGN 4)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from aiohttp import ClientSession

from runner.client import ApiError, Client
from tests.agents import Gate, steps
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.e2e.conftest import Scripted, Serve
from tests.e2e.server import SECONDS, Server, until
from tests.e2e.talk import Talk
from tests.e2e.test_daytona import config, states, talk_in


async def refused(work: object) -> tuple[str, int]:
    with pytest.raises(ApiError) as caught:
        await work  # type: ignore[misc]
    return caught.value.code, caught.value.status


async def names(client: Client, session: str, path: str = "") -> list[tuple[str, str]]:
    return [(item["name"], item["type"]) for item in (await client.files(session, path))["items"]]


async def test_files_go_in_and_out_of_a_cell(server: Server, client: Client) -> None:
    """Busy, parked and gone; what the agent made is had, and what it is given it can change."""
    talk = Talk(server, client, "files", harness="demo")
    assert await refused(client.write_file("files", "a", b"")) == ("not_found", 404)
    assert (await talk.prompt("/write made.txt hello", workspace={"files": [{"path": "given", "content": "g"}]}))["ok"]
    assert await client.read_file("files", "made.txt") == b"hello\n"
    assert await names(client, "files") == [("given", "file"), ("made.txt", "file")]
    every = os.urandom(3_000_000)
    made = await client.write_file("files", "in/ü/every.bin", every)
    assert (made["created"], made["size"]) == (True, len(every))
    assert await client.read_file("files", "in/ü/every.bin") == every
    running = talk.dispatch("/tool sleep 300")
    await running.event("tool_call")
    await client.write_file("files", "while-busy", b"1")
    assert (await talk.stop())["outcome"] == "stopped"
    said = await talk.client.shell("files", "cat while-busy && echo 2 >> while-busy && ls in && mv in out && mkfifo p")
    assert (said["exit_code"], said["output"]) == (0, "1ü\n")
    assert await client.read_file("files", "while-busy") == b"12\n"
    await client.kill("files")
    assert await names(client, "files") == [
        ("given", "file"),
        ("made.txt", "file"),
        ("out", "folder"),
        ("p", "other"),
        ("while-busy", "file"),
    ]
    assert await refused(client.read_file("files", "p")) == ("invalid_request", 400)
    stale = (await client.files("files", "out"))["items"]
    assert [item["path"] for item in stale] == ["out/ü"]
    assert await refused(client.write_file("files", "given", b"new", if_match='"stale"')) == ("invalid_request", 412)
    await client.delete("files")
    assert await refused(client.read_file("files", "given")) == ("session_ended", 410)
    assert await refused(client.write_file("files", "given", b"")) == ("session_ended", 410)
    assert not server.workspace("files").exists()


async def test_while_the_first_agent_starts_they_are_refused_and_it_starts(
    scripted: Scripted, client: Client, tmp_path: Path
) -> None:
    """Case L5: files and shell of a session whose sandbox is being started; retryable, and the start is not hurt."""
    talk, script = scripted()
    gate = Gate(tmp_path / "gate")
    script.on("session/new", steps.gate(gate), steps.reply())
    turn = talk.dispatch("hi")
    await gate.reached(SECONDS)
    for work in (
        client.read_file(talk.session, "a"),
        client.write_file(talk.session, "a", b"1"),
        client.files(talk.session),
        client.shell(talk.session, "true"),
    ):
        with pytest.raises(ApiError) as caught:
            await work
        assert (caught.value.code, caught.value.status) == ("session_starting", 409)
        assert caught.value.retryable
    gate.open()
    assert (await turn.result())["ok"]
    assert (await client.write_file(talk.session, "a", b"1"))["created"]


async def test_nothing_of_the_machine_is_had_through_links(server: Server, client: Client) -> None:
    """Neither a neighbour's file, nor the state directory, nor the system's (case J1's neighbour)."""
    other = Talk(server, client, "neighbour", harness="demo")
    assert (await other.prompt("/write secret.txt precious"))["ok"]
    talk = Talk(server, client, "links", harness="demo")
    assert (await talk.prompt("hi"))["ok"]
    workspace = server.workspace("links")
    (workspace / "up").symlink_to("../neighbour")
    (workspace / "whole").symlink_to(server.workspace("neighbour") / "secret.txt")
    (workspace / "token").symlink_to(server.state_dir / "token")
    (workspace / "root").symlink_to("/")
    for path in ("up/secret.txt", "whole", "token", "root/etc/passwd", "..%2fneighbour/secret.txt"):
        assert await refused(client.read_file("links", path)) in (("invalid_request", 400), ("not_found", 404)), path
        if "%" not in path:
            assert await refused(client.write_file("links", path, b"x")) == ("invalid_request", 400), path
    async with ClientSession(headers={"Authorization": f"Bearer {server.token}"}) as http:
        for path in ("%2e%2e/neighbour/secret.txt", "%2Fetc%2Fpasswd", "x/%2e%2e/%2e%2e/neighbour/secret.txt"):
            async with http.get(f"{server.url}/v1/sessions/links/files/{path}") as answer:
                assert answer.status in (400, 404), path
    assert (server.workspace("neighbour") / "secret.txt").read_bytes() == b"precious\n"


async def test_a_directory_of_the_host_shows_its_own_files_only(serve: Serve, tmp_path: Path) -> None:
    """The state directory below it stays hidden; what is new belongs to the owner of its folder."""
    server = serve()
    checkout = server.folder
    (checkout / "kept.txt").write_text("kept")
    async with server.client() as client:
        talk = Talk(server, client, "host", harness="demo", workspace={"path": str(checkout)})
        assert (await talk.prompt("hi"))["ok"]
        assert await client.read_file("host", "kept.txt") == b"kept"
        assert "state" not in dict(await names(client, "host"))
        for path in ("state/token", "state/store.sqlite3", "state"):
            assert await refused(client.read_file("host", path)) == ("not_found", 404)
        assert await refused(client.write_file("host", "state/lock", b"")) == ("not_found", 404)
        assert await refused(client.files("host", "state")) == ("not_found", 404)
        for inner in (server.state_dir, server.state_dir / "workspaces"):
            refusal = await Talk(server, client, "inner", workspace={"path": str(inner)}).refused()
            assert (refusal.code, "workspace.path" in str(refusal)) == ("forbidden", True)
        if os.geteuid() == 0:
            (checkout / "theirs").mkdir()
            os.chown(checkout / "theirs", 1234, 1235)
            await client.write_file("host", "theirs/new/file", b"1")
            for path in ("theirs/new", "theirs/new/file"):
                facts = (checkout / path).stat()
                assert (facts.st_uid, facts.st_gid) == (1234, 1235)


async def test_files_of_a_remote_sandbox_awake_asleep_and_gone(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """It is woken for them, goes back to sleep, and a turn takes it over as it is."""
    server = serve(config(daytona_emulator, "idle_seconds = 1"))
    async with server.client() as client:
        talk = talk_in(server, client, "s")
        assert (await talk.prompt("/write made.txt hello"))["ok"]
        assert await client.read_file("s", "made.txt") == b"hello\n"
        every = os.urandom(500_000)
        await client.write_file("s", "in/every.bin", every)
        await until(lambda: states(daytona_emulator) == ["stopped"], "it sleeps")
        assert await client.read_file("s", "in/every.bin") == every
        assert states(daytona_emulator) == ["started"]
        assert await names(client, "s") == [("in", "folder"), ("made.txt", "file")]
        again = await talk.prompt("/write in/more.txt 1")
        assert (again["ok"], again.get("context_lost")) == (True, None)
        assert dict(await names(client, "s", "in")) == {"every.bin": "file", "more.txt": "file"}
        head = (await talk.client.records("s", limit=1000))["items"][-1]["cursor"]
        made = await client.fork("s", head, session_id="fork")
        assert (made["workspace"], made.get("reason")) == ("copied", None)
        assert await client.read_file("fork", "in/every.bin") == every
        other = await talk_in(server, client, "fork").prompt("/write in/fork.txt 1")
        assert (other["ok"], other["context_lost"]) == (True, True)
        assert dict(await names(client, "fork", "in")) == {"every.bin": "file", "fork.txt": "file", "more.txt": "file"}
        assert "fork.txt" not in dict(await names(client, "s", "in"))
        for session in ("s", "fork"):
            await client.delete(session)
        await until(lambda: states(daytona_emulator) == [], "both are deleted")
