"""Files and folders of a session never lead out of it (DESIGN 3.11)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.sandbox import workspace
from runner.sandbox.workspace import check_files, open_directory, remove_tree, write_given, write_private


def refused(root: Path, path: str) -> RunnerError:
    with pytest.raises(RunnerError) as error:
        write_given(root, {path: b"new"})
    assert error.value.code == "invalid_request"
    assert error.value.extra["field"] == "workspace.files"
    return error.value


def test_folders_are_made_and_a_path_is_normalised(tmp_path: Path) -> None:
    write_given(tmp_path, {"a//b/./c.txt": b"1", "top": b"2"})
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == b"1"
    assert (tmp_path / "top").read_bytes() == b"2"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c.txt", "top"]


@pytest.mark.parametrize("path", ["link/file", "link", "dangling", "inner/link/x"])
def test_a_symlink_is_never_followed(tmp_path: Path, path: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (root / "inner").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "inner" / "link").symlink_to("/")
    (root / "dangling").symlink_to(outside / "new")
    refused(root, path)
    assert list(outside.iterdir()) == []
    assert (root / "link").is_symlink()


def test_a_folder_is_not_replaced_by_a_file_nor_a_file_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    refused(tmp_path, "folder")
    refused(tmp_path, "file/below")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_fifo_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path, "pipe")


def test_a_hard_link_s_other_name_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").write_bytes(b"precious")
    os.link(tmp_path / "outside", tmp_path / "root" / "linked")
    write_given(tmp_path / "root", {"linked": b"new"})
    assert (tmp_path / "outside").read_bytes() == b"precious"
    assert (tmp_path / "root" / "linked").read_bytes() == b"new"


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"old")
    (tmp_path / "run").chmod(0o751)
    write_given(tmp_path, {"run": b"new"})
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o751


def test_bounds_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_FILES", 2)
    monkeypatch.setattr(workspace, "MAX_BYTES", 10)
    check_files({"a": b"12345", "b": b"12345"})
    for files in ({"a": b"", "b": b"", "c": b""}, {"a": b"12345678901"}):
        with pytest.raises(RunnerError) as error:
            check_files(files)
        assert error.value.code == "too_large"
        assert "10 bytes" in error.value.message


def test_nothing_is_written_when_one_path_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "../x")
    with pytest.raises(RunnerError):
        write_given(tmp_path, {"good": b"", "../bad": b""})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        write_given(tmp_path, {"file": b"new"})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_private_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_private(tmp_path, {".x/key": b"1"})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / ".x" / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / ".x").stat().st_mode) == 0o700


def test_a_private_file_replaces_a_symlink_of_its_name(tmp_path: Path) -> None:
    """An agent may have made one in its home; the next start must neither follow it nor fail for ever."""
    (tmp_path / "outside").write_bytes(b"precious")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").symlink_to(tmp_path / "outside")
    write_private(tmp_path / "home", {"key": b"new"})
    assert (tmp_path / "outside").read_bytes() == b"precious"
    assert not (tmp_path / "home" / "key").is_symlink()


def test_no_descriptor_is_lost_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    before = len(os.listdir("/proc/self/fd"))
    for parts in (("a", "b"), ("link", "x"), ("a", "b", "c")):
        try:
            os.close(open_directory(tmp_path, parts))
        except OSError:
            assert parts[0] == "link"
    for parts in (("a", "nothing", "x"), ("a", "b"), ("nothing", "x")):
        remove_tree(tmp_path, parts)
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "a").exists()
    assert not (tmp_path / "a" / "b").exists()


def test_a_symlink_itself_is_not_taken_for_a_tree(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="link"):
        remove_tree(tmp_path, ("link",))
    assert (tmp_path / "outside" / "kept").exists()
