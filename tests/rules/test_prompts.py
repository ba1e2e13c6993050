"""The prompts of one session as a pure machine: its table, and what holds after every sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.rules.prompts import (
    LIVE,
    TABLE,
    Activity,
    Busy,
    Claim,
    Ended,
    Idle,
    IllegalMove,
    Move,
    Prompts,
    StartTurn,
    StopShell,
    StopTurn,
    Token,
)


def queued(prompts: Prompts, *names: str) -> list[object]:
    effects: list[object] = []
    for name in names:
        prompts.register(name)
        assert prompts.persist(name)
        effects += prompts.admit(name)
    return effects


def running(*waiting: str) -> Prompts:
    """A is claimed, the others wait."""
    prompts = Prompts()
    assert queued(prompts, "A") == [Busy(), StartTurn()]
    assert prompts.claim() == Claim(("A",), "A")
    queued(prompts, *waiting)
    return prompts


def test_terminal_states_have_no_moves() -> None:
    assert {state for state, _ in TABLE} == LIVE
    assert set(TABLE.values()) == set(Token) - {Token.PREPARING}


@pytest.mark.parametrize("state", sorted(LIVE))
@pytest.mark.parametrize("move", list(Move))
def test_an_illegal_move_changes_nothing(state: Token, move: Move) -> None:
    if (state, move) in TABLE:
        return
    prompts = Prompts(tokens={"A": state})
    with pytest.raises(IllegalMove):
        prompts._move("A", move)
    assert prompts.tokens == {"A": state}


def test_the_newest_of_a_batch_owns_it_and_absorbs_the_older() -> None:
    prompts = running("B", "C")
    assert prompts.turn_ended(Move.FINISH) == [Ended("A", Token.DONE), StartTurn()]
    claim = prompts.claim()
    assert claim == Claim(("B", "C"), "C", (Ended("B", Token.ABSORBED, "C"),))
    assert prompts.abort("B") == (False, [])
    assert prompts.abort("C") == (True, [StopTurn("C")])
    assert prompts.turn_ended(Move.ABORT) == [Ended("C", Token.ABORTED), Idle()]


def test_first_in_first_out_takes_the_oldest() -> None:
    prompts = running("B", "C")
    prompts.mode = "fifo"
    prompts.turn_ended(Move.FINISH)
    assert prompts.claim() == Claim(("B",), "B")
    assert prompts.turn_ended(Move.FINISH) == [Ended("B", Token.DONE), StartTurn()]


def test_an_abort_of_a_queued_prompt_touches_nothing_else() -> None:
    prompts = running("B")
    assert prompts.abort("B") == (True, [Ended("B", Token.CANCELLED)])
    assert prompts.abort("B") == (False, [])
    assert prompts.owner == "A"
    assert prompts.turn_ended(Move.FINISH) == [Ended("A", Token.DONE), Idle()]


def test_a_batch_that_went_stale_before_its_claim_is_sent_without_what_was_cancelled() -> None:
    prompts = running("B", "C")
    prompts.turn_ended(Move.FINISH)
    prompts.abort("B")
    queued(prompts, "D")
    assert prompts.claim() == Claim(("C",), "C")
    assert prompts.queue == ["D"]


def test_an_empty_claim_ends_without_a_frame_and_idles_once() -> None:
    prompts = running("B")
    prompts.turn_ended(Move.FINISH)
    assert prompts.abort("B") == (True, [Ended("B", Token.CANCELLED), StopTurn(None)])
    assert prompts.claim() == Claim((), None)
    assert prompts.turn_ended(Move.CANCEL) == [Idle()]


def test_no_idle_while_another_prompt_is_prepared() -> None:
    prompts = running()
    prompts.register("C")
    assert prompts.turn_ended(Move.ABORT) == [Ended("A", Token.ABORTED)]
    assert prompts.abort("C") == (True, [Ended("C", Token.CANCELLED), Idle()])
    assert not prompts.persist("C"), "its row is born cancelled"
    assert prompts.admit("C") == []


def test_a_failed_preparation_is_its_own_alone() -> None:
    prompts = running()
    prompts.register("B")
    assert prompts.fail("B") == [Ended("B", Token.FAILED)]
    assert prompts.abort("B") == (False, [])
    assert prompts.fail("B") == []


def test_a_stop_cancels_what_waits_and_what_is_prepared() -> None:
    prompts = running("B")
    prompts.register("C")
    assert prompts.stop() == [Ended("B", Token.CANCELLED), Ended("C", Token.CANCELLED), StopTurn("A")]
    assert prompts.stop() == []
    assert prompts.turn_ended(Move.ABORT) == [Ended("A", Token.ABORTED), Idle()]


def test_a_stop_may_keep_the_queue() -> None:
    prompts = running("B")
    assert prompts.stop(keep_queue=True) == [StopTurn("A")]
    assert prompts.turn_ended(Move.ABORT) == [Ended("A", Token.ABORTED), StartTurn()]


def test_an_answer_that_was_processed_first_wins() -> None:
    prompts = running()
    assert prompts.abort("A", responded=True) == (False, [])
    assert prompts.stop(responded=True) == []


def test_a_steering_prompt_cancels_and_goes_first() -> None:
    for mode, order in (("coalesce", ("B", "X")), ("fifo", ("X",))):
        prompts = running("B")
        prompts.mode = mode  # type: ignore[assignment]
        prompts.register("X")
        prompts.persist("X")
        assert prompts.admit("X", steer=True) == [StopTurn("A")]
        assert prompts.turn_ended(Move.ABORT) == [Ended("A", Token.ABORTED), StartTurn()]
        assert prompts.claim().prompt_ids == order


def test_a_shell_is_exclusive_and_a_stop_kills_it() -> None:
    prompts = Prompts()
    assert prompts.begin_shell() == [Busy()]
    assert prompts.begin_shell() is None
    assert queued(prompts, "P", "Q") == []
    assert prompts.abort("P") == (True, [Ended("P", Token.CANCELLED)])
    assert prompts.stop() == [Ended("Q", Token.CANCELLED), StopShell()]
    assert prompts.shell_ended() == [Idle()]
    assert running().begin_shell() is None


def test_a_turn_that_failed_before_its_claim_fails_its_batch() -> None:
    prompts = running("B", "C")
    prompts.turn_ended(Move.FINISH)
    queued(prompts, "D")
    failed = [Ended("B", Token.FAILED), Ended("C", Token.FAILED), StartTurn()]
    assert prompts.turn_ended(Move.FAIL) == failed


def test_a_paused_prompt_stays_active_and_nothing_queued_starts() -> None:
    prompts = running("B")
    prompts.pause("A")
    assert (prompts.tokens["A"], prompts.busy) == (Token.ACTIVE, True)
    assert queued(prompts, "C") == []
    prompts.resume_chain()
    assert prompts.turn_ended(Move.FINISH) == [Ended("A", Token.DONE), StartTurn()]


def test_an_ownerless_turn_is_not_hit_by_an_abort() -> None:
    prompts = Prompts()
    assert prompts.begin_ownerless() == [Busy()]
    assert prompts.claim() == Claim((), None)
    queued(prompts, "B")
    assert prompts.abort("B") == (True, [Ended("B", Token.CANCELLED)])
    assert prompts.stop() == [StopTurn(None)]
    assert prompts.turn_ended(Move.ABORT) == [Idle()]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["register", "persist", "admit", "steer", "fail", "abort", "stop", "keep", "claim", "end", "shell"]
        ),
        st.integers(0, 5),
    ),
    max_size=60,
)


class World:
    """What a correct shell does with the machine, and what it has seen."""

    def __init__(self, mode: str) -> None:
        self.prompts = Prompts(mode=mode)  # type: ignore[arg-type]
        self.ended: dict[str, Token] = {}
        self.aborted: list[str] = []
        self.sent: list[str] = []
        self.registered: list[str] = []
        self.busy = False

    def perform(self, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            match effect:
                case Ended(name, state):
                    assert name not in self.ended, "one ending each"
                    self.ended[name] = state
                case StartTurn():
                    assert self.prompts.activity is Activity.STARTING
                    assert self.prompts.batch.prompt_ids
                case Busy():
                    assert not self.busy
                    self.busy = True
                case Idle():
                    assert self.busy, "idle once per busy period"
                    assert not self.prompts.tokens
                    assert self.prompts.activity is Activity.IDLE
                    self.busy = False

    def step(self, what: str, number: int) -> None:
        prompts, waits = self.prompts, [name for name in self.registered if name in self.prompts.tokens]
        name = waits[number % len(waits)] if waits else "none"
        match what:
            case "register":
                name = f"p{len(self.registered)}"
                self.registered.append(name)
                prompts.register(name)
            case "persist" if prompts.tokens.get(name) is Token.PREPARING:
                assert prompts.persist(name)
            case "admit" | "steer" if prompts.tokens.get(name) is Token.PERSISTED:
                self.perform(prompts.admit(name, steer=what == "steer", withdraw=number == 3))
                if prompts.activity is Activity.STARTING and prompts.paused:
                    self.perform(prompts.chain_ended(Move.ABORT))
            case "fail":
                self.perform(prompts.fail(name))
            case "abort":
                cancelled, effects = prompts.abort(name)
                self.perform(effects)
                if cancelled:
                    assert name not in self.aborted, "true once"
                    self.aborted.append(name)
            case "stop" | "keep":
                self.perform(prompts.stop(keep_queue=what == "keep"))
            case "claim" if prompts.activity is Activity.STARTING:
                claim = prompts.claim()
                self.perform(claim.effects)
                assert not set(claim.prompt_ids) & {n for n, s in self.ended.items() if s is Token.CANCELLED}
                assert not set(claim.prompt_ids) & set(self.sent), "none is sent twice"
                self.sent += claim.prompt_ids
            case "end" if prompts.activity is Activity.TURN and number == 5 and not prompts.stopping:
                prompts.pause(prompts.owner)
            case "end" if prompts.activity is Activity.TURN:
                move = Move.ABORT if prompts.stopping else (Move.FINISH, Move.FAIL)[number % 2]
                self.perform(prompts.turn_ended(move))
            case "end" if prompts.activity is Activity.STARTING and (prompts.stopping or number == 4):
                self.perform(prompts.turn_ended(Move.CANCEL if prompts.stopping else Move.FAIL))
            case "end" if prompts.paused and prompts.activity is Activity.IDLE:
                if number % 2:
                    prompts.resume_chain()
                else:
                    self.perform(prompts.chain_ended(Move.ABORT))
            case "shell":
                if prompts.activity is Activity.SHELL:
                    self.perform(prompts.shell_ended())
                else:
                    self.perform(prompts.begin_shell() or [])

    def check(self) -> None:
        tokens, prompts = self.prompts.tokens, self.prompts
        assert set(tokens) == set(self.registered) - set(self.ended)
        owners = [name for name in (prompts.owner, prompts.chain) if name is not None]
        assert [name for name, state in tokens.items() if state is Token.ACTIVE] == owners
        assert set(prompts.queue) == {name for name, state in tokens.items() if state is Token.QUEUED}
        assert prompts.busy is self.busy
        assert self.busy or prompts.activity is Activity.IDLE
        assert prompts.paused or not (prompts.queue and prompts.activity is Activity.IDLE), "nothing is stuck"


@settings(max_examples=400)
@given(STEPS, st.sampled_from(["coalesce", "fifo"]))
def test_every_sequence_keeps_the_invariants(steps: list[tuple[str, int]], mode: str) -> None:
    world = World(mode)
    for what, number in steps:
        world.step(what, number)
        world.check()
    for _ in range(200):
        if not world.prompts.tokens and world.prompts.activity is Activity.IDLE and not world.prompts.paused:
            break
        if world.prompts.activity is Activity.SHELL:
            world.step("shell", 0)
        for what in ("persist", "admit", "claim", "end"):
            for number in range(4):
                world.step(what, number)
                world.check()
    assert set(world.ended) == set(world.registered)
    assert not world.busy


def test_a_stop_spares_what_came_later_than_it() -> None:
    prompts = running("B", "C")
    assert prompts.stop(running=False, newer={"C"}) == [Ended("B", Token.CANCELLED)]
    assert prompts.abort("A") == (True, [StopTurn("A")]), "the turn is newer than the Stop, and is not stopping"
    assert prompts.queue == ["C"]


def test_a_chain_that_gives_way_is_aborted_already() -> None:
    prompts = running()
    prompts.pause("A")
    queued(prompts)
    prompts.register("X")
    prompts.persist("X")
    assert prompts.admit("X", steer=True) == [StartTurn()]
    assert prompts.abort("A") == (False, [])
