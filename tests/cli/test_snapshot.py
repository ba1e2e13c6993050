"""``acp-runner snapshot`` against an emulator that runs the build of the real image, with the real pins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.cli.doctor import check_snapshots
from runner.config import Settings
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import image_bed

pytestmark = pytest.mark.timeout(150)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(daytona_emulator: EmulatorProcess, tmp_path: Path) -> Run:
    root = tmp_path / "image" / "acp-runner"
    path = image_bed.programs(tmp_path / "bin")
    daytona_emulator.scenario("run_builds", path=path, writable=str(root.parent))
    config = tmp_path / "acp-runner.toml"
    members = {"api_url": daytona_emulator.api_url, "api_key": daytona_emulator.api_key, "root": str(root)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in members.items()]
    config.write_text("[daytona]\n" + "\n".join(lines) + "\n")
    state_dir = str(tmp_path / "state")

    def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "runner.cli.main", *words]
        given = {**os.environ, "ACP_RUNNER_STATE_DIR": state_dir, "ACP_RUNNER_CONFIG": str(config), **environ}
        return subprocess.run(command, env=given, capture_output=True, text=True, timeout=90, check=False)

    return run


def inside(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_build_shows_the_log_and_prints_the_name_of_a_snapshot_that_matches(
    cli: Run, daytona_emulator: EmulatorProcess
) -> None:
    built = cli("snapshot", "build")
    assert built.returncode == 0, built.stderr
    name = built.stdout.strip()
    assert daytona_emulator.snapshots()[name] == "active"
    for words in ("Step 1/", "npm installed", "Successfully built", "claude, codex", f'snapshot = "{name}"'):
        assert words in built.stderr
    again = inside(cli("snapshot", "build", "--json"))
    assert (again["name"], again["how"], again["differences"]) == (name, "found", [])
    assert set(again["inside"]["harnesses"]) == {"claude", "codex"}


def test_check_tells_what_a_snapshot_lacks(cli: Run) -> None:
    done = cli("snapshot", "check", "daytona-small")
    assert done.returncode == 1
    assert "daytona-small: claude: it is not in it" in done.stderr
    assert done.stdout.strip() == "daytona-small"


def test_doctor_says_whether_the_snapshots_match(cli: Run) -> None:
    given = {"ACP_RUNNER_DAYTONA__SNAPSHOT": "daytona-small", "ACP_RUNNER_DAYTONA__SNAPSHOTS": '{"big": "nowhere"}'}
    told = inside(cli("doctor", "--sandbox", "daytona", "--json", **given))
    found = {item["name"]: item["detail"] for item in told["findings"] if item["name"].startswith("snapshot")}
    assert "claude: it is not in it" in found["snapshot daytona-small"]
    assert "Snapshot nowhere not found" in found["snapshot nowhere"]


def test_doctor_does_not_wait_for_a_service_that_nobody_reaches(cli: Run, unused_tcp_port: int) -> None:
    given = {"ACP_RUNNER_DAYTONA__API_URL": f"http://127.0.0.1:{unused_tcp_port}/api"}
    given["ACP_RUNNER_DAYTONA__SNAPSHOT"] = "some-name"
    done = cli("doctor", "--sandbox", "daytona", "--json", **given)
    found = [item for item in inside(done)["findings"] if item["name"].startswith(("sandbox", "snapshot"))]
    assert done.returncode == 1
    assert [item["name"] for item in found] == ["sandbox daytona"]
    assert "Daytona is not reached" in found[0]["detail"]


def test_doctor_names_the_command_where_no_snapshot_is_set(tmp_path: Path) -> None:
    (finding,) = check_snapshots(Settings(), tmp_path)
    assert (finding.ok, finding.needed, finding.fix) == (False, False, "acp-runner snapshot build")


def test_what_fails_ends_with_one_clear_line(cli: Run, daytona_emulator: EmulatorProcess) -> None:
    daytona_emulator.scenario("failing_build", reason="no space left")
    done = cli("snapshot", "build")
    assert done.returncode == 1
    assert "acp-runner: sandbox_start_failed: Snapshot acp-runner-" in done.stderr
    assert "could not be built: no space left" in done.stderr
    assert "Traceback" not in done.stderr
    unset = cli("snapshot", "check", "--json", ACP_RUNNER_DAYTONA__API_KEY="")
    assert inside(unset)["error"]["code"] == "invalid_request"
    assert "set [daytona] api_key" in unset.stderr
