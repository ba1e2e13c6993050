"""Which spares are kept, and who may have one."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runner.ids import SPARES, valid_id
from runner.rules.reuse import FACETS
from runner.rules.spares import (
    BACKOFF_SECONDS,
    LATELY_SECONDS,
    REFILL_SECONDS,
    Begin,
    Kind,
    Retire,
    Shelf,
    ShelfError,
    SpareState,
    adopted,
    is_new,
    place_of,
)

DEMO, OTHER = Kind("demo", "local", "default"), Kind("other", "local", "default")
PRINT = dict.fromkeys(FACETS, "0")


def prints(kind: Kind) -> dict[str, str]:
    return PRINT


def shelf_with(*spare_ids: str, keep: int = 2, now: float = 0.0) -> Shelf:
    """A shelf with ready spares of the demo kind."""
    shelf = Shelf(keep, 100.0)
    shelf.used(DEMO, now - REFILL_SECONDS)
    for spare_id in spare_ids:
        shelf.begun(spare_id, DEMO, PRINT)
        shelf.opened(spare_id, now)
    return shelf


def test_nothing_is_kept_of_a_kind_that_nobody_used():
    assert Shelf(2, 100.0).due(0.0, 10, prints) == []


def test_a_kind_that_is_used_is_kept_one_start_at_a_time_up_to_its_number():
    shelf = shelf_with()
    assert shelf.due(0.0, 10, prints) == [Begin(DEMO)]
    shelf.begun("a", DEMO, PRINT)
    assert shelf.due(0.0, 10, prints) == []
    shelf.opened("a", 1.0)
    assert shelf.due(1.0, 10, prints) == [Begin(DEMO)]
    shelf.begun("b", DEMO, PRINT)
    shelf.opened("b", 2.0)
    assert shelf.due(2.0, 10, prints) == []


def test_a_refill_waits_until_the_turn_that_took_one_is_on_its_way():
    shelf = Shelf(1, 100.0)
    shelf.used(DEMO, 10.0)
    assert shelf.due(10.0, 10, prints) == []
    assert shelf.next_due(10.0) == 10.0 + REFILL_SECONDS
    shelf.used(DEMO, 10.0 + REFILL_SECONDS / 2)
    assert shelf.due(10.0 + REFILL_SECONDS, 10, prints) == [Begin(DEMO)]


def test_a_spare_takes_no_place_of_anybody():
    shelf = shelf_with()
    shelf.used(OTHER, -REFILL_SECONDS)
    assert shelf.due(0.0, 0, prints) == []
    assert shelf.due(0.0, 1, prints) == [Begin(DEMO)]


@pytest.mark.parametrize("facet", FACETS)
def test_a_spare_serves_only_what_it_was_made_for_case_c12(facet: str):
    """Case C12: neither another harness, nor variables, secrets, servers, files or a path of the dispatch's own."""
    shelf = shelf_with("a")
    assert shelf.claim(DEMO, {**PRINT, facet: "1"}, 0.0) is None
    assert shelf.claim(OTHER, PRINT, 0.0) is None
    claimed = shelf.claim(DEMO, dict(PRINT), 0.0)
    assert claimed is not None
    assert claimed.spare_id == "a"


def test_a_spare_is_handed_out_once_and_the_oldest_first():
    shelf = shelf_with("a", "b")
    assert [shelf.claim(DEMO, PRINT, 0.0), shelf.claim(DEMO, PRINT, 0.0), shelf.claim(DEMO, PRINT, 0.0)][2] is None
    assert shelf.spares == {}


def test_one_that_starts_retires_or_expired_is_not_handed_out():
    shelf = shelf_with("a")
    assert shelf.claim(DEMO, PRINT, 100.0) is None
    assert shelf.due(100.0, 0, prints) == [Retire("a", "expired")]
    assert shelf.claim(DEMO, PRINT, 0.0) is None
    shelf.begun("b", DEMO, PRINT)
    assert shelf.claim(DEMO, PRINT, 0.0) is None


@pytest.mark.parametrize("facet", ["harness", "isolation", "patches"])
def test_a_stale_one_retires(facet: str):
    shelf = shelf_with("a")
    assert shelf.due(0.0, 0, lambda kind: {**PRINT, facet: "1"}) == [Retire("a", f"changed:{facet}")]


