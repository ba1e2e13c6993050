"""Request bodies of the HTTP API (DESIGN 4.1): what they may hold, checked once, at the border."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from runner.clock import parse_rfc3339
from runner.errors import RunnerError
from runner.ids import valid_id
from runner.rules.permission import Policy, Rule

T = TypeVar("T", bound="Part")
MAX_DEPTH: Final = 64
MAX_BLOCKS: Final = 1000
MAX_NAMES: Final = 256
MAX_FILES: Final = 10_000
MAX_VALUE: Final = 128 * 1024
MAX_WAIT_SECONDS: Final = 600
ID_TEXT: Final = "^[A-Za-z0-9_-]{1,128}$"
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")


def _id(text: str) -> str:
    if not valid_id(text):
        raise ValueError("must match [A-Za-z0-9_-]{1,128}")
    return text


def _name(text: str) -> str:
    if not 1 <= len(text) <= 256 or not text.isprintable():
        raise ValueError("must be 1 to 256 printable characters")
    return text


def _instant(text: str) -> str:
    try:
        parse_rfc3339(text)
    except (ValueError, OverflowError):
        raise ValueError("must be an RFC 3339 instant with an offset") from None
    return text


def _relative(path: str) -> str:
    parts = path.split("/")
    if len(path) > 1024 or "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError("must be a relative path without '.', '..', empty parts or backslashes")
    return path


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path or len(path) > 4096 or ".." in path.split("/"):
        raise ValueError("must be an absolute path without '..'")
    return path


def _check_variable(name: Any) -> str:
    if not isinstance(name, str) or _VARIABLE.match(name) is None:
        raise ValueError("holds a name that is not a variable name ([A-Za-z_][A-Za-z0-9_]*)")
    return name


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the value of {name} must be a string")
    if "\0" in value or len(value) > MAX_VALUE:
        raise ValueError(f"the value of {name} must be at most {MAX_VALUE} characters without NUL")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if len(value) > MAX_NAMES:
        raise ValueError(f"must have at most {MAX_NAMES} members")
    return value


def _env(value: Any) -> dict[str, str]:
    return {_check_variable(name): _check_text(name, item) for name, item in _table(value).items()}


def _options(value: Any) -> dict[str, str | bool]:
    for name, item in _table(value).items():
        _name(name)
        if not isinstance(item, bool):
            _check_text(name, item)
    return dict(value)


def _prompt(value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("must not be empty")
        return value
    if not isinstance(value, list):
        raise ValueError("must be text or a list of ACP content blocks")
    if not 1 <= len(value) <= MAX_BLOCKS:
        raise ValueError(f"must have 1 to {MAX_BLOCKS} content blocks")
    for index, block in enumerate(value):
        _check_block(index, block)
    return value


_BLOCK_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "text": ("text",),
    "image": ("data", "mimeType"),
    "audio": ("data", "mimeType"),
    "resource_link": ("uri", "name"),
}


def _check_block(index: int, block: Any) -> None:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise ValueError(f"block {index} must be an object with a string 'type'")
    for need in _BLOCK_NEEDS.get(block["type"], ()):
        if not isinstance(block.get(need), str):
            raise ValueError(f"block {index} of type {block['type']} needs a string '{need}'")
    if block["type"] == "resource" and not isinstance(block.get("resource"), dict):
        raise ValueError(f"block {index} of type resource needs an object 'resource'")


def _mcp_servers(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise ValueError(f"must be a list of at most {MAX_NAMES} MCP servers")
    for index, server in enumerate(value):
        if not isinstance(server, dict) or not isinstance(server.get("name"), str) or not server["name"]:
            raise ValueError(f"server {index} must be an object with a string 'name'")
        remote = server.get("type") in ("http", "sse")
        need = "url" if remote else "command"
        if not isinstance(server.get(need), str) or not server[need] or server.get("type", "stdio") not in _TRANSPORTS:
            raise ValueError(f"server {index} needs a 'command', or 'type' http or sse and a 'url'")
    return value


_TRANSPORTS: Final = ("stdio", "http", "sse")


class SecretRef(BaseModel):
    """``{"ref": NAME}``: the value is taken from ``[secrets]`` of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ref: str


def _secrets(value: Any) -> dict[str, str | SecretRef]:
    found: dict[str, str | SecretRef] = {}
    for name, item in _table(value).items():
        _check_variable(name)
        if isinstance(item, dict):
            if list(item) != ["ref"] or not isinstance(item["ref"], str) or not item["ref"]:
                raise ValueError(f'the value of {name} must be a string or {{"ref": NAME}}')
            found[name] = SecretRef(ref=item["ref"])
        else:
            found[name] = _check_text(name, item)
    return found


