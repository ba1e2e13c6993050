"""The installer: whole or not at all, exactly what is pinned, one at a time."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.installed import NpmInstall, fits_this_machine, node_cpu, read_manifest
from runner.harness.installer import check, install
from runner.harness.spec import HarnessSpec, Resolved, installed_directory, installed_file

FAKE = Path(__file__).with_name("fake_npm.py")

AGENT = f"""#!{sys.executable}
import json
input()
info = {{"name": "toy", "version": "1.0.0"}}
print(json.dumps({{"id": 1, "result": {{"protocolVersion": 1, "agentInfo": info}}}}), flush=True)
"""


@dataclass(frozen=True)
class ToyInstall(NpmInstall):
    """A lock made in the test."""

    version: str = "1.0.0"

    def lock_bytes(self) -> bytes:
        def entry(name: str, **more: object) -> dict:
            return {"version": self.version, "integrity": f"sha512-{name}{self.version}", **more}

        packages = {
            "": {"name": "toy", "version": self.version, "dependencies": {"toy": self.version}},
            "node_modules/toy": entry("toy"),
            "node_modules/toy-here": entry("here", optional=True, os=["linux"], cpu=[node_cpu()]),
            "node_modules/toy-there": entry("there", optional=True, cpu=["linux-never"]),
        }
        return json.dumps({"lockfileVersion": 3, "packages": packages}).encode()


def toy(version: str = "1.0.0", program: str = "node_modules/toy/bin/agent") -> HarnessSpec:
    pinned = ToyInstall("toy", {"toy": version}, version)

    def resolve(state_dir: Path) -> Resolved:
        directory = installed_directory("toy", pinned, state_dir)
        return Resolved((str(installed_file("toy", directory, program)),), (directory,))

    return HarnessSpec("toy", "Toy", resolve, version=version, install=pinned)


@dataclass
class Shop:
    """A state directory and the installer pointed at the toy."""

    state_dir: Path
    spec: HarnessSpec
    log: Path

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue([self.spec], self.state_dir)

    @property
    def directory(self) -> Path:
        return self.state_dir / "harnesses" / "toy"

    def install(self, seconds: float = 20.0) -> bool:
        lines: list[str] = []
        made = install("toy", self.state_dir, lines.append, catalogue=self.catalogue, seconds=seconds)
        assert made.directory == self.directory
        assert made.version == self.spec.version
        assert lines
        return made.fresh

    def check(self) -> str:
        result = check("toy", self.state_dir, catalogue=self.catalogue, seconds=10)
        return "ok" if result.ok else result.detail

    def runs_of_npm(self) -> int:
        return self.log.read_text().count("ci") if self.log.exists() else 0

    def leftovers(self) -> list[str]:
        return [path.name for path in self.directory.parent.glob(".toy.*-*")]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:{os.defpath}")
    monkeypatch.setenv("FAKE_NPM_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_AGENT", AGENT)
    return Shop(tmp_path / "state", toy(), tmp_path / "log")


def manner(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FAKE_NPM", value)


def test_an_installation_is_found_and_checked(shop: Shop) -> None:
    assert not shop.catalogue.availability("toy").available
    assert shop.install()
    assert shop.catalogue.availability("toy").available
    assert shop.check() == "ok"
    manifest = read_manifest(shop.directory)
    assert manifest is not None
    assert set(manifest.packages) == {"node_modules/toy", "node_modules/toy-here"}
    assert shop.leftovers() == []


def test_a_second_call_does_nothing(shop: Shop) -> None:
    assert shop.install()
    assert not shop.install()
    assert shop.runs_of_npm() == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("fails", "EINTEGRITY"),
        ("leaves_out", "could not install node_modules/toy 1.0.0"),
        ("other_digest", "another node_modules/toy"),
        ("adds", "node_modules/extra, which is not pinned"),
        ("silent", "no record"),
    ],
)
def test_a_bad_installation_is_none(shop: Shop, monkeypatch: pytest.MonkeyPatch, bad: str, words: str) -> None:
    manner(monkeypatch, bad)
    with pytest.raises(RunnerError, match=words) as raised:
        shop.install()
    assert raised.value.code == "harness_missing"
    assert not shop.directory.exists()
    assert shop.leftovers() == []
    assert not shop.catalogue.availability("toy").available


def test_npm_that_does_not_end_is_ended(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    manner(monkeypatch, "hangs")
    with pytest.raises(RunnerError, match="in time"):
        shop.install(seconds=1.0)
    assert shop.leftovers() == []


def test_without_npm_the_command_that_installs_it_is_named(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(shop.state_dir))
    with pytest.raises(RunnerError, match="apt-get install npm") as raised:
        shop.install()
    assert raised.value.code == "harness_missing"


def test_what_a_crash_left_is_removed_and_not_used(shop: Shop) -> None:
    for kind in ("new", "old"):
        left = shop.directory.parent / f".toy.{kind}-crashed"
        (left / "node_modules").mkdir(parents=True)
    shop.directory.mkdir()
    (shop.directory / "half").write_text("")
    assert not shop.catalogue.availability("toy").available
    assert shop.install()
    assert shop.leftovers() == []
    assert not (shop.directory / "half").exists()


def test_a_failed_upgrade_leaves_the_old_installation(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.install()
    newer = replace(shop, spec=toy("2.0.0"))
    manner(monkeypatch, "fails")
    with pytest.raises(RunnerError):
        newer.install()
    assert shop.catalogue.availability("toy").available
    manner(monkeypatch, "good")
    assert "another version" in (newer.catalogue.availability("toy").reason or "")
    assert newer.install()
    assert not shop.catalogue.availability("toy").available


def test_two_at_once_install_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    manner(monkeypatch, "slow")
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(shop.install())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(made) == [False, False, True]
    assert shop.runs_of_npm() == 1


def test_damage_is_seen_by_the_check_and_mended_by_the_installer(shop: Shop) -> None:
    shop.install()
    program = shop.directory / "node_modules" / "toy" / "bin" / "agent"
    program.chmod(0o644)
    assert "bin/agent has changed" in shop.check()
    assert "acp-runner harness install toy" in shop.check()
    assert shop.install()
    assert shop.check() == "ok"
    (shop.directory / "node_modules" / "toy-here" / "package.json").unlink()
    assert "package.json is gone" in shop.check()


def test_a_changed_byte_is_seen(shop: Shop) -> None:
    shop.install()
    record = shop.directory / "node_modules" / "toy" / "package.json"
    record.write_text(record.read_text().replace("1", "7"))
    assert "package.json has changed" in shop.check()


def test_an_agent_of_another_version_than_pinned_is_not_ok(shop: Shop) -> None:
    shop.spec = toy("1.5.0")
    shop.install()
    assert "but version 1.5.0 is pinned" in shop.check()


def test_nothing_to_install_is_no_error(tmp_path: Path) -> None:
    made = install("demo", tmp_path)
    assert (made.directory, made.fresh) == (None, False)


def test_an_unknown_harness(tmp_path: Path) -> None:
    with pytest.raises(RunnerError) as raised:
        install("nope", tmp_path)
    assert raised.value.code == "harness_unknown"


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        ({}, True),
        ({"os": ["linux"]}, True),
        ({"os": "linux", "cpu": node_cpu()}, True),
        ({"os": ["darwin", "win32"]}, False),
        ({"os": ["!win32"]}, True),
        ({"os": ["!linux"]}, False),
        ({"cpu": ["mips"]}, False),
        ({"libc": ["no-such-libc"]}, False),
    ],
)
def test_which_packages_belong_on_this_machine(entry: dict, fits: bool) -> None:
    assert fits_this_machine(entry) is fits
