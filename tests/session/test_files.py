"""Files of a session's workspace: when they are to be had, one write at a time, nothing behind the end (DESIGN 4)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.files import ALWAYS, Precondition, Written
from runner.sandbox.memory_files import MemoryFiles
from runner.session.port import Caller
from tests.session.bed import CALLER, Bed

pytestmark = pytest.mark.virtual_time


async def refused(work: Any) -> RunnerError:
    with pytest.raises(RunnerError) as caught:
        await work
    return caught.value


async def read(bed: Bed, path: str = "a") -> bytes:
    return (await bed.sessions.files.read(CALLER, "s", path)).data


async def write(bed: Bed, path: str = "a", data: bytes = b"1", condition: Precondition = ALWAYS) -> Written | None:
    return await bed.sessions.files.write(CALLER, "s", path, data, condition)


async def test_while_the_sandbox_starts_they_wait_and_the_start_is_not_hurt(bed: Bed) -> None:
    """Case L5: retryable; a Stop meanwhile is accepted."""
    bed.provider.start_gate = asyncio.Event()
    handle = await bed.dispatch(keep_on_disconnect=True)
    files = bed.sessions.files
    for work in (read(bed), write(bed), files.list(CALLER, "s", "", 10, None)):
        error = await refused(work)
        assert (error.code, error.retryable, error.extra["retry_after"]) == ("session_starting", True, 1)
    bed.provider.start_gate.set()
    agent = await bed.agent()
    frame = await agent.prompt()
    assert await write(bed, data=b"while it works") is not None
    assert await read(bed) == b"while it works"
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["ok"]
    assert await read(bed) == b"while it works"
    bed.provider.start_gate.clear()
    await bed.sessions.kill(CALLER, "s")
    assert await read(bed) == b"while it works"
    again = await bed.dispatch(keep_on_disconnect=True)
    assert (await refused(read(bed))).code == "session_starting"
    assert (await bed.cancel()).status in (200, 202)
    bed.provider.start_gate.set()
    assert (await again.result())["outcome"] == "cancelled"


async def test_a_session_that_is_none_has_no_files(bed: Bed) -> None:
    assert (await refused(read(bed))).code == "not_found"
    assert (await refused(write(bed))).code == "not_found"
    await bed.turn()
    await write(bed)
    stranger = Caller("other", CALLER.scopes)
    assert (await refused(bed.sessions.files.read(stranger, "s", "a"))).code == "not_found"
    await bed.sessions.delete(CALLER, "s")
    for work in (read(bed), write(bed), bed.sessions.files.list(CALLER, "s", "", 10, None)):
        assert (await refused(work)).code == "session_ended"
    assert bed.provider.written == {}


async def test_a_write_that_the_end_overtakes_leaves_nothing(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workspace is removed while it is being written."""
    await bed.turn()
    gate, writing = asyncio.Event(), MemoryFiles.write

    async def slow(self: MemoryFiles, path: str, data: bytes, condition: Precondition = ALWAYS) -> Written | None:
        await gate.wait()
        return await writing(self, path, data, condition)

    monkeypatch.setattr(MemoryFiles, "write", slow)
    late = asyncio.create_task(write(bed))
    await asyncio.sleep(0.1)
    await bed.sessions.delete(CALLER, "s")
    gate.set()
    assert (await refused(late)).code == "session_ended"
    assert bed.provider.removed == [("p", "s"), ("p", "s")]


async def test_writes_of_a_session_never_overlap(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    await bed.turn()
    running, most = 0, 0

    async def slow(self: MemoryFiles, path: str, data: bytes, condition: Precondition = ALWAYS) -> Written | None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1
        return None

    monkeypatch.setattr(MemoryFiles, "write", slow)
    await asyncio.gather(*(write(bed, str(n)) for n in range(4)))
    assert most == 1


async def test_a_directory_of_the_host_needs_the_scope_that_names_it(bed: Bed, tmp_path: Path) -> None:
    await bed.turn()
    handle = await bed.dispatch(keep_on_disconnect=True, workspace={"path": str(tmp_path)})
    agent = await bed.agent(2)
    await agent.finish()
    await handle.result()
    await write(bed)
    plain = Caller("p", frozenset({"dispatch", "read"}))
    error = await refused(bed.sessions.files.read(plain, "s", "a"))
    assert (error.code, error.extra["field"]) == ("forbidden", "workspace.path")


async def test_a_page_says_where_the_next_one_begins(bed: Bed) -> None:
    await bed.turn()
    for name in ("f/a", "f/b", "f/c"):
        await write(bed, name)
    files = bed.sessions.files
    first = await files.list(CALLER, "s", "./f//", 2, None)
    assert (first["path"], [item["path"] for item in first["items"]]) == ("f", ["f/a", "f/b"])
    item = {"name": "c", "path": "f/c", "type": "file", "size": 1, "modified_at": "1970-01-01T00:00:00.000Z"}
    assert await files.list(CALLER, "s", "f", 2, first["next_cursor"]) == {
        "path": "f",
        "items": [item],
        "next_cursor": None,
    }


async def test_where_a_link_leads_is_judged_again_when_its_turn_comes(tmp_path: Path) -> None:
    """A dispatch waits, and meanwhile a step of its ``workspace.path`` is exchanged for a link that leads elsewhere."""
    root, other = tmp_path / "root", tmp_path / "other"
    (root / "checkout").mkdir(parents=True)
    other.mkdir()
    bed = await Bed.make(settings={"local": {"roots": [str(root)]}})
    first = await bed.dispatch("s", keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    where = {"path": str(root / "checkout")}
    waiting = await bed.dispatch("s", prompt="next", keep_on_disconnect=True, on_busy="queue", workspace=where)
    (root / "checkout").rename(root / "moved")
    (root / "checkout").symlink_to(other)
    await agent.finish()
    assert (await first.result())["ok"]
    error = (await waiting.result())["error"]
    assert (error["code"], "under no [local] root" in error["message"]) == ("forbidden", True)
    await bed.close()
