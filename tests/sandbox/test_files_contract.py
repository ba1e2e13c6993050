"""What the files of a workspace keep, whatever provider has them (DESIGN 3.11, 4)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.files import Precondition, etag_of
from runner.sandbox.memory import MemoryProvider
from tests.sandbox.test_contract import Bench
from tests.sandbox.test_contract import bench as bench

MOST = 1024 * 1024


def files(bench: Bench, session: str = "of_seat_1") -> Any:
    return bench.provider.files("default", session, None)


async def refused(work: Any) -> tuple[str, str | None]:
    with pytest.raises(RunnerError) as caught:
        await work
    return caught.value.code, caught.value.extra.get("field")


async def inside(bench: Bench, sandbox: Any, script: str) -> bytes:
    """What a command in the sandbox says."""
    heard: list[bytes] = []
    await sandbox.mark(script).set(10.0)
    ended = await sandbox.run(script, ["/bin/sh", "-c", script], heard.append)
    assert ended.code == 0, b"".join(heard)
    return b"".join(heard)


def real(bench: Bench) -> bool:
    return not isinstance(bench.provider, MemoryProvider)


async def test_a_file_goes_in_and_out_beside_a_running_agent(bench: Bench) -> None:
    sandbox = await bench.start(workspace_files={"given.txt": b"given"})
    space = files(bench)
    assert (await space.read("given.txt", MOST)).data == b"given"
    every = bytes(range(256)) * 40
    written = await space.write("new/deep folder/ünï😀.bin", every)
    assert (written.created, written.size, written.etag) == (True, len(every), etag_of(every))
    content = await space.read("new//./deep folder/ünï😀.bin", MOST)
    assert (content.data, content.etag) == (every, written.etag)
    assert not (await space.write("given.txt", b"")).created
    assert (await space.read("given.txt", MOST)).data == b""
    if real(bench):
        assert await inside(bench, sandbox, "cat 'new/deep folder/ünï😀.bin'") == every
        await inside(bench, sandbox, "echo changed > 'new/deep folder/ünï😀.bin' && echo mine > mine && rm given.txt")
        assert (await space.read("new/deep folder/ünï😀.bin", MOST)).data == b"changed\n"
        assert (await space.read("mine", MOST)).data == b"mine\n"
        assert await refused(space.read("given.txt", MOST)) == ("not_found", None)
    await sandbox.destroy()


async def test_they_are_there_before_the_first_start_and_behind_the_last_end(bench: Bench) -> None:
    space = files(bench)
    assert list((await space.list("", b"", 10)).entries) == []
    assert await refused(space.read("a", MOST)) == ("not_found", None)
    assert await refused(space.list("a", b"", 10)) == ("not_found", None)
    assert (await space.write("sub/a", b"1")).created
    sandbox = await bench.start()
    if real(bench):
        assert await inside(bench, sandbox, "cat sub/a && echo 2 >> sub/a") == b"1"
    await sandbox.destroy()
    assert (await space.read("sub/a", MOST)).data == (b"12\n" if real(bench) else b"1")
    await bench.provider.remove("default", "of_seat_1")
    assert await refused(space.read("sub/a", MOST)) == ("not_found", None)


async def test_a_large_file_is_whole_and_one_too_large_is_refused(bench: Bench) -> None:
    await bench.start()
    space, data = files(bench), b"\0\xff\r\n" * 100_000
    await space.write("large", data)
    content = await space.read("large", len(data))
    assert (content.data == data, content.etag) == (True, etag_of(data))
    assert await refused(space.read("large", len(data) - 1)) == ("too_large", None)


async def test_a_folder_is_listed_page_by_page(bench: Bench) -> None:
    await bench.start()
    space = files(bench)
    for name in ("b", "a.txt", "f/x", "f/y/z", "é"):
        await space.write(name, name.encode())
    first = await space.list("", b"", 2)
    assert [(entry.name, entry.kind, entry.size) for entry in first.entries] == [("a.txt", "file", 5), ("b", "file", 1)]
    rest = await space.list("", first.after, 10)
    assert [(entry.name, entry.kind, entry.size) for entry in rest.entries] == [("f", "folder", None), ("é", "file", 2)]
    assert rest.after is None
    assert [entry.name for entry in (await space.list("f/", b"", 10)).entries] == ["x", "y"]
    assert await refused(space.list("b", b"", 10)) == ("invalid_request", "path")
    assert await refused(space.list("nowhere", b"", 10)) == ("not_found", None)


async def test_a_file_and_a_folder_do_not_replace_each_other(bench: Bench) -> None:
    await bench.start(workspace_files={"file": b"old", "folder/x": b"old"})
    space = files(bench)
    assert await refused(space.write("file/below", b"new")) == ("invalid_request", "path")
    assert await refused(space.write("folder", b"new")) == ("invalid_request", "path")
    assert await refused(space.read("folder", MOST)) == ("invalid_request", "path")
    assert (await space.read("file", MOST)).data == b"old"
    assert [entry.name for entry in (await space.list("", b"", 10)).entries] == ["file", "folder"]


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a/", "a\0b", "x" * 2000, "d/" * 100 + "x"])
async def test_a_path_that_leaves_the_workspace_is_refused(bench: Bench, path: str) -> None:
    space = files(bench)
    assert await refused(space.read(path, MOST)) == ("invalid_request", "path")
    assert await refused(space.write(path, b"")) == ("invalid_request", "path")
    if path.strip("./") and path != "a/":
        assert await refused(space.list(path, b"", 10)) == ("invalid_request", "path")


async def test_a_condition_decides_with_the_write(bench: Bench) -> None:
    await bench.start()
    space, new = files(bench), Precondition(none_match=("*",))
    first = await space.write("a", b"1", new)
    assert first.created
    assert await space.write("a", b"2", new) is None
    assert await space.write("a", b"2", Precondition(match=('"other"',))) is None
    assert await space.write("b/c", b"2", Precondition(match=("*",))) is None
    second = await space.write("a", b"2", Precondition(match=('"other"', first.etag)))
    assert (second.created, (await space.read("a", MOST)).data) == (False, b"2")
    assert await space.write("a", b"3", Precondition(none_match=(second.etag,))) is None
    assert [entry.name for entry in (await space.list("", b"", 10)).entries] == ["a"]
    won = await asyncio.gather(*(space.write("race", bytes([n]), new) for n in range(4)))
    (winner,) = (n for n, written in enumerate(won) if written is not None)
    assert (await space.read("race", MOST)).data == bytes([winner])


async def test_links_lead_nowhere_but_into_the_workspace(bench: Bench) -> None:
    """Nor do pipes, nor sockets: none of them is opened."""
    if not real(bench):
        return
    sandbox = await bench.start(workspace_files={"folder/file": b"inside"})
    script = """
        ln -s folder/file good; ln -s ../folder folder/up; ln -s "$PWD/folder" whole
        ln -s /etc/passwd bad; ln -s ../../../../../../../../etc over; ln -s .. above; ln -s loop loop
        ln -s folder/new dangling; ln -s /proc/self/environ proc; mkfifo pipe; ln -s pipe topipe
    """
    await inside(bench, sandbox, script)
    space = files(bench)
    for path in ("good", "folder/up/file", "whole/file", "folder/up/up/file"):
        assert (await space.read(path, MOST)).data == b"inside", path
    for path in ("bad", "over/passwd", "above/x", "loop", "loop/x", "proc", "pipe", "topipe", "pipe/x"):
        code = (await refused(space.read(path, MOST)))[0]
        assert code == ("not_found" if path == "pipe/x" else "invalid_request"), path
        assert await refused(space.write(path, b"new")) == ("invalid_request", "path"), path
    for path in ("over", "above", "loop", "pipe"):
        assert await refused(space.list(path, b"", 10)) == ("invalid_request", "path"), path
    assert not (await space.write("good", b"new")).created
    assert (await space.write("dangling", b"made")).created
    assert await inside(bench, sandbox, "cat folder/file folder/new; test -h good; test -h dangling") == b"newmade"
    kinds = {entry.name: (entry.kind, entry.target) for entry in (await space.list("", b"", 50)).entries}
    assert kinds["good"] == ("link", "folder/file")
    assert kinds["pipe"] == ("other", None)
    assert kinds["bad"] == ("link", "/etc/passwd")


async def test_what_is_replaced_keeps_its_mode_and_the_agent_may_change_what_is_new(bench: Bench) -> None:
    if not real(bench):
        return
    sandbox = await bench.start()
    await inside(bench, sandbox, "echo old > tool && chmod 751 tool")
    space = files(bench)
    await space.write("tool", b"#!/bin/sh\necho runs\n")
    await space.write("made/by/us", b"1")
    assert await inside(bench, sandbox, "stat -c %a tool; ./tool") == b"751\nruns\n"
    await inside(bench, sandbox, "echo 2 >> made/by/us && mv made/by/us made/other && rmdir made/by")
    assert (await space.read("made/other", MOST)).data == b"12\n"


async def test_a_reader_never_meets_half_a_file(bench: Bench) -> None:
    await bench.start()
    space, versions = files(bench), [bytes([65 + n]) * 50_000 for n in range(3)]
    await space.write("f", versions[0])
    count = 4 if bench.emulator is not None else 30

    async def write() -> None:
        for n in range(count):
            await space.write("f", versions[n % 3])

    writing = asyncio.create_task(write())
    while not writing.done():
        assert (await space.read("f", MOST)).data in versions
        await asyncio.sleep(0)
    await writing


async def test_a_workspace_is_copied_into_one_that_has_nothing(bench: Bench) -> None:
    """For a fork; what becomes of one is nothing to the other."""
    assert await bench.provider.copy_workspace(("default", "nobody"), ("default", "fork")) == "none"
    sandbox = await bench.start(workspace_files={"a": b"1", "f/g/b": b"2", "f/large": bytes(200_000)})
    if real(bench):
        script = """
            chmod 751 a; chmod 500 f/g; ln -s /etc/passwd out; ln -s f/large in; mkfifo pipe; mkdir none; touch 'é
x'; ln -s nowhere f/nowhere; head -c 300000 /dev/urandom > noise
        """
        await inside(bench, sandbox, script)
    assert await bench.provider.copy_workspace(("default", "of_seat_1"), ("default", "fork")) == "copied"
    source, fork = files(bench), files(bench, "fork")
    assert (await fork.read("f/g/b", MOST)).data == b"2"
    await source.write("a", b"changed")
    assert (await fork.read("a", MOST)).data == b"1"
    if real(bench):
        assert (await fork.read("noise", MOST)).etag == (await source.read("noise", MOST)).etag
        names = [entry.name for entry in (await fork.list("", b"", 50)).entries]
        assert names == ["a", "f", "in", "noise", "none", "out", "é\nx"]
    assert await bench.provider.copy_workspace(("default", "of_seat_1"), ("default", "fork")) == "copied"
    assert (await fork.read("a", MOST)).data == b"1"
    if real(bench):
        other = await bench.start("seat_2", session_id="fork")
        assert await inside(bench, other, "stat -c %a a f/g; readlink in out f/nowhere; test ! -e pipe; ./a || true")
        await other.destroy()
    await sandbox.destroy()
