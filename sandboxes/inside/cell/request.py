"""Members of a request, each checked where it is read."""

from __future__ import annotations

from cell.confine import Confinement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class BadRequest(Exception):
    """A request that cannot be carried out; the text is the reply's error."""


def text_of(request: dict[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string")
    return value


def texts_of(request: dict[str, Any], name: str) -> tuple[str, ...]:
    value = request.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadRequest(f"{name} must be a list of strings")
    return tuple(value)


def program_of(request: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """``argv`` and ``env`` of what is to be started."""
    argv, env = texts_of(request, "argv"), request.get("env")
    named = bool(argv and argv[0]) and isinstance(env, dict) and all(isinstance(value, str) for value in env.values())
    if not named or not isinstance(env, dict):
        raise BadRequest("argv must name a program, env must be an object of strings")
    return argv, env


def seconds_of(request: dict[str, Any], name: str, default: float) -> float:
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 3600:
        raise BadRequest(f"{name} must be between 0 and 3600")
    return float(value)


def confinement_of(request: dict[str, Any]) -> Confinement:
    """``confine``: {read?, write?, processes?, keyrings?}; without it nothing is confined."""
    given = request.get("confine") or {}
    if not isinstance(given, dict):
        raise BadRequest("confine must be an object")
    read, write = (texts_of(given, name) if name in given else None for name in ("read", "write"))
    keyrings = given.get("keyrings", True)
    if not isinstance(keyrings, bool):
        raise BadRequest("keyrings must be true or false")
    return Confinement(read, write, count_of(given, "processes"), keyrings)


def count_of(request: dict[str, Any], name: str) -> int:
    value = request.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequest(f"{name} must be a number, 0 or more")
    return value
