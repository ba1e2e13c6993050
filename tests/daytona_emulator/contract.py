"""Is what the emulator said what the service would say?

Two judges look at the recorded exchanges: the SDK's generated clients (paths, success codes and strict models; always
there with the SDK) and the published OpenAPI, when a copy of ``api.json`` and ``toolbox.json`` lies in
``$DAYTONA_OPENAPI`` or in a folder ``shared/daytona`` beside the checkout.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from pydantic import BaseModel, ValidationError

from tests.daytona_emulator.recording import Exchange

SIDES = {"/api": "daytona_api_client_async", "/toolbox/{id}": "daytona_toolbox_api_client_async"}
SPECS = {"/api": "api.json", "/toolbox/{id}": "toolbox.json"}
API_ERROR = {"path", "timestamp", "statusCode", "error", "message"}
SWITCHING = 101
PLAIN = {"str": str, "bool": bool, "object": object, "float": float, "int": int}
NEWER_ENUM = "unknown_default_open_api"
_STEP = re.compile(
    r"_response_types_map: Dict\[str, Optional\[str\]\] = (?P<map>\{.*?\})"
    r"|method='(?P<method>\w+)',\s+resource_path='(?P<path>[^']+)'",
    re.DOTALL,
)

Answers = Mapping[str, str | None]
"""Status → the type of the generated client's answer, None without a body."""


def sdk_violations(exchanges: Iterable[Exchange]) -> list[str]:
    """What the SDK's generated clients would not take, one line each."""
    return list(_judged(exchanges, _sdk_complaints))


def openapi_violations(exchanges: Iterable[Exchange]) -> list[str]:
    """What the published OpenAPI does not allow, one line each; none where no copy is at hand."""
    return list(_judged(exchanges, _openapi_complaints)) if spec_folder() is not None else []


@cache
def spec_folder() -> Path | None:
    """Where the copy of the published OpenAPI lies."""
    named = os.environ.get("DAYTONA_OPENAPI")
    beside = [parent / "shared" / "daytona" for parent in Path(__file__).resolve().parents]
    found = (folder for folder in ([Path(named)] if named else beside) if (folder / "api.json").is_file())
    return next(found, None)


@cache
def sdk_operations(package: str) -> dict[tuple[str, str], Answers]:
    """Method and path shape → answers, read in the text of the generated clients."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is missing; install it:  pip install daytona"
    operations: dict[tuple[str, str], Answers] = {}
    for file in sorted(Path(spec.origin).with_name("api").glob("*_api.py")):
        answers: Answers = {}
        for step in _STEP.finditer(file.read_text(encoding="utf-8")):
            if step["map"]:
                answers = ast.literal_eval(step["map"])
            else:
                operations[step["method"], _shape(step["path"])] = answers
    return operations


def _judged(exchanges: Iterable[Exchange], judge: Any) -> Iterator[str]:
    for one in exchanges:
        if one.faulted or not one.template:
            continue
        side = next(prefix for prefix in SIDES if one.template.startswith(prefix))
        path = one.template.removeprefix(side)
        for complaint in judge(side, path, one):
            yield f"{one.method} {one.template} {one.status}: {complaint}"


def _shape(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def _sdk_complaints(side: str, path: str, one: Exchange) -> Iterator[str]:
    package = SIDES[side]
    answers = sdk_operations(package).get((one.method, _shape(path)))
    if answers is None:
        yield "no operation of the SDK"
    elif one.status >= 400:
        if one.json and side == "/api" and set(one.answered) != API_ERROR:
            yield f"not the API's error body: {one.answered}"
        elif one.json and "errors" not in one.answered and side != "/api":
            yield from _unlike("ErrorResponse", package, one.answered)
    elif one.status == SWITCHING:
        return
    elif str(one.status) not in answers:
        yield f"the SDK takes {sorted(answers)}"
    elif one.json or (one.status == 200 and answers[str(one.status)] not in (None, "bytes", "Dict[str, object]")):
        yield from _unlike(answers[str(one.status)], package, one.answered)


def _unlike(kind: str | None, package: str, value: Any) -> Iterator[str]:
    """Why a value is not of a generated type."""
    if kind is None:
        if value is not None:
            yield f"the SDK expects no body: {value}"
    elif inner := re.fullmatch(r"List\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"not a list: {value}"
        for item in value if isinstance(value, list) else []:
            yield from _unlike(inner[1], package, item)
    elif kind.startswith("Dict["):
        if not isinstance(value, dict):
            yield f"not an object: {value}"
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]):
            yield f"not a {kind}: {value}"
    else:
        model = getattr(importlib.import_module(f"{package}.models"), kind)
        try:
            parsed = model.from_dict(value)
        except (ValidationError, TypeError, KeyError, ValueError) as error:
            yield f"not a {kind}: {error}"
        else:
            yield from _unknown_of(parsed, kind)


def _unknown_of(value: Any, where: str) -> Iterator[str]:
    """Fields and enum values that the generated models do not know, at any depth."""
    if isinstance(value, BaseModel):
        if extra := getattr(value, "additional_properties", None):
            yield f"{where} has no {sorted(extra)}"
        for name in type(value).model_fields:
            if name != "additional_properties":
                yield from _unknown_of(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from _unknown_of(item, where)
    elif value == NEWER_ENUM:
        yield f"{where} has an unknown value"


def _openapi_complaints(side: str, path: str, one: Exchange) -> Iterator[str]:
    document = _spec(side)
    wanted, method = _shape(path), one.method.lower()
    same = (operations for known, operations in document["paths"].items() if _shape(known) == wanted)
    operation = next((operations[method] for operations in same if method in operations), None)
    if operation is None:
        yield "no operation of the OpenAPI"
        return
    if one.asked is not None and (schema := _asked_schema(operation)) is not None:
        yield from _mismatches(document, schema, one.asked, "request")
    if one.status >= 400 or one.status == SWITCHING:
        return
    answer = operation["responses"].get(str(one.status))
    if answer is None:
        yield f"the OpenAPI has {sorted(operation['responses'])}"
        return
    schema = _answer_schema(answer)
    if schema is not None and one.json:
        yield from _mismatches(document, schema, one.answered, "answer")


@cache
def _spec(side: str) -> dict[str, Any]:
    folder = spec_folder()
    assert folder is not None
    document: dict[str, Any] = _nullable(json.loads((folder / SPECS[side]).read_text(encoding="utf-8")))
    return document


def _nullable(node: Any) -> Any:
    """OpenAPI 3.0's ``nullable`` in the words of JSON Schema."""
    if isinstance(node, list):
        return [_nullable(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {name: _nullable(value) for name, value in node.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if node.get("nullable") is True else plain


def _asked_schema(operation: dict[str, Any]) -> dict[str, Any] | None:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    in_body = (entry["schema"] for entry in operation.get("parameters") or [] if entry.get("in") == "body")
    return body or next(in_body, None)


def _answer_schema(answer: dict[str, Any]) -> dict[str, Any] | None:
    content = answer.get("content", {}).get("application/json", {})
    return content.get("schema") or answer.get("schema")


def _mismatches(document: dict[str, Any], schema: dict[str, Any], value: Any, what: str) -> Iterator[str]:
    roots = {name: document[name] for name in ("components", "definitions") if name in document}
    for error in jsonschema.Draft202012Validator({**schema, **roots}).iter_errors(value):
        yield f"{what} {error.json_path}: {error.message}"
