"""Types of the fields of request bodies: what each may hold, its bounds, and its schema (DESIGN 4.1)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from runner.clock import parse_rfc3339
from runner.ids import parse_cursor, valid_id
from runner.wire.codec import storable

MAX_BLOCKS: Final = 1000
MAX_NAMES: Final = 256
MAX_VALUE: Final = 128 * 1024
ID_TEXT: Final = "^[A-Za-z0-9_-]{1,128}$"
CURSOR_TEXT: Final = r"^(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})$"
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")


def _id(text: str) -> str:
    if not valid_id(text):
        raise ValueError("must match [A-Za-z0-9_-]{1,128}")
    return text


def _cursor(text: str) -> str:
    if parse_cursor(text) is None:
        raise ValueError("must be a cursor like 3.17")
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
    return storable(value)


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
Cursor = Annotated[str, AfterValidator(_cursor), WithJsonSchema({"type": "string", "pattern": CURSOR_TEXT})]
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
Instant = Annotated[str, AfterValidator(_instant), WithJsonSchema({"type": "string", "format": "date-time"})]
RelativePath = Annotated[str, AfterValidator(_relative), WithJsonSchema({"type": "string", "maxLength": 1024})]
AbsolutePath = Annotated[str, AfterValidator(_absolute), WithJsonSchema({"type": "string", "maxLength": 4096})]
