"""What is shown is in a file first: whole entries behind any kill, and no file longer than it is needed."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.turn.live_file import END, HEAD, Entry, LiveFile, Pen, left_by, read
from runner.turn.log import Chunk

SEGMENT = 4096


class Disk:
    """A live file in small segments, its time, and a disk that can be full."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int = 10 * SEGMENT) -> None:
        self.folder = folder / "live"
        self.now = 100.0
        self.full = False
        self.file = LiveFile(self.folder, "rep_1", lambda: self.now, segment_bytes=SEGMENT, most_bytes=most_bytes)
        self._reserve = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self.reserve)

    def reserve(self, fd: int, start: int, size: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._reserve(fd, start, size)

    def kept(self) -> list[Entry]:
        return list(read(sorted(self.folder.iterdir()))) if self.folder.exists() else []

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def chunk(text: str | bytes = b"{}", *, durable: bool = False, whole: bytes = b"") -> Chunk:
    lines = text.encode() if isinstance(text, str) else text
    return Chunk(1, 1, 1, "p", lines + b"\n", whole, durable)


def fill(pen: Pen, segments: int = 1) -> None:
    """Write until this many segments more are there."""
    for _ in range(segments * 4):
        pen.write(chunk(b"x" * (SEGMENT // 4)))


def test_entries_are_read_as_they_were_written(disk: Disk) -> None:
    one, other = disk.file.pen("p", "s"), disk.file.pen("ä", "s-2")
    one.write(chunk("a"))
    other.write(chunk("b", durable=True))
    one.write(chunk("update", durable=True, whole=b"record\n"))
    one.write(chunk("l" * 300), b"short\n")
    assert disk.kept() == [
        Entry(("p", "s"), False, b"a\n"),
        Entry(("ä", "s-2"), True, b"b\n"),
        Entry(("p", "s"), True, b"record\n"),
        Entry(("p", "s"), False, b"short\n"),
    ]


def test_it_is_for_nobody_else_and_not_there_before_it_is_needed(disk: Disk) -> None:
    pen = disk.file.pen("p", "s")
    assert not disk.folder.exists()
    pen.write(chunk())
    assert stat.S_IMODE(disk.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in disk.folder.iterdir()] == [0o600]
    assert left_by(disk.folder) == {"rep_1": disk.file.paths}
    assert left_by(disk.folder / "nowhere") == {}


def test_a_large_event_has_a_segment_of_its_size(disk: Disk) -> None:
    pen = disk.file.pen("p", "s")
    large = b"x" * (3 * SEGMENT)
    for text in (b"a", large, b"b"):
        pen.write(chunk(text))
    assert [entry.lines for entry in disk.kept()] == [b"a\n", large + b"\n", b"b\n"]


def test_what_is_settled_is_kept_no_longer(disk: Disk) -> None:
    one, other = disk.file.pen("p", "one"), disk.file.pen("p", "other")
    other.write(chunk("long ago"))
    fill(one, 3)
    names = disk.names()
    assert len(names) > 3
    one.settled()
    assert disk.names() == [names[0], names[-1]], "the other session's, and the one that is written to"
    other.settled()
    assert disk.names() == [names[-1]]
    assert disk.kept() == []
    one.write(chunk("again"))
    assert [entry.lines for entry in disk.kept()] == [b"again\n"], "its bytes are used again"


def test_a_full_segment_is_asked_for_by_nobody_who_is_at_rest(disk: Disk) -> None:
    """Whoever forgot to say that it is settled."""
    one, other = disk.file.pen("p", "one"), disk.file.pen("p", "other")
    other.write(chunk("long ago"))
    fill(one, 2)
    names = disk.names()
    disk.file.at_rest = lambda key: key == ("p", "other")
    fill(one, 1)
    assert names[0] in disk.names(), "the first one has something of both"
    one.settled()
    fill(one, 1)
    assert names[0] not in disk.names()


def test_a_file_that_is_closed_leaves_what_somebody_needs(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    one, other = disk.file.pen("p", "one"), disk.file.pen("p", "other")
    one.write(chunk("a"))
    fill(other, 2)
    other.settled()
    disk.file.close()
    disk.file.close()
    one.write(chunk("too late"))
    assert disk.kept()[0].lines == b"a\n"
    assert len(disk.names()) == 1
    assert "1 sessions" in caplog.text


def test_a_file_that_nobody_needs_is_gone_when_it_is_closed(disk: Disk) -> None:
    pen = disk.file.pen("p", "s")
    fill(pen, 2)
    pen.settled()
    disk.file.close()
    assert disk.names() == []


def test_a_turn_that_does_not_end_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path, monkeypatch, most_bytes=3 * SEGMENT)
    pen = disk.file.pen("p", "s")
    fill(pen, 9)
    pen.write(chunk("newest"))
    assert sum(path.stat().st_size for path in disk.folder.iterdir()) <= 3 * SEGMENT
    assert disk.kept()[-1].lines == b"newest\n"
    assert "oldest segment is dropped" in caplog.text


def test_a_full_disk_is_told_once_and_stops_nobody(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    pen = disk.file.pen("p", "s")
    pen.write(chunk("before"))
    disk.full = True
    fill(pen, 3)
    assert "No space" in str(disk.file.failing)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    unwritten = disk.file.unwritten
    assert unwritten > 0
    assert len(disk.names()) == 1, "no half-made segment stays"
    disk.full = False
    fill(pen)
    assert disk.file.unwritten > unwritten, "it is not tried at each event"
    disk.now += 2
    pen.write(chunk("after" * 500))
    assert disk.file.failing is None
    assert disk.kept()[-1].lines == b"after" * 500 + b"\n"
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


def test_a_folder_that_cannot_be_made_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "live").write_text("not a folder")
    file = LiveFile(tmp_path / "live", "rep_1", lambda: 1.0)
    file.pen("p", "s").write(chunk())
    assert file.failing is not None
    file.close()


TEXTS = st.lists(st.binary(min_size=1, max_size=60).map(lambda text: text.replace(b"\n", b"")), max_size=12)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.data())
@settings(max_examples=60)
def test_a_kill_between_two_stores_tears_no_entry(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[bytes]], data: st.DataObject
) -> None:
    """Whatever the bytes of the last write are at the kill, a prefix of them: all that was shown before is read."""
    file = LiveFile(tmp_path_factory.mktemp("torn"), "rep_1", lambda: 1.0, segment_bytes=1 << 16)
    pen = file.pen("p", "s")
    for texts in runs:
        pen.settled()
        for text in texts:
            pen.write(chunk(text))
    paths = file.paths
    if not paths:
        return
    shown = [text + b"\n" for text in runs[-1]]
    assert [entry.lines for entry in read(paths)] == shown
    image = bytearray(paths[0].read_bytes())
    at = sum(HEAD.size + 3 + len(text) for text in shown)
    body = b"p\0s" + data.draw(st.binary(max_size=40)) + b"\n" + END
    stored = data.draw(st.integers(0, len(body)))
    image[at + HEAD.size : at + HEAD.size + stored] = body[:stored]
    if stored == len(body):
        head = HEAD.pack(0, 3, len(body) - 3 - len(END), b"Lf")
        part = data.draw(st.integers(0, len(head) - 1))
        image[at : at + part] = head[:part]
    paths[0].write_bytes(image)
    assert [entry.lines for entry in read(paths)] == shown
    file.close()


def test_a_file_that_was_cut_is_read_up_to_there(disk: Disk) -> None:
    pen: Any = disk.file.pen("p", "s")
    pen.write(chunk("a"))
    pen.write(chunk("b" * 100))
    [path] = disk.file.paths
    whole = path.read_bytes()
    for length in range(2 * HEAD.size + 120):
        path.write_bytes(whole[:length])
        assert [entry.lines for entry in read([path, path.with_name("gone")])] in (
            [],
            [b"a\n"],
            [b"a\n", b"b" * 100 + b"\n"],
        )
