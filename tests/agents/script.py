"""Scripts of the scripted agent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Self

from tests.agents.census import alive_with, kill_all
from tests.agents.frame_log import FrameLog
from tests.agents.steps import Step

SCRIPTED = Path(__file__).with_name("scripted.py")


class AgentScript:
    """What one scripted agent does; polite where nothing is said.

    Polite: the n-th prompt is answered with the text ``answer n`` and ``end_turn``, a cancel with ``cancelled`` at
    once, session ids are ``scripted-<pid>-<n>``.

    Args:
        folder: where the script and the frame log are kept.
        name: tells several agents of one folder apart.
        ids: of the agent's own requests: ``one`` (1, 2, …), ``zero`` (0, 1, …) or ``uuid``.
        ignore_signals: names without SIG, like ``TERM``.
        stay: live on after the end of stdin.
        wrap: the command is a wrapper that forks the real agent and dies by SIGTERM alone (case D2).
        stop_reading_after: a method; stdin is not read any more once it came.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "agent",
        *,
        ids: str = "one",
        ignore_signals: tuple[str, ...] = (),
        stay: bool = False,
        wrap: bool = False,
        stop_reading_after: str | None = None,
    ) -> None:
        self.path = folder / f"{name}.script.json"
        self.log = FrameLog(folder / f"{name}.frames.jsonl")
        self._on: dict[str, list[list[Step]]] = {}
        self._script: dict[str, Any] = {
            "ids": ids,
            "ignore_signals": list(ignore_signals),
            "stay": stay,
            "wrap": wrap,
            "stop_reading_after": stop_reading_after,
            "start": [],
            "on": self._on,
        }
        self.save()

    def save(self) -> None:
        """Write the script; every method that changes it does so, for agents that start later."""
        self.path.write_text(json.dumps(self._script))

    def on_start(self, *steps: Step) -> Self:
        """Before anything is read."""
        self._script["start"] = list(steps)
        self.save()
        return self

    def on(self, method: str, *steps: Step) -> Self:
        """For a method: the first call says what its first request gets, the second its second; the last repeats.

        No steps at all: the request is never answered, the notification ignored.
        """
        self._on.setdefault(method, []).append(list(steps))
        self.save()
        return self

    def on_initialize(self, *steps: Step) -> Self:
        return self.on("initialize", *steps)

    def on_new(self, *steps: Step) -> Self:
        return self.on("session/new", *steps)

    def on_load(self, *steps: Step) -> Self:
        """``session/load``; a polite one replays nothing, so that a client finds it empty."""
        return self.on("session/load", *steps)

    def on_prompt(self, *steps: Step) -> Self:
        return self.on("session/prompt", *steps)

    def on_cancel(self, *steps: Step) -> Self:
        return self.on("session/cancel", *steps)

    def alive(self) -> dict[int, str]:
        """Every live process of these agents, whatever became of its parents: pid to command line."""
        return alive_with(self._variable)

    def kill(self) -> None:
        """Leave none of them behind; for the end of a test."""
        kill_all(self._variable)

    @property
    def _variable(self) -> str:
        return f"FRAME_LOG={self.log.path}"

    @property
    def argv(self) -> list[str]:
        """The agent's command."""
        return [sys.executable, str(SCRIPTED)]

    @property
    def env(self) -> dict[str, str]:
        """The agent's environment: ``SCRIPT`` and ``FRAME_LOG``."""
        return {"SCRIPT": str(self.path), "FRAME_LOG": str(self.log.path)}


def directive(*steps: Step) -> str:
    """A prompt text that runs these steps instead of the script's."""
    return json.dumps(list(steps))