def test_spares_of_a_kind_that_nobody_uses_any_more_retire():
    shelf = shelf_with("a")
    shelf.seconds = math.inf
    later = LATELY_SECONDS - REFILL_SECONDS
    assert shelf.due(later, 0, prints) == [Retire("a", "unused")]
    always = Shelf(1, 100.0)
    always.used(DEMO, 0.0, always=True)
    always.used(DEMO, 5.0)
    assert always.due(10 * LATELY_SECONDS, 1, prints) == [Begin(DEMO)]


def test_a_start_that_fails_is_tried_again_later_and_later():
    shelf, now, waits = shelf_with(), 0.0, []
    for number in range(10):
        assert shelf.due(now, 1, prints) == [Begin(DEMO)]
        shelf.begun(f"s{number}", DEMO, PRINT)
        shelf.lost(f"s{number}", now, failed=True)
        shelf.gone(f"s{number}")
        assert shelf.due(now, 1, prints) == []
        due = min(shelf.kinds[DEMO].not_before, now + LATELY_SECONDS)
        waits.append(due - now)
        shelf.used(DEMO, now)
        now = due
    first, most = BACKOFF_SECONDS
    assert waits == [min(most, first * 2**number) for number in range(10)]
    shelf.begun("good", DEMO, PRINT)
    shelf.opened("good", now)
    assert shelf.claim(DEMO, PRINT, now) is not None
    assert shelf.kinds[DEMO].failures == 0


def test_a_kind_that_lacks_what_a_dispatch_brings_is_given_up_until_it_is_used_again():
    shelf = shelf_with("a")
    shelf.given_up(DEMO)
    assert shelf.due(1.0, 1, prints) == [Retire("a", "unused")]
    assert shelf.due(100.0, 1, prints) == []
    shelf.given_up(DEMO)
    shelf.used(DEMO, 200.0)
    assert shelf.due(201.0, 1, prints) == [Begin(DEMO)]
    always = Shelf(1, 100.0)
    always.used(DEMO, 0.0, always=True)
    always.given_up(DEMO)
    assert always.due(1.0, 1, prints) == [Begin(DEMO)]


def test_one_whose_seat_was_needed_is_no_failure():
    shelf = shelf_with("a")
    shelf.lost("a", 1.0, failed=False)
    shelf.gone("a")
    assert shelf.due(1.0, 1, prints) == [Begin(DEMO)]


def test_a_drain_retires_all_and_nothing_follows():
    shelf = shelf_with("a")
    shelf.begun("b", DEMO, PRINT)
    assert shelf.close() == [Retire("a", "shutdown"), Retire("b", "shutdown")]
    assert shelf.close() == []
    assert shelf.due(0.0, 9, prints) == []
    assert shelf.claim(DEMO, PRINT, 0.0) is None
    with pytest.raises(ShelfError):
        shelf.begun("c", DEMO, PRINT)


@pytest.mark.parametrize("move", ["opened", "lost", "gone"])
def test_an_illegal_move_changes_nothing(move: str):
    shelf = shelf_with("a")
    calls = {
        "opened": lambda: shelf.opened("a", 1.0),
        "lost": lambda: shelf.lost("x", 1.0, failed=True),
        "gone": lambda: shelf.gone("a"),
    }
    with pytest.raises(ShelfError):
        calls[move]()
    assert shelf.spares["a"].state is SpareState.READY
    assert shelf.kinds[DEMO].failures == 0


@pytest.mark.parametrize("trace", [{"agent": {"x": 1}}, {"has_context": True}, {"fork": {}}, {"fork": {"a": 1}}])
def test_only_the_first_turn_of_a_session_that_has_nothing_is_new(trace: dict[str, object]):
    assert is_new({}, epoch=1, chain=False)
    assert is_new({"agent": None, "has_context": False}, epoch=1, chain=False)
    assert not is_new({}, epoch=2, chain=False)
    assert not is_new({}, epoch=1, chain=True)
    if any(trace.values()):
        assert not is_new(trace, epoch=1, chain=False)


