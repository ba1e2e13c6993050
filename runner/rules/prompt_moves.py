"""The words of ``rules.prompts``: states of a token, their table, what the shell is told to do (DESIGN 3.6)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Token(StrEnum):
    """States of a prompt's token; those behind ``ACTIVE`` are terminal, the token is gone then."""

    PREPARING = "preparing"
    PERSISTED = "persisted"
    QUEUED = "queued"
    ACTIVE = "active"
    ABSORBED = "absorbed"
    DONE = "done"
    ABORTED = "aborted"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Move(StrEnum):
    """What happens to a token."""

    PERSIST = "persist"
    ADMIT = "admit"
    CLAIM = "claim"
    ABSORB = "absorb"
    CANCEL = "cancel"
    FAIL = "fail"
    FINISH = "finish"
    ABORT = "abort"


TABLE: Final[dict[tuple[Token, Move], Token]] = {
    (Token.PREPARING, Move.PERSIST): Token.PERSISTED,
    (Token.PREPARING, Move.CANCEL): Token.CANCELLED,
    (Token.PREPARING, Move.FAIL): Token.FAILED,
    (Token.PERSISTED, Move.ADMIT): Token.QUEUED,
    (Token.PERSISTED, Move.CANCEL): Token.CANCELLED,
    (Token.PERSISTED, Move.FAIL): Token.FAILED,
    (Token.QUEUED, Move.CLAIM): Token.ACTIVE,
    (Token.QUEUED, Move.ABSORB): Token.ABSORBED,
    (Token.QUEUED, Move.CANCEL): Token.CANCELLED,
    (Token.QUEUED, Move.FAIL): Token.FAILED,
    (Token.ACTIVE, Move.FINISH): Token.DONE,
    (Token.ACTIVE, Move.ABORT): Token.ABORTED,
    (Token.ACTIVE, Move.CANCEL): Token.CANCELLED,
    (Token.ACTIVE, Move.FAIL): Token.FAILED,
}
LIVE: Final = frozenset({Token.PREPARING, Token.PERSISTED, Token.QUEUED, Token.ACTIVE})
WAITING: Final = frozenset({Token.PREPARING, Token.PERSISTED, Token.QUEUED})


class IllegalMove(Exception):
    """A move that the table does not have; nothing changed."""


@dataclass(frozen=True, slots=True)
class StartTurn:
    """A turn must be started for what is queued; ``batch`` is read when it is admitted."""


@dataclass(frozen=True, slots=True)
class StopTurn:
    """The running turn is to be cancelled; ``prompt_id`` owns it (None: it has no owner)."""

    prompt_id: str | None


@dataclass(frozen=True, slots=True)
class StopShell:
    """The running shell is to be killed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A prompt has its terminal state: say so, and store it."""

    prompt_id: str
    state: Token
    absorbed_by: str | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """A busy period begins."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The busy period is over: nothing runs, waits or is on its way."""


Effect = StartTurn | StopTurn | StopShell | Ended | Busy | Idle
