"""What is mounted where, so that nothing that is deleted is another's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

MOUNTINFO: Final = Path("/proc/self/mountinfo")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def mounted_below(path: Path) -> list[str]:
    """Mount points at or below a path without symlinks, binds of the same disk too; none where nobody can tell."""
    try:
        return points_below(MOUNTINFO.read_text(errors="surrogateescape"), str(path))
    except OSError:
        return []


def points_below(mountinfo: str, path: str) -> list[str]:
    """Those of ``/proc/<pid>/mountinfo``, in order: the fifth word, with blanks and the like as octal numbers."""
    words = (line.split(" ", 5) for line in mountinfo.splitlines())
    points = (_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), word[4]) for word in words if len(word) > 5)
    return [point for point in points if point == path or point.startswith(path.rstrip("/") + "/")]
