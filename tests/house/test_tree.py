"""The rules of the house that no tool checks (DESIGN 6)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import ROOT, below, files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_COMMENT_LINES = 3
CODE = ("runner", "sandboxes", "scripts")

# Written in pieces, so that this file does not hold what it looks for.
HOSTS = [
    ".".join(parts)
    for parts in (
        ("registry", "npmjs", "org"),
        ("registry", "yarnpkg", "com"),
        ("npmjs", "com"),
        ("pypi", "org"),
        ("pypi", "python", "org"),
        ("pythonhosted", "org"),
        ("deb", "debian", "org"),
        ("security", "debian", "org"),
    )
]
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:" + "root|work|tmp/brief" + r")/\w")
UNFINISHED = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
BANNER = re.compile(r"^#\s*[-=#*~_]{4,}")


def texts() -> Iterator[tuple[str, str]]:
    for path in files():
        try:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def lines_that(match: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:160]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if match.search(line)
    ]


def comment_blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Runs of whole-line comments: the first line's number and their text."""
    block: list[str] = []
    start = last = 0
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line.strip() != token.string:
            continue
        line = token.start[0]
        if line != last + 1 and block:
            yield start, block
            block = []
        if not block:
            start = line
        block.append(token.string)
        last = line
    if block:
        yield start, block


def python_files() -> list[Path]:
    return below(*CODE, suffix=".py")


def test_the_tree_is_seen() -> None:
    names = {str(path.relative_to(ROOT)) for path in files()}
    assert {"pyproject.toml", "README.md", "LICENSE", "scripts/setup", "runner/errors.py"} <= names
    assert len(python_files()) > 20


def test_no_file_names_a_package_registry() -> None:
    assert lines_that(re.compile("|".join(map(re.escape, HOSTS)))) == []


def test_no_file_holds_a_path_of_the_machine_it_was_written_on() -> None:
    assert MACHINE_PATH.search("cd /" + "root/x")
    assert lines_that(MACHINE_PATH) == []


def test_nothing_is_left_unfinished() -> None:
    assert lines_that(UNFINISHED) == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    empty = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
    assert [str(path) for path in python_files() if {path.stem, path.parent.name} & empty] == []


def test_files_are_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in python_files()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    }
    assert long == {}


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_comments_are_short_and_no_banners() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files()
        for line, block in comment_blocks(path)
        if len(block) > MAX_COMMENT_LINES or any(BANNER.match(text) for text in block)
    ]
    assert bad == []


@pytest.mark.parametrize("wrong", ["cancel" + "ed", "Cancel" + "ed"])
def test_the_spelling_is_cancelled(wrong: str) -> None:
    assert [
        f"{path.relative_to(ROOT)}"
        for path in [*below("runner", "docs"), ROOT / "README.md"]
        if wrong in path.read_text(encoding="utf-8", errors="replace")
    ] == []


def test_every_package_of_the_product_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in below("runner", suffix=".py")
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert silent == []
