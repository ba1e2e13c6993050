"""Whether an answer to ``session/prompt`` is the stale ending of the prompt before it (PROMPT-ABORT.md, W4)."""

from __future__ import annotations


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
