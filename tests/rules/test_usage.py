"""What turns cost, and what that adds up to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rules.usage import MAX_CURRENCIES, Meter, Spent, cleaned, with_parked, with_seconds, with_turn


def usd(amount: Any) -> dict[str, Any]:
    return {"cost": {"amount": amount, "currency": "USD"}}


def test_tokens_of_every_answer_of_a_turn_are_summed() -> None:
    meter = Meter()
    meter.answered({"inputTokens": 10, "outputTokens": 2, "totalTokens": 12})
    meter.answered({"inputTokens": 5, "cachedReadTokens": 7, "somethingElse": 9})
    assert meter.usage(1.5) == {
        "input_tokens": 15,
        "output_tokens": 2,
        "total_tokens": 12,
        "cached_read_tokens": 7,
        "turn_seconds": 1.5,
    }


@pytest.mark.parametrize("wrong", [None, [], "x", {"inputTokens": -1}, {"inputTokens": True}, {"inputTokens": "3"}])
def test_what_is_no_count_is_left_out(wrong: Any) -> None:
    meter = Meter()
    meter.answered(wrong)
    assert meter.usage(None) == {}


@pytest.mark.parametrize(
    ("totals", "base", "cost"),
    [
        ([0.1, 0.25], {}, 0.25),
        ([0.3, 0.3], {"USD": 0.2}, 0.1),
        ([0.05], {"USD": 0.2}, 0.05),
        ([0.5, 0.1, 0.2], {}, 0.7),
        ([0], {}, 0.0),
    ],
)
def test_a_turn_costs_what_it_adds_to_the_total_of_its_agent_session(
    totals: list[float], base: Spent, cost: float
) -> None:
    meter, spent = Meter(), dict(base)
    for total in totals:
        meter.told(usd(total), spent)
    assert meter.usage(None) == {"cost": {"USD": pytest.approx(cost)}}
    assert spent == {"USD": totals[-1]}


@pytest.mark.parametrize(
    "wrong", [None, 3, {"amount": None}, {"amount": float("nan")}, {"amount": -1}, {"amount": True}]
)
def test_a_cost_that_is_none_changes_nothing(wrong: Any) -> None:
    meter, spent = Meter(), {"USD": 1.0}
    meter.told({"used": 3, "size": None, "cost": wrong}, spent)
    assert (meter.usage(None), spent) == ({"context": {"used": 3}}, {"USD": 1.0})


def test_currencies_are_kept_apart_and_bounded() -> None:
    meter, spent = Meter(), Spent()
    meter.told({"cost": {"amount": 1}}, spent)
    for n in range(2 * MAX_CURRENCIES):
        meter.told({"cost": {"amount": 1, "currency": "C" + chr(ord("A") + n)}}, spent)
    assert len(meter.cost) == MAX_CURRENCIES
    assert meter.cost["unknown"] == 1


def test_a_session_is_the_sum_of_its_turns_and_the_newest_context() -> None:
    total: dict[str, Any] = {}
    first = {"input_tokens": 10, "cost": {"USD": 0.1}, "context": {"used": 50, "size": 100}, "turn_seconds": 2.0}
    total = with_turn(total, first | {"sandbox_seconds": 3.0})
    total = with_parked(total, 10.0)
    total = with_turn(total, {"input_tokens": 5, "context": {"used": 20, "size": 100}, "turn_seconds": 1.0})
    total = with_turn(total, {})
    assert total == {
        "turns": 3,
        "input_tokens": 15,
        "cost": {"USD": 0.1},
        "context": {"used": 20, "size": 100},
        "turn_seconds": 3.0,
        "sandbox_seconds": 13.0,
        "warm_seconds": 10.0,
    }


def test_a_usage_of_an_earlier_shape_is_not_added_to() -> None:
    earlier = {"used": 5, "size": 9, "cost": {"amount": 1, "currency": "USD"}, "inputTokens": 4, "turns": "2"}
    assert with_turn(earlier, {"input_tokens": 1}) == {"turns": 1, "input_tokens": 1}


def test_no_time_is_no_entry() -> None:
    assert with_seconds({}, turn_seconds=0.0, warm_seconds=-1.0) == {}


_NUMBERS = st.sampled_from([-1, 0, 3, 10**20, 0.5, float("inf"), float("nan"), None, True, "x", [1]])
_NAMES = st.sampled_from(["turns", "input_tokens", "total_tokens", "cost", "context", "turn_seconds", "other"])
_INNER = st.dictionaries(st.sampled_from(["USD", "used", "size", "currency"]), _NUMBERS)


@given(st.dictionaries(_NAMES, st.one_of(_NUMBERS, _INNER)))
def test_whatever_was_stored_can_be_added_to(stored: dict[str, Any]) -> None:
    total = with_turn(stored, stored)
    assert cleaned(total) == total
    assert total["turns"] >= 1
