"""The scripted agent for tests: what it shall do, what it received, and gates that make both deterministic."""

from tests.agents.frame_log import FrameLog
from tests.agents.gate import Gate
from tests.agents.script import SCRIPTED, AgentScript, directive

__all__ = ["SCRIPTED", "AgentScript", "FrameLog", "Gate", "directive"]
