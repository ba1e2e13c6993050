"""The wheel carries the package, the sandboxes and the patches, and works where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.tree import ROOT, below

BUNDLED = ("sandboxes", "patches")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this checkout, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed into a folder; its dependencies are those of the running interpreter."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder)]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def run_installed(installed: Path, *argv: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=installed, env=environ, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_every_file_of_the_bundled_folders(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"runner/_bundled/{path.relative_to(ROOT)}" for path in below(*BUNDLED)}
    assert len(wanted) > 1
    assert wanted <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_the_wheel_carries_every_file_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {str(path.relative_to(ROOT)) for path in below("runner")} <= names


def test_an_installed_wheel_finds_its_own_resources(installed: Path) -> None:
    code = (
        "import json, runner; from pathlib import Path; from runner.resources import resource_path;"
        "from runner.harness.demo import SPEC;"
        "print(json.dumps([runner.__file__, str(resource_path('patches', 'manifest.toml')),"
        " SPEC.resolve(Path('.')).argv[-1]]))"
    )
    package, manifest, agent = json.loads(run_installed(installed, "-c", code))
    assert Path(package).is_relative_to(installed)
    assert Path(manifest).is_relative_to(installed)
    assert Path(manifest).read_bytes() == (ROOT / "patches" / "manifest.toml").read_bytes()
    assert Path(agent).is_relative_to(installed)
    compile(Path(agent).read_bytes(), agent, "exec")


def test_an_installed_wheel_makes_the_same_snapshot_and_has_the_same_patches(installed: Path) -> None:
    code = (
        "import json; from pathlib import Path; from runner.assembly.snapshot_image import image;"
        "from runner.harness.catalogue import Catalogue; from runner.harness.patching import shipped;"
        "known = Catalogue.build({}, Path('state').absolute());"
        "facts = {name: [patch.facts() for patch in patches] for name, patches in shipped().items()};"
        "print(json.dumps([image('/opt/acp-runner', known).name, facts]))"
    )
    here = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    assert json.loads(run_installed(installed, "-c", code)) == json.loads(here.stdout)


def test_an_installed_wheel_has_its_command(installed: Path) -> None:
    assert "serve" in run_installed(installed, str(installed / "bin" / "acp-runner"), "--help")


def test_a_missing_resource_says_which() -> None:
    from runner.resources import resource_path

    with pytest.raises(FileNotFoundError, match="sandboxes/nothing"):
        resource_path("sandboxes", "nothing")
