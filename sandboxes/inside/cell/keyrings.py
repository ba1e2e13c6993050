"""The kernel's keyrings belong to a user, whatever namespace a process is in: a filter keeps programs from them."""

from __future__ import annotations

import errno
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCH_AT = 0, 4
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOSYS
_X32 = 1 << 30
_GENERIC = (217, 218, 219)
CALLS = {
    0xC000003E: (248, 249, 250, 248 | _X32, 249 | _X32, 250 | _X32),
    0x40000003: (286, 287, 288),
    0xC00000B7: _GENERIC,
    0xC00000F3: _GENERIC,
    0xC0000102: _GENERIC,
    0x40000028: (309, 310, 311),
    0xC0000015: (269, 270, 271),
    0x80000016: (278, 279, 280),
}
"""``add_key``, ``request_key``, ``keyctl`` of x86_64 (and x32), i386, arm64, riscv64, loongarch64, arm, ppc64le, s390x.

All of them in one filter: a process may change the ABI that it calls the kernel by.
"""


def program() -> bytes:
    """The filter as the kernel reads it: those calls are answered as by a kernel without keyrings."""
    lines = [(_LOAD, 0, 0, _ARCH_AT)]
    for arch, numbers in CALLS.items():
        lines.append((_IF_EQUAL, 0, len(numbers) + 3, arch))
        lines.append((_LOAD, 0, 0, _NUMBER_AT))
        lines += [(_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
        lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


class NoKeyrings:
    """Made before a fork, applied in the child.

    Args:
        libc: see ``confine.library``.
    """

    def __init__(self, libc: ctypes.CDLL) -> None:
        import ctypes

        class Program(ctypes.Structure):
            _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))

        text = program()
        self._libc = libc
        self._program = Program(len(text) // 8, text)

    def apply(self) -> None:
        """Keep this process and all that it starts from keyrings.

        Raises:
            OSError: the system refuses. A kernel without filters is let pass: it has no way to keep anybody from them.
        """
        import ctypes
        import os

        for words in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program))):
            if self._libc.prctl(*words) != 0 and ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
