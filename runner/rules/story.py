"""What the machines of a session did lately: told move by move, shown on request, replayed by a test (DESIGN 6).

A move is kept as it was told, so that a step costs a tuple; it becomes JSON when somebody reads it. Nothing that an
agent or a client said is in it: of an error only its code stays.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

from runner.errors import RunnerError
from runner.ids import Key
from runner.rules import turn as machine
from runner.rules.turn_moves import Event
from runner.terms import StopReason, TurnPhase

Machine = Literal["turn", "pool", "lease", "command", "interaction"]

KEPT_MOVES: Final = 256
KEPT_SESSIONS: Final = 512
_EVENTS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in get_args(Event)}


class Told(NamedTuple):
    """One move of one machine.

    Attributes:
        at: milliseconds since 1970.
        machine: which kind.
        id: which one: a turn, seat, command or interaction; of a lease the turn that beats.
        event: a frozen dataclass, a word, or a word with its details.
        before, after: a state as a word or as names and values; None where there is none.
        effects: what the shell was told to do, in order.
    """

    at: int
    machine: Machine
    id: str
    event: Any
    before: Any
    after: Any
    effects: Sequence[Any] = ()


class Tell(Protocol):
    """Tells the moves of one kind of machine."""

    def __call__(
        self, key: Key, id: str, event: Any, before: Any = None, after: Any = None, effects: Sequence[Any] = (), /
    ) -> None:
        """Keep one move; see ``Told``."""
        ...


def untold(
    key: Key, id: str, event: Any, before: Any = None, after: Any = None, effects: Sequence[Any] = (), /
) -> None:
    """For a machine that nobody listens to."""


class TurnStory:
    """Where one turn's machine tells its moves; takes the place of ``Turn.story``."""

    __slots__ = ("_key", "_stories", "_turn_id")

    def __init__(self, stories: Stories, key: Key, turn_id: str) -> None:
        self._stories = stories
        self._key = key
        self._turn_id = turn_id

    def append(self, move: machine.Moved) -> None:
        """Keep a move; an error is kept without its message, and without the frames that its traceback holds."""
        event, before, after, effects = move
        self._stories.tell(
            self._key, "turn", self._turn_id, _bare(event), before, after, [_bare(effect) for effect in effects]
        )


class Stories:
    """A bounded ring of moves for each session, the newest ``KEPT_MOVES``; of the sessions that moved last.

    ``now_ms`` is the replica's clock.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._rings: OrderedDict[Key, deque[Told]] = OrderedDict()

    def turn(self, key: Key, turn_id: str) -> TurnStory:
        """Where a turn of the session tells its moves."""
        return TurnStory(self, key, turn_id)

    def teller(self, kind: Machine) -> Tell:
        """Tells the moves of one kind of machine."""

        def tell(
            key: Key, id: str, event: Any, before: Any = None, after: Any = None, effects: Sequence[Any] = (), /
        ) -> None:
            self.tell(key, kind, id, event, before, after, effects)

        return tell

    def tell(
        self,
        key: Key,
        kind: Machine,
        id: str,
        event: Any,
        before: Any = None,
        after: Any = None,
        effects: Sequence[Any] = (),
    ) -> None:
        """Keep one move of a machine of the session."""
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = deque(maxlen=KEPT_MOVES)
            if len(self._rings) > KEPT_SESSIONS:
                self._rings.popitem(last=False)
        else:
            self._rings.move_to_end(key)
        ring.append(Told(self._now_ms(), kind, id, event, before, after, effects))

    def of(self, key: Key) -> list[Told]:
        """The session's moves, oldest first."""
        return list(self._rings.get(key, ()))

    def sessions(self) -> list[Key]:
        """Sessions with moves."""
        return list(self._rings)

    def forget(self, key: Key) -> None:
        """The session ended: nothing of it is remembered."""
        self._rings.pop(key, None)


def render(told: Told) -> dict[str, Any]:
    """A move as JSON values: ``{at, machine, id, event, before, after, effects}``, ``at`` in milliseconds.

    Events and effects are objects with a ``name`` and what they carry; a state is an object with a ``state`` or, of a
    turn, what is not as it was at first.
    """
    return {
        "at": told.at,
        "machine": told.machine,
        "id": told.id,
        "event": _named(told.event),
        "before": _state(told.before),
        "after": _state(told.after),
        "effects": [_named(effect) for effect in told.effects],
    }


def replay(items: Iterable[Mapping[str, Any]]) -> list[str]:
    """Step every turn of a rendered story again and say where the rules now do something else; empty: nowhere.

    A turn begins as its first move found it. What the machine does not decide itself (``output``, ``denied``) is taken
    from the story.
    """
    turns: dict[str, machine.Turn] = {}
    found: list[str] = []
    for number, item in enumerate(items):
        if item["machine"] != "turn":
            continue
        where = f"move {number} of {item['id']}, {item['event']['name']}"
        turn = turns.get(item["id"])
        if turn is None:
            turn = turns[item["id"]] = _turn_of(item["before"])
        else:
            turn.output, turn.denied = bool(item["before"].get("output")), bool(item["before"].get("denied"))
        found += _compared(where, "before", item["before"], _state(machine.known(turn)))
        try:
            effects = machine.step(turn, _event_of(item["event"]))
        except machine.IllegalMove as error:
            found.append(f"{where}: is illegal: {error}")
            continue
        found += _compared(where, "after", item["after"], _state(machine.known(turn)))
        found += _compared(where, "effects", item["effects"], [_named(_bare(effect)) for effect in effects])
    return found


def _compared(where: str, what: str, told: Any, now: Any) -> list[str]:
    return [] if told == now else [f"{where}: {what} was {told}, is {now}"]


def _turn_of(state: Mapping[str, Any]) -> machine.Turn:
    given = dict(state)
    given["phase"] = TurnPhase(given["phase"])
    if "stop" in given:
        given["stop"] = StopReason(given["stop"])
    if "stop_error" in given:
        given["stop_error"] = RunnerError(given["stop_error"], "")
    return machine.Turn(**given)


def _event_of(rendered: Mapping[str, Any]) -> Event:
    given = {name: value for name, value in rendered.items() if name != "name"}
    if "reason" in given:
        given["reason"] = StopReason(given["reason"])
    if "error" in given:
        given["error"] = RunnerError(given["error"], "")
    event: Event = _EVENTS[rendered["name"]](**given)
    return event


def _bare(move: Any) -> Any:
    error = getattr(move, "error", None)
    if error is not None:
        return replace(move, error=RunnerError(error.code, ""))
    return replace(move, error_message="") if getattr(move, "error_message", "") else move


def _named(move: Any) -> dict[str, Any]:
    if is_dataclass(move):
        shown = {field.name: getattr(move, field.name) for field in fields(move)}
        given = {field.name: field.default for field in fields(move)}
        rest = {name: _plain(value) for name, value in shown.items() if value is not given[name] or name == "seconds"}
        return {"name": type(move).__name__, **rest}
    if isinstance(move, str):
        return {"name": move}
    name, details = move
    return {"name": name, **{key: _plain(value) for key, value in details.items()}}


def _state(state: Any) -> dict[str, Any]:
    if state is None:
        return {}
    if isinstance(state, str):
        return {"state": _plain(state)}
    if isinstance(state, machine.Known):
        return {
            name: _plain(value)
            for name, value in zip(machine.Known._fields, state, strict=True)
            if name == "phase" or value not in (None, False)
        }
    return {name: _plain(value) for name, value in state.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, RunnerError):
        return value.code
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
