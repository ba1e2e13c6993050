"""OpenAPI 3.1 from the route table and the wire models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import orjson
from pydantic import BaseModel, TypeAdapter

from runner import __version__
from runner.server.routes import ANY, OPEN, PATH_PARAMETERS, ROUTES, Answer, Route
from runner.wire import problems, views

_REF: Final = "#/components/schemas/{model}"
_NDJSON: Final = "application/x-ndjson"
_SSE: Final = "text/event-stream"
_COMMON_ERRORS: Final = {
    400: "The request is not valid; `detail` names the field.",
    401: "No known token.",
    403: "The token lacks the scope, or Host or Origin is not accepted.",
}
_ERRORS: Final = {
    404: "Not found.",
    409: "In conflict with what runs or was decided.",
    410: "It has ended.",
    412: "If-Match or If-None-Match does not hold.",
    413: "The request is too large.",
    422: "The harness or recipe is not known or not installed.",
    429: "No capacity; see Retry-After.",
    503: "A backend is unavailable; see Retry-After.",
}


def describe(routes: Iterable[Route] = ROUTES) -> bytes:
    """The description of an application with these routes, as JSON."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "acp-runner",
            "version": __version__,
            "description": "Runs coding agents in sandboxes, one turn per request. Streams are lines of `Line`.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
    return orjson.dumps(document)


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {str(status): _answer(answer, schemas) for status, answer in route.answers.items()},
    }
    if route.scope == OPEN:
        operation["security"] = [{}, {"token": []}]
    else:
        operation["description"] = "Needs a token." if route.scope == ANY else f"Needs the scope `{route.scope}`."
        _add_errors(route, operation["responses"], schemas)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": PATH_PARAMETERS[name]}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    parameters += [{"name": name, "in": "header", "schema": schema} for name, schema in route.headers.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        form, schema = "application/json", {} if route.body is bytes else _schema(route.body, schemas)
        content = {"*/*" if route.body is bytes else form: {"schema": schema}}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    return operation


def _add_errors(route: Route, responses: dict[str, Any], schemas: dict[str, Any]) -> None:
    content = {problems.CONTENT_TYPE: {"schema": _schema(views.Problem, schemas)}}
    wanted = {**_COMMON_ERRORS, **{status: _ERRORS[status] for status in route.errors}}
    for status, text in sorted(wanted.items()):
        responses.setdefault(str(status), {"description": text, "content": content})


def _answer(answer: Answer, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if answer.stream:
        _schema(views.Line, schemas)
        text = {"schema": {"type": "string", "description": "Lines of `Line`."}}
        content.update({_NDJSON: text, _SSE: text})
    if answer.lines is not None:
        (name,) = _schema(answer.lines, schemas).values()
        description = f"Lines of `{name.rpartition('/')[2]}`."
        content[_NDJSON] = {"schema": {"type": "string", "description": description}}
    for form in answer.text_forms:
        content[form] = {"schema": {"type": "string"}}
    if answer.json:
        content["application/json"] = {"schema": _schema(answer.shape, schemas)}
    return {"description": answer.text, "content": content}


def _schema(shape: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the shape's schema; it and what it refers to are added to ``schemas``."""
    mode: Any = "validation"
    is_model = isinstance(shape, type) and issubclass(shape, BaseModel)
    made = (
        shape.model_json_schema(ref_template=_REF, mode=mode)
        if is_model
        else TypeAdapter(shape).json_schema(ref_template=_REF, mode=mode)
    )
    schemas.update(made.pop("$defs", {}))
    title = made.get("title")
    if not title:
        return dict(made)
    schemas[title] = made
    return {"$ref": _REF.format(model=title)}
