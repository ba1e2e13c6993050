"""The settings: every section with its names, bounds and defaults (DESIGN 5)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from runner.config.credentials import Credentials, ProxiedKeys
from runner.config.strict import STRICT
from runner.ids import valid_id
from runner.redaction import MASK, without_password
from runner.resources import state_dir as state_dir
from runner.rules.egress import MOST_PORTS, AllowList

MIB: Final = 1024 * 1024
POSTGRESQL: Final = ("postgresql://", "postgres://")


def _id(text: str) -> str:
    if not valid_id(text):
        raise ValueError("must match [A-Za-z0-9_-]{1,128}")
    return text


def _plane_url(text: str) -> str:
    if text and urlsplit(text).scheme not in ("redis", "rediss", "unix", "http", "https"):
        raise ValueError("must be empty, redis://…, rediss://…, unix://… or http(s)://…")
    return text


def _store_url(text: str) -> str:
    if text.startswith(POSTGRESQL):
        return _database_url(text)
    if text and not (text.startswith("sqlite:////") and len(text) > len("sqlite:////")):
        raise ValueError("must be empty, sqlite:////absolute/path or postgresql://user:password@host:port/database")
    return text


def _database_url(text: str) -> str:
    """What a password leaves unescaped would be taken for a host, and shown."""
    place, _, options = text.partition("://")[2].partition("?")
    before, slash, database = place.rpartition("/")
    if not (slash and database) or before.count("@") > 1 or any(letter in text for letter in "# \t\r\n"):
        raise ValueError("must name a database; in user and password write @ / ? # and spaces as %40 %2F %3F %23 %20")
    if "@" in database + options or "/" in before:
        raise ValueError("in user and password write @ / ? # and spaces as %40 %2F %3F %23 %20")
    return text


def _stream_url(text: str) -> str:
    if text and urlsplit(text).scheme not in ("redis", "rediss", "unix"):
        raise ValueError("must be empty, redis://…, rediss://… or unix://…")
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

    model_config = STRICT


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
    ring_seconds: Seconds = 600


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
    spare_seconds: Seconds = 1800
    spare_harnesses: list[Id] = []
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
    """``[local]``: local sandboxes. ``memory_bytes``, ``pids`` and ``cpus`` bound one cell; 0 is no bound."""

    isolation: Literal["auto", "cell", "landlock", "none"] = "auto"
    allow_weak: bool = False
    roots: list[Path] = []
    memory_bytes: Count = 0
    pids: Count = 1024
    cpus: Window = 0
    network: Literal["shared", "none", "proxy"] = "shared"
    allow_hosts: list[str] = []
    """Where cells with the network ``proxy`` may connect to: ``rules.egress.entry``."""

    @model_validator(mode="after")
    def _hosts_are_for_the_proxy(self) -> Local:
        if self.allow_hosts and self.network != "proxy":
            raise ValueError("allow_hosts needs network = proxy")
        if len(AllowList.of(self.allow_hosts).loopback_ports()) > MOST_PORTS:
            raise ValueError(f"allow_hosts names at most {MOST_PORTS} ports of this machine")
        return self


class Leases(Section):
    """``[leases]``: an empty url is the plane in this process; ``redis://…``; ``http(s)://…`` an ``acp-runner plane``.

    A runner shows an HTTP plane the ``[[auth.tokens]]`` entries with scope ``runner``, each for its project.
    """

    url: Annotated[str, AfterValidator(_plane_url)] = ""
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
    """``[store]``: an empty url is SQLite in the state directory, or the store of an HTTP plane.

    ``sqlite:////absolute/path`` is one file that the runners of a machine share, ``postgresql://…`` a database that
    those of many machines do.
    """

    url: Annotated[str, AfterValidator(_store_url)] = ""


class Records(Section):
    """``[records]``: delivery and retention; ``retention_days`` 0 keeps everything.

    ``stream``: the Redis by which records travel to ``acp-runner worker``; empty: the runner writes them itself.
    ``stream_entries``: the most that wait there; beyond it runners write to the store themselves.
    """

    stream: Annotated[str, AfterValidator(_stream_url)] = ""
    stream_entries: Size = 100_000
    max_deliveries: Size = 5
    reclaim_idle_seconds: Seconds = 60
    retention_days: Count = 0
    lost_after_seconds: Seconds = 120


class Daytona(Section):
    """``[daytona]``: the remote provider, there when ``api_key`` is. ``orphan_seconds`` cannot be 0 (case C3).

    ``max_running`` 0: the account alone bounds it. ``snapshots``: recipe to its snapshot; ``snapshot`` is that of all
    others. ``root``: where a snapshot keeps the harnesses (empty: where this machine does). Secrets are stored at the
    service and may go to ``secret_hosts`` only; ``plain_secrets``: their values go into the environment of an agent
    over there.
    """

    api_url: str = ""
    api_key: SecretStr | None = None
    target: str = ""
    snapshot: str = ""
    snapshots: dict[Id, Annotated[str, Field(min_length=1)]] = {}
    orphan_seconds: Seconds = 120
    max_running: Count = 0
    root: str = "/opt/acp-runner"
    python: str = "python3"
    plain_secrets: bool = False
    secret_hosts: list[str] = ["api.anthropic.com", "api.openai.com"]


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


def _below_home(path: str) -> str:
    if {"", "..", "."} & set(path.split("/")) or "\0" in path:
        raise ValueError("must lie below the agent's home")
    return path


class Logins(Section):
    """``[logins]``: whose sessions get what ``acp-runner harness login`` stored on this machine."""

    projects: list[str] = ["default"]


class CustomLogin(Section):
    """``[harness.<name>.login]``: the JSON file that an agent keeps its login in; members are dotted paths."""

    command: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    file: Annotated[str, AfterValidator(_below_home)]
    secrets: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    refresh: str = ""
    expires: str = ""


class CustomHarness(Section):
    """``[harness.<name>]``: relative paths are meant from ``Settings.base_dir``."""

    command: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    env: dict[str, str] = {}
    pass_env: list[str] = []
    keys: ProxiedKeys = []
    read: list[Path] = []
    write: list[Path] = []
    resume: Literal["none", "load", "resume"] = "none"
    """How its agent goes on with a session of an earlier process; name only what it was seen to do."""
    login: CustomLogin | None = None


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
    logins: Logins = Logins()
    daytona: Daytona = Daytona()
    secrets: dict[str, SecretStr] = {}
    credentials: Credentials = Credentials()
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
        """JSON-ready settings for people: secret values, literal values given to harnesses, passwords are masked."""
        shown = self.model_dump(mode="json")
        for section in shown.values():
            for name, value in section.items() if isinstance(section, dict) else ():
                if isinstance(value, str) and "://" in value:
                    section[name] = without_password(value)
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
