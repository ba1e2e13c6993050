"""What a provider makes for no session: adopted where it is, or swept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from runner.clock import SystemClock
from runner.ids import SPARES
from runner.sandbox.local import LocalProvider
from runner.sandbox.memory import MemoryProvider
from runner.sandbox.port import Sandbox, SandboxSpec, SpareProvider
from tests.sandbox import bed

ADOPTED, LEFT = "spare_1", "spare_2"


@pytest.fixture(params=["local", "memory"])
async def spares(request: pytest.FixtureRequest, tmp_path: Path, store_id: str) -> AsyncIterator[SpareProvider]:
    """Every provider that makes spares."""

    async def body(agent: object) -> None:
        await asyncio.Event().wait()

    local: Callable[[], SpareProvider] = lambda: bed.local(tmp_path / "state", store_id)  # noqa: E731
    made = local() if request.param == "local" else MemoryProvider(body, clock=SystemClock())
    yield made
    await made.close()
    assert bed.carriers(store_id) == {}


def spare_spec(spare_id: str, *, spare: bool = True) -> SandboxSpec:
    return bed.spec(f"seat_of_{spare_id}", project=SPARES, session_id=spare_id, spare=spare)


async def started(spares: SpareProvider, spare_id: str) -> Sandbox:
    return await spares.start(spare_spec(spare_id))


async def test_what_nobody_adopted_is_swept_and_what_a_session_has_stays(spares: SpareProvider) -> None:
    boxes = [await started(spares, name) for name in (ADOPTED, LEFT)]
    identity = await spares.home_identity(SPARES, ADOPTED)
    assert identity is not None
    spares.adopt(ADOPTED)
    spares.adopt(ADOPTED)
    for box in boxes:
        await box.destroy(0.0)
    assert await spares.sweep_spares() == 1
    assert await spares.sweep_spares() == 0
    assert await spares.home_identity(SPARES, ADOPTED) == identity
    assert await spares.home_identity(SPARES, LEFT) is None
    assert await spares.copy_workspace((SPARES, ADOPTED), ("default", "fork")) == "copied"
    await spares.remove(SPARES, ADOPTED)
    assert await spares.home_identity(SPARES, ADOPTED) is None


async def test_a_session_is_untouched_until_it_has_a_directory(spares: SpareProvider) -> None:
    assert spares.untouched("default", "of_seat_1")
    box = await spares.start(bed.spec())
    assert not spares.untouched("default", "of_seat_1")
    assert spares.untouched("default", "other")
    await box.destroy(0.0)


async def test_an_adopted_place_is_used_again_and_survives_a_sweep_that_could_not_finish(
    provider: LocalProvider, tmp_path: Path
) -> None:
    """A start of a session there settles whose it is, whatever an earlier runner left undone."""
    paths = provider.paths(SPARES, LEFT, None)
    box = await provider.start(spare_spec(LEFT))
    assert (paths.home.parent / "unclaimed").exists()
    await box.destroy(0.0)
    (paths.workspace / "work.txt").write_text("mine")
    box = await provider.start(spare_spec(LEFT, spare=False))
    assert not (paths.home.parent / "unclaimed").exists()
    assert await provider.sweep_spares() == 0
    assert (paths.workspace / "work.txt").read_text() == "mine"
    await box.destroy(0.0)


async def test_the_begin_of_a_spare_that_was_never_started_is_swept(provider: LocalProvider, tmp_path: Path) -> None:
    """Case C7: a runner that was killed between any two steps leaves nothing."""
    homes = tmp_path / "state" / "homes" / SPARES
    (homes / "spare_a").mkdir(parents=True)
    (homes / "spare_b").mkdir()
    (homes / "spare_b" / "unclaimed").touch()
    workspace = provider.paths(SPARES, "spare_b", None).workspace
    workspace.mkdir(parents=True)
    assert await provider.sweep_spares() == 2
    assert list(homes.iterdir()) == []
    assert not workspace.exists()


async def test_the_note_cannot_be_reached_from_a_cell(tmp_path: Path, store_id: str) -> None:
    """An agent cannot make its own directories a spare's, nor those of another session."""
    provider = bed.local(tmp_path / "state", store_id, level="cell")
    note = provider.paths(SPARES, LEFT, None).home.parent / "unclaimed"
    look = f"ls -A {note.parent} | grep -v home; rm -f {note}; : > {note}; echo done; sleep 60"
    box = await provider.start(
        SandboxSpec(SPARES, LEFT, "seat_1", ("/bin/sh", "-c", look), {"PATH": "/usr/bin:/bin"}, spare=True)
    )
    assert (await bed.Talk(box).line()) in ("done", "tmp")
    assert note.exists()
    await box.destroy(0.0)
    await provider.close()
