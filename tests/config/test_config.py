"""The settings model: sources, precedence, refusals (DESIGN 5)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from runner.config import Settings, Windows, load_settings, state_dir
from runner.errors import RunnerError


def write(folder: Path, text: str) -> Path:
    file = folder / "acp-runner.toml"
    file.write_text(text)
    return file


def refused(path: Path | None, environ: dict[str, str]) -> RunnerError:
    with pytest.raises(RunnerError) as caught:
        load_settings(path, environ)
    assert caught.value.code == "invalid_request"
    return caught.value


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults_are_those_of_the_design():
    settings = load_settings(None, {})
    assert settings.model_dump() == Settings().model_dump()
    assert (settings.server.host, settings.server.port, settings.server.max_turns) == ("127.0.0.1", 8765, 64)
    assert settings.server.max_body_bytes == 32 * 1024 * 1024
    assert settings.server.ring_bytes == 4 * 1024 * 1024
    assert (settings.turn.settle_seconds, settings.turn.drain_seconds, settings.turn.pause_quiet_ms) == (10, 30, 100)
    assert settings.turn.total_seconds is None
    assert settings.turn.quiet_seconds == 300
    assert (settings.leases.beat_seconds, settings.leases.lease_seconds) == (5, 20)
    assert (settings.leases.beat_timeout_seconds, settings.leases.on_unreachable) == (3, "open")
    assert settings.acp.max_line_bytes == 64 * 1024 * 1024
    assert settings.records.lost_after_seconds == 120
    assert settings.file is None


def test_windows_default_per_provider_and_the_nearest_table_wins(tmp_path: Path):
    assert Settings().pool.windows("local") == Windows(60, 600, 600, 0)
    assert Settings().pool.windows("daytona") == Windows(120, 120, 120, 1800)
    file = write(tmp_path, "[pool]\nidle_seconds = 5\nstopped_seconds = 0\n[pool.daytona]\nidle_seconds = 7\n")
    pool = load_settings(file, {}).pool
    assert pool.windows("local") == Windows(5, 600, 0, 0)
    assert pool.windows("daytona") == Windows(7, 120, 0, 1800)
    assert pool.windows("another") == Windows(5, 600, 0, 0)


def test_a_variable_overrides_one_value_of_the_file(tmp_path: Path):
    file = write(tmp_path, "[server]\nport = 1\nhost = '::1'\n[pool.daytona]\ndisk_seconds = 9\n")
    environ = {"ACP_RUNNER_SERVER__PORT": "2", "ACP_RUNNER_POOL__DAYTONA__DISK_SECONDS": "8.5"}
    settings = load_settings(file, environ)
    assert (settings.server.port, settings.server.host) == (2, "::1")
    assert settings.pool.windows("daytona").disk_seconds == 8.5
    assert (settings.file, settings.base_dir) == (file, tmp_path)


def test_tables_and_lists_in_variables():
    settings = load_settings(
        None,
        {
            "ACP_RUNNER_HARNESS__MINE__COMMAND": '["python", "my_agent.py"]',
            "ACP_RUNNER_HARNESS__MINE__ENV__Mode": "1",
            "ACP_RUNNER_AUTH__TOKENS": '[{"token": "t-1", "project": "p", "scopes": ["read"]}]',
            "ACP_RUNNER_SECRETS__A__KEY": '{"kept": "as text"}',
            "ACP_RUNNER_LOCAL__ROOTS": '["/srv"]',
            "ACP_RUNNER_SERVER": '{"max_turns": 3, "port": 1}',
            "ACP_RUNNER_SERVER__PORT": "4",
        },
    )
    assert settings.harness["mine"].command == ["python", "my_agent.py"]
    assert settings.harness["mine"].env == {"Mode": "1"}
    assert settings.auth.tokens[0].token.get_secret_value() == "t-1"
    assert settings.secrets["A__KEY"].get_secret_value() == '{"kept": "as text"}'
    assert settings.local.roots == [Path("/srv")]
    assert (settings.server.max_turns, settings.server.port) == (3, 4)


def test_a_custom_harness_is_three_lines(tmp_path: Path):
    file = write(
        tmp_path, '[harness.mine]\ncommand = ["./agent"]\nenv = { MODE = "fast" }\npass_env = ["MY_API_KEY"]\n'
    )
    harness = load_settings(file, {}).harness["mine"]
    assert (harness.command, harness.env, harness.pass_env) == (["./agent"], {"MODE": "fast"}, ["MY_API_KEY"])
    assert (harness.read, harness.write) == ([], [])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[server]\nprot = 1\n", "server.prot"),
        ("[sever]\nport = 1\n", "sever"),
        ("[pool.daytona]\nidle = 1\n", "pool.daytona.idle"),
        ("[harness.mine]\ncommand = ['a']\ncwd = '/'\n", "harness.mine.cwd"),
        ("[[auth.tokens]]\ntoken = 'x'\nproject = 'p'\nscopes = ['read']\nname = 'n'\n", "auth.tokens.0.name"),
    ],
)
def test_unknown_names_in_the_file_refuse_by_dotted_name_and_file(tmp_path: Path, text: str, name: str):
    file = write(tmp_path, text)
    error = refused(file, {})
    assert error.extra["field"] == name
    assert error.message == f"{name}: unknown name ({file})"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[server]\nmax_turns = 0\n", "server.max_turns"),
        ("[server]\nport = 70000\n", "server.port"),
        ("[turn]\nsettle_seconds = -1\n", "turn.settle_seconds"),
        ("[turn]\nidle_seconds = nan\n", "turn.idle_seconds"),
        ("[turn]\nidle_seconds = -5\n", "turn.idle_seconds"),
        ("[pool]\nidle_seconds = inf\n", "pool.idle_seconds"),
        ("[pool.daytona]\ndisk_seconds = 0\n", "pool.daytona.disk_seconds"),
        ("[daytona]\norphan_seconds = 0\n", "daytona.orphan_seconds"),
        ("[leases]\nlease_seconds = 8\n", "leases"),
        ("[leases]\non_unreachable = 'maybe'\n", "leases.on_unreachable"),
        ("[leases]\nurl = 'ftp://127.0.0.1'\n", "leases.url"),
        ("[store]\nurl = 'sqlite:///relative'\n", "store.url"),
        ("[store]\nurl = 'mysql://127.0.0.1/acp'\n", "store.url"),
        ("[harness.mine]\ncommand = []\n", "harness.mine.command"),
        ("[[auth.tokens]]\ntoken = ''\nproject = 'p'\nscopes = ['read']\n", "auth.tokens.0.token"),
        ("[[auth.tokens]]\ntoken = 'x'\nproject = '../p'\nscopes = ['read']\n", "auth.tokens.0.project"),
        ("[[auth.tokens]]\ntoken = 'x'\nproject = 'p'\nscopes = ['root']\n", "auth.tokens.0.scopes.0"),
    ],
)
def test_bounds_are_named(tmp_path: Path, text: str, name: str):
    """Also case C3: a provider's last net cannot be switched off."""
    assert refused(write(tmp_path, text), {}).extra["field"] == name


