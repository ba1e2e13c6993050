"""Readers that come back, are slow, or are elsewhere, and the feed: records travel by the stream into PostgreSQL."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.records.bed import Fleet
from tests.replicas.bed import Cluster, Session
from tests.replicas.test_readers import (
    test_the_project_feed_is_the_same_at_every_door,
    test_three_readers_and_one_elsewhere_see_the_same_conversation,
)

__all__ = [
    "test_the_project_feed_is_the_same_at_every_door",
    "test_three_readers_and_one_elsewhere_see_the_same_conversation",
]


@pytest.fixture
def cluster(fleet: Fleet) -> Cluster:
    return fleet.cluster


@pytest.fixture
def sessions(fleet: Fleet) -> Callable[[], Session]:
    numbers = itertools.count(1)
    return lambda: fleet.session(f"s{next(numbers)}")
