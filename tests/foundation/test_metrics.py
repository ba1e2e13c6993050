"""The counts themselves."""

from __future__ import annotations

import re

from runner.metrics import FAMILIES, LEASES_LOST, MOST_SERIES, SEATS, TURN_SECONDS, TURNS, Metrics, Sample


def test_names_follow_the_conventions() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert re.fullmatch(r"acp_runner_[a-z_]+", family.name)
        assert family.name.endswith("_total") is (family.kind == "counter")
        assert bool(family.buckets) is (family.kind == "histogram")
        assert list(family.buckets) == sorted(family.buckets)
        assert not set(family.labels) & {"session", "session_id", "turn_id", "prompt_id", "replica_id"}
        if family.kind == "histogram":
            assert family.name.endswith("_seconds")


def test_counts_add_up_by_their_labels() -> None:
    metrics = Metrics()
    metrics.add(TURNS, "completed", "demo")
    metrics.add(TURNS, "completed", "demo", amount=2)
    metrics.add(TURNS, "failed", "demo")
    assert metrics.numbers() == {TURNS: {("completed", "demo"): 3, ("failed", "demo"): 1}}


def test_sources_are_asked_at_each_read_and_summed() -> None:
    metrics, now = Metrics(), [1.0]
    metrics.read_by(lambda: [Sample(SEATS, now[0], ("busy",))])
    metrics.read_by(lambda: [Sample(SEATS, 10, ("busy",)), Sample(SEATS, 5, ("idle",))])
    assert metrics.numbers() == {SEATS: {("busy",): 11, ("idle",): 5}}
    now[0] = 2
    assert metrics.numbers()[SEATS][("busy",)] == 12


def test_a_value_falls_into_the_first_bucket_that_holds_it() -> None:
    metrics, bounds = Metrics(), TURN_SECONDS.buckets
    for seconds in (0.0, bounds[0], bounds[0] + 0.001, bounds[-1] + 1):
        metrics.observe(TURN_SECONDS, seconds, "completed")
    seen = metrics.histograms()[TURN_SECONDS][("completed",)]
    assert (seen.counts[0], seen.counts[1], seen.counts[-1], sum(seen.counts)) == (2, 1, 1, 4)
    assert seen.total == sum((0.0, bounds[0], bounds[0] + 0.001, bounds[-1] + 1))


def test_a_metric_has_a_bounded_number_of_series() -> None:
    metrics = Metrics()
    for number in range(2 * MOST_SERIES):
        metrics.add(LEASES_LOST, f"reason{number}")
    series = metrics.numbers()[LEASES_LOST]
    assert len(series) == MOST_SERIES + 1
    assert series[("other",)] == MOST_SERIES
    metrics.add(LEASES_LOST, "reason0")
    assert metrics.numbers()[LEASES_LOST][("reason0",)] == 2
