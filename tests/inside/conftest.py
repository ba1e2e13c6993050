"""Cells as root and, when the tests run as root, as an unprivileged user too."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.inside.cell import Cell

KINDS = [False, True] if os.getuid() == 0 else [False]


@pytest.fixture(params=KINDS, ids=lambda unprivileged: "nobody" if unprivileged else "self")
def unprivileged(request: pytest.FixtureRequest) -> bool:
    """Whether the cell runs as nobody."""
    value: bool = request.param
    return value


@pytest.fixture
def cell(unprivileged: bool) -> Iterator[Cell]:
    """One cell without an agent yet."""
    with Cell(unprivileged) as made:
        yield made
