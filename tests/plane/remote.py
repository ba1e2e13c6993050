"""A store in memory that a test takes away, slows down, or makes lose its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from runner.errors import RunnerError
from runner.store.memory import MemoryStore
from runner.store.port import Admission, Appended, Ending, InteractionRow, PromptRow, RecordRow


class Remote(MemoryStore):
    """``calls`` holds the writes that arrived; ``deaf``: they are written, but the answer is lost.

    ``hang``: seconds after which a lost answer is given up.
    """

    def __init__(self) -> None:
        super().__init__("store_remote")
        self.deaf = False
        self.hang = 0.0
        self.gate: asyncio.Event | None = None
        self.calls: list[str] = []

    async def _told(self, name: str, answer: Any) -> Any:
        self.calls.append(name)
        if self.gate is not None:
            await self.gate.wait()
        if self.hang:
            await asyncio.sleep(self.hang)
            raise RunnerError("store_unavailable", "no answer came")
        if self.deaf:
            raise RunnerError("store_unavailable", "the answer was lost")
        return answer

    async def admit(self, admission: Admission) -> bool:
        return bool(await self._told(f"admit {admission.turn.turn_id}", await super().admit(admission)))

    async def end(self, ending: Ending) -> bool:
        return bool(await self._told(f"end {ending.turn.turn_id}", await super().end(ending)))

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        numbers = ",".join(f"{row.epoch}.{row.n}" for row in records)
        answer: Appended = await self._told(f"append {numbers}", await super().append(records, interactions, prompts))
        return answer
