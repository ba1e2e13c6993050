"""Elicitations: what the agent may ask for, and whether an answer fits its form (DESIGN 3.8, ACP ``elicitation``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

MODES: Final = ("form", "url")
CANCEL: Final[dict[str, Any]] = {"action": "cancel"}
DECLINE: Final[dict[str, Any]] = {"action": "decline"}
FORM_CHARS: Final = 64 * 1024
URL_CHARS: Final = 8 * 1024
MESSAGE_CHARS: Final = 16 * 1024
TYPES: Final = ("string", "number", "integer", "boolean", "array")


def request_problem(params: Mapping[str, Any]) -> str | None:
    """What makes an ``elicitation/create`` of a known mode unusable, or None."""
    message = params.get("message")
    if not isinstance(message, str):
        return "message must be a string"
    if len(message) > MESSAGE_CHARS:
        return f"message is longer than {MESSAGE_CHARS} characters"
    if params.get("mode") == "url":
        return _url_problem(params)
    return _schema_problem(params.get("requestedSchema"))


def _url_problem(params: Mapping[str, Any]) -> str | None:
    url = params.get("url")
    if not isinstance(params.get("elicitationId"), str):
        return "elicitationId must be a string"
    if not isinstance(url, str) or not url.lower().startswith(("https://", "http://")):
        return "url must be a web address"
    return None if len(url) <= URL_CHARS else f"url is longer than {URL_CHARS} characters"


def _schema_problem(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return "requestedSchema must be an object"
    if len(json.dumps(schema, default=str)) > FORM_CHARS:
        return f"requestedSchema is longer than {FORM_CHARS} characters"
    properties, required = schema.get("properties", {}), schema.get("required") or []
    if not isinstance(properties, dict) or not all(isinstance(field, dict) for field in properties.values()):
        return "requestedSchema.properties must be objects by name"
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "requestedSchema.required must be a list of names"
    unknown = [name for name, field in properties.items() if field.get("type") not in TYPES]
    return f"requestedSchema.properties.{unknown[0]} has no type that a form can hold" if unknown else None


def content_problem(schema: Mapping[str, Any], content: Mapping[str, Any]) -> str | None:
    """What keeps ``content`` from filling the form, naming the field; None when it does.

    A field's ``pattern`` and ``format`` are the agent's to check: an expression of its own could hang the runner.
    """
    properties: Mapping[str, Any] = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if content.get(name) is None:
            return f"content.{name}: required but missing"
    for name, value in content.items():
        field = properties.get(name)
        if field is None:
            return f"content.{name}: unknown field"
        if value is None:
            return f"content.{name}: leave it out when there is no value"
        problem = _value_problem(field, value)
        if problem is not None:
            return f"content.{name}: {problem}"
    return None


def _value_problem(field: Mapping[str, Any], value: Any) -> str | None:
    match field.get("type"):
        case "string":
            return _text_problem(field, value)
        case "boolean":
            return None if isinstance(value, bool) else "must be true or false"
        case "array":
            return _choices_problem(field, value)
        case kind:
            return _number_problem(field, value, whole=kind == "integer")


def _text_problem(field: Mapping[str, Any], value: Any) -> str | None:
    if not isinstance(value, str):
        return "must be a string"
    if not _within(len(value), field.get("minLength"), field.get("maxLength")):
        return f"has {len(value)} characters, which is too few or too many"
    offered = _offered(field)
    return None if offered is None or value in offered else f"must be one of {', '.join(map(str, offered))}"


def _number_problem(field: Mapping[str, Any], value: Any, *, whole: bool) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a number"
    if whole and value != int(value):
        return "must be a whole number"
    if not _within(value, field.get("minimum"), field.get("maximum")):
        return f"{value} is out of range"
    return None


def _choices_problem(field: Mapping[str, Any], value: Any) -> str | None:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return "must be a list of strings"
    if len(set(value)) != len(value):
        return "names a choice twice"
    if not _within(len(value), field.get("minItems"), field.get("maxItems")):
        return f"has {len(value)} choices, which is too few or too many"
    items = field.get("items")
    offered = _offered(items) if isinstance(items, Mapping) else None
    wrong = [item for item in value if offered is not None and item not in offered]
    return f"{wrong[0]} is not offered" if wrong else None


def _offered(field: Mapping[str, Any]) -> list[Any] | None:
    """The values of an enumeration, None when anything goes."""
    listed = field.get("enum")
    if isinstance(listed, list):
        return listed
    for name in ("oneOf", "anyOf"):
        choices = field.get(name)
        if isinstance(choices, list):
            return [choice.get("const") for choice in choices if isinstance(choice, Mapping)]
    return None


def _within(number: float, least: Any, most: Any) -> bool:
    return (not _is_number(least) or number >= least) and (not _is_number(most) or number <= most)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
