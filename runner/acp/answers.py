"""What an agent's answers and questions hold, validated as far as it is used (case E11)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from runner.acp.inbox import AgentError
from runner.errors import RunnerError
from runner.rules.bounds import cut

PROTOCOL_VERSION: Final = 1
AUTH_REQUIRED: Final = -32000
MESSAGE_CHARS: Final = 4000


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """What ``initialize`` answered; capabilities that were not given are empty."""

    protocol_version: int
    name: str | None
    version: str | None
    capabilities: dict[str, Any] = field(default_factory=dict)
    auth_methods: list[Any] = field(default_factory=list)

    @property
    def loads(self) -> bool:
        """Whether it says that it can load a session."""
        return self.capabilities.get("loadSession") is True

    @property
    def resumes(self) -> bool:
        """Whether it says that it can resume a session; an empty object says so too."""
        return mapping(self.capabilities.get("sessionCapabilities")).get("resume") not in (None, False)


@dataclass(frozen=True, slots=True)
class NewSession:
    """What ``session/new`` answered: the parts we use, and ``raw`` as it came."""

    agent_session_id: str
    modes: dict[str, Any] | None
    config_options: list[dict[str, Any]] | None
    raw: dict[str, Any] = field(default_factory=dict)


def agent_info(answer: Any) -> AgentInfo:
    """Raises ``RunnerError`` ``harness_protocol_error`` unless the agent speaks our version."""
    if not isinstance(answer, dict):
        raise RunnerError("harness_protocol_error", "The agent answered initialize without an object.")
    version = answer.get("protocolVersion")
    if version is None:
        raise RunnerError(
            "harness_protocol_error",
            f"The agent did not say which protocol version it speaks; this runner speaks {PROTOCOL_VERSION}.",
        )
    if not isinstance(version, int) or isinstance(version, bool) or version != PROTOCOL_VERSION:
        raise RunnerError(
            "harness_protocol_error",
            f"The agent speaks protocol version {version!r:.40}; this runner speaks {PROTOCOL_VERSION}.",
        )
    info = mapping(answer.get("agentInfo"))
    methods = answer.get("authMethods")
    return AgentInfo(
        version,
        _text(info.get("name")),
        _text(info.get("version")),
        mapping(answer.get("agentCapabilities")),
        methods if isinstance(methods, list) else [],
    )


def new_session(answer: Any) -> NewSession:
    """Raises ``RunnerError`` ``harness_protocol_error`` without a session id."""
    given = mapping(answer)
    agent_session_id = given.get("sessionId")
    if not isinstance(agent_session_id, str) or not agent_session_id:
        raise RunnerError("harness_protocol_error", "The agent answered session/new without a session id.")
    return NewSession(agent_session_id, mapping(given.get("modes")) or None, config_options(given), given)


def config_options(answer: Any) -> list[dict[str, Any]] | None:
    """The complete list of config options in an answer, or None when it has none."""
    options = mapping(answer).get("configOptions")
    return [option for option in options if isinstance(option, dict)] if isinstance(options, list) else None


def agent_error(value: Any) -> AgentError | None:
    """The ``error`` member of a response, whatever it holds; the message is bounded."""
    if value is None:
        return None
    given = mapping(value)
    code = given.get("code")
    message = given.get("message")
    text = message if isinstance(message, str) else str(value)
    return AgentError(
        code if isinstance(code, int) and not isinstance(code, bool) else -32603,
        cut(text, MESSAGE_CHARS).replace("\0", "\ufffd"),
        given.get("data"),
    )


def login_needed(error: AgentError) -> RunnerError | None:
    """The refusal that stands for the agent's "auth required", None for any other error."""
    if error.code != AUTH_REQUIRED:
        return None
    return RunnerError("harness_auth_required", f"The agent needs a login: {error.message}")


def permission_problem(params: dict[str, Any]) -> str | None:
    """What makes a permission request unusable (case F15), or None."""
    options = params.get("options")
    if not isinstance(options, list) or not all(
        isinstance(option, dict) and isinstance(option.get("optionId"), str) for option in options
    ):
        return "options must be a list of objects with an optionId"
    tool_call = params.get("toolCall")
    if not isinstance(tool_call, dict) or not isinstance(tool_call.get("toolCallId"), str):
        return "toolCall must have a toolCallId"
    return None


def mapping(value: Any) -> dict[str, Any]:
    """The value when it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
