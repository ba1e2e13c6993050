"""Request bodies of the HTTP API (DESIGN 4.1): what they may hold, checked once, at the border."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runner.clock import parse_rfc3339
from runner.errors import RunnerError
from runner.rules.permission import Policy, Rule
from runner.wire.codec import storable
from runner.wire.fields import (
    ID_TEXT,
    MAX_NAMES,
    AbsolutePath,
    Cursor,
    Env,
    Id,
    Instant,
    Limit,
    McpServers,
    Name,
    Options,
    Prompt,
    RelativePath,
    SecretRef,
    Secrets,
)

__all__ = [
    "ID_TEXT",
    "AnswerRequest",
    "CancelRequest",
    "DispatchRequest",
    "ForkRequest",
    "Part",
    "SecretRef",
    "ShellRequest",
    "parse",
    "parse_answer",
    "parse_cancel",
    "parse_dispatch",
    "parse_fork",
    "parse_shell",
    "refusal",
]

T = TypeVar("T", bound="Part")
MAX_DEPTH: Final = 64
MAX_FILES: Final = 10_000
MAX_WAIT_SECONDS: Final = 600
MAX_COMMAND: Final = 30_000
MAX_SHELL_SECONDS: Final = 3600
SHELL_SECONDS: Final = 120.0


class Part(BaseModel):
    """A body or a part of one: unknown fields are refused, types are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    def given(self, name: str) -> bool:
        """Whether the client sent this field, be it as null; a field left out keeps the session's value."""
        return name in self.model_fields_set


class SandboxChoice(Part):
    """Where the agent runs."""

    provider: Literal["local", "daytona"] = "local"
    recipe: Id = "default"


class WorkspaceFile(Part):
    """A file that is written into the workspace: exactly one of ``content`` (text) and ``base64``."""

    path: RelativePath
    content: str | None = None
    base64: str | None = None

    @model_validator(mode="after")
    def _one_content(self) -> WorkspaceFile:
        if (self.content is None) == (self.base64 is None):
            raise ValueError("needs exactly one of content and base64")
        if self.base64 is not None:
            try:
                base64.b64decode(self.base64, validate=True)
            except (binascii.Error, ValueError):
                raise ValueError("base64 is not valid base64") from None
        return self

    def data(self) -> bytes:
        """The file's bytes."""
        if self.base64 is not None:
            return base64.b64decode(self.base64)
        return (self.content or "").encode("utf-8", "surrogatepass")


class WorkspaceChoice(Part):
    """Files to write, or a directory of the host used in place."""

    files: Annotated[list[WorkspaceFile], Field(max_length=MAX_FILES)] = []
    path: AbsolutePath | None = None

    @model_validator(mode="after")
    def _each_path_once(self) -> WorkspaceChoice:
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("files name the same path twice")
        folders = {str(folder) for file in self.files for folder in PurePosixPath(file.path).parents}
        if any(file.path in folders for file in self.files):
            raise ValueError("files name a path that is also the folder of another file")
        return self


class PermissionRule(Part):
    """``tool`` is a tool kind or ``*``; ``match`` a glob on the call's command, path or title."""

    tool: Name
    match: Annotated[str, Field(max_length=1024)] = "*"
    decision: Literal["allow", "deny", "ask"]


class Permissions(Part):
    """The permission policy of one turn."""

    default: Literal["ask", "allow", "deny", "allow_reads"] = "ask"
    rules: Annotated[list[PermissionRule], Field(max_length=MAX_NAMES)] = []

    def policy(self) -> Policy:
        """The same as the rules read it."""
        return Policy(self.default, tuple(Rule(rule.tool, rule.decision, rule.match) for rule in self.rules))


class Limits(Part):
    """Limits in seconds: left out takes the server's default, null switches that limit off."""

    total_seconds: Limit | None = None
    idle_seconds: Limit | None = None
    first_update_seconds: Limit | None = None
    tool_call_seconds: Limit | None = None
    quiet_seconds: Limit | None = None


_SANDBOX: Final = SandboxChoice()
_WORKSPACE: Final = WorkspaceChoice()
_PERMISSIONS: Final = Permissions()
_LIMITS: Final = Limits()


class DispatchRequest(Part):
    """The body of ``POST /v1/sessions/{sid}/turns`` (DESIGN 4.1).

    A default here means only "left out": ask ``given(name)``; the session applies what it remembers.
    """

    prompt: Prompt
    prompt_id: Id | None = None
    turn_id: Id | None = None
    harness: Id | None = None
    model: Name | None = None
    mode: Name | None = None
    config_options: Options = Field(default_factory=dict)
    sandbox: SandboxChoice = Field(default_factory=lambda: _SANDBOX)
    workspace: WorkspaceChoice = Field(default_factory=lambda: _WORKSPACE)
    mcp_servers: McpServers = Field(default_factory=list)
    env: Env = Field(default_factory=dict, repr=False)
    secrets: Secrets = Field(default_factory=dict, repr=False)
    secrets_expire_at: Instant | None = None
    permissions: Permissions = Field(default_factory=lambda: _PERMISSIONS)
    on_busy: Literal["reject", "queue", "steer"] = "reject"
    queue_mode: Literal["coalesce", "fifo"] = "coalesce"
    context_only: bool = False
    keep_on_disconnect: bool = False
    limits: Limits = Field(default_factory=lambda: _LIMITS)

    def blocks(self) -> list[dict[str, Any]]:
        """The prompt as ACP content blocks; a NUL is U+FFFD for the agent too, so that all see what is stored."""
        return storable([{"type": "text", "text": self.prompt}] if isinstance(self.prompt, str) else self.prompt)

    @property
    def secrets_expire_ms(self) -> int | None:
        """``secrets_expire_at`` in milliseconds since the epoch."""
        return parse_rfc3339(self.secrets_expire_at) if self.secrets_expire_at else None


