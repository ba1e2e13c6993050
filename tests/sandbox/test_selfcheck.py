"""The self-check passes on the local provider, and fails where a promise is broken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runner.clock import SystemClock
from runner.sandbox.egress import variables
from runner.sandbox.local import LocalProvider
from runner.sandbox.local_sandbox import LocalSandbox
from runner.sandbox.memory import MemoryProvider
from runner.sandbox.port import Gone, Reaped
from runner.sandbox.selfcheck import check
from tests.sandbox import bed


async def failed(provider: Any) -> set[str]:
    return {item.name for item in await check(provider) if not item.ok}


async def test_the_local_provider_keeps_every_promise(provider: LocalProvider, store_id: str) -> None:
    checks = await check(provider)
    assert [item for item in checks if not item.ok] == []
    assert len({item.name for item in checks}) == len(checks) >= 20
    assert provider.live == ()
    assert bed.carriers(store_id) == {}


@pytest.mark.parametrize("level", ["cell", "landlock"])
async def test_isolated_cells_keep_more_promises(tmp_path: Path, store_id: str, level: str) -> None:
    """Case K1: a neighbour's files, the runner's environment, the system and other processes are out of reach."""
    provider = bed.local(tmp_path / "state", store_id, level=level)
    try:
        checks = await check(provider)
    finally:
        await provider.close()
    assert [item for item in checks if not item.ok] == []
    assert "a neighbour's and the runner's files and environment are out of reach" in {item.name for item in checks}
    assert bed.carriers(store_id) == {}


async def test_the_variables_of_the_proxy_are_no_leak(tmp_path: Path, store_id: str) -> None:
    provider = bed.local(tmp_path / "state", store_id, level="cell", network="proxy")
    try:
        assert [item for item in await check(provider, variables()) if not item.ok] == []
        assert await failed(provider) == {"the agent's environment is the allow-list"}
    finally:
        await provider.close()


async def test_walls_that_do_not_hold_fail_it(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case K1: it is looked at what the agent can do, not at what the provider says."""
    monkeypatch.setattr(LocalSandbox, "isolation", "landlock")
    assert "a neighbour's and the runner's files and environment are out of reach" in await failed(provider)


async def test_a_leaked_variable_fails_it(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case K1."""
    monkeypatch.setattr("runner.sandbox.local.BASE_ENV", {**os.environ, "PATH": os.environ["PATH"], "LANG": "C.UTF-8"})
    assert "the agent's environment is the allow-list" in await failed(provider)


async def test_a_kill_that_kills_nobody_fails_it(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D10."""

    async def lie(self: LocalSandbox, turn_id: str, seconds: float) -> Reaped:
        return Reaped(5)

    monkeypatch.setattr(LocalSandbox, "kill_turn", lie)
    assert await failed(provider) == {"first turn: none is left", "later turn: none is left"}


async def test_a_teardown_that_is_only_claimed_fails_it(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D10."""
    really = LocalSandbox.destroy

    async def lie(self: LocalSandbox, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        return Gone(True, "echild")

    monkeypatch.setattr(LocalSandbox, "destroy", lie)
    assert {"the census is zero", "the agent's end was told once"} <= await failed(provider)
    monkeypatch.setattr(LocalSandbox, "destroy", really)


async def test_a_sandbox_lost_on_the_way_is_a_failed_check_and_nothing_is_left(
    provider: LocalProvider, store_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case A1."""
    mark = LocalSandbox.mark

    def lose(self: LocalSandbox, turn_id: str) -> Any:
        self._init.kill()
        return mark(self, turn_id)

    monkeypatch.setattr(LocalSandbox, "mark", lose)
    checks = await check(provider)
    lost = [item for item in checks if not item.ok]
    assert [item.name for item in lost] == ["inside"]
    assert "sandbox_lost" in lost[0].detail
    assert bed.carriers(store_id) == {}


async def test_an_agent_that_answers_nothing_is_a_failed_check() -> None:
    async def silent(agent: Any) -> None:
        await agent.read_frame()

    provider = MemoryProvider(silent, clock=SystemClock())
    assert {"refuses a command that is not there", "inside"} <= await failed(provider)
    assert provider.live == ()
