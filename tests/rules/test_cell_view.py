"""The bubblewrap command: what it shows, in which order, and what stays hidden."""

from __future__ import annotations

from typing import Any

import pytest

from runner.rules.cell_view import CellView, System, below, bubblewrap, places_of, toolchain

SYSTEM = System(("/usr",), (("/bin", "usr/bin"), ("/lib", "usr/lib")), ("/etc/hosts",))
STATE = "/home/me/.local/state/acp-runner"
OWN = f"{STATE}/homes/p/s"


def view(**changes: Any) -> CellView:
    members: dict[str, Any] = {
        "read": (),
        "write": (f"{STATE}/workspaces/p/s", f"{OWN}/home"),
        "hidden": (STATE,),
        "tmp": f"{OWN}/tmp",
        "accounts": (f"{OWN}/passwd", f"{OWN}/group"),
    }
    return CellView(**{**members, **changes})


def command(shown: CellView, network: Any = "shared") -> list[str]:
    return bubblewrap("/usr/bin/bwrap", SYSTEM, shown, uid=1000, gid=1001, network=network, init=["/python", "init.py"])


def mounts(shown: CellView) -> list[tuple[str, str]]:
    """What is mounted behind the fixed part, in order: option and path."""
    argv = command(shown)
    argv = argv[argv.index("/var/tmp") + 1 : argv.index("--remount-ro")]
    found = []
    while argv:
        size = 2 if argv[0] == "--tmpfs" else 3
        assert size == 2 or argv[1] == argv[2]
        found.append((argv[0], argv[1]))
        argv = argv[size:]
    return found


def test_the_whole_command() -> None:
    tmp = f"{OWN}/tmp"
    expected = (
        "/usr/bin/bwrap --unshare-user --uid 1000 --gid 1001 --unshare-pid --unshare-ipc --unshare-uts "
        "--unshare-cgroup-try --die-with-parent --as-pid-1 --hostname cell --ro-bind /usr /usr --symlink usr/bin /bin "
        f"--symlink usr/lib /lib --ro-bind-try /etc/hosts /etc/hosts --ro-bind {OWN}/passwd /etc/passwd "
        f"--ro-bind {OWN}/group /etc/group --proc /proc --dev /dev --bind {tmp} /tmp --bind {tmp} /var/tmp "
        f"--bind-try {STATE}/workspaces/p/s {STATE}/workspaces/p/s --bind-try {OWN}/home {OWN}/home "
        f"--bind-try {tmp} {tmp} --remount-ro / --chdir / -- /python init.py"
    )
    assert command(view()) == expected.split()


@pytest.mark.parametrize(("network", "own"), [("shared", False), ("none", True), ("proxy", True)])
def test_a_network_of_its_own_unless_shared(network: Any, own: bool) -> None:
    assert ("--unshare-net" in command(view(), network)) == own


def test_the_state_directory_stays_hidden_in_a_workspace_above_it() -> None:
    """Case K1: what is below it and the cell's own is shown again, behind the cover."""
    shown = mounts(view(write=("/home/me", f"{OWN}/home"), read=(f"{STATE}/harnesses/codex",)))
    assert shown == [
        ("--bind-try", "/home/me"),
        ("--tmpfs", STATE),
        ("--ro-bind-try", f"{STATE}/harnesses/codex"),
        ("--bind-try", f"{OWN}/home"),
        ("--bind-try", f"{OWN}/tmp"),
    ]


def test_what_is_masked_is_covered_last() -> None:
    argv = command(view(masked=("/w/acp-runner.toml",)))
    assert argv[argv.index("--remount-ro") - 3 :][:3] == ["--ro-bind", "/dev/null", "/w/acp-runner.toml"]


@pytest.mark.parametrize(
    ("shown", "places"),
    [
        ([("/link", "/real")], ["/link/a/f"]),
        ([("/link", "/real/a/"), ("/real", "/real")], ["/link/f", "/real/a/f"]),
        ([("/", "/")], ["/real/a/f"]),
        ([("/one", "/real/a/f")], ["/one"]),
        ([("/real/b", "/real/b"), ("/re", "/re")], []),
    ],
)
def test_by_which_paths_a_cell_would_reach_what_it_must_not(shown: list[tuple[str, str]], places: list[str]) -> None:
    """Case K1: a workspace may be named by a link."""
    assert places_of("/real/a/f", shown) == places


@pytest.mark.parametrize(
    ("read", "write", "expected"),
    [
        (("/a/b",), ("/a",), [("--bind-try", "/a"), ("--ro-bind-try", "/a/b")]),
        (("/a",), ("/a/b",), [("--ro-bind-try", "/a"), ("--bind-try", "/a/b")]),
        (("/a",), ("/a",), [("--bind-try", "/a")]),
        (("/a", "/a/bin/python", "/ab"), (), [("--ro-bind-try", "/a"), ("--ro-bind-try", "/ab")]),
        (("/a/b/c",), ("/a", "/a/b/d"), [("--bind-try", "/a"), ("--ro-bind-try", "/a/b/c")]),
        (("/usr/local/x", "/bin/y"), (), []),
    ],
)
def test_what_lies_deeper_is_mounted_later(read: Any, write: Any, expected: Any) -> None:
    assert mounts(view(read=read, write=write, hidden=()))[: len(expected)] == expected
    assert len(mounts(view(read=read, write=write, hidden=()))) == len(expected) + 1


@pytest.mark.parametrize(
    ("program", "there", "expected"),
    [
        ("/v/bin/python", ["bin", "lib", "pyvenv.cfg", "share"], ("/v/bin", "/v/lib", "/v/pyvenv.cfg")),
        ("/n/v20/bin/node", ["bin", "lib", "include"], ("/n/v20/bin", "/n/v20/include", "/n/v20/lib")),
        ("/home/me/bin/agent", ["bin", "Documents"], ("/home/me/bin/agent",)),
        ("/srv/agent", ["lib"], ("/srv/agent",)),
        ("/bin/agent", ["lib"], ("/bin/agent",)),
    ],
)
def test_a_toolchain_is_never_a_whole_prefix(program: str, there: list[str], expected: tuple[str, ...]) -> None:
    assert toolchain(program, there) == expected


@pytest.mark.parametrize(
    ("path", "folder", "expected"),
    [("/a/b", "/a", True), ("/a", "/a", True), ("/ab", "/a", False), ("/a", "/", True), ("/", "/a", False)],
)
def test_below(path: str, folder: str, expected: bool) -> None:
    assert below(path, folder) == expected
