"""Where control groups may be made, from what the kernel tells; version 2 is not on every machine that runs this."""

from __future__ import annotations

from pathlib import Path

from runner.rules.isolation import Limits
from runner.sandbox.cgroups import Cgroup, places_of

LIMITS = Limits(1 << 30, pids=300, cpus=1.5)
UNIT = "system.slice/acp-runner.service/serve"


def mount(point: Path, kind: str, options: str, root: str = "/") -> str:
    return f"31 22 0:27 {root} {point} rw,nosuid shared:9 - {kind} {kind} rw,{options}\n"


def test_version_2_offers_the_own_group_and_the_one_above(tmp_path: Path) -> None:
    (tmp_path / UNIT).mkdir(parents=True)
    info = "broken - x y z a b\n" + mount(tmp_path, "cgroup2", "nsdelegate")
    unified, found = places_of(f"0::/{UNIT}\n", info, lambda at: "cpuset cpu io memory pids\n")
    places = (tmp_path / UNIT, tmp_path / UNIT.rpartition("/")[0])
    assert unified
    assert found == dict.fromkeys(("cpu", "memory", "pids"), places)


def test_a_root_of_version_2_has_none_above(tmp_path: Path) -> None:
    """A container with a hierarchy of its own."""
    unified, found = places_of("0::/\n", mount(tmp_path, "cgroup2", "x"), lambda at: "memory\n")
    assert (unified, found) == (True, {"memory": (tmp_path,)})


def test_a_hybrid_has_its_controllers_at_version_1(tmp_path: Path) -> None:
    """Version 2 is mounted there too, with none of them; a mount may show a part of the hierarchy only."""
    (tmp_path / "memory" / "inner").mkdir(parents=True)
    info = (
        mount(tmp_path / "memory", "cgroup", "memory", "/outer")
        + mount(tmp_path / "cpu", "cgroup", "cpu,cpuacct")
        + mount(tmp_path / "unified", "cgroup2", "x")
    )
    mine = "4:memory:/outer/inner\n1:cpu,cpuacct:/elsewhere\n0::/\n"
    unified, found = places_of(mine, info, lambda at: "hugetlb\n")
    assert not unified
    assert found == {"memory": (tmp_path / "memory" / "inner",), "cpu": (tmp_path / "cpu",)}


def test_what_nobody_can_tell_is_not_used(tmp_path: Path) -> None:
    def refused(at: Path) -> str:
        raise PermissionError(at)

    assert places_of("0::/\n", mount(tmp_path, "cgroup2", "x"), refused) == (False, {})


def test_the_limits_of_version_2_and_its_word_on_memory(tmp_path: Path) -> None:
    group = Cgroup(dict.fromkeys(("memory", "pids", "cpu"), tmp_path / "cell"), unified=True)
    group.create(LIMITS)
    written = {file.name: file.read_text() for file in (tmp_path / "cell").iterdir()}
    assert written == {"memory.max": str(1 << 30), "pids.max": "300", "cpu.max": "150000 100000"}
    assert group.memory_kills() == 0
    (tmp_path / "cell" / "memory.events").write_text("low 0\nmax 12\noom 1\noom_kill 1\n")
    assert group.memory_kills() == 1


def test_the_limits_of_version_1(tmp_path: Path) -> None:
    group = Cgroup({name: tmp_path / name / "cell" for name in ("memory", "pids", "cpu")}, unified=False)
    for name in ("memory", "pids", "cpu"):
        (tmp_path / name).mkdir()
    group.create(LIMITS)
    written = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.glob("*/cell/*")}
    assert written == {
        "memory/cell/memory.limit_in_bytes": str(1 << 30),
        "pids/cell/pids.max": "300",
        "cpu/cell/cpu.cfs_period_us": "100000",
        "cpu/cell/cpu.cfs_quota_us": "150000",
    }
    (tmp_path / "memory" / "cell" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert group.memory_kills() == 2
