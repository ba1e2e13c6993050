"""A failure that repeats is told when it begins and when it is over, not each time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from runner.errors import RunnerError

log = logging.getLogger("runner.session")


class Outage:
    """Of one piece of work that is tried again and again.

    Args:
        work: what it is, as the beginning of a log line: "the sweep of commands".
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._lasts = False

    def met(self, why: object) -> None:
        """It failed; only the first time in a row is a warning."""
        log.log(logging.DEBUG if self._lasts else logging.WARNING, "%s fails for now: %s", self._work, why)
        self._lasts = True

    def over(self) -> None:
        """It worked."""
        if self._lasts:
            self._lasts = False
            log.warning("%s works again", self._work)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Run one try of the work; whatever it raises ends here."""
        try:
            yield
        except RunnerError as error:
            self.met(error.message)
        except Exception:
            log.exception("%s failed", self._work)
        else:
            self.over()