_TEXT_MAP: Final = {
    "type": "object",
    "maxProperties": MAX_NAMES,
    "propertyNames": {"pattern": _VARIABLE.pattern[:-2] + "$"},
}
Id = Annotated[str, AfterValidator(_id), WithJsonSchema({"type": "string", "pattern": ID_TEXT})]
Name = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 256})]
Limit = Annotated[float, Field(gt=0, le=10 * 365 * 86_400, allow_inf_nan=False)]
Prompt = Annotated[
    str | list[dict[str, Any]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "pattern": "\\S"},
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_BLOCKS,
                    "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
                },
            ]
        }
    ),
]
Env = Annotated[
    dict[str, str],
    PlainValidator(_env),
    WithJsonSchema({**_TEXT_MAP, "additionalProperties": {"type": "string", "maxLength": MAX_VALUE}}),
]
Options = Annotated[
    dict[str, str | bool],
    PlainValidator(_options),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "boolean"]}}),
]
McpServers = Annotated[
    list[dict[str, Any]],
    PlainValidator(_mcp_servers),
    WithJsonSchema({"type": "array", "maxItems": MAX_NAMES, "items": {"type": "object", "required": ["name"]}}),
]
Secrets = Annotated[
    dict[str, str | SecretRef],
    PlainValidator(_secrets),
    WithJsonSchema(
        {
            **_TEXT_MAP,
            "additionalProperties": {
                "anyOf": [
                    {"type": "string", "maxLength": MAX_VALUE},
                    {
                        "type": "object",
                        "required": ["ref"],
                        "properties": {"ref": {"type": "string", "minLength": 1}},
                        "additionalProperties": False,
                    },
                ]
            },
        }
    ),
]


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

    path: Annotated[str, AfterValidator(_relative), WithJsonSchema({"type": "string", "maxLength": 1024})]
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
    path: Annotated[str, AfterValidator(_absolute), WithJsonSchema({"type": "string"})] | None = None

    @model_validator(mode="after")
    def _each_path_once(self) -> WorkspaceChoice:
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("files name the same path twice")
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
    sandbox: SandboxChoice = _SANDBOX
    workspace: WorkspaceChoice = _WORKSPACE
    mcp_servers: McpServers = Field(default_factory=list)
    env: Env = Field(default_factory=dict, repr=False)
    secrets: Secrets = Field(default_factory=dict, repr=False)
    secrets_expire_at: (
        Annotated[str, AfterValidator(_instant), WithJsonSchema({"type": "string", "format": "date-time"})] | None
    ) = None
    permissions: Permissions = _PERMISSIONS
    on_busy: Literal["reject", "queue", "steer"] = "reject"
    queue_mode: Literal["coalesce", "fifo"] = "coalesce"
    context_only: bool = False
    keep_on_disconnect: bool = False
    limits: Limits = _LIMITS

    def blocks(self) -> list[dict[str, Any]]:
        """The prompt as ACP content blocks."""
        return [{"type": "text", "text": self.prompt}] if isinstance(self.prompt, str) else self.prompt

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


class AnswerRequest(Part):
    """The body of ``POST …/answer``: exactly one of ``option_id`` and ``decision``."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["option_id"]}, {"required": ["decision"]}]},
    )

    option_id: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    decision: Literal["allow", "deny"] | None = None
    idempotency_key: Name | None = None

    @model_validator(mode="after")
    def _one_answer(self) -> AnswerRequest:
        if (self.option_id is None) == (self.decision is None):
            raise ValueError("needs exactly one of option_id and decision")
        return self


def parse_dispatch(body: bytes) -> DispatchRequest:
    """Read and check a dispatch body.

    Raises:
        RunnerError: ``invalid_request`` naming the field, also for a known value that this version lacks.
    """
    request = _parse(DispatchRequest.model_validate, body)
    _refuse_not_built(request)
    return request


def parse_cancel(body: bytes) -> CancelRequest:
    """Read and check a cancel body; an empty one is ``{}``. Raises as ``parse_dispatch``."""
    return _parse(CancelRequest.model_validate, body or b"{}")


def parse_answer(body: bytes) -> AnswerRequest:
    """Read and check an answer body. Raises as ``parse_dispatch``."""
    return _parse(AnswerRequest.model_validate, body)


def _refuse_not_built(request: DispatchRequest) -> None:
    if request.on_busy != "reject":
        raise _not_built("on_busy", request.on_busy)
    if request.queue_mode != "coalesce":
        raise _not_built("queue_mode", request.queue_mode)
    if request.context_only:
        raise _not_built("context_only", "true")
    if request.sandbox.provider != "local":
        raise _not_built("sandbox.provider", request.sandbox.provider)


def _not_built(field: str, value: str) -> RunnerError:
    return RunnerError("invalid_request", f"{field}: {value} is not available in this version.", field=field)


def _parse(validate: Callable[[Any], T], body: bytes) -> T:
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
        raise _refusal(error) from None


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


def _refusal(error: ValidationError) -> RunnerError:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    field = ".".join(str(step)[:100] for step in first["loc"]) or "body"
    if first["type"] == "extra_forbidden":
        return RunnerError("invalid_request", f"{field}: unknown field.", field=field)
    if first["type"] == "missing":
        return RunnerError("invalid_request", f"{field}: required but missing.", field=field)
    reason = str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    return RunnerError("invalid_request", f"{field}: {reason}.", field=field)
