"""Patches at installation: applied, recorded, named by the fingerprint, refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.harness.catalogue import BUILT_IN, Catalogue
from runner.harness.installed import NpmInstall, read_manifest
from runner.harness.installer import check, install
from runner.harness.patching import read_patches, shipped
from runner.harness.spec import HarnessSpec
from runner.rules.patches import Patch, patches_digest
from tests.harness.test_installer import AGENT, FAKE, ToyInstall, toy

TARGET = "node_modules/toy/bin/agent"
DIFF = "--- a/bin/agent\n+++ b/bin/agent\n@@ -2 +2 @@\n-import json\n+import json  # patched\n"


@dataclass(frozen=True)
class PatchedInstall(ToyInstall):
    """The toy with patches of the test's own."""

    given: tuple[Patch, ...] = ()

    def patches(self) -> tuple[Patch, ...]:
        return self.given


def folder(tmp_path: Path, diff: str = DIFF, **changes: str) -> Path:
    """A folder of patches with one for the toy."""
    made = tmp_path / "patches"
    made.mkdir(exist_ok=True)
    members = {
        "harness": "toy",
        "package": "toy",
        "version": "1.0.0",
        "file": "toy.patch",
        "sha256": hashlib.sha256(AGENT.encode()).hexdigest(),
        "reason": "a test",
        **changes,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in members.items()]
    (made / "manifest.toml").write_text("[[patch]]\n" + "\n".join(lines) + "\n")
    (made / "toy.patch").write_text(diff)
    return made


def patched(spec: HarnessSpec, patches: tuple[Patch, ...]) -> HarnessSpec:
    pinned = PatchedInstall("toy", {"toy": "1.0.0"}, "1.0.0", patches)

    def resolve(state_dir: Path):
        from runner.harness.spec import Resolved, installed_directory, installed_file

        directory = installed_directory("toy", pinned, state_dir)
        return Resolved((str(installed_file("toy", directory, TARGET)),), (directory,))

    return replace(spec, install=pinned, resolve=resolve)


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:{os.defpath}")
    monkeypatch.setenv("FAKE_AGENT", AGENT)
    return tmp_path / "state"


def test_a_patch_is_applied_recorded_and_checked(tmp_path: Path, state_dir: Path) -> None:
    patches = read_patches(folder(tmp_path))["toy"]
    spec = patched(toy(), patches)
    known = Catalogue([spec], state_dir)
    news: list[str] = []
    assert install("toy", state_dir, news.append, catalogue=known).fresh
    directory = state_dir / "harnesses" / "toy"
    assert (directory / TARGET).read_text() == AGENT.replace("import json\n", "import json  # patched\n")
    assert (directory / TARGET).stat().st_mode & 0o777 == 0o755
    assert f"toy: applied toy.patch to {TARGET}" in news
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.patches == tuple(patch.facts() for patch in patches)
    assert known.patches("toy") == patches_digest(manifest.patches) != Catalogue([toy()], state_dir).patches("toy")
    assert check("toy", state_dir, catalogue=known).ok
    assert not install("toy", state_dir, catalogue=known).fresh
    assert [path.name for path in (directory / TARGET).parent.iterdir()] == ["agent"]


def test_other_patches_are_another_installation(tmp_path: Path, state_dir: Path) -> None:
    plain = Catalogue([toy()], state_dir)
    install("toy", state_dir, catalogue=plain)
    known = Catalogue([patched(toy(), read_patches(folder(tmp_path))["toy"])], state_dir)
    reason = known.availability("toy").reason or ""
    assert "other patches than this runner has" in reason and "acp-runner harness install toy" in reason
    assert install("toy", state_dir, catalogue=known).fresh
    assert known.availability("toy").available
    assert not plain.availability("toy").available


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sha256": "0" * 64}, "does not apply to node_modules/toy/bin/agent: the file has other content"),
        ({"version": "2.0.0"}, "made for version 2.0.0, and 1.0.0 is pinned"),
        ({"package": "other"}, "and no version is pinned"),
        ({"diff": DIFF.replace("-2 +2", "-3 +3")}, "line 3 is another than the patch expects"),
        ({"diff": DIFF.replace("bin/agent", "bin/none")}, "does not apply to node_modules/toy/bin/none"),
    ],
)
def test_a_patch_that_does_not_fit_leaves_no_installation(
    tmp_path: Path, state_dir: Path, changes: dict[str, str], words: str
) -> None:
    known = Catalogue([patched(toy(), read_patches(folder(tmp_path, **changes))["toy"])], state_dir)
    with pytest.raises(RunnerError, match=words) as raised:
        install("toy", state_dir, catalogue=known)
    assert raised.value.code == "harness_missing"
    assert "patches/toy.patch" in raised.value.message
    assert not (state_dir / "harnesses" / "toy").exists()


def test_a_package_of_another_machine_is_not_there_to_be_patched(tmp_path: Path, state_dir: Path) -> None:
    patches = read_patches(folder(tmp_path, package="toy-there"))["toy"]
    known = Catalogue([patched(toy(), patches)], state_dir)
    assert install("toy", state_dir, catalogue=known).fresh
    assert known.availability("toy").available


def test_a_symlink_out_of_the_installation_is_not_followed(tmp_path: Path, state_dir: Path) -> None:
    from runner.harness.patching import apply_patches

    outside = tmp_path / "outside"
    outside.write_text(AGENT)
    place = tmp_path / "made" / TARGET
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    locked = {"node_modules/toy": "1.0.0"}
    with pytest.raises(RunnerError, match="symlink"):
        apply_patches("toy", read_patches(folder(tmp_path))["toy"], locked, locked, tmp_path / "made", print)
    assert outside.read_text() == AGENT


@pytest.mark.parametrize(("changes", "words"), [({"file": "../x"}, "beside the manifest"), ({"file": "none"}, "none")])
def test_a_manifest_that_cannot_be_used_says_why(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    with pytest.raises(RunnerError, match=words):
        read_patches(folder(tmp_path, **changes))


def test_every_shipped_patch_is_of_a_pinned_package() -> None:
    installs = {spec.name: spec.install for spec in BUILT_IN if spec.install is not None}
    for harness, patches in shipped().items():
        pinned: NpmInstall = installs[harness]
        for patch in patches:
            assert pinned.locked()[patch.place] == patch.version, patch.file
