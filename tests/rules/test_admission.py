"""Admission (DESIGN 3.1): what a prompt id means, and what the first answer makes of a turn."""

from __future__ import annotations

from itertools import product

import pytest

from runner.errors import TURN_IN_USE_SENTENCE, RunnerError, turn_in_use
from runner.rules.admission import Verdict, first_answer, known_prompt


def test_a_known_id_with_the_same_content_attaches_case_b5():
    known_prompt("d1", "d1")


def test_another_content_under_a_known_id_is_a_conflict():
    with pytest.raises(RunnerError) as caught:
        known_prompt("d1", "d2")
    assert (caught.value.code, caught.value.status, caught.value.retryable) == ("prompt_conflict", 409, False)


@pytest.mark.parametrize(("admitted", "busy", "gone"), list(product([True, False], repeat=3)))
def test_the_plane_decides_and_what_is_known_here_is_the_backstop_case_b1(admitted: bool, busy: bool, gone: bool):
    expected = Verdict.ADMITTED if admitted and not busy and not gone else Verdict.REFUSED
    assert first_answer(admitted=admitted, locally_busy=busy, chain_gone=gone) is expected


def test_the_refusal_is_one_sentence_byte_for_byte():
    assert TURN_IN_USE_SENTENCE == ("Another turn is already running in this session. Your message was not sent.")
    assert turn_in_use().as_event() == {
        "code": "session_turn_in_use",
        "message": TURN_IN_USE_SENTENCE,
        "retryable": False,
    }
