"""What a Daytona's answers and states mean, and what is done next (DESIGN 3.4, 3.10)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Call = Literal["create", "start", "stop", "delete", "read", "exec"]
"""``read``: asks and changes nothing, or may be asked twice; ``exec``: may have been done when its answer is lost."""

Kind = Literal["http", "connection", "timeout", "queue", "spot"]
"""How a call failed: by an answer, without one, by a deadline of ours, or by an ending of the service's own."""

Action = Literal["retry", "look", "adopt", "gone", "recover", "activate", "fail"]
"""``look``: ask for the state and go on by ``next_step``. ``gone``: there is no such sandbox (any more)."""

Want = Literal["run", "sleep", "gone"]
Step = Literal["use", "wait", "start", "stop", "recover", "delete", "replace", "done"]

RETRY_SECONDS: Final = 0.5
RATE_SECONDS: Final = 5.0
RATE_MAX_SECONDS: Final = 60.0
ORPHAN_GRACE_SECONDS: Final = 600.0
"""A sandbox this young may belong to a start that the store does not show yet, one that broke so lately to a repair."""
STUCK_SECONDS: Final = 600.0
"""How long a deletion may take before it is asked for again and shown."""
SKEW_SECONDS: Final = 30.0
"""How far the service's clock may be from ours where an age is compared with a window."""

