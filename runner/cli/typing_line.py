"""The line that a person types while an answer streams: keys in, the line above which everything else is shown."""

from __future__ import annotations

import codecs
import os
import shutil
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from runner.cli.terminal import plain

ESCAPE: Final = "\x1b"
ERASE: Final = "\r\x1b[K"
SEQUENCES: Final = ("[", "O")
PROMPT: Final = "> "
_CHUNK: Final = 4096


@dataclass(frozen=True, slots=True)
class Sent:
    """Enter: this was typed."""

    text: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Esc."""


@dataclass(frozen=True, slots=True)
class Left:
    """Ctrl-D on an empty line, or the end of the input."""


Key = Sent | Abort | Left


class Line:
    """What was typed so far. Keys change its end only: printable ones, Backspace, Ctrl-U, Enter, Esc, Ctrl-D.

    Attributes:
        text: the line as it stands.
    """

    def __init__(self) -> None:
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[Key]:
        """Take what one read gave; an Esc that comes with more behind it is a key of its own, and ignored."""
        if not data:
            return [Left()]
        typed, keys = iter(self._decoder.decode(data)), list[Key]()
        for char in typed:
            if char == ESCAPE:
                keys += [] if _sequence(typed) else [Abort()]
            elif char in "\r\n":
                keys += [Sent(self.text)] if self.text.strip() else []
                self.text = ""
            elif char == "\x04":
                keys += [] if self.text else [Left()]
            elif char in "\x7f\b":
                self.text = self.text[:-1]
            elif char == "\x15":
                self.text = ""
            elif char.isprintable():
                self.text += char
        return keys

    def give_back(self, text: str) -> None:
        """A message was not sent: it stands on the line again, before what was typed since."""
        self.text = f"{text} {self.text}".rstrip() if self.text else text


def _sequence(typed: Iterator[str]) -> bool:
    """Skip the rest of an arrow's or a function key's sequence; False when nothing is behind the Esc."""
    second = next(typed, None)
    if second in SEQUENCES:
        for char in typed:
            if "@" <= char <= "~":
                break
    return second is not None


class Screen:
    """Stdout and stderr of a terminal, with the typed line kept below whatever is shown.

    Text is shown in whole lines, so that the line stays the last one. Without a terminal nothing is redrawn.
    """

    def __init__(self, line: Line, *, terminal: bool) -> None:
        self._line = line
        self._terminal = terminal
        self._open = ""
        self.status = ""

    def text(self, text: str) -> None:
        """Show text of the agent: its whole lines now, the rest with ``flush`` or its newline."""
        *whole, self._open = (self._open + plain(text)).split("\n")
        if self._terminal:
            whole += self._wrapped()
        if whole:
            self._above(lambda: sys.stdout.write("".join(f"{line}\n" for line in whole)))

    def _wrapped(self) -> list[str]:
        """The rows that the open line fills already: a long paragraph is seen while it comes."""
        rows, width = list[str](), max(8, shutil.get_terminal_size().columns)
        while len(self._open) > width:
            cut = self._open.rfind(" ", 1, width + 1)
            cut = cut if cut > 0 else width
            rows.append(self._open[:cut])
            self._open = self._open[cut:].removeprefix(" ")
        return rows

    def flush(self) -> None:
        """End an open line of text."""
        if self._open:
            self.text("\n")

    def say(self, text: str) -> None:
        """Show a line for people."""
        self.flush()
        self._above(lambda: sys.stderr.write(f"{plain(text)}\n"))

    @contextmanager
    def others(self) -> Iterator[None]:
        """Somebody else writes to the terminal meanwhile."""
        self.flush()
        self._erase()
        try:
            yield
        finally:
            self.draw()

    def draw(self) -> None:
        """Show the typed line: its end, where it is wider than the terminal."""
        if self._terminal:
            sys.stdout.flush()
            lead = f"{self.status}{PROMPT}"
            room = max(8, shutil.get_terminal_size().columns - len(lead) - 1)
            sys.stderr.write(f"{ERASE}{lead}{plain(self._line.text)[-room:]}")
            sys.stderr.flush()

    def _erase(self) -> None:
        if self._terminal:
            sys.stderr.write(ERASE)
            sys.stderr.flush()

    def _above(self, write: Callable[[], Any]) -> None:
        self._erase()
        write()
        sys.stdout.flush()
        sys.stderr.flush()
        self.draw()


@contextmanager
def keys_at_once(descriptor: int) -> Iterator[Callable[[bool], None]]:
    """Read keys as they are typed, unechoed; the yielded call hands the terminal back (False) and takes it again."""
    before = termios.tcgetattr(descriptor)

    def at_once(wanted: bool) -> None:
        if wanted:
            tty.setcbreak(descriptor)
        else:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    at_once(True)
    try:
        yield at_once
    finally:
        at_once(False)


def read_keys(descriptor: int) -> bytes:
    """What was typed; empty at the end of the input."""
    try:
        return os.read(descriptor, _CHUNK)
    except OSError:
        return b""
