"""Files below one folder: nothing leads out, whoever changes it meanwhile (DESIGN 3.11)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.clock import rfc3339
from runner.errors import RunnerError
from runner.sandbox import tree as module
from runner.sandbox.daytona.programs import program
from runner.sandbox.local_files import LocalFiles
from runner.sandbox.tree import Refused, Tree

MOST = 1000


@contextmanager
def opened(root: Path, **more: Any) -> Iterator[Tree]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Tree(fd, (str(root),), **more)
    finally:
        os.close(fd)


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as caught:
        work()
    return caught.value.code


def test_a_folder_that_turns_into_a_link_meanwhile_leads_nowhere(tmp_path: Path) -> None:
    """An agent that exchanges both all the time gets nothing read or written outside."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root, root / "real", outside):
        folder.mkdir()
    (root / "real" / "f").write_bytes(b"inside")
    (outside / "f").write_bytes(b"outside")
    (root / "link").symlink_to(outside)
    over = threading.Event()

    def moved(name: str, to: str) -> None:
        """The tree may have made a folder of that name meanwhile."""
        while True:
            try:
                return os.rename(root / name, root / to)
            except OSError:
                shutil.rmtree(root / to, ignore_errors=True)

    def exchange() -> None:
        while not over.is_set():
            for name, to in (("real", "x"), ("link", "real"), ("real", "link"), ("x", "real")):
                moved(name, to)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=exchange)
    thread.start()
    seen = set()
    try:
        with opened(root) as tree:
            for _ in range(3000):
                with suppress(Refused, OSError):
                    seen.add(tree.read(("real", "f"), MOST)[0])
                with suppress(Refused, OSError):
                    tree.write(("real", "f"), b"inside")
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert seen == {b"inside"}
    assert (outside / "f").read_bytes() == b"outside"
    assert sorted(os.listdir(outside)) == ["f"]


def test_hidden_folders_and_foreign_devices_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "state" / "deep").mkdir(parents=True)
    (tmp_path / "state" / "token").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("state")
    facts = (tmp_path / "state").stat()
    with opened(tmp_path, hidden=frozenset({(facts.st_dev, facts.st_ino)})) as tree:
        for path in (("state",), ("state", "token"), ("link", "token"), ("state", "deep", "x")):
            assert refused(partial(tree.read, path, MOST)) == "not_found"
            assert refused(partial(tree.write, path, b"")) == "not_found"
        assert refused(lambda: tree.listing(("link",), b"", 10)) == "not_found"
        assert [entry["name"] for entry in tree.listing((), b"", 10)[0]] == ["link"]
    assert os.listdir(tmp_path / "state" / "deep") == []
    fd = os.open("/", os.O_RDONLY)
    try:
        whole = Tree(fd, ("/",), foreign=frozenset({os.stat("/proc").st_dev}))
        assert refused(lambda: whole.read(("proc", "self", "environ"), MOST)) == "not_found"
        assert "proc" not in [entry["name"] for entry in whole.listing((), b"", 1000)[0]]
    finally:
        os.close(fd)
    assert (
        refused(lambda: opened(Path("/proc"), foreign=frozenset({os.stat("/proc").st_dev})).__enter__()) == "not_found"
    )


def test_names_that_are_no_text_are_shown(tmp_path: Path) -> None:
    for name in (b"a", b"\xff\xfe", b"line\nbreak", "ü".encode()):
        (tmp_path / os.fsdecode(name)).write_bytes(b"1")
    with opened(tmp_path) as tree:
        entries, last = tree.listing((), b"", 2)
        assert ([entry["name"] for entry in entries], last) == (["a", "line\nbreak"], b"line\nbreak")
        entries, last = tree.listing((), b"line\nbreak", 2)
        assert ([entry["name"] for entry in entries], last) == (["ü", "\ufffd\ufffd"], None)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (-(10**9), "1970-01-01T00:00:00.000Z"),
        (1_700_000_000, "2023-11-14T22:13:20.000Z"),
        (10**11, "5138-11-16T09:46:40.000Z"),
        (9 * 10**18, "9999-12-31T23:59:59.999Z"),
    ],
)
def test_times_are_such_as_a_calendar_has(seconds: int, told: str) -> None:
    """Whatever an agent set, and its disk took: neither a listing nor an answer's head fails of it."""
    facts: Any = SimpleNamespace(st_mtime_ns=seconds * 10**9)
    assert rfc3339(module.changed(facts)) == told
    assert "GMT" in format_datetime(datetime.fromtimestamp(module.changed(facts) / 1000, UTC), usegmt=True)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with opened(tmp_path) as tree, pytest.raises(OSError, match="No space"):
        tree.write(("f",), b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"old")]


