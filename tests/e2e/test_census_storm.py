"""A thousand mixed turns on real cells; then an independent look for whatever they could have left."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from runner.client import Client
from tests.e2e.conftest import Serve
from tests.e2e.server import Server, until
from tests.e2e.talk import Talk
from tests.sandbox.hostile_run import inhabitants

TURNS = 1000
SESSIONS = 8
MOST_NAMESPACES = 300
LEFT_BEHIND = "/leak exec env -i sleep 600\n"
"""Detached, and without any variable that a census could know it by."""
CONFIG = """
[server]
reader_grace_seconds = 0
[local]
memory_bytes = 1073741824
pids = 200
"""


async def _normal(talk: Talk) -> str:
    return str((await talk.prompt("hello"))["outcome"])


async def _stopped(talk: Talk) -> str:
    turn = talk.dispatch(f"{LEFT_BEHIND}/hang")
    await turn.text("left")
    await talk.stop()
    return str((await turn.result())["outcome"])


async def _crashed(talk: Talk) -> str:
    return str((await talk.prompt(f"{LEFT_BEHIND}/crash"))["outcome"])


async def _disconnected(talk: Talk) -> str:
    turn = talk.dispatch(f"{LEFT_BEHIND}/sleep 0.1")
    await turn.text("left")
    await turn.drop()
    return str((await talk.idle())["last_turn"]["outcome"])


KINDS: dict[Callable[[Talk], Coroutine[Any, Any, str]], str] = {
    _normal: "completed",
    _stopped: "cancelled",
    _crashed: "failed",
    _disconnected: "completed",
}


async def _turns(talk: Talk, number: int) -> Counter[tuple[str, str]]:
    """One session's share, every kind behind every other."""
    seen: Counter[tuple[str, str]] = Counter()
    kinds = list(KINDS)
    for nth in range(TURNS // SESSIONS):
        kind = kinds[(number + nth + nth // len(kinds)) % len(kinds)]
        seen[kind.__name__, await kind(talk)] += 1
    return seen


class Namespaces:
    """The pid namespaces of a server's cells, held so that no number of theirs is given to another; some hundreds."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._held = {os.readlink("/proc/self/ns/pid"): -1}

    async def watch(self) -> None:
        """Note those of all that live, again and again."""
        while len(self) < MOST_NAMESPACES:
            for info in await asyncio.to_thread(self._server.census):
                self._note(f"/proc/{info.pid}/ns/pid")
            await asyncio.sleep(0.3)

    def _note(self, path: str) -> None:
        try:
            held = os.open(path, os.O_RDONLY)
        except OSError:
            return
        if self._held.setdefault(os.readlink(f"/proc/self/fd/{held}"), held) != held:
            os.close(held)

    def __len__(self) -> int:
        return len(self._held) - 1

    def inhabitants(self) -> list[int]:
        """Live processes in any of them; gives them back."""
        _own, *names = self._held
        found = [pid for name in names for pid in inhabitants(name)]
        for name in names:
            os.close(self._held[name])
        return found


def _descriptors(server: Server) -> Counter[str]:
    """What the server holds open, by kind: sockets and pipes have numbers that change."""
    folder = Path(f"/proc/{server.pid}/fd")
    found: Counter[str] = Counter()
    for entry in folder.iterdir():
        try:
            found[os.readlink(entry).partition(":[")[0]] += 1
        except FileNotFoundError:
            continue
    return found


def _control_groups(server: Server) -> list[str]:
    return [
        f"{folder}/{name}"
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if server.store_id in name
    ]


def _folders(server: Server) -> list[Path]:
    """What is kept for sessions."""
    return [path for kind in ("workspaces", "homes") for path in (server.state_dir / kind).glob("*/*")]


async def _warmed(server: Server) -> Counter[str]:
    """What an idle server without a seat holds open, once it has done everything that it does once."""
    async with server.client() as client:
        talk = Talk(server, client, "first", harness="demo")
        for kind in KINDS:
            await kind(talk)
        await _over(client, talk)
    await until(lambda: not server.census(), "the first session's cells are gone")
    await asyncio.sleep(0.5)
    return _descriptors(server)


async def _over(client: Client, talk: Talk) -> None:
    await client.kill(talk.session)
    await client.delete(talk.session)


@pytest.mark.timeout(300)
async def test_a_thousand_mixed_turns_leave_nothing(serve: Serve, tmp_path: Path) -> None:
    """Cases D1, D9 and D11: no process, folder, control group, descriptor or socket; one ending for each turn."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    server = serve(CONFIG, env={"TMPDIR": str(temporary)})
    before = await _warmed(server)
    namespaces = Namespaces(server)
    watch = asyncio.create_task(namespaces.watch())
    async with server.client() as client:
        talks = [Talk(server, client, f"s{number}", harness="demo") for number in range(SESSIONS)]
        seen = sum(await asyncio.gather(*(_turns(talk, n) for n, talk in enumerate(talks))), Counter())
        watch.cancel()
        for talk in talks:
            await talk.check()
        for talk in talks:
            await _over(client, talk)
    assert seen == {(kind.__name__, outcome): TURNS // len(KINDS) for kind, outcome in KINDS.items()}
    assert len(namespaces) >= SESSIONS
    await until(lambda: not server.census(), "no cell is left")
    assert namespaces.inhabitants() == []
    assert [pid for pid in server.everybody() if pid != server.pid] == []
    assert _control_groups(server) == []
    assert _folders(server) == []
    assert list(temporary.iterdir()) == []
    await until(lambda: _descriptors(server) == before, "the server holds open what it held before")
