"""Logins on disk: ``logins/<harness>/`` of the state directory, mode 0700; the one place that owns each (case K4)."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from runner.rules import login as rules

FILE, IDENTITY, LENT, LOCK = "login", "identity", "lent", "lock"
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER: Final = _OPEN | os.O_DIRECTORY
_HOME: Final = ".home-"


@dataclass(frozen=True, slots=True)
class Lent:
    """Who has the refresh token; written before he gets it, so that a killed runner's successor finds what he made.

    Attributes:
        seat_id: the sandbox.
        session_id: for people.
        home: its home, absolute.
        digest: of what was lent.
    """

    seat_id: str
    session_id: str
    home: str
    digest: str


class Shelf:
    """The login of one harness. Every method reads or writes the disk at once.

    Args:
        state_dir: the runner's state directory.
        name: the harness.
        form: of its login file.
    """

    def __init__(self, state_dir: Path, name: str, form: rules.Form) -> None:
        self.name = name
        self.form = form
        self.directory = state_dir / "logins" / name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes it meanwhile, ``harness login`` in another process included."""
        self._make()
        with open(self.directory / LOCK, "a") as file:
            os.fchmod(file.fileno(), 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def home(self) -> Iterator[Path]:
        """A folder to log in in, which goes afterwards; that of a killed process goes with the next call."""
        with self.locked():
            self._sweep()
            home = Path(tempfile.mkdtemp(prefix=_HOME, dir=self.directory))
            held = os.open(home, _FOLDER)
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield home
        finally:
            shutil.rmtree(home, ignore_errors=True)
            os.close(held)

    def _sweep(self) -> None:
        for left in self.directory.glob(f"{_HOME}*"):
            held = os.open(left, _FOLDER)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            except BlockingIOError:
                continue
            finally:
                os.close(held)

    def _make(self) -> None:
        for folder in (self.directory.parent, self.directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)

    def content(self) -> bytes | None:
        """The login file; None when nobody is logged in."""
        return read_file(self.directory / FILE)

    def login(self) -> rules.Login | None:
        """What it says."""
        return rules.read(self.form, self.content())

    def identity(self) -> str | None:
        """Changes when a person logs in, not with a refresh; None when nobody is logged in."""
        found = read_file(self.directory / IDENTITY)
        return found.decode("ascii", "replace") if found else None

    def lent(self) -> Lent | None:
        """Who has the refresh token."""
        try:
            return Lent(**json.loads(read_file(self.directory / LENT) or b""))
        except (ValueError, TypeError):
            return None

    def put(self, content: bytes) -> None:
        """A person logged in: the new login, under a new identity; what is lent of an older one does not come back."""
        self.keep(content)
        write_file(self.directory / IDENTITY, secrets.token_hex(16).encode())
        self.lend(None)

    def keep(self, content: bytes) -> None:
        """The same login, refreshed."""
        self._make()
        write_file(self.directory / FILE, content)

    def lend(self, lent: Lent | None) -> None:
        """Note who has the refresh token; None: nobody."""
        if lent is None:
            (self.directory / LENT).unlink(missing_ok=True)
        else:
            write_file(self.directory / LENT, json.dumps(asdict(lent)).encode())

    def forget(self) -> bool:
        """Log out; whether anybody was logged in. What a killed ``harness login`` left goes, too."""
        self._sweep()
        there = (self.directory / FILE).exists()
        for name in (FILE, IDENTITY, LENT):
            (self.directory / name).unlink(missing_ok=True)
        return there


def read_file(path: Path) -> bytes | None:
    """A regular file of bounded size, never through a symlink: an agent may have put one there. None: there is none."""
    try:
        with open(os.open(path, _OPEN | os.O_NONBLOCK), "rb") as file:
            return file.read(rules.MAX_BYTES + 1)
    except OSError:
        return None


def write_file(path: Path, content: bytes) -> None:
    """Write beside and rename, mode 0600.

    Raises:
        OSError: the disk refuses.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
