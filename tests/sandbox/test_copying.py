"""A workspace that is copied into a fork's: all of it or nothing, and never anything from outside."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from runner.sandbox.copying import Budget, TooMuch, copy_tree

SOURCE = ("workspaces", "p", "s")
TARGET = ("workspaces", "p", "new")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path.joinpath(*SOURCE)
    (made / "src").mkdir(parents=True)
    (made / "src" / "a.py").write_text("print()")
    (made / "run.sh").write_text("true")
    os.chmod(made / "run.sh", 0o755)
    return made


def copy(base: Path, **more: int) -> bool:
    return copy_tree(base, SOURCE, TARGET, Budget(time.monotonic() + 60, **more))


def left(base: Path) -> list[str]:
    return sorted(path.name for path in base.joinpath(*TARGET[:-1]).iterdir())


def test_files_folders_modes_and_times_go_over(tmp_path: Path, source: Path) -> None:
    os.utime(source / "run.sh", ns=(10**18, 10**18))
    assert copy(tmp_path)
    target = tmp_path.joinpath(*TARGET)
    assert (target / "src" / "a.py").read_text() == "print()"
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "run.sh").stat().st_mtime_ns == 10**18
    assert left(tmp_path) == ["new", "s"]


def test_a_file_is_copied_whole_whatever_its_size(tmp_path: Path, source: Path) -> None:
    content = os.urandom(3 * 1024 * 1024 + 17)
    (source / "big").write_bytes(content)
    assert copy(tmp_path)
    assert (tmp_path.joinpath(*TARGET) / "big").read_bytes() == content


def test_links_stay_links_and_nothing_is_followed(tmp_path: Path, source: Path) -> None:
    (tmp_path / "secret").write_text("no")
    (source / "link").symlink_to(tmp_path / "secret")
    (source / "outside").symlink_to(tmp_path)
    os.mkfifo(source / "pipe")
    assert copy(tmp_path)
    target = tmp_path.joinpath(*TARGET)
    assert os.readlink(target / "link") == str(tmp_path / "secret")
    assert (target / "outside").is_symlink()
    assert not (target / "pipe").exists()


def test_a_workspace_that_is_a_link_is_not_copied(tmp_path: Path, source: Path) -> None:
    source.rename(tmp_path / "elsewhere")
    source.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        copy(tmp_path)


@pytest.mark.parametrize("bound", [{"entries": 2}, {"size": 5}])
def test_what_is_too_much_leaves_nothing(tmp_path: Path, source: Path, bound: dict[str, int]) -> None:
    with pytest.raises(TooMuch):
        copy(tmp_path, **bound)
    assert left(tmp_path) == ["s"]


def test_what_takes_too_long_leaves_nothing(tmp_path: Path, source: Path) -> None:
    with pytest.raises(TooMuch):
        copy_tree(tmp_path, SOURCE, TARGET, Budget(time.monotonic() - 1))
    assert left(tmp_path) == ["s"]


def test_a_target_that_has_something_in_it_stays(tmp_path: Path, source: Path) -> None:
    target = tmp_path.joinpath(*TARGET)
    target.mkdir()
    (target / "mine").write_text("mine")
    assert copy(tmp_path)
    assert [path.name for path in target.iterdir()] == ["mine"]
    assert left(tmp_path) == ["new", "s"]


def test_nothing_to_copy(tmp_path: Path) -> None:
    assert not copy(tmp_path)


def test_a_folder_that_may_not_be_written_goes_over_and_can_be_removed(tmp_path: Path, source: Path) -> None:
    os.chmod(source / "src", 0o555)
    assert copy(tmp_path)
    assert (tmp_path.joinpath(*TARGET) / "src").stat().st_mode & 0o700 == 0o700
    os.chmod(source / "src", 0o755)
