from __future__ import annotations

import orjson
import pytest

from runner.errors import CODES, TURN_IN_USE_SENTENCE, RunnerError, turn_in_use
from runner.wire.problems import error_of, problem, problem_bytes, retry_after


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_document(code: str) -> None:
    document = orjson.loads(problem_bytes(RunnerError(code, "Why.")))
    assert document["code"] == code
    assert document["title"]
    assert document["detail"] == "Why."
    assert document["retryable"] is CODES[code].retryable


def test_the_refusal_of_a_busy_session() -> None:
    assert problem(turn_in_use())["detail"] == TURN_IN_USE_SENTENCE


def test_extras_are_shown_when_they_have_a_value() -> None:
    error = RunnerError("execution_mismatch", "No.", current_execution_id="t2", owner=None, code_of="x")
    assert problem(error)["current_execution_id"] == "t2"
    assert "owner" not in problem(error)


def test_retry_after_is_whole_seconds() -> None:
    assert retry_after(RunnerError("owned_elsewhere", "x", retry_after=1.2)) == "2"
    assert retry_after(RunnerError("owned_elsewhere", "x", retry_after=0)) == "1"
    assert retry_after(RunnerError("runner_at_capacity", "x")) == "1"
    assert retry_after(RunnerError("store_unavailable", "x")) == "1"
    assert retry_after(RunnerError("not_found", "x")) is None


def test_a_document_is_read_back() -> None:
    error = RunnerError("execution_mismatch", "No.", current_execution_id="t2")
    again = error_of(problem(error))
    assert (again.code, again.message, again.extra) == (error.code, error.message, error.extra)
    assert error_of({"code": "from_the_future", "detail": "Hm."}).code == "internal"
