"""The filter that keeps a cell from the kernel's keyrings, run by a small machine of the tests' own."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "sandboxes" / "inside"))

from cell.keyrings import CALLS, program

ALLOWED, REFUSED = 0x7FFF0000, 0x00050026
X86_64, I386 = 0xC000003E, 0x40000003


def verdict(arch: int, number: int) -> int:
    """What the kernel would do with this call."""
    lines, at, loaded = list(struct.iter_unpack("=HBBI", program())), 0, 0
    while True:
        code, yes, no, value = lines[at]
        at += 1
        if code == 0x20:
            loaded = {0: number, 4: arch}[value]
        elif code == 0x15:
            at += yes if loaded == value else no
        else:
            assert code == 0x06
            return int(value)


@pytest.mark.parametrize("arch", CALLS)
def test_each_of_the_calls_is_refused_and_no_other(arch: int) -> None:
    refused = {
        number for base in (0, 1 << 30) for number in range(base, base + 500) if verdict(arch, number) == REFUSED
    }
    assert refused == set(CALLS[arch])
    assert len(refused) in (3, 6)


def test_numbers_are_those_of_their_own_machine() -> None:
    assert (verdict(X86_64, 250), verdict(X86_64, 1 << 30 | 250), verdict(I386, 288)) == (REFUSED,) * 3
    assert (verdict(X86_64, 288), verdict(I386, 250), verdict(0x1234, 250)) == (ALLOWED,) * 3
