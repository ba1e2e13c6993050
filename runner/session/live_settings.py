"""Mode, model and config options of a live agent session: set where they differ from what a dispatch wants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runner.acp.connection import AgentError
from runner.errors import RunnerError
from runner.session.effective import Effective
from runner.turn.live import LiveSeat

SETTING_SECONDS: Final = 10.0


async def apply(live: LiveSeat, effective: Effective) -> None:
    """Apply mode, model and config options to the live agent session, where they differ (DESIGN 3.5).

    Raises:
        RunnerError: ``invalid_request`` when the agent does not offer what was asked for, ``harness_unresponsive``.
    """
    config = effective.config
    mode, model, options = config.get("mode"), config.get("model"), config.get("config_options")
    if not (mode or model or options):
        return
    if mode and mode != live.mode:
        await _apply_mode(live, str(mode))
    if model:
        await _apply_model(live, str(model))
    for name, value in (options or {}).items():
        await _apply_option(live, name, value)


async def _apply_mode(live: LiveSeat, mode: str) -> None:
    if mode in live.modes or _untold(live):
        await set_mode(live, mode)
        return
    option = _by_category(live.config_options, "mode")
    if option is None:
        raise _not_offered("mode", mode, live.modes)
    await _apply_option(live, str(option["id"]), mode)


async def set_mode(live: LiveSeat, mode: str) -> None:
    """Set a mode of the agent session; raises as ``apply`` does."""
    await _bounded(live.connection.set_mode(live.agent_session_id, mode, seconds=SETTING_SECONDS), "mode")
    live.mode = mode


async def _apply_model(live: LiveSeat, model: str) -> None:
    option = _by_category(live.config_options, "model")
    if option is None and not _untold(live):
        raise _not_offered("model", model, ())
    await _apply_option(live, str(option["id"]) if option is not None else "model", model)


async def _apply_option(live: LiveSeat, name: str, value: str | bool) -> None:
    option = next((item for item in live.config_options if item.get("id") == name), None)
    if option is None and _untold(live):
        option = {"id": name}
    if option is None:
        offered = [str(item.get("id")) for item in live.config_options]
        raise _not_offered(f"config option {name}", str(value), offered)
    if option.get("currentValue") == value:
        return
    choices = _choices(option)
    if choices and value not in choices:
        raise _not_offered(name, str(value), choices)
    answer = await _bounded(
        live.connection.set_config_option(live.agent_session_id, name, value, seconds=SETTING_SECONDS), name
    )
    option["currentValue"] = value
    if answer:
        live.config_options = list(answer)


async def _bounded(call: Any, what: str) -> Any:
    try:
        return await call
    except AgentError as error:
        raise RunnerError("invalid_request", f"The agent refused the {what}: {error}") from None
    except TimeoutError:
        raise RunnerError("harness_unresponsive", f"The agent did not answer when its {what} was set.") from None


def _untold(live: LiveSeat) -> bool:
    """A resumed agent may leave out what its session offers; then what a dispatch wants is asked for all the same."""
    return live.resumed and not live.modes and not live.config_options


def take_modes(live: LiveSeat, modes: Mapping[str, Any] | None) -> None:
    """What an opened agent session says of its modes."""
    if not modes:
        return
    live.mode = modes.get("currentModeId")
    live.modes = tuple(str(item["id"]) for item in modes.get("availableModes", []) if isinstance(item, dict))


def _by_category(options: list[dict[str, Any]], category: str) -> dict[str, Any] | None:
    named = (item for item in options if item.get("category") == category or item.get("id") == category)
    return next(named, None)


def _choices(option: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for item in option.get("options") or ():
        if isinstance(item, dict) and isinstance(item.get("options"), list):
            found += [str(inner.get("value")) for inner in item["options"] if isinstance(inner, dict)]
        elif isinstance(item, dict) and "value" in item:
            found.append(str(item["value"]))
    return found


def _not_offered(what: str, value: str, offered: Any) -> RunnerError:
    known = ", ".join(str(item) for item in offered) or "none"
    return RunnerError("invalid_request", f"The agent offers no {what} “{value}”; it offers: {known}.", field=what)