_QUOTA: Final = re.compile(r"limit exceeded|resource limit reached|no available (runners|nodes)", re.IGNORECASE)
_TOO_LARGE: Final = re.compile(r"exceeds maximum allowed per sandbox", re.IGNORECASE)
_STOPPED: Final = re.compile(r"is the sandbox started|no ip address found", re.IGNORECASE)
_ERRORED: Final = re.compile(r"errored state", re.IGNORECASE)
_NAME_TAKEN: Final = re.compile(r"already exists", re.IGNORECASE)
_NOT_READY: Final = re.compile(r"snapshot .* is (pulling|pending|building)", re.IGNORECASE)
_INACTIVE: Final = re.compile(r"snapshot .* is inactive", re.IGNORECASE)
_SUSPENDED: Final = re.compile(r"is suspended", re.IGNORECASE)
_WRONG_STATE: Final = re.compile(r"not in a (stoppable|startable) state|is not (stopped|started)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that failed, without the vendor's classes.

    Attributes:
        kind: see ``Kind``.
        status: HTTP status of the answer, None without one.
        code, source: of the error envelope.
        message: of the answer.
        retry_after: seconds that the answer asks for.
    """

    kind: Kind = "http"
    status: int | None = None
    code: str | None = None
    source: str | None = None
    message: str = ""
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, after how many seconds, and the error when there is no more time or nothing else to do."""

    action: Action
    code: str = "sandbox_start_failed"
    seconds: float = 0.0


def judge(call: Call, failure: Failure) -> Verdict:
    """What a failed call means (table: SANDBOXES A5).

    The service has no classes for a full quota, an inactive snapshot or a stopped sandbox, so their texts decide; a
    text that changes makes a failure of it, never a success.
    """
    lost = _code(call)
    if failure.kind == "queue":
        return Verdict("fail", "provider_at_capacity")
    if failure.kind == "spot":
        return Verdict("gone", "sandbox_lost")
    if failure.kind != "http" or failure.status is None:
        return _unanswered(call)
    if failure.status == 429:
        wait = failure.retry_after if failure.retry_after is not None else RATE_SECONDS
        return Verdict("retry", "provider_at_capacity", min(max(wait, RETRY_SECONDS), RATE_MAX_SECONDS))
    if failure.status == 404:
        missing = call == "create"
        return Verdict("fail") if missing else Verdict("gone", "sandbox_lost")
    if failure.status == 409:
        return Verdict("adopt" if call == "create" and _NAME_TAKEN.search(failure.message) else "look", lost)
    if failure.status in (408, 500, 502, 503, 504):
        return _unanswered(call)
    if failure.status in (400, 403):
        return _refused(call, failure.message)
    return Verdict("fail", lost)


def start_code(code: str) -> str:
    """The error of a start that ended so: nothing that was there is lost by it."""
    return "sandbox_start_failed" if code == "sandbox_lost" else code


def _code(call: Call) -> str:
    return "sandbox_start_failed" if call in ("create", "start") else "sandbox_lost"


def _unanswered(call: Call) -> Verdict:
    """Nobody knows whether it was done: reads are repeated, everything else begins with a look."""
    if call == "read":
        return Verdict("retry", "sandbox_lost", RETRY_SECONDS)
    return Verdict("look", _code(call), RETRY_SECONDS)


def _refused(call: Call, message: str) -> Verdict:
    if _TOO_LARGE.search(message):
        return Verdict("fail")
    if _QUOTA.search(message):
        return Verdict("fail", "provider_at_capacity")
    if _INACTIVE.search(message):
        return Verdict("activate")
    if _NOT_READY.search(message):
        return Verdict("retry", seconds=2.0)
    if _ERRORED.search(message):
        return Verdict("recover", _code(call))
    if _STOPPED.search(message) or _WRONG_STATE.search(message):
        return Verdict("look", "sandbox_lost")
    return Verdict("fail", _code(call))


ASLEEP: Final = frozenset({"stopped", "archived", "paused"})
_AWAY: Final = frozenset({"destroyed", "destroying"})
_BROKEN: Final = frozenset({"error", "build_failed"})


def next_step(want: Want, state: str, *, desired: str = "", recoverable: bool = False, recovered: bool = False) -> Step:
    """What brings a sandbox from ``state`` to what is wanted of it.

    Args:
        want: ``run``: start, reconnect and wake alike; ``sleep``: the disk stays; ``gone``: nothing stays.
        state, desired: the service's words; an unknown state is waited for.
        recoverable: the service says that it can repair an errored one.
        recovered: that was tried already.
    """
    if want == "gone":
        return "done" if state in _AWAY else "delete"
    if state in _AWAY:
        return "replace" if want == "run" else "done"
    if state in _BROKEN:
        if want == "sleep":
            return "delete"
        return "recover" if state == "error" and recoverable and not recovered else "replace"
    if want == "sleep":
        if state in ASLEEP:
            return "done"
        if state == "started":
            return "wait" if desired in ("stopped", "archived", "paused", "destroyed") else "stop"
        return "wait"
    if state == "started":
        return "use" if desired in ("", "started") else "wait"
    if state in ASLEEP:
        return "start" if desired in ("", state) else "wait"
    return "wait"


def late_creation(wanted_again: bool, state: str) -> Literal["adopt", "delete", "done"]:
    """A creation that its caller gave up turned out to have happened: nobody may pay for it unknowingly."""
    if state in _AWAY:
        return "done"
    return "adopt" if wanted_again and state not in _BROKEN else "delete"


def reap(
    *,
    known: bool,
    in_use: bool,
    owned: bool,
    state: str,
    age_seconds: float,
    silent_seconds: float,
    orphan_seconds: float,
) -> Literal["keep", "sleep", "delete", "stuck"]:
    """What becomes of a labelled sandbox that a list shows.

    Args:
        known: the store has its session, and the session has not ended.
        in_use: a seat of this runner holds it, or its start or end is under way here.
        owned: another runner that lives has the session.
        state: the service's word.
        age_seconds: since it was created.
        silent_seconds: since its state changed last.
        orphan_seconds: how long an agent lives without its runner; behind that a started sandbox is an empty one.
    """
    if in_use or state == "destroyed":
        return "keep"
    if state == "destroying":
        return "stuck" if silent_seconds >= STUCK_SECONDS else "keep"
    if known:
        if state == "started" and not owned and silent_seconds >= orphan_seconds:
            return "sleep"
        return "delete" if state in _BROKEN and silent_seconds >= ORPHAN_GRACE_SECONDS else "keep"
    return "delete" if age_seconds >= ORPHAN_GRACE_SECONDS else "keep"


def disk_over(state: str, silent_seconds: float, disk_seconds: float) -> bool:
    """Whether a disk whose window ended here may go: another runner may have woken it, or put it to sleep again."""
    return state in ASLEEP and silent_seconds + SKEW_SECONDS >= disk_seconds


def trouble(failure: Failure) -> str | None:
    """Why no sandbox is to be had from this service at all, as a call showed; None when it may well be."""
    if failure.kind == "connection":
        return f"Daytona is not reached: {failure.message}"
    if failure.kind != "http":
        return None
    if failure.status == 401:
        return f"Daytona refuses the API key: {failure.message}"
    if failure.status == 403 and _SUSPENDED.search(failure.message):
        return f"Daytona refuses the account: {failure.message}"
    return None


def fits(taken: int, capacity: int) -> bool:
    """Whether one more sandbox may be made; a capacity of 0 is bounded by the service alone."""
    return capacity <= 0 or taken < capacity


def minutes(seconds: float) -> int:
    """An interval as the service counts them: whole minutes, never 0, which switches it off."""
    return max(1, -(-int(seconds) // 60))