class CancelRequest(Part):
    """The body of ``POST …/cancel``."""

    expected_execution_id: Id | None = None
    idempotency_key: Name | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)] = 0
    queue: Literal["drop", "keep"] = "drop"


class ShellRequest(Part):
    """The body of ``POST …/shell``: a command of ``sh -c``, killed whole after ``timeout_seconds``."""

    command: Annotated[str, Field(min_length=1, max_length=MAX_COMMAND, pattern="^[^\\x00]*$")]
    timeout_seconds: Annotated[float, Field(gt=0, le=MAX_SHELL_SECONDS, allow_inf_nan=False)] = SHELL_SECONDS


class ForkRequest(Part):
    """The body of ``POST …/fork``: the history up to ``after``, inclusive, into ``session_id`` or a new id."""

    after: Cursor
    session_id: Id | None = None
    allow_incomplete: bool = False


class AnswerRequest(Part):
    """The body of ``POST …/answer``: exactly one of ``option_id``, ``decision`` and, of an elicitation, ``action``."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["option_id"]}, {"required": ["decision"]}, {"required": ["action"]}]
        },
    )

    option_id: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    decision: Literal["allow", "deny"] | None = None
    action: Literal["accept", "decline", "cancel"] | None = None
    content: Annotated[dict[Name, str | int | float | bool | list[str] | None], Field(max_length=MAX_NAMES)] | None = (
        None
    )
    idempotency_key: Name | None = None

    @model_validator(mode="after")
    def _one_answer(self) -> AnswerRequest:
        if sum(given is not None for given in (self.option_id, self.decision, self.action)) != 1:
            raise ValueError("needs exactly one of option_id, decision and action")
        if self.content is not None and self.action != "accept":
            raise ValueError("content only goes with the action accept")
        return self


def parse_dispatch(body: bytes) -> DispatchRequest:
    """Read and check a dispatch body.

    Raises:
        RunnerError: ``invalid_request`` naming the field.
    """
    return parse(DispatchRequest.model_validate, body)


def parse_cancel(body: bytes) -> CancelRequest:
    """Read and check a cancel body; an empty one is ``{}``. Raises as ``parse_dispatch``."""
    return parse(CancelRequest.model_validate, body or b"{}")


def parse_answer(body: bytes) -> AnswerRequest:
    """Read and check an answer body. Raises as ``parse_dispatch``."""
    return parse(AnswerRequest.model_validate, body)


def parse_fork(body: bytes) -> ForkRequest:
    """Read and check a fork body. Raises as ``parse_dispatch``."""
    return parse(ForkRequest.model_validate, body)


def parse_shell(body: bytes) -> ShellRequest:
    """Read and check a shell body. Raises as ``parse_dispatch``."""
    return parse(ShellRequest.model_validate, body)


def parse(validate: Callable[[Any], T], body: bytes) -> T:
    """The body as ``validate`` reads it: a JSON object of at most ``MAX_DEPTH`` levels. Raises as above."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RunnerError("invalid_request", f"The body is not valid JSON: {error}.", field="body") from None
    if not isinstance(value, dict):
        raise RunnerError("invalid_request", "The body must be a JSON object.", field="body")
    # Fewer brackets than the bound cannot nest deeper; only larger bodies need the walk.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise RunnerError("invalid_request", f"The body is nested deeper than {MAX_DEPTH} levels.", field="body")
    try:
        return validate(value)
    except ValidationError as error:
        raise refusal(error) from None


def _deeper(value: Any, bound: int) -> bool:
    level = [value]
    for _ in range(bound):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below.extend(child for child in children if isinstance(child, dict | list))
        if not below:
            return False
        level = below
    return True


def refusal(error: ValidationError) -> RunnerError:
    """``invalid_request`` naming the first field that is wrong."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    field = ".".join(str(step)[:100] for step in first["loc"]) or "body"
    if first["type"] == "extra_forbidden":
        return RunnerError("invalid_request", f"{field}: unknown field.", field=field)
    if first["type"] == "missing":
        return RunnerError("invalid_request", f"{field}: required but missing.", field=field)
    reason = str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    return RunnerError("invalid_request", f"{field}: {reason}.", field=field)
