"""A scripted model server on loopback, for driving real agents without a real model.

It speaks Anthropic Messages, OpenAI Responses and OpenAI Chat Completions, streaming. What it
answers is written in the user's prompt as a directive (see ``script``), because harnesses send
extra requests of their own and so an order of answers cannot be relied on.

In a test::

    async with ModelServer() as model:
        env = {"ANTHROPIC_BASE_URL": model.url, "ANTHROPIC_API_KEY": "k"}
        ...  # prompt the agent with "[[hold]]"
        (held,) = await model.wait_held()
        model.release()

As a program: ``python -m tests.model_server --port 0`` prints one JSON ready line.
"""

from tests.model_server.requests import RecordedRequest
from tests.model_server.script import AUXILIARY_TEXT, HELD_TEXT, RELEASED_TEXT, TOOL_DONE
from tests.model_server.server import ModelServer

__all__ = [
    "AUXILIARY_TEXT",
    "HELD_TEXT",
    "RELEASED_TEXT",
    "TOOL_DONE",
    "ModelServer",
    "RecordedRequest",
]
