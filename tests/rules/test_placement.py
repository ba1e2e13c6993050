from __future__ import annotations

from collections import Counter

import pytest

from runner.errors import RunnerError
from runner.leases.port import ReplicaInfo
from runner.rules.placement import choose
from runner.session.placing import Placement

REPLICAS = ["rep_a", "rep_b", "rep_c"]
SESSIONS = [f"s{n}" for n in range(600)]


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose("default", "s1", []) is None


def test_a_session_stays_where_it_is_and_all_are_spread() -> None:
    chosen = {session: choose("default", session, REPLICAS) for session in SESSIONS}
    assert chosen == {session: choose("default", session, list(reversed(REPLICAS))) for session in SESSIONS}
    assert min(Counter(chosen.values()).values()) > 120
    without = {session: choose("default", session, REPLICAS[:2]) for session in SESSIONS}
    assert {session for session in SESSIONS if chosen[session] != without[session]} == {
        session for session in SESSIONS if chosen[session] == "rep_c"
    }


def test_projects_are_spread_apart() -> None:
    assert any(choose("one", session, REPLICAS) != choose("two", session, REPLICAS) for session in SESSIONS)


async def test_placement_passes_over_who_failed_and_who_has_no_address_or_another_project() -> None:
    theirs = ReplicaInfo("rep_d", "http://d")

    async def others() -> list[ReplicaInfo]:
        return [ReplicaInfo("rep_a", "http://a"), ReplicaInfo("rep_b"), ReplicaInfo("rep_c", "http://c"), theirs]

    place = Placement(others, lambda replica, project: (replica, project) != ("rep_d", "default"))
    first = await place("default", "s1", ())
    second = await place("default", "s1", {first.replica_id})
    assert {first.replica_id, second.replica_id} == {"rep_a", "rep_c"}
    assert second.advertise_url == f"http://{second.replica_id[-1]}"
    with pytest.raises(RunnerError, match="No runner is connected") as refused:
        await place("default", "s1", {"rep_a", "rep_c"})
    assert (refused.value.code, refused.value.retryable) == ("plane_unavailable", True)
