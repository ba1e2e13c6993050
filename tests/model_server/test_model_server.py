"""The model server over raw requests: each protocol, each directive, holds and disconnects."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import aiohttp
import pytest

from tests.model_server import AUXILIARY_TEXT, HELD_TEXT, RELEASED_TEXT, TOOL_DONE, ModelServer

SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
EXEC = {
    "type": "object",
    "properties": {
        "cmd": {"type": "string"},
        "sandbox_permissions": {"type": "string"},
        "justification": {"type": "string"},
    },
}


class Anthropic:
    """Requests and answers in the words of Anthropic Messages."""

    path = "/v1/messages?beta=true"
    shell_arguments: ClassVar = {"command": "echo 1"}

    def body(self, *turns: str, tools: bool = True, stream: bool = True) -> dict[str, Any]:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": text}]}
            if index % 2 == 0
            else {"role": "assistant", "content": [{"type": "text", "text": text}]}
            for index, text in enumerate(turns)
        ]
        offered = [{"name": "Bash", "input_schema": SHELL}] if tools else []
        return {"model": "m", "stream": stream, "messages": messages, "tools": offered}

    def with_result(self, prompt: str, call: dict[str, Any], result: str) -> dict[str, Any]:
        body = self.body(prompt)
        use = {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["input"]}
        back = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": result}],
        }
        reminder = {"type": "text", "text": "<system-reminder>be brief</system-reminder>"}
        body["messages"] += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [back, reminder]},
        ]
        return body

    def text(self, events: list[dict[str, Any]]) -> str:
        return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")

    def call(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        (start,) = [
            event["content_block"]
            for event in events
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use"
        ]
        parts = [
            event["delta"]["partial_json"]
            for event in events
            if event.get("delta", {}).get("type") == "input_json_delta"
        ]
        return {**start, "input": json.loads("".join(parts))}

    def ended(self, events: list[dict[str, Any]]) -> bool:
        return events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"

    def whole_text(self, answer: dict[str, Any]) -> str:
        return str(answer["content"][0]["text"])


class Responses:
    """Requests and answers in the words of OpenAI Responses."""

    path = "/v1/responses"
    shell_arguments: ClassVar = {"cmd": "echo 1"}

    def body(self, *turns: str, tools: bool = True, stream: bool = True) -> dict[str, Any]:
        items = [
            {
                "type": "message",
                "role": "user" if index % 2 == 0 else "assistant",
                "content": [{"type": "input_text", "text": text}],
            }
            for index, text in enumerate(turns)
        ]
        offered = [{"type": "function", "name": "exec_command", "parameters": EXEC}]
        return {"model": "m", "stream": stream, "input": items, "tools": offered if tools else []}

    def with_result(self, prompt: str, call: dict[str, Any], result: str) -> dict[str, Any]:
        body = self.body(prompt)
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        body["input"] += [call["raw"], output]
        return body

    def text(self, events: list[dict[str, Any]]) -> str:
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        return "".join(deltas)

    def call(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        (item,) = [
            event["item"]
            for event in events
            if event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call"
        ]
        return {**item, "raw": item, "input": json.loads(item["arguments"])}

    def ended(self, events: list[dict[str, Any]]) -> bool:
        numbered = [event["sequence_number"] for event in events] == list(range(len(events)))
        return numbered and events[-1]["type"] == "response.completed"

    def whole_text(self, answer: dict[str, Any]) -> str:
        return str(answer["output"][0]["content"][0]["text"])


class Chat:
    """Requests and answers in the words of Chat Completions."""

    path = "/v1/chat/completions"
    shell_arguments: ClassVar = {"command": "echo 1"}

    def body(self, *turns: str, tools: bool = True, stream: bool = True) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "[[text:no]]"}]
        messages += [
            {"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(turns)
        ]
        offered = [{"type": "function", "function": {"name": "bash", "parameters": SHELL}}]
        body = {"model": "m", "stream": stream, "messages": messages}
        return {**body, "tools": offered} if tools else body

    def with_result(self, prompt: str, call: dict[str, Any], result: str) -> dict[str, Any]:
        body = self.body(prompt)
        body["messages"] += [
            {"role": "assistant", "content": None, "tool_calls": [call["raw"]]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
        return body

    def text(self, events: list[dict[str, Any]]) -> str:
        return "".join(choice["delta"].get("content") or "" for e in events for choice in e["choices"])

    def call(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        (call,) = [
            call for event in events for choice in event["choices"] for call in choice["delta"].get("tool_calls", [])
        ]
        function = call["function"]
        arguments = json.loads(function["arguments"])
        return {"id": call["id"], "name": function["name"], "raw": call, "input": arguments}

    def ended(self, events: list[dict[str, Any]]) -> bool:
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        return len(reasons) == 1 and events[-1]["usage"]["total_tokens"] > 0

    def whole_text(self, answer: dict[str, Any]) -> str:
        return str(answer["choices"][0]["message"]["content"])


Words = Anthropic | Responses | Chat


@pytest.fixture(params=[Anthropic, Responses, Chat])
def words(request: pytest.FixtureRequest) -> Words:
    made: Words = request.param()
    return made


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def events_of(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """Every ``data:`` object of an event stream."""
    assert response.status == 200
    assert response.content_type == "text/event-stream"
    lines = (await response.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


async def ask(
    http: aiohttp.ClientSession, model: ModelServer, words: Words, body: dict[str, Any]
) -> list[dict[str, Any]]:
    headers = {"Authorization": "Bearer the-key"}
    async with http.post(model.url + words.path, json=body, headers=headers) as response:
        return await events_of(response)


async def test_text_is_streamed(http: aiohttp.ClientSession, model: ModelServer, words: Words) -> None:
    events = await ask(http, model, words, words.body("please [[text:hi\nthere]]"))
    assert words.text(events) == "hi\nthere"
    assert words.ended(events)
    (seen,) = model.requests
    assert (seen.directive, seen.finished, seen.closed_by_client) == ("text", True, False)
    assert seen.api_key == "the-key"
    assert seen.user_texts == ["please [[text:hi\nthere]]"]


async def test_the_last_directive_after_the_last_answer_wins(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    body = words.body("[[text:first]]", "first", "[[text:second]] [[stream:3]]")
    events = await ask(http, model, words, body)
    assert words.text(events) == "0 1 2 "


async def test_an_answered_directive_is_not_repeated(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    events = await ask(http, model, words, words.body("[[text:first]]", "first", "and now?"))
    assert words.text(events) == "echo: and now?"


async def test_a_shell_call_and_its_result(http: aiohttp.ClientSession, model: ModelServer, words: Words) -> None:
    events = await ask(http, model, words, words.body("[[shell:echo 1]]"))
    assert words.ended(events)
    call = words.call(events)
    assert call["input"] == words.shell_arguments
    follow_up = words.with_result("[[shell:echo 1]]", call, "one [[hold]]")
    events = await ask(http, model, words, follow_up)
    assert words.text(events) == f"{TOOL_DONE} one [[hold]]"
    assert model.requests[-1].tool_results == ["one [[hold]]"]


async def test_escalation_is_asked_for_where_the_tool_knows_it(http: aiohttp.ClientSession, model: ModelServer) -> None:
    words = Responses()
    call = words.call(await ask(http, model, words, words.body("[[esc:id]]")))
    assert call["input"]["sandbox_permissions"] == "require_escalated"
    assert call["input"]["justification"]
    call = Anthropic().call(await ask(http, model, Anthropic(), Anthropic().body("[[esc:id]]")))
    assert call["input"] == {"command": "id"}


async def test_a_named_tool_is_called_with_its_arguments(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    events = await ask(http, model, words, words.body('[[tool:lookup {"id": 3}]]'))
    call = words.call(events)
    assert (call["name"], call["input"]) == ("lookup", {"id": 3})


async def test_requests_without_tools_are_auxiliary(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    events = await ask(http, model, words, words.body("title for [[hold]]", tools=False))
    assert words.text(events) == AUXILIARY_TEXT
    assert model.requests[0].auxiliary
    assert model.turns == []


async def test_without_a_stream_the_answer_is_one_object(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    body = words.body("[[text:whole]]", stream=False)
    async with http.post(model.url + words.path, json=body) as response:
        assert words.whole_text(await response.json()) == "whole"


async def test_a_hold_sends_a_first_chunk_and_waits_for_the_release(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    task = asyncio.create_task(ask(http, model, words, words.body("[[hold]]")))
    (held,) = await model.wait_held()
    assert model.held == [held]
    assert not held.finished
    assert model.release() == 1
    assert model.held == []
    events = await task
    assert words.text(events) == HELD_TEXT + RELEASED_TEXT
    assert (held.finished, held.closed_by_client, held.held) == (True, False, False)


async def test_one_of_several_held_requests_is_released(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    first = asyncio.create_task(ask(http, model, words, words.body("[[hold:a]]")))
    (held,) = await model.wait_held(1)
    second = asyncio.create_task(ask(http, model, words, words.body("[[hold0:b]]")))
    _, other = await model.wait_held(2)
    assert model.release(other) == 1
    assert words.text(await second) == "b" + RELEASED_TEXT
    assert not first.done()
    assert model.held == [held]
    model.release()
    assert words.text(await first) == "a" + RELEASED_TEXT


@pytest.mark.parametrize("directive", ["[[hold]]", "[[hold0]]"])
async def test_a_client_that_goes_away_is_seen(
    http: aiohttp.ClientSession, model: ModelServer, words: Words, directive: str
) -> None:
    task = asyncio.create_task(ask(http, model, words, words.body(directive)))
    (held,) = await model.wait_held()
    task.cancel()
    assert await model.wait_closed(held) is held
    assert (held.finished, held.closed_by_client, held.held) == (False, True, False)
    assert model.held == []


async def test_a_hold_before_the_headers_sends_nothing(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    post = http.post(model.url + words.path, json=words.body("[[hold0]]"))
    task = asyncio.ensure_future(post)
    await model.wait_held()
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    model.release()
    response = await task
    assert words.text(await events_of(response)) == HELD_TEXT + RELEASED_TEXT


async def test_an_http_error(http: aiohttp.ClientSession, model: ModelServer, words: Words) -> None:
    async with http.post(model.url + words.path, json=words.body("[[http:529]]")) as response:
        assert response.status == 529
        assert "error" in await response.json()
    assert model.requests[0].finished


async def test_a_cut_drops_the_connection_after_the_text(
    http: aiohttp.ClientSession, model: ModelServer, words: Words
) -> None:
    async with http.post(model.url + words.path, json=words.body("[[cut:half]]")) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert not model.requests[0].closed_by_client


async def test_an_empty_answer_ends_without_text(http: aiohttp.ClientSession, model: ModelServer, words: Words) -> None:
    events = await ask(http, model, words, words.body("[[empty]]"))
    assert words.text(events) == ""
    assert words.ended(events)


async def test_the_other_routes(http: aiohttp.ClientSession, model: ModelServer) -> None:
    async with http.get(model.openai_url + "/models") as response:
        assert (await response.json())["data"][0]["id"] == "fake-model"
    async with http.head(model.url + "/") as response:
        assert response.status == 200
    async with http.post(model.url + "/v1/messages/count_tokens", json={}) as response:
        assert await response.json() == {"input_tokens": 11}
    async with http.get(model.url + "/nowhere") as response:
        assert response.status == 404


async def test_waiting_for_what_does_not_come_says_what_came(http: aiohttp.ClientSession, model: ModelServer) -> None:
    await ask(http, model, Chat(), Chat().body("[[text:x]]"))
    with pytest.raises(TimeoutError, match=r"1 held requests.*\('chat', 'text'\)"):
        await model.wait_held(timeout_seconds=0.01)


async def test_as_a_program_it_prints_one_ready_line(http: aiohttp.ClientSession) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.model_server", "--port", "0"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        assert ready["ready"] is True
        body = Anthropic().body("[[hold]]")
        async with http.post(ready["url"] + "/v1/messages", json=body) as response:
            await response.content.readuntil(HELD_TEXT.encode())
            process.stdin.write(b"release\n")
            assert RELEASED_TEXT.encode() in await response.read()
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
