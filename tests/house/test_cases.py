"""Every case that the product answers for by now has a test that names it, in its name or its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.house.tree import ROOT, below

NUMBERS = {
    "A": (1, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19),
    "B": (1, 2, 5, 6, 7, 9, 10, 11),
    "C": (2, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14),
    "D": (1, 2, 3, 4, 6, 7, 9, 10, 11),
    "E": (1, 3, 4, 5, 6, 8, 9, 10, 11, 12),
    "F": (1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 14, 15, 16),
    "G": (1, 2, 3, 5, 7, 8, 9, 10, 11, 13, 14),
    "H": (3, 4, 5, 6, 7, 8, 9, 10),
    "I": (1, 3, 5, 6, 7, 9),
    "J": (1, 3, 5),
    "K": (1, 3, 4),
    "L": (1, 2, 3, 4, 5, 6),
    "M": (1, 3, 4, 6, 7, 8, 9, 10),
    "N": (1, 3, 5, 6),
}
CASES = [f"{letter}{number}" for letter, numbers in NUMBERS.items() for number in numbers]


def case_ids(name: str, docstring: str) -> set[str]:
    """Ids in a test's words: ``_a1`` in its name, or ``case A1`` and ``cases A1, B2 and C3`` in its docstring."""
    lists = re.findall(r"\bcases? ((?:[A-Z]\d+(?:, and |, | and |/)?)+)", docstring, re.IGNORECASE)
    found = {word for text in lists for word in re.findall(r"[A-Z]\d+", text)}
    return found | {word.upper() for word in re.findall(r"_([a-z]\d+)(?=_|$)", name)}


def each_test(source: str) -> Iterator[tuple[str, str]]:
    """Name and docstring of every test function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


@cache
def covered() -> frozenset[str]:
    files = (path for path in below("tests", suffix=".py") if path.relative_to(ROOT).parts[1] != "house")
    tests = (test for path in files if path.name.startswith("test_") for test in each_test(path.read_text()))
    return frozenset(case for test in tests for case in case_ids(*test))


def test_what_counts_as_naming_a_case() -> None:
    assert case_ids("test_stop_case_a1", "Cases B2, C3 and D4: twice; case E5.") == {"A1", "B2", "C3", "D4", "E5"}
    assert case_ids("test_a10_and_utf8_b1x", "In any case, A2 is not named.") == {"A10"}
    source = 'def plain():\n    """case A1"""\n\n\nasync def test_x():\n    """case A2"""\n'
    assert list(each_test(source)) == [("test_x", "case A2")]


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_tested(case: str) -> None:
    assert case in covered()
