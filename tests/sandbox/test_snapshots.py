"""Snapshots: built by the SDK at an emulator that runs their steps, looked into, compared with what is here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.assembly import snapshots
from runner.assembly.snapshot_image import MAX_BYTES, content_of, image
from runner.clock import SystemClock
from runner.config import Settings
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.installer import install
from runner.harness.patching import read_patches
from runner.sandbox.bridge_files import bridge_digest
from runner.sandbox.daytona import building
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.harness.test_installer import AGENT, toy
from tests.harness.test_patching import folder, patched
from tests.sandbox import image_bed
from tests.sandbox.daytona_bed import provider, spec, states

CLOCK = SystemClock()


class Site:
    """A runner with one toy harness and its patch, an emulator that builds, and where the image lies."""

    def __init__(self, emulator: EmulatorProcess, tmp_path: Path) -> None:
        self.emulator = emulator
        self.root = tmp_path / "image" / "acp-runner"
        self.state_dir = tmp_path / "state"
        self.programs = tmp_path / "bin"
        self.path = image_bed.programs(self.programs, agent=AGENT)
        emulator.scenario("run_builds", path=self.path, writable=str(self.root.parent))
        self.spec = patched(toy(), read_patches(folder(tmp_path))["toy"])
        self.settings = image_bed.settings(emulator, self.root)
        self.log: list[str] = []

    @property
    def known(self) -> Catalogue:
        return Catalogue([self.spec], self.state_dir)

    async def build(self, **more: bool) -> tuple[str, str]:
        made, how = await snapshots.build(self.settings, self.known, CLOCK, self.log.append, **more)
        return made.name, how

    async def check(self, name: str | None = None) -> list[str]:
        checked = await snapshots.check(self.settings, self.known, CLOCK, name)
        assert states(self.emulator) == {}
        return checked.differences

    def snapshots(self) -> dict[str, str]:
        return self.emulator.snapshots()


@pytest.fixture
def site(daytona_emulator: EmulatorProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(building, "LOOK_SECONDS", 0.1)
    made = Site(daytona_emulator, tmp_path)
    monkeypatch.setenv("PATH", f"{made.programs}:{os.environ['PATH']}")
    yield made
    assert daytona_emulator.state()["processes"] == []


async def test_it_is_built_once_with_its_log_and_matches(site: Site) -> None:
    """The agents there are those of ``harness install`` here, patches and all, byte for byte."""
    name, how = await site.build()
    assert how == "built"
    text = "\n".join(site.log)
    assert "FROM python:3.12" in text and "applied toy.patch" in text and "Successfully built" in text
    assert max(map(len, site.log)) < 300
    record = json.loads((site.root / "snapshot.json").read_text())
    assert record["bridge"] == bridge_digest()
    assert not (site.root / "parcel").exists()
    assert "import json  # patched" in (site.root / "harnesses/toy/node_modules/toy/bin/agent").read_text()
    assert await site.check() == []
    install("toy", site.state_dir, catalogue=site.known)
    assert await site.check() == []
    assert await site.build() == (name, "found")


async def test_each_thing_that_is_not_as_here_is_told(site: Site) -> None:
    await site.build()
    install("toy", site.state_dir, catalogue=site.known)
    harness = site.root / "harnesses/toy"
    agent = harness / "node_modules/toy/bin/agent"
    patched_text = agent.read_text()
    agent.write_text(AGENT)
    assert await site.check() == ["toy: its files are others than those installed here"]
    agent.write_text(patched_text)
    manifest = json.loads((harness / "manifest.json").read_text())
    (harness / "manifest.json").write_text(json.dumps({**manifest, "patches": []}))
    assert await site.check() == ["toy: its patches are others than here"]
    (harness / "manifest.json").write_text(json.dumps({**manifest, "lock_digest": "x"}))
    assert await site.check() == ["toy: its packages are of another version"]
    (harness / "manifest.json").write_text(json.dumps(manifest))
    (site.root / "inside/demo_agent.py").write_text("")
    (site.root / f"bridge-{bridge_digest()}/link.py").write_text("")
    (site.programs / "node").unlink()
    (harness / "node_modules/toy/package.json").write_text('{"version": "9.9.9"}')
    found = await site.check()
    assert "the files of the bridge have changed" in found
    assert "toy: node_modules/toy is 9.9.9, not 1.0.0" in found
    assert any("demo agent" in what for what in found)


async def test_another_snapshot_than_this_installation_s_is_told(site: Site) -> None:
    name, _ = await site.build()
    site.spec = toy()
    assert await site.check(name) == ["toy: its patches are others than here"]
    assert image(str(site.root), site.known).name != name


async def test_a_snapshot_without_agents(site: Site) -> None:
    found = await site.check("")
    assert "the bridge and the init of this version are not in it" in found
    assert "toy: it is not in it" in found


async def test_a_build_that_fails_is_told_with_its_log_s_end_and_deleted(site: Site) -> None:
    (site.programs / "npm").write_text("#!/bin/sh\necho npm error E404\nexit 1\n")
    with pytest.raises(RunnerError, match="could not be built") as raised:
        await site.build()
    assert raised.value.code == "sandbox_start_failed"
    assert "npm error E404" in raised.value.message and "npm failed with exit code 1" in raised.value.message
    assert list(site.snapshots()) == ["daytona-small"]


async def test_a_patch_that_does_not_fit_fails_the_build_by_name(site: Site) -> None:
    image_bed.programs(site.programs, agent="other\n")
    with pytest.raises(RunnerError, match=r"patches/toy\.patch does not apply"):
        await site.build()


async def test_another_websockets_than_the_runner_s_fails_the_build(site: Site) -> None:
    image_bed.programs(site.programs, after_pip='echo "#" >> "$2/websockets/__init__.py"')
    with pytest.raises(RunnerError, match="is not the one of the runner"):
        await site.build()


async def test_what_an_earlier_build_left_is_deleted_and_built_again(site: Site) -> None:
    name, _ = await site.build()
    site.emulator.scenario("snapshot_state", snapshot=name, state="build_failed")
    (site.root / "snapshot.json").unlink()
    assert await site.build() == (name, "built")
    assert f"{name} is what an earlier build left" in "\n".join(site.log)
    site.emulator.scenario("snapshot_state", snapshot=name, state="inactive")
    assert await site.build() == (name, "activated")
    assert await site.build(again=True) == (name, "built")


async def test_a_build_that_does_not_begin_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.rules.snapshot.PENDING_SECONDS", 0.5)
    site.emulator.scenario("hanging_build")
    with pytest.raises(RunnerError, match="does not begin to be built"):
        await site.build()
    assert list(site.snapshots()) == ["daytona-small"]


@pytest.mark.parametrize(
    "fault",
    [
        {"match": "^GET /api/snapshots/", "status": 502},
        {"match": "^POST /api/snapshots$", "status": 429, "headers": {"Retry-After": "1"}},
        {"match": "^POST /api/snapshots$", "drop": "before"},
    ],
)
async def test_calls_that_fail_on_the_way_are_minded(site: Site, fault: dict[str, object]) -> None:
    site.emulator.fault(**fault)  # type: ignore[arg-type]
    name, _ = await site.build()
    assert site.snapshots()[name] == "active"


async def test_a_wrong_key_is_told_at_once(site: Site) -> None:
    site.settings = image_bed.settings(site.emulator, site.root, api_key="wrong")
    with pytest.raises(RunnerError, match="Daytona refused the snapshot"):
        await site.build()


async def test_a_copy_is_made_of_the_recipe_of_what_it_copies(daytona_emulator: EmulatorProcess) -> None:
    daytona = provider(daytona_emulator, snapshots={"agents": "daytona-small"})
    sandbox = await daytona.start(spec("ses_1", recipe="agents", workspace_files={"given.txt": b"given"}))
    await sandbox.destroy(0.0)
    assert await daytona.copy_workspace(("default", "ses_1"), ("default", "ses_2")) == "copied"
    labels = [box["labels"] for box in daytona_emulator.state()["sandboxes"]]
    assert [label["acp-runner-recipe"] for label in labels] == ["agents", "agents"]
    with pytest.raises(RunnerError, match="the session's disk is made of agents"):
        await daytona.start(spec("ses_2"))
    again = await daytona.start(spec("ses_2", seat_id="seat_3", recipe="agents"))
    await again.destroy(0.0)
    await daytona.close()


@pytest.mark.parametrize("root", ["relative", "/a/../b", "/a b", "/a'b", "/"])
def test_a_root_that_a_shell_would_read_otherwise_is_refused(root: str, tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="no plain absolute path"):
        image(root, Catalogue([], tmp_path))


def test_the_dockerfile_of_the_real_agents_fits_a_request(tmp_path: Path) -> None:
    made = image(Settings().daytona.root, Catalogue.build({}, tmp_path))
    assert len(json.dumps(made.dockerfile)) < MAX_BYTES
    assert max(map(len, made.dockerfile.splitlines())) < 65_535
    assert made == image(Settings().daytona.root, Catalogue.build({}, tmp_path / "elsewhere"))
    assert made.content == content_of(Settings().daytona.root, Catalogue.build({}, tmp_path))
    assert made.name.startswith("acp-runner-") and made.name != image("/opt/x", Catalogue.build({}, tmp_path)).name
    assert str(tmp_path) not in made.dockerfile
