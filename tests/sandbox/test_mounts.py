"""What is mounted into a session's folders is another's, and is never deleted with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.sandbox.mounts import points_below
from runner.sandbox.workspace import remove_tree

ROOT = Path(__file__).parents[2]
MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /srv/state/workspaces/p/s rw - tmpfs tmpfs rw
31 22 254:0 /data /srv/state/workspaces/p/s/a\\040b\\134c rw shared:5 - ext4 /dev/vda rw
32 22 0:31 / /srv/state/workspaces/p/session rw - tmpfs tmpfs rw
broken
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/srv/state/workspaces/p/s", ["/srv/state/workspaces/p/s", "/srv/state/workspaces/p/s/a b\\c"]),
        ("/srv/state/workspaces/p/s/a b\\c", ["/srv/state/workspaces/p/s/a b\\c"]),
        ("/srv/state/workspaces/p/s/a", []),
        ("/srv/state/workspaces/p/sess", []),
        ("/srv/state/homes", []),
    ],
)
def test_mount_points_at_or_below_a_path(path: str, expected: list[str]) -> None:
    assert points_below(MOUNTS, path) == expected


REMOVE = """
import sys
from pathlib import Path
from runner.sandbox.workspace import remove_tree
try:
    remove_tree(Path(sys.argv[1]), ("workspaces", "p", "s"))
except OSError as error:
    print(error.strerror, error.filename)
"""


@pytest.mark.parametrize("at", ["", "kept/deep"])
def test_what_is_still_mounted_is_not_deleted(tmp_path: Path, at: str) -> None:
    """Case J1: an unmount that did not really happen; nothing is deleted then, and the caller is told."""
    foreign, session = tmp_path / "foreign", tmp_path / "state" / "workspaces" / "p" / "s"
    point = session / at
    for folder in (foreign, point):
        folder.mkdir(parents=True)
    (foreign / "precious").write_text("of others")
    (session / "own").write_text("of the session")
    bound = ("bwrap", "--dev-bind", "/", "/", "--bind", str(foreign), str(point), "--")
    command = [*bound, sys.executable, "-c", REMOVE, str(tmp_path / "state")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60, text=True)
    assert ran.stdout == f"something is mounted there {point}\n"
    assert (foreign / "precious").read_text() == "of others"
    assert (session / "own").exists()
    remove_tree(tmp_path / "state", ("workspaces", "p", "s"))
    assert not session.exists()
    assert (foreign / "precious").exists()
