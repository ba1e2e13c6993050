"""What of the runner's own files, beside its state directory, no agent and no caller gets (case K1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.assembly.sandboxes import secret_files
from runner.config import load_settings
from runner.errors import RunnerError
from runner.sandbox.local_files import LocalFiles


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("[server]\nport = 1\n[harness.mine]\ncommand = ['a']\n", False),
        ("[secrets]\nKEY = 'value'\n", True),
        ("[[auth.tokens]]\ntoken = 'x'\nproject = 'p'\nscopes = ['read']\n", True),
        ("[daytona]\napi_key = 'key'\n", True),
        ("[harness.mine]\ncommand = ['a']\nenv = { KEY = 'value' }\n", True),
        ("[leases]\nurl = 'redis://:password@r:6379/0'\n", True),
    ],
)
def test_settings_are_hidden_when_they_hold_a_secret(tmp_path: Path, text: str, hidden: bool) -> None:
    file = tmp_path / "acp-runner.toml"
    file.write_text(text)
    assert secret_files(load_settings(file, {})) == ((file,) if hidden else ())
    assert secret_files(load_settings(None, {"ACP_RUNNER_SECRETS__KEY": "value"})) == ()


def test_a_store_of_its_own_place_is_hidden_with_what_belongs_to_it(tmp_path: Path) -> None:
    found = secret_files(load_settings(None, {"ACP_RUNNER_STORE__URL": f"sqlite:///{tmp_path}/s.db"}))
    assert [path.name for path in found] == ["s.db", "s.db-wal", "s.db-shm", "s.db-journal"]
    assert found[0] == tmp_path / "s.db"


async def test_they_are_not_among_the_files_of_a_workspace(tmp_path: Path) -> None:
    secret = tmp_path / "conf" / "acp-runner.toml"
    secret.parent.mkdir()
    secret.write_text("secret")
    (tmp_path / "link").symlink_to("conf/acp-runner.toml")
    (tmp_path / "hard").hardlink_to(secret)
    files = LocalFiles(tmp_path / "state", tmp_path, own=False, secret=(secret, tmp_path / "absent"))
    for path in ("conf/acp-runner.toml", "link", "hard"):
        for work in (files.read(path, 100), files.write(path, b"mine")):
            with pytest.raises(RunnerError) as refused:
                await work
            assert refused.value.code == "not_found"
    assert (await files.list("conf", b"", 10)).entries == []
    assert secret.read_text() == "secret"
