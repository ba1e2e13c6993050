"""One seed from its first step to its last check."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from runner.rules.story import render
from tests.simulation.checks import Violation, check_rest, check_step, tables
from tests.simulation.loop import SimulationLoop
from tests.simulation.world import World

LIMIT_SECONDS = 20_000.0


@dataclass
class Run:
    """How a seed went. ``fault`` is None when everything held; ``stories`` tells each session's moves by replica."""

    seed: int
    fault: str | None
    visited: dict[str, set[Any]]
    stories: dict[str, list[dict[str, Any]]]

    def story(self) -> str:
        """The moves of every session as JSON, in the order in which they happened."""
        items = [item for moves in self.stories.values() for item in moves]
        return json.dumps(sorted(items, key=lambda item: item["at"]), indent=1)


def run_seed(seed: int, *, tell: bool = False, of: type[World] = World) -> Run:
    """Live through a seed; a fault is told, not raised. ``tell``: the stories also where everything held."""
    loop = SimulationLoop(LIMIT_SECONDS)
    box: list[World] = []
    fault: str | None = None
    logging.disable(logging.CRITICAL)
    try:
        loop.run_until_complete(_live(of(seed), box))
        if loop.complaints:
            fault = loop.complaints[0]
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        if not isinstance(error, Violation):
            fault += _where(error)
    finally:
        loop.bury()
        logging.disable(logging.NOTSET)
    world = box[0]
    stories = _stories(world) if tell or fault is not None else {}
    return Run(seed, fault, tables(world), stories)


async def _live(world: World, box: list[World]) -> None:
    box.append(world)
    await world.begin()
    for _ in range(4 + int(world.chance.random.random() * 12)):
        await world.step()
        check_step(world)
    await world.calm()
    await check_rest(world)
    await world.next_messages()
    await world.calm()
    await check_rest(world)
    await world.end()
    check_step(world)
    for client in world.clients:
        if client.done() and not client.cancelled() and client.exception() is not None:
            raise client.exception() or AssertionError


def _stories(world: World) -> dict[str, list[dict[str, Any]]]:
    found = [(replica.replica_id, replica.services.stories) for replica in world.replicas]
    found += [(f"plane {number}", plane.story) for number, plane in enumerate(world.planes)]
    return {
        f"{name} {key[1]}": [{**render(told), "replica": name, "session": key[1]} for told in stories.of(key)]
        for name, stories in found
        for key in stories.sessions()
    }


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
