"""The store port as JSON calls: names, parameters and answers are read off the port itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, get_type_hints

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from runner.store.port import RecordKey, RecordRow, Store
from runner.wire.models import refusal

CALLS: Final = frozenset(
    name for name, member in vars(Store).items() if inspect.iscoroutinefunction(member) and name != "close"
)
"""Every method of the port that a runner may call at a plane."""
ACROSS_PROJECTS: Final = frozenset(
    {"open_turns", "paused_turns", "waiting_prompts", "open_commands", "open_interactions"}
)
"""Calls whose answer spans projects when they name none: a plane answers them for one project."""
_STRICT: Final = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


def encode(value: Any) -> bytes:
    """Rows as JSON objects of the same members; the JSON text of a record's ``data`` stays a text, byte for byte."""
    return orjson.dumps(value, default=_plain)


def decode_parameters(call: str, body: bytes) -> dict[str, Any]:
    """The parameters of a call, as the port types them.

    Raises:
        RunnerError: ``invalid_request`` naming the first field that is wrong.
    """
    try:
        parsed = _parameters(call).model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None
    return {name: getattr(parsed, name) for name in type(parsed).model_fields if name in parsed.model_fields_set}


def decode_answer(call: str, body: bytes) -> Any:
    """What a call returned; ``ValueError`` when it cannot be."""
    return _answer(call).validate_json(body)


def projects(call: str, parameters: Mapping[str, Any]) -> set[str]:
    """Every project that the parameters of a call name, in whatever row; all of them at once are ``""``: none."""
    found = {str(parameters["project"] or "")} if "project" in parameters else set()
    if parameters.get("key") is not None:
        found.add(str(parameters["key"][0]))
    for value in parameters.values():
        _collect(value, found)
    return found


def _collect(value: Any, found: set[str]) -> None:
    if isinstance(value, RecordRow | RecordKey):
        found.add(value.project)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif is_dataclass(value):
        for field in fields(value):
            member = getattr(value, field.name)
            if field.name == "project":
                found.add(str(member))
            else:
                _collect(member, found)


def _plain(value: Any) -> Any:
    if isinstance(value, RecordRow):
        return {**value._asdict(), "data": value.data.decode()}
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(type(value).__name__)


@cache
def _parameters(call: str) -> type[BaseModel]:
    method = getattr(Store, call)
    hints = get_type_hints(method)
    members: dict[str, Any] = {
        name: (hints[name], ... if parameter.default is inspect.Parameter.empty else parameter.default)
        for name, parameter in inspect.signature(method).parameters.items()
        if name != "self"
    }
    return create_model(call, __config__=_STRICT, **members)


@cache
def _answer(call: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(getattr(Store, call))["return"])
