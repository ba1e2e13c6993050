"""Codex's configuration is made from the dispatch alone."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.harness import codex
from runner.harness.spec import LaunchContext


def config(**env: str) -> dict:
    context = LaunchContext(Path("/home"), Path("/work"), Path("/tmp/x"), env, Path("/state"))
    return tomllib.loads(codex.config_toml(context))


def test_a_key_alone_talks_to_the_official_server() -> None:
    made = config(OPENAI_API_KEY="sk-secret")
    assert made["model_provider"] == "acp-runner"
    assert made["model_providers"]["acp-runner"] == {
        "name": "OpenAI",
        "base_url": codex.DEFAULT_BASE_URL,
        "wire_api": "responses",
        "env_key": "OPENAI_API_KEY",
    }
    assert "model" not in made


def test_the_key_itself_is_not_written() -> None:
    context = LaunchContext(Path("/h"), Path("/w"), Path("/t"), {"OPENAI_API_KEY": "sk-secret"}, Path("/s"))
    assert "sk-secret" not in codex.config_toml(context)


def test_every_setting() -> None:
    made = config(
        OPENAI_API_KEY="k",
        OPENAI_BASE_URL="http://127.0.0.1:1/v1",
        CODEX_MODEL="fake-model",
        CODEX_APPROVAL_POLICY="on-request",
        CODEX_SANDBOX_MODE="workspace-write",
        CODEX_MAX_RETRIES="0",
    )
    provider = made["model_providers"]["acp-runner"]
    assert made["model"] == "fake-model"
    assert (made["approval_policy"], made["sandbox_mode"]) == ("on-request", "workspace-write")
    assert provider["base_url"] == "http://127.0.0.1:1/v1"
    assert (provider["request_max_retries"], provider["stream_max_retries"]) == (0, 0)


def test_a_server_without_a_key_gets_none() -> None:
    made = config(OPENAI_BASE_URL="http://127.0.0.1:1/v1")
    assert "env_key" not in made["model_providers"]["acp-runner"]


def test_without_key_and_server_codex_asks_for_its_own_login() -> None:
    made = config()
    assert "model_provider" not in made
    assert "model_providers" not in made


def test_it_asks_before_commands_and_leaves_isolation_to_the_runner() -> None:
    made = config()
    assert (made["approval_policy"], made["sandbox_mode"]) == ("untrusted", "danger-full-access")
    assert made["check_for_update_on_startup"] is False
    assert made["analytics"] == {"enabled": False}


@pytest.mark.parametrize(
    "setting", [{"CODEX_MAX_RETRIES": "many"}, {"CODEX_APPROVAL_POLICY": "x"}, {"CODEX_SANDBOX_MODE": "none"}]
)
def test_a_setting_with_an_unknown_value_is_refused_by_name(setting: dict[str, str]) -> None:
    with pytest.raises(RunnerError, match=next(iter(setting))) as raised:
        config(OPENAI_API_KEY="k", **setting)
    assert raised.value.code == "invalid_request"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_as_a_toml_string(text: str) -> None:
    assert tomllib.loads(f"x = {codex.toml_string(text)}") == {"x": text}
