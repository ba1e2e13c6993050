"""An agent made of the published SDK's agent side; what it does stands in the prompt's text.

Run as a program; each frame that the SDK refuses is an error response or a line on stderr.
"""

from __future__ import annotations

import asyncio
from typing import Any

import acp
from acp import schema
from acp.exceptions import RequestError

SESSION = "sdk-1"
OPTIONS = [
    schema.PermissionOption(option_id="yes", name="Yes", kind="allow_once"),
    schema.PermissionOption(option_id="no", name="No", kind="reject_once"),
]


class SdkAgent:
    """One session; ``cancelled`` is set by ``session/cancel``."""

    def __init__(self) -> None:
        self.client: Any = None
        self.cancelled = asyncio.Event()

    def on_connect(self, client: Any) -> None:
        self.client = client

    async def initialize(self, protocol_version: int, **given: Any) -> schema.InitializeResponse:
        return schema.InitializeResponse(
            protocol_version=protocol_version,
            agent_info=schema.Implementation(name="sdk", version=given["client_info"].name),
            agent_capabilities=schema.AgentCapabilities(load_session=False),
        )

    async def new_session(self, cwd: str, mcp_servers: Any = None, **given: Any) -> schema.NewSessionResponse:
        servers = " ".join(server.command for server in mcp_servers or [])
        modes = [schema.SessionMode(id=name, name=f"{name} {servers}") for name in ("ask", "code")]
        return schema.NewSessionResponse(
            session_id=SESSION, modes=schema.SessionModeState(current_mode_id="ask", available_modes=modes)
        )

    async def close_session(self, session_id: str, **given: Any) -> schema.CloseSessionResponse:
        return schema.CloseSessionResponse()

    async def set_session_mode(self, session_id: str, mode_id: str, **given: Any) -> schema.SetSessionModeResponse:
        await self.say(f"mode {mode_id}")
        return schema.SetSessionModeResponse()

    async def set_config_option(
        self, config_id: str, session_id: str, value: str | bool, **given: Any
    ) -> schema.SetSessionConfigOptionResponse:
        await self.say(f"option {config_id}={value!r}")
        option = schema.SessionConfigOptionBoolean(
            id=config_id, name=config_id, type="boolean", current_value=bool(value)
        )
        return schema.SetSessionConfigOptionResponse(config_options=[option])

    async def cancel(self, session_id: str, **given: Any) -> None:
        self.cancelled.set()

    async def prompt(self, session_id: str, prompt: list[Any], **given: Any) -> schema.PromptResponse:
        word, _, rest = prompt[0].text.partition(" ")
        self.cancelled.clear()
        stop_reason = await getattr(self, f"do_{word}")(rest)
        return schema.PromptResponse(stop_reason=stop_reason or "end_turn")

    async def say(self, text: str) -> None:
        await self.client.session_update(SESSION, acp.update_agent_message_text(text))

    async def do_stream(self, count: str) -> None:
        for number in range(int(count)):
            await self.say(str(number))

    async def do_kinds(self, _: str) -> None:
        """One update of each kind that the SDK can make."""
        for update in (
            acp.update_user_message_text("asked"),
            acp.update_agent_thought_text("thinking"),
            acp.start_tool_call("t1", "list", kind="execute", status="pending", raw_input={"command": "ls"}),
            acp.update_tool_call("t1", status="completed", content=[acp.tool_content(acp.text_block("a b"))]),
            acp.update_plan([acp.plan_entry("look", priority="high", status="completed")]),
            schema.AvailableCommandsUpdate(
                session_update="available_commands_update",
                available_commands=[schema.AvailableCommand(name="web", description="search")],
            ),
            schema.CurrentModeUpdate(session_update="current_mode_update", current_mode_id="code"),
            schema.SessionInfoUpdate(session_update="session_info_update", title="A title"),
            schema.UsageUpdate(session_update="usage_update", used=10, size=200),
            acp.update_agent_message(acp.image_block("aGk=", "image/png")),
        ):
            await self.client.session_update(SESSION, update)
        await self.say("done")

    async def do_ask(self, _: str) -> str | None:
        call = schema.ToolCallUpdate(tool_call_id="t2", title="rm", kind="execute", raw_input={"command": "rm x"})
        answer = await self.client.request_permission(SESSION, call, OPTIONS)
        await self.say(answer.outcome.outcome)
        return "cancelled" if answer.outcome.outcome == "cancelled" else None

    async def do_wait(self, _: str) -> str:
        await self.cancelled.wait()
        return "cancelled"

    async def do_read(self, _: str) -> None:
        try:
            await self.client.read_text_file(SESSION, "/etc/hosts")
        except RequestError as error:
            await self.say(str(error.code))

    async def do_want(self, _: str) -> None:
        """Ask for what the client did not offer, and tell the codes of its refusals."""
        codes = []
        for call in (
            self.client.create_terminal(SESSION, "ls"),
            self.client.ext_method("x/y", {}),
        ):
            try:
                await call
            except RequestError as error:
                codes.append(error.code)
        await self.client.ext_notification("x/z", {})
        await self.say(repr(codes))

    async def do_elicit(self, _: str) -> None:
        mode = schema.ElicitationFormSessionMode(
            mode="form",
            session_id=SESSION,
            requested_schema=schema.ElicitationSchema(
                properties={"name": schema.ElicitationStringPropertySchema(type="string")}, required=["name"]
            ),
        )
        answer = await self.client.create_elicitation("Which?", mode)
        await self.say(f"{answer.action} {getattr(answer, 'content', None)}")

    async def do_fail(self, _: str) -> None:
        raise RequestError(-32603, "it broke", {"why": "test"})


if __name__ == "__main__":
    asyncio.run(acp.run_agent(SdkAgent(), use_unstable_protocol=True))  # type: ignore[arg-type]
