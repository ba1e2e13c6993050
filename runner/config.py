"""One settings model: ``acp-runner.toml`` and ``ACP_RUNNER_…`` variables (DESIGN 5)."""

from __future__ import annotations

import json
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from runner.errors import RunnerError
from runner.ids import valid_id
from runner.redaction import MASK
from runner.resources import state_dir as state_dir

log = logging.getLogger("runner.config")

PREFIX: Final = "ACP_RUNNER_"
FILE_NAME: Final = "acp-runner.toml"
COMMAND_VARIABLES: Final = frozenset(
    {"ACP_RUNNER_URL", "ACP_RUNNER_TOKEN", "ACP_RUNNER_CONFIG", "ACP_RUNNER_STATE_DIR"}
)
SCOPES: Final = ("dispatch", "read", "operate", "runner")
MIB: Final = 1024 * 1024


def _id(text: str) -> str:
    if not valid_id(text):
        raise ValueError("must match [A-Za-z0-9_-]{1,128}")
    return text


def _zero_is_off(value: Any) -> Any:
    return None if value in (0, "0") else value


Id = Annotated[str, AfterValidator(_id)]
Seconds = Annotated[float, Field(gt=0, le=10 * 365 * 86_400)]
Window = Annotated[float, Field(ge=0, le=10 * 365 * 86_400)]
Limit = Annotated[Seconds | None, BeforeValidator(_zero_is_off)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A table of the file; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class Server(Section):
    """``[server]``: the HTTP side. Port 0 lets the system choose."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8765
    advertise_url: str | None = None
    allowed_hosts: list[str] = []
    max_turns: Size = 64
    max_body_bytes: Size = 32 * MIB
    ping_seconds: Seconds = 10
    reader_grace_seconds: Window = 10
    reader_buffer_bytes: Size = 8 * MIB
    ring_bytes: Size = 4 * MIB


class Turn(Section):
    """``[turn]``: budgets and default limits in seconds; a limit of 0 is switched off (None)."""

    settle_seconds: Seconds = 10
    drain_seconds: Window = 30
    total_seconds: Limit = None
    idle_seconds: Limit = 1800
    first_update_seconds: Limit = 120
    tool_call_seconds: Limit = 1800
    quiet_seconds: Limit = 300
    pause_quiet_ms: Count = 100


class Windows(NamedTuple):
    """How long a seat is kept after each kind of ending, in seconds; 0 keeps nothing (DESIGN 3.4)."""

    idle_seconds: float
    approval_seconds: float
    stopped_seconds: float
    disk_seconds: float


DEFAULT_WINDOWS: Final[dict[str, Windows]] = {
    "local": Windows(60, 600, 600, 0),
    "daytona": Windows(120, 120, 120, 1800),
}


class ProviderPool(Section):
    """``[pool.<provider>]``: windows of one provider; None keeps the value of ``[pool]``."""

    idle_seconds: Window | None = None
    approval_seconds: Window | None = None
    stopped_seconds: Window | None = None


class DaytonaPool(ProviderPool):
    """``[pool.daytona]``. ``disk_seconds`` cannot be 0: a sleeping disk always has an end (case C3)."""

    disk_seconds: Seconds | None = None


class Pool(Section):
    """``[pool]``: seats and their windows."""

    max_seats: Size = 64
    idle_seconds: Window | None = None
    approval_seconds: Window | None = None
    stopped_seconds: Window | None = None
    spares: Count = 0
    local: ProviderPool = ProviderPool()
    daytona: DaytonaPool = DaytonaPool()

    def windows(self, provider: str) -> Windows:
        """Windows of ``provider``: its own table, else ``[pool]``, else the defaults of DESIGN 3.4."""
        own = getattr(self, provider) if provider in DEFAULT_WINDOWS else None
        chosen = []
        for name, default in DEFAULT_WINDOWS.get(provider, DEFAULT_WINDOWS["local"])._asdict().items():
            values = (getattr(table, name, None) for table in (own, self))
            chosen.append(next((value for value in values if value is not None), default))
        return Windows(*chosen)


class Prompts(Section):
    """``[prompts]``: the queue of a session."""

    max_queued: Size = 100


class Acp(Section):
    """``[acp]``: bounds on what an agent may send and how long it may take to start."""

    max_line_bytes: Size = 64 * MIB
    start_seconds: Seconds = 90


class Local(Section):
    """``[local]``: the local sandbox provider."""

    isolation: Literal["auto", "cell", "landlock", "none"] = "auto"
    allow_weak: bool = False
    roots: list[Path] = []
    memory_bytes: Count = 0
    pids: Size = 1024
    network: Literal["shared", "none", "proxy"] = "shared"


class Leases(Section):
    """``[leases]``: an empty url is the plane in this process."""

    url: str = ""
    beat_seconds: Seconds = 5
    lease_seconds: Seconds = 20
    beat_timeout_seconds: Seconds = 3
    on_unreachable: Literal["open", "closed"] = "open"

    @model_validator(mode="after")
    def _lease_outlives_a_beat(self) -> Leases:
        if self.beat_seconds + self.beat_timeout_seconds >= self.lease_seconds:
            raise ValueError("lease_seconds must be larger than beat_seconds + beat_timeout_seconds")
        return self


class StoreSettings(Section):
    """``[store]``: an empty url is SQLite in the state directory."""

    url: str = ""


class Records(Section):
    """``[records]``: delivery and retention; ``retention_days`` 0 keeps everything."""

    max_deliveries: Size = 5
    reclaim_idle_seconds: Seconds = 60
    retention_days: Count = 0
    lost_after_seconds: Seconds = 120


class Daytona(Section):
    """``[daytona]``: the remote provider. ``orphan_seconds`` cannot be 0 (case C3)."""

    api_url: str = ""
    api_key: SecretStr | None = None
    target: str = ""
    snapshot: str = ""
    orphan_seconds: Seconds = 120


class Token(Section):
    """One of ``[[auth.tokens]]``."""

    token: Annotated[SecretStr, Field(min_length=1)]
    project: Id
    scopes: Annotated[list[Literal["dispatch", "read", "operate", "runner"]], Field(min_length=1)]


class Auth(Section):
    """``[auth]``: who may call; without tokens the server makes one at first start."""

    tokens: list[Token] = []

    @model_validator(mode="after")
    def _each_token_once(self) -> Auth:
        if len({token.token.get_secret_value() for token in self.tokens}) != len(self.tokens):
            raise ValueError("the same token is listed twice")
        return self


class CustomHarness(Section):
    """``[harness.<name>]``: relative paths are meant from ``Settings.base_dir``."""

    command: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    env: dict[str, str] = {}
    pass_env: list[str] = []
    read: list[Path] = []
    write: list[Path] = []


class Settings(BaseSettings):
    """All settings, defaults included. ``Settings()`` reads neither files nor variables: ``load_settings`` does."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    server: Server = Server()
    turn: Turn = Turn()
    pool: Pool = Pool()
    prompts: Prompts = Prompts()
    acp: Acp = Acp()
    local: Local = Local()
    leases: Leases = Leases()
    store: StoreSettings = StoreSettings()
    records: Records = Records()
    daytona: Daytona = Daytona()
    secrets: dict[str, SecretStr] = {}
    auth: Auth = Auth()
    harness: dict[Id, CustomHarness] = {}

    _file: Path | None = PrivateAttr(default=None)
    _base_dir: Path = PrivateAttr(default_factory=Path.cwd)
    _state_dir: Path = PrivateAttr(default_factory=lambda: state_dir(os.environ))

    @property
    def file(self) -> Path | None:
        """The file that was read, if any."""
        return self._file

    @property
    def base_dir(self) -> Path:
        """Directory of the file, else the working directory at load: relative paths start here."""
        return self._base_dir

    @property
    def state_dir(self) -> Path:
        """The state directory (DESIGN 5); not created here."""
        return self._state_dir

    def redacted(self) -> dict[str, Any]:
        """JSON-ready settings for people: secret values, and literal values given to harnesses, are masked."""
        shown = self.model_dump(mode="json")
        shown["secrets"] = dict.fromkeys(self.secrets, MASK)
        shown["daytona"]["api_key"] = MASK if self.daytona.api_key else None
        for token in shown["auth"]["tokens"]:
            token["token"] = MASK
        for harness in shown["harness"].values():
            harness["env"] = dict.fromkeys(harness["env"], MASK)
        return shown

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller gives: nothing of the process's surroundings slips in."""
        return (init_settings,)


NOT_BUILT: Final[dict[str, tuple[Any, ...]]] = {
    "local.isolation": ("auto", "none"),
    "local.network": ("shared",),
    "local.memory_bytes": (0,),
    "leases.url": ("",),
    "store.url": ("",),
    "records.retention_days": (0,),
    "pool.spares": (0,),
}


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
    for dotted, built in NOT_BUILT.items():
        section, name = dotted.split(".")
        if getattr(getattr(settings, section), name) not in built:
            raise _invalid(dotted, "this value is not available in this version", file, variables)
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
