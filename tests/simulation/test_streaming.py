"""Session control with a record stream, a live bus and followers: whatever happens, nobody misses a record."""

from __future__ import annotations

import warnings

import pytest

from tests.simulation.run import run_seed
from tests.simulation.streaming import StreamingWorld

SEEDS = 80
BLOCK = 20
LIMITED = "limit_total"
"""A next message may get a limit that its road is too slow for: then that is no fault."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_every_follower_sees_every_record_case_h9(first: int) -> None:
    """Cases G1, G5, H6 and M3: replicas die, freeze and lose their roads; the stream forgets; followers come back."""
    with warnings.catch_warnings():
        # What a killed replica had just begun is never awaited, as it should be.
        warnings.simplefilter("ignore", RuntimeWarning)
        for seed in range(first, first + BLOCK):
            run = run_seed(seed, of=StreamingWorld)
            if run.fault is not None and LIMITED not in run.fault:
                pytest.fail(f"{run.story()}\nseed {seed}: {run.fault}")