def test_limits_of_zero_are_off(tmp_path: Path):
    """Case I7: each limit can be switched off."""
    turn = load_settings(write(tmp_path, "[turn]\nidle_seconds = 0\n"), {"ACP_RUNNER_TURN__QUIET_SECONDS": "0"}).turn
    assert turn.idle_seconds is None
    assert turn.quiet_seconds is None


def test_unknown_variables_only_warn_and_the_commands_own_do_not(caplog: pytest.LogCaptureFixture):
    own = {"ACP_RUNNER_URL": "u", "ACP_RUNNER_TOKEN": "t", "ACP_RUNNER_STATE_DIR": "/x", "ACP_RUNNER_CONFIG": ""}
    with caplog.at_level(logging.WARNING, "runner.config"):
        load_settings(None, {**own, "PATH": "/bin"})
        assert caplog.messages == []
        load_settings(None, {"ACP_RUNNER_SERVER__PROT": "1", "ACP_RUNNER_FOO": "s3cret"})
    assert caplog.messages == [
        "unknown variable ACP_RUNNER_FOO is ignored",
        "unknown variable ACP_RUNNER_SERVER__PROT is ignored",
    ]


def test_a_wrong_variable_is_named_without_its_value():
    error = refused(None, {"ACP_RUNNER_SERVER__PORT": "sesame"})
    assert "ACP_RUNNER_SERVER__PORT" in error.message
    assert "sesame" not in error.message
    error = refused(None, {"ACP_RUNNER_LOCAL__ROOTS": "sesame"})
    assert "ACP_RUNNER_LOCAL__ROOTS" in error.message
    assert "sesame" not in error.message


def test_which_file_is_read(tmp_path: Path):
    named = tmp_path / "other.toml"
    named.write_text("[server]\nport = 2\n")
    assert load_settings(None, {}).server.port == 8765
    write(tmp_path, "[server]\nport = 1\n")
    assert load_settings(None, {}).server.port == 1
    assert load_settings(None, {"ACP_RUNNER_CONFIG": str(named)}).server.port == 2
    assert load_settings(tmp_path / "acp-runner.toml", {"ACP_RUNNER_CONFIG": str(named)}).server.port == 1


def test_a_named_file_must_be_readable_toml(tmp_path: Path):
    assert "absent.toml" in refused(tmp_path / "absent.toml", {}).message
    assert "not valid TOML" in refused(write(tmp_path, "[server\n"), {}).message


def test_settings_alone_read_no_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVER", '{"port": 1}')
    monkeypatch.setenv("ACP_RUNNER_SERVER__PORT", "1")
    assert Settings().server.port == 8765


