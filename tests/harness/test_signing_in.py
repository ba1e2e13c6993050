"""``harness login``: the agent's own way to log in, in a home of its own, of which only the login is kept."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.logins import Lent, Shelf
from runner.harness.signing_in import shelf_of, sign_in
from runner.harness.spec import HarnessSpec, Login, Resolved
from runner.rules.login import Form
from tests.harness_fixture import InstalledHarnesses

PROGRAM = str(Path(__file__).with_name("signing.py"))
FORM = Form(".mine/auth.json", ("access", "refresh"), "refresh", "expires")
FIRST = json.dumps({"access": "access-1", "refresh": "refresh-1", "expires": 1_900_000_000})
ENVIRON = {"PATH": "/usr/bin:/bin", "MY_SECRET": "of the runner"}
ROOT = Path(__file__).parents[2]
KILLED = """
import os, pathlib, sys
from runner.harness.signing_in import sign_in
from runner.harness.spec import HarnessSpec, Login, Resolved
from runner.rules.login import Form
command = (*sys.argv[2:], "acp", "wait")
login = Login("help", Form(".mine/auth.json", ()), None, "browser")
spec = HarnessSpec("mine", "Mine", lambda state_dir: Resolved(command), login=login)
sign_in(spec, pathlib.Path(sys.argv[1]), lambda text: print(text, flush=True), os.environ)
"""


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def spec(*words: str, acp: bool = False) -> HarnessSpec:
    command = (sys.executable, PROGRAM, *words)
    login = Login("help", FORM, None if acp else lambda state_dir: command, "browser", ("key", "MY_KEY"))
    return HarnessSpec("mine", "Mine", lambda state_dir: Resolved(command), login=login)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_a_terminal_program_logs_in_and_only_its_login_is_kept(tmp_path: Path) -> None:
    found = sign_in(spec("store", FIRST), tmp_path, print, ENVIRON)
    assert (found.rotates, found.expires_ms) == (True, 1_900_000_000_000)
    shelf = shelf_of(spec(), tmp_path)
    assert shelf.content() == FIRST.encode()
    assert sorted(path.name for path in shelf.directory.iterdir()) == ["identity", "lock", "login"]
    assert modes(shelf.directory) == {0o600}
    assert stat.S_IMODE(shelf.directory.stat().st_mode) == stat.S_IMODE(shelf.directory.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("words", [("give-up",), ("forget",), ("store", "half a fi")])
def test_a_login_that_failed_changes_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    sign_in(spec("store", FIRST), tmp_path, print, ENVIRON)
    shelf = shelf_of(spec(), tmp_path)
    identity = shelf.identity()
    with pytest.raises(RunnerError) as refused:
        sign_in(spec(*words), tmp_path, print, ENVIRON)
    assert refused.value.code == "harness_auth_required"
    assert (shelf.content(), shelf.identity()) == (FIRST.encode(), identity)
    assert sorted(path.name for path in shelf.directory.iterdir()) == ["identity", "lock", "login"]


def test_a_new_login_is_another_identity_and_what_is_lent_of_the_old_one_stays_away(tmp_path: Path) -> None:
    sign_in(spec("store", FIRST), tmp_path, print, ENVIRON)
    shelf = shelf_of(spec(), tmp_path)
    before = shelf.identity()
    shelf.lend(Lent("seat", "s1", "/nowhere", "digest"))
    shelf.keep(b'{"access": "access-2"}')
    assert (shelf.identity(), shelf.lent()) == (before, Lent("seat", "s1", "/nowhere", "digest"))
    sign_in(spec("store", FIRST), tmp_path, print, ENVIRON)
    assert shelf.identity() != before
    assert shelf.lent() is None
    assert (shelf.forget(), shelf.forget(), shelf.login(), shelf.identity()) == (True, False, None, None)


def test_an_agent_without_such_a_program_is_asked_by_acp(tmp_path: Path) -> None:
    assert sign_in(spec("acp", FIRST, acp=True), tmp_path, print, ENVIRON).rotates
    assert shelf_of(spec(), tmp_path).content() == FIRST.encode()


def test_a_key_is_stored_by_the_agent_itself(tmp_path: Path) -> None:
    found = sign_in(spec("acp", acp=True), tmp_path, print, ENVIRON, key="sk-123456")
    assert (found.rotates, found.secrets) == (False, ("sk-123456",))


def test_the_address_that_an_agent_would_open_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(RunnerError) as refused:
        sign_in(spec("acp", "wait", acp=True), tmp_path, said.append, ENVIRON, seconds=3.0)
    assert refused.value.code == "harness_unresponsive"
    assert "https://login.example/?code=1" in said[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_login_that_is_killed_leaves_no_agent_and_no_home(tmp_path: Path, number: signal.Signals) -> None:
    """Case K4: an agent that went on would write a login nobody asked for any more into a home nobody looks at."""
    command = (sys.executable, "-c", KILLED, str(tmp_path), sys.executable, PROGRAM)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "Open this address in a browser on this machine:\n"
    agents = children(process.pid)
    assert len(agents) == 1
    process.send_signal(number)
    process.communicate(timeout=20)
    wait_for(lambda: not any(alive(pid) for pid in agents))
    directory = shelf_of(spec(), tmp_path).directory
    left = [path for path in directory.iterdir() if path.is_dir()]
    assert len(left) == (1 if number == signal.SIGKILL else 0)
    sign_in(spec("store", FIRST), tmp_path, print, ENVIRON)
    assert sorted(path.name for path in directory.iterdir()) == ["identity", "lock", "login"]


def test_the_home_of_a_login_that_is_under_way_stays(tmp_path: Path) -> None:
    shelf = shelf_of(spec(), tmp_path)
    with shelf.home() as mine, shelf.home() as other:
        assert mine.is_dir()
        shelf.forget()
        assert mine.is_dir()
        assert other.is_dir()
    assert not mine.exists()
    assert not other.exists()


def test_a_refusal_of_the_agent_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="no such account"):
        sign_in(spec("acp", "refuse", acp=True), tmp_path, print, ENVIRON)


def test_a_harness_without_logins_says_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="keeps no login"):
        shelf_of(Catalogue.build({}, tmp_path).get("demo"), tmp_path)


def test_a_link_in_the_place_of_a_login_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(FIRST)
    shelf = Shelf(tmp_path, "mine", FORM)
    shelf.directory.mkdir(parents=True)
    (shelf.directory / "login").symlink_to(secret)
    assert shelf.login() is None


def test_codex_stores_a_key_by_itself(installed_harnesses: InstalledHarnesses, tmp_path: Path) -> None:
    installed_harnesses.link_into(tmp_path)
    codex = Catalogue.build({}, tmp_path).get("codex")
    found = sign_in(codex, tmp_path, print, ENVIRON, key="sk-codex-123")
    assert (found.secrets, found.rotates) == (("sk-codex-123",), False)


def test_codex_tells_the_address_of_its_login_page(installed_harnesses: InstalledHarnesses, tmp_path: Path) -> None:
    installed_harnesses.link_into(tmp_path)
    said: list[str] = []
    with pytest.raises(RunnerError):
        sign_in(Catalogue.build({}, tmp_path).get("codex"), tmp_path, said.append, ENVIRON, seconds=6.0)
    assert "https://auth.openai.com/oauth/authorize?" in said[0]


def test_claude_has_a_terminal_program_that_logs_in(installed_harnesses: InstalledHarnesses, tmp_path: Path) -> None:
    installed_harnesses.link_into(tmp_path)
    login = Catalogue.build({}, tmp_path).get("claude").login
    assert login is not None
    assert login.command is not None
    program, *words = login.command(tmp_path)
    assert Path(program).is_file()
    assert words == ["auth", "login"]
