"""The shipped locks: exact, complete, and without the address of any registry."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from runner.harness.catalogue import BUILT_IN
from runner.harness.installed import NpmInstall
from runner.harness.spec import HarnessSpec

PINNED = [spec for spec in BUILT_IN if spec.install is not None]
EXACT = re.compile(r"^\d+\.\d+\.\d+$")


@pytest.fixture(params=PINNED, ids=lambda spec: spec.name)
def spec(request: pytest.FixtureRequest) -> HarnessSpec:
    return request.param


@pytest.fixture
def pinned(spec: HarnessSpec) -> NpmInstall:
    assert spec.install is not None
    return spec.install


@pytest.fixture
def packages(pinned: NpmInstall) -> dict[str, Any]:
    return json.loads(pinned.lock_bytes())["packages"]


def test_both_real_harnesses_are_pinned() -> None:
    assert [spec.name for spec in PINNED] == ["claude", "codex"]


def test_the_direct_packages_are_those_of_the_spec(pinned: NpmInstall, packages: dict[str, Any]) -> None:
    root = packages[""]
    direct = {**root["dependencies"], **root.get("optionalDependencies", {})}
    assert direct == pinned.packages
    assert all(EXACT.match(version) for version in direct.values())


def test_each_direct_package_is_locked_at_its_version(pinned: NpmInstall, packages: dict[str, Any]) -> None:
    for name, version in pinned.packages.items():
        assert packages[f"node_modules/{name}"]["version"] == version


def test_every_package_has_a_digest_and_none_an_address(pinned: NpmInstall, packages: dict[str, Any]) -> None:
    for path, entry in packages.items():
        assert "resolved" not in entry
        assert not path or entry["integrity"].startswith("sha512-")
    assert b"://" not in pinned.lock_bytes()


def test_the_spec_version_is_that_of_the_adapter(spec: HarnessSpec, pinned: NpmInstall) -> None:
    assert spec.version in pinned.packages.values()
