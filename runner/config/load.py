"""Reads the settings from ``acp-runner.toml`` and ``ACP_RUNNER_…`` variables (DESIGN 5)."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from runner.config.model import CustomHarness, Settings
from runner.errors import RunnerError
from runner.resources import state_dir

log = logging.getLogger("runner.config")

PREFIX: Final = "ACP_RUNNER_"
FILE_NAME: Final = "acp-runner.toml"
COMMAND_VARIABLES: Final = frozenset(
    {"ACP_RUNNER_URL", "ACP_RUNNER_TOKEN", "ACP_RUNNER_CONFIG", "ACP_RUNNER_STATE_DIR"}
)


def load_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the file and the variables; a variable overrides the file, value by value.

    Args:
        path: the file of ``--config``; None takes ``ACP_RUNNER_CONFIG``, else ``./acp-runner.toml`` if it exists.
        environ: variables; ``ACP_RUNNER_SERVER__PORT`` is ``[server] port``, lists and tables are JSON.

    Raises:
        RunnerError: ``invalid_request`` naming the dotted name and the file or variable; ``field`` is the name.
    """
    file = _find_file(path, environ)
    from_file = _read_file(file) if file else {}
    variables = _read_variables(environ)

    class Loaded(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **more: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            given = (variables.values, from_file)
            return tuple(InitSettingsSource(settings_cls, init_kwargs=values) for values in given)

    try:
        settings: Settings = Loaded()
    except ValidationError as error:
        raise _refusal(error, file, variables) from None
    if settings.records.stream and not settings.store.url:
        raise _invalid("records.stream", "needs a shared store: set [store] url", file, variables)
    settings._file = file
    settings._base_dir = file.parent if file else Path.cwd()
    settings._state_dir = state_dir(environ)
    return settings


def _find_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    named = path or (Path(environ["ACP_RUNNER_CONFIG"]) if environ.get("ACP_RUNNER_CONFIG") else None)
    if named is not None:
        return named.expanduser().absolute()
    found = Path(FILE_NAME).absolute()
    return found if found.is_file() else None


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunnerError("invalid_request", f"cannot read {file}: {error.strerror}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunnerError("invalid_request", f"{file} is not valid TOML: {error}", field="config") from None


class _Variables(NamedTuple):
    values: dict[str, Any]
    names: dict[str, str]


def _read_variables(environ: Mapping[str, str]) -> _Variables:
    variables = _Variables({}, {})
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in COMMAND_VARIABLES:
            continue
        place = _place(name.removeprefix(PREFIX).split("__"))
        if place is None:
            log.warning("unknown variable %s is ignored", name)
            continue
        path, textual = place
        table = variables.values
        for step in path[:-1]:
            inner = table.setdefault(step, {})
            table = inner if isinstance(inner, dict) else {}
        table[path[-1]] = environ[name] if textual else _from_json(name, environ[name])
        variables.names[".".join(path)] = name
    return variables


def _place(steps: list[str]) -> tuple[list[str], bool] | None:
    """The settings path that a variable's parts name, and whether its text is the value as it stands."""
    path: list[str] = []
    model: type[BaseModel] = Settings
    while steps:
        field = model.model_fields.get(steps[0].lower())
        if field is None:
            return None
        path.append(steps.pop(0).lower())
        kind = field.annotation
        if get_origin(kind) is dict and steps:
            if model is not Settings or path[-1] == "secrets":
                return [*path, "__".join(steps)], True
            path.append(steps.pop(0).lower())
            kind = CustomHarness
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return (path, not _is_json(field)) if not steps else None
        model = kind
    return path, False


def _is_json(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (list, dict)


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise RunnerError("invalid_request", f"variable {name} must hold JSON", field=name) from None


def _refusal(error: ValidationError, file: Path | None, variables: _Variables) -> RunnerError:
    first = error.errors(include_input=False, include_url=False)[0]
    dotted = ".".join(str(step) for step in first["loc"])
    reason = "unknown name" if first["type"] == "extra_forbidden" else str(first["msg"]).removeprefix("Value error, ")
    return _invalid(dotted, reason, file, variables)


def _invalid(dotted: str, reason: str, file: Path | None, variables: _Variables) -> RunnerError:
    variable = next((name for path, name in variables.names.items() if _touch(path, dotted)), None)
    source = f"variable {variable}" if variable else str(file)
    return RunnerError("invalid_request", f"{dotted}: {reason} ({source})", field=dotted)


def _touch(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
