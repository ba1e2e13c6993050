"""The published schema as a judge of every frame that we send."""

from __future__ import annotations

from typing import Any

from acp import schema
from pydantic import BaseModel

REQUESTS: dict[str, tuple[type[BaseModel], ...]] = {
    "initialize": (schema.InitializeRequest,),
    "session/new": (schema.NewSessionRequest,),
    "session/load": (schema.LoadSessionRequest,),
    "session/resume": (schema.ResumeSessionRequest,),
    "session/prompt": (schema.PromptRequest,),
    "session/close": (schema.CloseSessionRequest,),
    "session/set_mode": (schema.SetSessionModeRequest,),
    "session/set_config_option": (
        schema.SetSessionConfigOptionBooleanRequest,
        schema.SetSessionConfigOptionSelectRequest,
    ),
}
NOTIFICATIONS: dict[str, type[BaseModel]] = {
    "session/cancel": schema.CancelNotification,
    "$/cancel_request": schema.CancelRequestNotification,
}
RESULTS: dict[str, type[BaseModel]] = {
    "session/request_permission": schema.RequestPermissionResponse,
}
ACTIONS: dict[str, type[BaseModel]] = {
    "accept": schema.AcceptElicitationResponse,
    "decline": schema.DeclineElicitationResponse,
    "cancel": schema.CancelElicitationResponse,
}


class Oracle:
    """Judges one connection's frames; it must see what the agent asked, to judge the answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, str]] = []
        self.judged = 0

    def agent_sent(self, frame: dict[str, Any]) -> None:
        if "id" in frame and isinstance(frame.get("method"), str):
            self.asked.append((frame["id"], frame["method"]))

    def judge(self, frame: dict[str, Any]) -> None:
        """Raises when the frame is not what the schema says."""
        self.judged += 1
        assert frame["jsonrpc"] == "2.0"
        method = frame.get("method")
        if method is None:
            self._judge_answer(frame)
        elif "id" in frame:
            assert set(frame) == {"jsonrpc", "id", "method", "params"}
            assert type(frame["id"]) is int
            models = REQUESTS[method]
            model = models[0] if len(models) == 1 or "type" in frame["params"] else models[1]
            _judge(model, frame["params"])
        else:
            assert set(frame) == {"jsonrpc", "method", "params"}
            _judge(NOTIFICATIONS[method], frame["params"])

    def _judge_answer(self, frame: dict[str, Any]) -> None:
        wanted = (type(frame["id"]), frame["id"])
        same = [at for at, (asked, _) in enumerate(self.asked) if (type(asked), asked) == wanted]
        assert same, f"an answer to nothing: {frame}"
        _, method = self.asked.pop(same[0])
        if "error" in frame:
            assert set(frame) == {"jsonrpc", "id", "error"}
            _judge(schema.Error, frame["error"])
        else:
            assert set(frame) == {"jsonrpc", "id", "result"}
            result = frame["result"]
            _judge(ACTIONS[result["action"]] if method == "elicitation/create" else RESULTS[method], result)


def _judge(model: type[BaseModel], value: dict[str, Any]) -> None:
    model.model_validate(value)
    known = {info.alias or name for name, info in model.model_fields.items()}
    assert set(value) <= known, f"members the schema does not know: {set(value) - known}"
