"""Admission: is this prompt known, and what does the first heartbeat's answer mean (DESIGN 3.1)."""

from __future__ import annotations

from enum import StrEnum

from runner.errors import RunnerError


def known_prompt(known_digest: str, digest: str) -> None:
    """A known id with the same content attaches, with other content it is a conflict (DESIGN 3.1.1).

    Raises:
        RunnerError: ``prompt_conflict``.
    """
    if known_digest != digest:
        raise RunnerError("prompt_conflict", "This prompt_id was already used with another content.")


class Verdict(StrEnum):
    """What a first answer makes of a turn."""

    ADMITTED = "admitted"
    REFUSED = "refused"


def first_answer(*, admitted: bool, locally_busy: bool, chain_gone: bool = False) -> Verdict:
    """The plane decides; what is known here refuses as a backstop even when the plane did not (DESIGN 3.1.7).

    Args:
        admitted: the plane's answer.
        locally_busy: another turn has the session, or its seat is busy.
        chain_gone: the paused chain that the turn would resume has ended since, or another turn resumed it.
    """
    return Verdict.ADMITTED if admitted and not locally_busy and not chain_gone else Verdict.REFUSED
