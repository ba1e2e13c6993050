"""What repeats is told once."""

from __future__ import annotations

import logging

import pytest

from runner.errors import RunnerError
from runner.session.outage import Outage


def test_a_failure_is_told_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = Outage("the sweep of questions")
    for _ in range(3):
        with outage.around():
            raise RunnerError("store_unavailable", "The store is away.")
    for _ in range(2):
        with outage.around():
            pass
    assert [record.getMessage() for record in caplog.records] == [
        "the sweep of questions fails for now: The store is away.",
        "the sweep of questions works again",
    ]


def test_what_nobody_expected_is_told_each_time_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("the look for commands")
    for _ in range(2):
        with outage.around():
            raise KeyError("a bug")
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
