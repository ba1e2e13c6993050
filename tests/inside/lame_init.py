"""The real init with signals that reach nobody while the file named by the first argument is missing (case D10)."""

import sys
from pathlib import Path

gate = Path(sys.argv[1])
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sandboxes" / "inside"))

import cell.control  # noqa: E402
import cell.kill  # noqa: E402
import cell.processes  # noqa: E402

really_send = cell.processes.send


def send(entry: cell.processes.Entry, number: int) -> bool:
    """Claim success; do it only once the gate is open."""
    return really_send(entry, number) if gate.exists() else True


vars(cell.kill)["send"] = send
cell.control.main(sys.argv[2:])
