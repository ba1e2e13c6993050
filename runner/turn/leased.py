"""What a sandbox has of model keys that stay outside of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from runner.ids import Key


@dataclass(frozen=True, slots=True)
class Leased:
    """The tokens of one sandbox.

    Attributes:
        variables: what its agent gets over its other variables.
        names: of the variables whose key stays outside.
        tokens: the values that stand for keys.
        end: from now on the tokens are worth nothing, and requests that use one are given up; idempotent.
        hand_over: from now on what they are used for belongs to this session (project, session).
    """

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    names: tuple[str, ...] = ()
    tokens: tuple[str, ...] = field(default=(), repr=False)
    end: Callable[[], None] = lambda: None
    hand_over: Callable[[Key], None] = lambda key: None
