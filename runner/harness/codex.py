"""Codex through its native ACP adapter: one binary, no Node.

Secret: ``OPENAI_API_KEY``. Settings, all optional: ``OPENAI_BASE_URL`` (any server that speaks
OpenAI Responses), ``CODEX_MODEL``, ``CODEX_APPROVAL_POLICY`` (``untrusted``), ``CODEX_SANDBOX_MODE``
(``danger-full-access``), ``CODEX_MAX_RETRIES`` (Codex's own default; 0 reports a failing model at
once). They come with the dispatch and are written to ``.codex/config.toml`` of the private home;
the key stays in the environment.

Without a key Codex takes its login, ``.codex/auth.json``, by which it may ask other servers, too.

Codex's own sandbox is off by default because the runner's sandbox is the one that isolates, and
Codex's needs bubblewrap inside it. In exchange Codex asks before every command that is not known
to only read, so the runner's permission policy decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.harness.installed import NpmInstall, node_cpu
from runner.harness.spec import (
    DENIAL_CANCELS_TURN,
    MODEL_STREAM_OUTLIVES_CANCEL,
    SECOND_PROMPT_UNANSWERED,
    STDIN_EOF_IGNORED,
    TOOL_OUTLIVES_CANCEL,
    TOOLS_IN_OWN_SESSION,
    HarnessSpec,
    LaunchContext,
    Login,
    Prepared,
    Resolved,
    installed_directory,
    installed_file,
)
from runner.rules.credentials import KeyRoute
from runner.rules.login import Form

NAME: Final = "codex"
VERSION: Final = "0.16.0"
INSTALL: Final = NpmInstall(lock=NAME, packages={"@zed-industries/codex-acp": VERSION})

CONFIG: Final = ".codex/config.toml"
DEFAULT_BASE_URL: Final = "https://api.openai.com/v1"

_APPROVAL_POLICIES: Final = ("untrusted", "on-request", "on-failure", "never")
_SANDBOX_MODES: Final = ("danger-full-access", "workspace-write", "read-only")


def _resolve(state_dir: Path) -> Resolved:
    directory = installed_directory(NAME, INSTALL, state_dir)
    package = f"node_modules/@zed-industries/codex-acp-linux-{node_cpu()}"
    return Resolved((str(installed_file(NAME, directory, f"{package}/bin/codex-acp")),), (directory,))


def _prepare(context: LaunchContext) -> Prepared:
    return Prepared(files={CONFIG: config_toml(context).encode()})


def config_toml(context: LaunchContext) -> str:
    """Codex's configuration for one start; pure.

    Raises:
        RunnerError: ``invalid_request`` for a setting with an unknown value.
    """
    env = context.env
    lines = [
        f"approval_policy = {_choice(env, 'CODEX_APPROVAL_POLICY', _APPROVAL_POLICIES)}",
        f"sandbox_mode = {_choice(env, 'CODEX_SANDBOX_MODE', _SANDBOX_MODES)}",
        "check_for_update_on_startup = false",
    ]
    if env.get("CODEX_MODEL"):
        lines.append(f"model = {toml_string(env['CODEX_MODEL'])}")
    provider = _provider(context)
    if provider:
        lines.append('model_provider = "acp-runner"')
    lines += [*provider, "[analytics]", "enabled = false"]
    return "\n".join(lines) + "\n"


def _provider(context: LaunchContext) -> list[str]:
    """A provider that takes its key from the environment, so that no login is asked for."""
    env = context.env
    has_key = bool(env.get("OPENAI_API_KEY"))
    if not has_key and not env.get("OPENAI_BASE_URL"):
        return []
    lines = [
        "[model_providers.acp-runner]",
        'name = "OpenAI"',
        f"base_url = {toml_string(env.get('OPENAI_BASE_URL') or DEFAULT_BASE_URL)}",
        'wire_api = "responses"',
    ]
    if has_key:
        lines.append('env_key = "OPENAI_API_KEY"')
    elif context.login:
        lines.append("requires_openai_auth = true")
    retries = env.get("CODEX_MAX_RETRIES")
    if retries:
        if not (retries.isdecimal() and int(retries) <= 100):
            raise RunnerError("invalid_request", "CODEX_MAX_RETRIES must be a number from 0 to 100.")
        lines += [f"request_max_retries = {int(retries)}", f"stream_max_retries = {int(retries)}"]
    return lines


def _choice(env: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = env.get(name) or allowed[0]
    if value not in allowed:
        raise RunnerError("invalid_request", f"{name} must be one of: {', '.join(allowed)}.")
    return toml_string(value)


def toml_string(text: str) -> str:
    """A TOML basic string."""
    escapes = {'"': '\\"', "\\": "\\\\"}
    return (
        '"'
        + "".join(
            escapes.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 32 or char == "\x7f" else char) for char in text
        )
        + '"'
    )


SPEC: Final = HarnessSpec(
    name=NAME,
    title="Codex",
    resolve=_resolve,
    version=VERSION,
    env={"NO_BROWSER": "1"},
    key_vars=("OPENAI_API_KEY",),
    setting_vars=(
        "OPENAI_BASE_URL",
        "CODEX_MODEL",
        "CODEX_APPROVAL_POLICY",
        "CODEX_SANDBOX_MODE",
        "CODEX_MAX_RETRIES",
    ),
    routes=(
        KeyRoute(
            name="openai",
            keys={"OPENAI_API_KEY": "bearer"},
            base_urls=("OPENAI_BASE_URL",),
            upstream=DEFAULT_BASE_URL,
        ),
    ),
    install=INSTALL,
    min_start_seconds=15.0,
    resume="resume",
    minted_input=frozenset({"call_id", "turn_id", "started_at_ms"}),
    quirks=frozenset(
        {
            DENIAL_CANCELS_TURN,
            MODEL_STREAM_OUTLIVES_CANCEL,
            SECOND_PROMPT_UNANSWERED,
            STDIN_EOF_IGNORED,
            TOOL_OUTLIVES_CANCEL,
            TOOLS_IN_OWN_SESSION,
        }
    ),
    prepare=_prepare,
    login=Login(
        "Dispatch with the secret OPENAI_API_KEY (and OPENAI_BASE_URL in env for another server), or log in:"
        " acp-runner harness login codex [--with-api-key].",
        form=Form(
            ".codex/auth.json",
            secrets=("OPENAI_API_KEY", "tokens.access_token", "tokens.refresh_token", "tokens.id_token"),
            refresh="tokens.refresh_token",
            expires="tokens.access_token",
        ),
        method="chatgpt",
        key_method=("openai-api-key", "OPENAI_API_KEY"),
        keyless=("OPENAI_BASE_URL",),
    ),
)
