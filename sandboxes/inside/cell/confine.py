"""What binds the agent and all that it starts: Landlock, a bound on processes, no keyrings. Applied before an exec."""

from __future__ import annotations

import os
import stat
import sys

from cell.keyrings import NoKeyrings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH_BENEATH = 1
_VERSION = 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECUREBITS, _PR_CAP_AMBIENT = 38, 28, 47
_ROOT_IS_NOBODY_SPECIAL, _CLEAR_ALL = 0b11, 4
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_RIGHTS_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1}
_RIGHTS = (1 << 15) - 1
_MAKE_DEVICES = 1 << 6 | 1 << 11
"""Handled and allowed nowhere: a device of one's own making is the whole disk."""
_SCOPES = 3
"""No signals to, and no abstract sockets of, processes outside."""


class Confinement:
    """What a cell's programs may touch; made once, applied in each child.

    Args:
        read, write: paths for Landlock; both None leave the file system alone.
        processes: for RLIMIT_NPROC; 0 leaves it alone.
        keyrings: whether the kernel's keyrings, which are those of the user, may be used.
    """

    def __init__(
        self,
        read: Sequence[str] | None = None,
        write: Sequence[str] | None = None,
        processes: int = 0,
        keyrings: bool = True,
    ) -> None:
        self._paths = None if read is None or write is None else (tuple(read), tuple(write))
        self._processes = processes
        self._libc = library() if self._paths is not None or not keyrings else None
        self._no_keyrings = NoKeyrings(self._libc) if self._libc is not None and not keyrings else None

    def apply(self) -> None:
        """Bind this process.

        Raises:
            OSError: the system refuses; what was asked for is not in force.
        """
        if self._processes:
            import resource

            resource.setrlimit(resource.RLIMIT_NPROC, (self._processes, self._processes))
        if self._paths is not None and self._libc is not None:
            restrict(self._libc, *self._paths)
        if self._no_keyrings is not None:
            self._no_keyrings.apply()


def library() -> ctypes.CDLL:
    """The C library; loaded before a fork, for a child must not."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def landlock_abi(libc: ctypes.CDLL) -> int:
    """Version of Landlock that the kernel has; 0 or less: none."""
    return int(libc.syscall(_CREATE, None, 0, _VERSION))


def restrict(libc: ctypes.CDLL, read: Sequence[str], write: Sequence[str]) -> None:
    """Allow this process and its children to read ``read``, to do all below ``write``, and nothing else to files.

    Raises:
        OSError: the system refuses.
    """
    import ctypes

    abi = landlock_abi(libc)
    if abi < 1:
        raise OSError(-abi, "Landlock is not there")
    rights = _RIGHTS_OF_ABI.get(abi, _RIGHTS)
    attributes = (ctypes.c_uint64 * 3)(rights, 0, _SCOPES if abi >= 6 else 0)
    ruleset = _checked(libc.syscall(_CREATE, attributes, 24 if abi >= 6 else 8, 0))
    try:
        for paths, allowed in ((read, _READ), (write, rights & ~_MAKE_DEVICES)):
            for path in paths:
                _allow(libc, ruleset, path, allowed & rights)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT, ruleset, 0))
        # What root may do besides files, loading modules for one, Landlock leaves alone: so an exec gives root nothing.
        libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
        if os.geteuid() == 0:
            _checked(libc.prctl(_PR_SET_SECUREBITS, _ROOT_IS_NOBODY_SPECIAL, 0, 0, 0))
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, allowed: int) -> None:
    import ctypes

    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            allowed &= _OF_FILES
        rule = allowed.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder, signed=True)
        _checked(libc.syscall(_ADD, ruleset, _PATH_BENEATH, ctypes.c_char_p(rule), 0))
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    import ctypes

    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)
