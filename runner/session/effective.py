"""What a dispatch means for its session: given fields over the session's last accepted values (DESIGN 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from runner.clock import parse_rfc3339
from runner.errors import RunnerError
from runner.rules.fingerprint import digest
from runner.rules.limits import Limits
from runner.rules.permission import Policy, Rule
from runner.wire.models import DispatchRequest, SecretRef

PER_PROMPT: Final = frozenset(
    {"prompt", "prompt_id", "turn_id", "on_busy", "queue_mode", "context_only", "keep_on_disconnect"}
)
LIMIT_NAMES: Final = ("total_seconds", "idle_seconds", "first_update_seconds", "tool_call_seconds", "quiet_seconds")


@dataclass(frozen=True, slots=True)
class Effective:
    """The configuration of one turn.

    Attributes:
        config: what is stored with the session: JSON, no secret value.
        secrets: literal and referenced values, memory only; None for a name whose value is gone.
        files: given workspace files that were not written yet.
        policy, limits: as the rules read them.
    """

    config: dict[str, Any]
    secrets: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)

    @property
    def harness(self) -> str:
        """Name of the harness."""
        return str(self.config.get("harness", "demo"))

    @property
    def provider(self) -> str:
        """Name of the provider."""
        return str(self.config.get("provider", "local"))

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return str(self.config.get("recipe", "default"))

    @property
    def workspace_path(self) -> str | None:
        """The host directory that is used in place."""
        return self.config.get("workspace_path")

    @property
    def secrets_expire_ms(self) -> int | None:
        """When the secrets expire, milliseconds since 1970."""
        instant = self.config.get("secrets_expire_at")
        return parse_rfc3339(instant) if instant else None

    def known_secrets(self) -> dict[str, str]:
        """Every secret with its value.

        Raises:
            RunnerError: ``credentials_missing`` when a value is gone (literals do not survive a restart).
        """
        gone = sorted(name for name, value in self.secrets.items() if value is None)
        if gone:
            raise RunnerError("credentials_missing", f"Send these secrets again: {', '.join(gone)}.")
        return {name: value for name, value in self.secrets.items() if value is not None}


def restored(config: dict[str, Any], vault: Mapping[str, str], defaults: Limits) -> Effective:
    """The configuration of a session that was read from the store: literal secrets are gone, references resolve."""
    named = {name: vault.get(ref) if ref else None for name, ref in config.get("secrets", {}).items()}
    return Effective(config, named, {}, _policy(config), _limits(config, defaults))


def merged(last: Effective, request: DispatchRequest, vault: Mapping[str, str], defaults: Limits) -> Effective:
    """``last`` with the fields that this request gives.

    Args:
        last: the session's last accepted configuration.
        request: the dispatch.
        vault: ``[secrets]`` of the configuration, for ``{"ref": NAME}``.
        defaults: ``[turn]`` limits, for limits left out.

    Raises:
        RunnerError: ``invalid_request`` for a reference that ``[secrets]`` does not have.
    """
    if request.model_fields_set <= PER_PROMPT:
        return last
    config = dict(last.config)
    for name in ("harness", "model", "mode", "config_options", "mcp_servers", "env", "secrets_expire_at"):
        if request.given(name):
            config[name] = getattr(request, name)
    if request.given("harness") and request.harness is None:
        config.pop("harness")
    if request.given("sandbox"):
        config["provider"], config["recipe"] = request.sandbox.provider, request.sandbox.recipe
    if request.given("permissions"):
        config["permissions"] = request.permissions.model_dump()
    if request.given("limits"):
        config["limits"] = {name: getattr(request.limits, name) for name in request.limits.model_fields_set}
    files = _merge_workspace(config, last, request)
    secrets = _merge_secrets(config, last, request, vault)
    return Effective(config, secrets, files, _policy(config), _limits(config, defaults))


def _merge_workspace(config: dict[str, Any], last: Effective, request: DispatchRequest) -> Mapping[str, bytes]:
    if not request.given("workspace"):
        return last.files
    if request.workspace.given("path"):
        config["workspace_path"] = request.workspace.path
    if not request.workspace.given("files"):
        return last.files
    files = {file.path: file.data() for file in request.workspace.files}
    config["workspace_files"] = digest({path: data.hex() for path, data in files.items()})
    return files


def _merge_secrets(
    config: dict[str, Any], last: Effective, request: DispatchRequest, vault: Mapping[str, str]
) -> Mapping[str, str | None]:
    if not request.given("secrets"):
        return last.secrets
    values: dict[str, str | None] = {}
    named: dict[str, str | None] = {}
    for name, value in request.secrets.items():
        if isinstance(value, SecretRef):
            if value.ref not in vault:
                raise RunnerError("invalid_request", f"[secrets] has no {value.ref}.", field=f"secrets.{name}")
            values[name], named[name] = vault[value.ref], value.ref
        else:
            values[name], named[name] = value, None
    config["secrets"] = named
    return values


def _policy(config: Mapping[str, Any]) -> Policy:
    given = config.get("permissions")
    if not given:
        return Policy()
    rules = tuple(Rule(rule["tool"], rule["decision"], rule["match"]) for rule in given["rules"])
    return Policy(given["default"], rules)


def _limits(config: Mapping[str, Any], defaults: Limits) -> Limits:
    given: Mapping[str, float | None] = config.get("limits") or {}
    chosen = {name: given.get(name, getattr(defaults, name)) for name in LIMIT_NAMES}
    return Limits(**chosen)