def test_no_descriptor_is_lost(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name, target in (("loop", "loop"), ("out", "/etc/passwd"), ("up", "d/.."), ("dangling", "d/none")):
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    with opened(tmp_path) as tree:
        for path in (("loop",), ("out",), ("up",), ("dangling",), ("pipe",), ("d",), ("no", "x"), ("up", "up", "d")):
            for work in (lambda p: tree.read(p, MOST), lambda p: tree.listing(p, b"", 9), lambda p: tree.write(p, b"")):
                try:
                    work(path)
                except Refused:
                    continue
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "d" / "none").read_bytes() == b""


def test_a_hard_link_s_other_name_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").write_bytes(b"precious")
    os.link(tmp_path / "outside", tmp_path / "root" / "linked")
    with opened(tmp_path / "root") as tree:
        assert not tree.write(("linked",), b"new")
    assert (tmp_path / "outside").read_bytes() == b"precious"


async def test_a_workspace_that_was_exchanged_for_a_link_is_none(tmp_path: Path) -> None:
    own = tmp_path / "workspaces" / "p" / "s"
    own.parent.mkdir(parents=True)
    own.symlink_to("/etc")
    files = LocalFiles(tmp_path, own, own=True)
    for work in (files.read("passwd", 10_000_000), files.write("x", b""), files.list("", b"", 10)):
        with pytest.raises(RunnerError):
            await work
    assert "x" not in os.listdir("/etc")


async def test_a_workspace_of_the_host_that_was_exchanged_since_it_was_judged_is_none(tmp_path: Path) -> None:
    checkout = tmp_path / "top" / "checkout"
    checkout.mkdir(parents=True)
    (checkout / "a").write_bytes(b"mine")
    files = LocalFiles(tmp_path / "state", checkout, own=False)
    assert (await files.read("a", 10)).data == b"mine"
    (tmp_path / "top").rename(tmp_path / "moved")
    (tmp_path / "top").symlink_to(tmp_path / "moved")
    for work in (files.read("a", 10), files.write("a", b"x")):
        with pytest.raises(RunnerError):
            await work
    assert (tmp_path / "moved" / "checkout" / "a").read_bytes() == b"mine"


def test_it_is_one_program_of_the_standard_library_alone(tmp_path: Path) -> None:
    """As a remote sandbox runs it: isolated, one request, one line."""
    root = tmp_path / "workspace"

    def ask(**asked: Any) -> Any:
        request = base64.b64encode(json.dumps({"root": str(root), **asked}).encode()).decode()
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program(module), request], capture_output=True, check=True
        )
        assert done.stderr == b""
        return json.loads(done.stdout)

    assert ask(op="list", path=[], after="", limit=3)["error"] == "not_found"
    assert ask(op="write", path=["d", "ü"], data="MTIz", match=None, none_match=["*"]) == {"created": True}
    assert ask(op="write", path=["d", "ü"], data="", match=None, none_match=["*"])["error"] == "mismatch"
    said = ask(op="read", path=["d", "ü"], most=3, inline=10)
    assert (said["data"], said["size"]) == ("MTIz", 3)
    assert ask(op="read", path=["d", "ü"], most=2, inline=10)["error"] == "too_large"
    staged = str(tmp_path / "staged-1")
    assert "data" not in ask(op="read", path=["d", "ü"], most=3, inline=2, staged=staged)
    assert Path(staged).read_bytes() == b"123"
    assert ask(op="write", path=["e"], data=None, staged=staged, match=None, none_match=None) == {"created": True}
    assert (root / "e").read_bytes() == b"123"
    assert not Path(staged).exists()
    assert len(program(module)) < 20_000
    assert Path(module.__file__).read_text().count("from runner") == 0
