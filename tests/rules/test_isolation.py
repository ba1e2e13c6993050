"""Which level of isolation a runner gets, by what keeps each limit, and whom it may serve."""

from __future__ import annotations

from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.isolation import Choice, Probed, Refusal, choose, short_of_memory, unfit

ALL = Probed()
NO_CELL = Probed(cell="no bubblewrap")
NO_LANDLOCK = Probed(landlock="no Landlock")
NEITHER = Probed(cell="no bubblewrap", landlock="no Landlock")
NO_GROUPS: dict[str, Any] = {"memory": "no group", "pids": "no group", "cpu": "no group"}


@pytest.mark.parametrize(
    ("wanted", "probed", "level", "why"),
    [
        ("auto", ALL, "cell", ""),
        ("auto", NO_LANDLOCK, "cell", ""),
        ("auto", NO_CELL, "landlock", "cell: no bubblewrap"),
        ("auto", NEITHER, "none", "cell: no bubblewrap; landlock: no Landlock"),
        ("cell", ALL, "cell", ""),
        ("landlock", ALL, "landlock", "[local] isolation = landlock"),
        ("landlock", NO_CELL, "landlock", "cell: no bubblewrap"),
        ("none", ALL, "none", "[local] isolation = none"),
        ("none", NEITHER, "none", "cell: no bubblewrap; landlock: no Landlock"),
    ],
)
def test_the_strongest_level_that_works_or_the_one_that_was_named(
    wanted: Any, probed: Probed, level: str, why: str
) -> None:
    chosen = choose(wanted, "shared", probed)
    assert isinstance(chosen, Choice)
    assert (chosen.level, chosen.why) == (level, why)


@pytest.mark.parametrize(
    ("wanted", "network", "probed", "field"),
    [
        ("cell", "shared", NO_CELL, "local.isolation"),
        ("landlock", "shared", NO_LANDLOCK, "local.isolation"),
        ("auto", "none", NO_CELL, "local.network"),
        ("none", "none", ALL, "local.network"),
        ("landlock", "proxy", ALL, "local.network"),
    ],
)
def test_what_was_named_is_never_weakened_in_silence(wanted: Any, network: Any, probed: Probed, field: str) -> None:
    refused = choose(wanted, network, probed)
    assert isinstance(refused, Refusal)
    assert refused.field == field


@pytest.mark.parametrize(
    ("wanted", "probed", "by"),
    [
        ("cell", ALL, ("cgroup", "cgroup", "cgroup")),
        ("none", ALL, ("cgroup", "cgroup", "cgroup")),
        ("cell", Probed(**NO_GROUPS), ("init", "rlimit", "off")),
        ("cell", Probed(**NO_GROUPS, root=True), ("init", "off", "off")),
        ("landlock", Probed(**NO_GROUPS), ("init", "off", "off")),
        ("none", Probed(**NO_GROUPS), ("init", "off", "off")),
    ],
)
def test_a_limit_is_told_with_what_keeps_it(wanted: Any, probed: Probed, by: tuple[str, ...]) -> None:
    """RLIMIT_NPROC counts one cell only inside its own user namespace, and does not bind root."""
    chosen = choose(wanted, "shared", probed, memory_bytes=1 << 30, pids=100, cpus=2.0)
    assert isinstance(chosen, Choice)
    limits = chosen.limits
    assert (limits.memory_by, limits.pids_by, limits.cpus_by) == by
    assert limits.view()["pids"] == {"limit": 100, "by": by[1]}


def test_no_limit_is_kept_by_nothing() -> None:
    chosen = choose("auto", "shared", ALL)
    assert isinstance(chosen, Choice)
    assert {bound["by"] for bound in chosen.limits.view().values()} == {"off"}


@pytest.mark.parametrize(
    ("level", "projects", "beyond", "allow_weak", "served"),
    [
        ("cell", 5, True, False, True),
        ("landlock", 1, False, False, True),
        ("none", 0, False, False, True),
        ("none", 2, False, False, False),
        ("landlock", 2, False, False, False),
        ("landlock", 1, True, False, False),
        ("none", 2, True, True, True),
    ],
)
def test_below_cell_only_one_project_on_loopback(
    level: Any, projects: int, beyond: bool, allow_weak: bool, served: bool
) -> None:
    """Case K1: DESIGN 3.10."""
    refused = unfit(level, projects=projects, beyond_loopback=beyond, allow_weak=allow_weak)
    assert (refused is None) == served


@pytest.mark.parametrize(
    ("said", "killed", "told"),
    [
        ("It broke.", 0, "It broke."),
        ("It broke.", 1, "It broke. The sandbox had no memory left: a process of it had to be killed"),
        ("It broke.", 3, "It broke. The sandbox had no memory left: 3 processes of it had to be killed"),
        ("killed ([local] memory_bytes = 9)", 1, "killed ([local] memory_bytes = 9)"),
    ],
)
def test_an_error_says_when_memory_was_short(said: str, killed: int, told: str) -> None:
    error = short_of_memory(RunnerError("harness_protocol_error", said), killed)
    assert error.code == "harness_protocol_error"
    assert error.message.removesuffix(" ([local] memory_bytes).") == told