def test_state_dir():
    assert state_dir({"HOME": "/h"}) == Path("/h/.local/state/acp-runner")
    assert load_settings(None, {"ACP_RUNNER_STATE_DIR": "/s"}).state_dir == Path("/s")


def test_redacted_shows_names_but_no_secret(tmp_path: Path):
    file = write(
        tmp_path,
        "[secrets]\nKEY = 'marker-1'\n[daytona]\napi_key = 'marker-2'\n"
        "[[auth.tokens]]\ntoken = 'marker-3'\nproject = 'p'\nscopes = ['read']\n"
        "[harness.mine]\ncommand = ['a']\nenv = { TOKEN = 'marker-4' }\n",
    )
    settings = load_settings(file, {})
    shown = settings.redacted()
    assert "marker" not in str(shown)
    assert "marker-1" not in repr(settings) + str(settings.daytona) + str(settings.auth)
    assert shown["secrets"] == {"KEY": "[secret]"}
    assert shown["auth"]["tokens"][0]["project"] == "p"
    assert shown["harness"]["mine"]["env"] == {"TOKEN": "[secret]"}


def test_the_same_token_twice_is_refused(tmp_path: Path):
    one = "[[auth.tokens]]\ntoken = 'x'\nproject = 'p'\nscopes = ['read']\n"
    error = refused(write(tmp_path, one + one), {})
    assert "twice" in error.message


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://acp:pa%40ss@db.example:5432/acp",
        "postgres://acp@db.example/acp?sslmode=require",
        "postgresql://acp:pass@[::1]:5432/acp",
        "postgresql://acp:pass@db1.example:5432,db2.example:5432/acp?target_session_attrs=primary",
        "postgresql:///acp?host=/run/postgresql",
    ],
)
def test_a_database_is_named_and_its_password_is_not_shown(url: str):
    settings = load_settings(None, {"ACP_RUNNER_STORE__URL": url, "ACP_RUNNER_LEASES__URL": "redis://:pass@r:6379/0"})
    assert settings.store.url == url
    shown = str(settings.redacted())
    assert "pass" not in shown
    assert "pa%40ss" not in shown
    assert "db.example" in shown or "db.example" not in url
    assert "redis://r:6379/0" in shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://127.0.0.1",
        "postgresql://127.0.0.1/",
        "postgresql://acp:s3c/ret@db/acp",
        "postgresql://acp:s3c@ret@db/acp",
        "postgresql://acp:s3c?ret@db/acp",
        "postgresql://acp:s3c#ret@db/acp",
        "postgresql://acp:s3c ret@db/acp",
    ],
)
def test_a_database_whose_password_could_be_taken_for_a_host_is_refused(url: str):
    error = refused(None, {"ACP_RUNNER_STORE__URL": url})
    assert error.extra["field"] == "store.url"
    assert "s3c" not in error.message


def test_keys_of_a_harness_and_hosts_they_may_go_to(tmp_path: Path):
    text = (
        '[harness.mine]\ncommand = ["a"]\nkeys = [{ key = "K", base_url = "B", upstream = "https://m.example/v1" }]\n'
    )
    settings = load_settings(
        write(tmp_path, text + '[credentials]\nhosts = ["*.example", "http://127.0.0.1:4000"]\n'), {}
    )
    (key,) = settings.harness["mine"].keys
    assert (key.key, key.base_url, key.upstream, key.header) == ("K", "B", "https://m.example/v1", "bearer")
    assert settings.credentials.proxy is True
    assert load_settings(None, {"ACP_RUNNER_CREDENTIALS__PROXY": "false"}).credentials.proxy is False
    assert load_settings(None, {"ACP_RUNNER_CREDENTIALS__HOSTS": '["a"]'}).credentials.hosts == ["a"]


@pytest.mark.parametrize(
    "keys",
    [
        '{ key = "K", base_url = "B", upstream = "m.example" }',
        '{ key = "K", base_url = "B", upstream = "https://user:pw@m.example" }',
        '{ key = "K L", base_url = "B", upstream = "https://m.example" }',
        '{ key = "K", base_url = "B", upstream = "https://m.example", header = "cookie" }',
        '{ key = "K", base_url = "B", upstream = "https://m" }, { key = "K", base_url = "C", upstream = "https://m" }',
        '{ key = "K", base_url = "B", upstream = "https://m" }, { key = "L", base_url = "B", upstream = "https://n" }',
        '{ key = "K", upstream = "https://m.example" }',
    ],
)
def test_keys_that_make_no_sense(tmp_path: Path, keys: str):
    error = refused(write(tmp_path, f'[harness.mine]\ncommand = ["a"]\nkeys = [{keys}]\n'), {})
    assert error.extra["field"].startswith("harness.mine.keys")


def test_a_host_that_is_none(tmp_path: Path):
    assert refused(write(tmp_path, '[credentials]\nhosts = ["a/b"]\n'), {}).extra["field"] == "credentials.hosts.0"