def test_where_the_directories_of_a_session_are():
    state = {"place": adopted("local", "spare_1")}
    assert place_of(state, ("p", "s"), "local") == (SPARES, "spare_1")
    assert place_of(state, ("p", "s"), "daytona") == ("p", "s")
    assert place_of({}, ("p", "s"), "local") == ("p", "s")
    assert place_of({"place": "x"}, ("p", "s"), "local") == ("p", "s")
    assert not valid_id(SPARES)
    assert not is_new(state, epoch=1, chain=False)


class Kept(RuleBasedStateMachine):
    """A shelf whose shell does as it is told, with a world in which anything may happen."""

    @initialize(keep=st.integers(1, 3), room=st.integers(0, 4))
    def begin(self, keep: int, room: int) -> None:
        self.shelf, self.now, self.room, self.minted = Shelf(keep, 50.0), 0.0, room, 0
        self.print = "0"
        self.handed: set[str] = set()
        self.closed = False

    def prints(self, kind: Kind) -> dict[str, str]:
        return {**PRINT, "harness": f"{kind.harness}{self.print}"}

    def of(self, *states: SpareState) -> list[str]:
        return [name for name, spare in self.shelf.spares.items() if spare.state in states]

    @rule(kind=st.sampled_from([DEMO, OTHER]))
    def used(self, kind: Kind) -> None:
        self.shelf.used(kind, self.now)

    @rule(seconds=st.sampled_from([0.0, REFILL_SECONDS, 10.0, 60.0, LATELY_SECONDS]))
    def time(self, seconds: float) -> None:
        self.now += seconds

    @rule(print_=st.sampled_from("01"))
    def change(self, print_: str) -> None:
        self.print = print_

    @rule()
    def due(self) -> None:
        taken = len(self.shelf.spares)
        for effect in self.shelf.due(self.now, self.room - taken, self.prints):
            assert not self.closed
            if isinstance(effect, Begin):
                self.minted += 1
                self.shelf.begun(f"s{self.minted}", effect.kind, self.prints(effect.kind))
            else:
                assert self.shelf.spares[effect.spare_id].state is SpareState.RETIRING
        for name in self.of(SpareState.READY):
            spare = self.shelf.spares[name]
            assert spare.facets == self.prints(spare.kind)
            assert spare.expires_at > self.now

    @rule(data=st.data(), failed=st.booleans())
    def outcome(self, data: st.DataObject, failed: bool) -> None:
        starting = self.of(SpareState.STARTING)
        if starting:
            name = data.draw(st.sampled_from(starting))
            if failed:
                self.shelf.lost(name, self.now, failed=True)
            else:
                self.shelf.opened(name, self.now)

    @rule(data=st.data())
    def evicted(self, data: st.DataObject) -> None:
        there = self.of(SpareState.STARTING, SpareState.READY)
        if there:
            self.shelf.lost(data.draw(st.sampled_from(there)), self.now, failed=False)

    @rule(data=st.data())
    def gone(self, data: st.DataObject) -> None:
        retiring = self.of(SpareState.RETIRING)
        if retiring:
            self.shelf.gone(data.draw(st.sampled_from(retiring)))

    @rule(kind=st.sampled_from([DEMO, OTHER]))
    def claim(self, kind: Kind) -> None:
        ready = set(self.of(SpareState.READY))
        spare = self.shelf.claim(kind, self.prints(kind), self.now)
        if spare is not None:
            assert spare.spare_id in ready
            assert spare.spare_id not in self.handed
            assert spare.facets == self.prints(kind)
            assert spare.expires_at > self.now
            assert not self.closed
            self.handed.add(spare.spare_id)

    @rule()
    def close(self) -> None:
        self.closed = True
        self.shelf.close()
        assert not self.of(SpareState.STARTING, SpareState.READY)

    @invariant()
    def bounded(self) -> None:
        for kind in (DEMO, OTHER):
            kept = [s for s in self.shelf.spares.values() if s.kind == kind and s.state is not SpareState.RETIRING]
            assert len(kept) <= self.shelf.keep
        assert not self.handed & set(self.shelf.spares)
        assert self.shelf.next_due(self.now) is None or not math.isinf(self.shelf.next_due(self.now) or 0.0)


TestKept = Kept.TestCase
