"""Opens the agent session of a new process: the one that an earlier process had, or a new one (DESIGN 3.5)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from runner.acp.answers import AgentInfo
from runner.acp.connection import AgentConnection, AgentError
from runner.errors import RunnerError
from runner.rules.resume import Proven, came_back_empty, way

RESUME_SECONDS: Final = 30.0


class ResumeStuck(Exception):
    """The agent cannot be trusted any more: it exited, did not answer, or brought back nothing (cases M6, M7).

    ``empty``: it did the last.
    """

    def __init__(self, why: str, *, empty: bool = False) -> None:
        super().__init__(why)
        self.empty = empty


@dataclass(frozen=True, slots=True)
class Opened:
    """An agent session that can be prompted.

    Attributes:
        resumed: it has the memory of an earlier process.
        failed: why it has not, although that was tried.
        facts: updates about mode and options that came with it.
    """

    agent_session_id: str
    modes: dict[str, Any] | None
    config_options: list[dict[str, Any]] | None
    resumed: bool = False
    failed: str | None = None
    facts: tuple[dict[str, Any], ...] = ()


async def open_agent_session(
    connection: AgentConnection,
    info: AgentInfo,
    cwd: str,
    mcp_servers: list[dict[str, Any]],
    *,
    known: str | None,
    proven: Proven,
    deadline: float,
) -> Opened:
    """Go on with the agent session ``known`` where that may be tried, else, or when it is refused, open a new one.

    Args:
        known: the agent's own id of it, None when there is none to go on with.
        deadline: loop time by which a session must be open.

    Raises:
        ResumeStuck: start another process and open a new session there.
        RunnerError, AgentError, TimeoutError: as ``AgentConnection.new_session``.
    """
    chosen = way(proven, loads=info.loads, resumes=info.resumes)
    failed = None
    if known is not None and chosen is not None:
        calls = {"load": connection.load_session, "resume": connection.resume_session}
        seconds = min(RESUME_SECONDS, _left(deadline) / 2)
        try:
            reopened = await calls[chosen](known, cwd, mcp_servers, seconds=seconds)
        except AgentError as error:
            failed = f"session/{chosen} was refused: {error}"
        except TimeoutError:
            raise ResumeStuck(f"session/{chosen} had no answer within {seconds:g} s") from None
        except RunnerError as error:
            if error.code != "harness_auth_required":
                raise ResumeStuck(f"session/{chosen} failed: {error.message}") from None
            failed = error.message
        else:
            if came_back_empty(chosen, reopened.replayed):
                raise ResumeStuck(f"session/{chosen} brought nothing back", empty=True)
            return Opened(known, reopened.modes, reopened.config_options, resumed=True, facts=reopened.facts)
    made = await connection.new_session(cwd, mcp_servers, seconds=_left(deadline))
    return Opened(made.agent_session_id, made.modes, made.config_options, failed=failed)


def _left(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())
