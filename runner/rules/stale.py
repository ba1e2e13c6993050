"""What became of a prompt frame where the agent does not say so: a stale answer, a write cut off (PROMPT-ABORT.md)."""

from __future__ import annotations

from runner.errors import RunnerError


def stale(*, behind_cancel: bool, stopping: bool, updated: bool, usage: bool, error: bool) -> bool:
    """Whether the prompt is to be sent once more: nothing of it was done as far as anybody saw.

    Args:
        behind_cancel: it is the first prompt behind a cancel, of a harness that is known to answer twice.
        stopping: this prompt is being cancelled itself; then its answer is the one that was asked for.
        updated: an update came before the answer.
        usage: the answer tells what it cost.
        error: the answer is an error.
    """
    return behind_cancel and not (stopping or updated or usage or error)


def gone(error: RunnerError, *, cut: bool, updated: bool) -> RunnerError:
    """Why a prompt failed whose agent is gone: ``delivery_unknown`` when nobody can say whether it was read.

    Args:
        error: the connection's.
        cut: the agent ended before all of the frame was taken.
        updated: an update came: it was read.
    """
    if error.code not in ("harness_exited", "sandbox_lost") or updated or not cut:
        return error
    return RunnerError("delivery_unknown", f"It is not known whether the agent has read the prompt. {error.message}")
