"""What happens to replicas and to their roads, and the repair that follows each of it after a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from tests.simulation.chance import Chance
from tests.simulation.replicas import Fallen, Node

KINDS: Final = ("crash", "freeze", "freeze", "store", "plane", "plane", "lossy", "drain", "slow")


class Trouble:
    """Strikes a replica; one that is struck already is left alone."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._repairs: list[asyncio.Task[None]] = []

    def strike(self, kind: str, node: Node) -> None:
        """Do it; the repair comes by itself."""
        if not node.up or node.frozen or node.leaving:
            return
        if node.store_road.down and kind in ("crash", "drain"):
            # What a replica could not make durable dies with it: two strikes at once are more than is promised.
            return
        match kind:
            case "crash":
                node.crash()
                self._repair(self._chance.pick((0.1, 3.0, 40.0)), node.start)
            case "drain":
                node.leaving = True
                self._repair(0.0, lambda: self._restart(node))
            case "freeze":
                node.freeze()
                self._repair(self._chance.pick((1.0, 6.0, 24.0, 45.0, 75.0)), _now(node.thaw))
            case "store" | "plane":
                road = node.store_road if kind == "store" else node.plane_road
                name = self._chance.pick(("down", "hanging")) if kind == "plane" else "down"
                setattr(road, name, True)
                self._repair(self._chance.pick((0.5, 4.0, 25.0)), _now(road.heal))
            case "lossy":
                node.plane_road.lossy = 0.3
                self._repair(10.0, _now(lambda: setattr(node.plane_road, "lossy", 0.0)))
            case "slow":
                node.plane_road.long = node.store_road.long = 0.3
                self._repair(15.0, _now(lambda: _fast(node)))

    async def mended(self) -> None:
        """Wait until every repair is done."""
        while self._repairs:
            repairs, self._repairs = self._repairs, []
            await asyncio.gather(*repairs)

    def _repair(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        async def later() -> None:
            await asyncio.sleep(seconds)
            await work()

        self._repairs.append(asyncio.create_task(later(), name="repair"))

    @staticmethod
    async def _restart(node: Node) -> None:
        try:
            await node.drain()
        except Fallen:
            return
        await node.start()


def _fast(node: Node) -> None:
    node.plane_road.long = node.store_road.long = 0.02


def _now(work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def done() -> None:
        work()

    return done
