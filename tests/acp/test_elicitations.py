"""Elicitations on the wire: to the session that they belong to, refused when malformed, answered once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.acp.connection import ElicitationAsked, ElicitationCompleted, PermissionWithdrawn, Updates
from tests.acp.bed import SESSION, Bed, text_update, texts

pytestmark = pytest.mark.virtual_time

FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ACCEPT = {"action": "accept", "content": {"name": "x"}}


def elicitation(request_id: Any = "e", **members: Any) -> dict[str, Any]:
    """An ``elicitation/create``, as a form unless members say otherwise; None takes a member away."""
    params = {"sessionId": SESSION, "mode": "form", "message": "Which?", "requestedSchema": FORM, **members}
    params = {name: value for name, value in params.items() if value is not None}
    return {"jsonrpc": "2.0", "id": request_id, "method": "elicitation/create", "params": params}


def url(request_id: Any = "u", identity: str = "one", **members: Any) -> dict[str, Any]:
    given = {"requestedSchema": None, "mode": "url", "url": "https://example.test/x", "elicitationId": identity}
    return elicitation(request_id, **(given | members))


def complete(identity: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "elicitation/complete", "params": {"elicitationId": identity}}


async def test_both_modes_are_advertised(bed: Bed) -> None:
    asking = asyncio.create_task(bed.connection.initialize(seconds=5))
    frame = await bed.reads("initialize")
    assert frame["params"]["clientCapabilities"]["elicitation"] == {"form": {}, "url": {}}
    bed.says({"jsonrpc": "2.0", "id": frame["id"], "result": {"protocolVersion": 1}})
    await asking


@pytest.mark.parametrize("frame", [elicitation(), url("e")], ids=["form", "url"])
async def test_it_is_answered_once(bed: Bed, frame: dict[str, Any]) -> None:
    bed.inbox()
    bed.says(frame)
    [item] = await bed.items()
    assert isinstance(item, ElicitationAsked)
    assert item.params["message"] == "Which?"
    assert bed.connection.respond(item.key, ACCEPT) is True
    assert bed.connection.respond(item.key, {"action": "cancel"}) is False
    assert (await bed.reads())["result"] == ACCEPT


@pytest.mark.parametrize(
    "frame",
    [
        elicitation(mode="voice"),
        elicitation(mode=None),
        elicitation(message=7),
        elicitation(message="x" * 20_000),
        elicitation(requestedSchema=None),
        elicitation(requestedSchema={"properties": []}),
        elicitation(requestedSchema={"properties": {"a": 1}}),
        elicitation(requestedSchema={"properties": {"a": {"type": "object"}}}),
        elicitation(requestedSchema={"required": "a"}),
        elicitation(requestedSchema={"title": "x" * 70_000}),
        url("e", url="javascript:alert(1)"),
        url("e", url=None),
        url("e", url="https://" + "x" * 9000),
        url("e", elicitationId=None),
    ],
)
async def test_what_is_malformed_is_refused_and_noticed(bed: Bed, frame: dict[str, Any]) -> None:
    """Case F15, and the mode that nobody advertised."""
    bed.inbox()
    bed.says(frame)
    [item] = await bed.items()
    assert isinstance(item, Updates)
    assert item.updates[0]["sessionUpdate"] == "malformed_elicitation"
    assert (await bed.reads())["error"]["code"] == -32602


async def test_one_that_belongs_to_a_request_belongs_to_its_session(bed: Bed) -> None:
    bed.inbox()
    prompt = bed.connection.prompt(SESSION, [])
    await bed.reads("session/prompt")
    bed.says(elicitation(sessionId=None, requestId=prompt))
    [item] = await bed.items()
    assert isinstance(item, ElicitationAsked)
    bed.connection.respond(item.key, {"action": "decline"})


@pytest.mark.parametrize("scope", [{"sessionId": "s9"}, {"sessionId": None}, {"sessionId": None, "requestId": 77}])
async def test_one_of_nobody_is_cancelled(bed: Bed, scope: dict[str, Any]) -> None:
    """There is nobody to ask: during a start, or of a session that is closed."""
    bed.says(elicitation(**scope))
    assert (await bed.reads())["result"] == {"action": "cancel"}
    assert bed.connection.counts["elicitations_without_session"] == 1


async def test_it_can_be_withdrawn(bed: Bed) -> None:
    bed.inbox()
    bed.says(elicitation(5), {"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": 5}})
    asked, withdrawn = await bed.items()
    assert isinstance(asked, ElicitationAsked)
    assert withdrawn == PermissionWithdrawn(asked.key)
    assert bed.connection.respond(asked.key, ACCEPT) is False
    assert (await bed.reads())["error"]["code"] == -32800


async def test_a_closed_session_cancels_it(bed: Bed) -> None:
    bed.inbox()
    bed.says(elicitation())
    await bed.items()
    closing = asyncio.create_task(bed.connection.close_session(SESSION))
    frame = await bed.reads("session/close")
    bed.says({"jsonrpc": "2.0", "id": frame["id"], "result": {}})
    await closing
    assert (await bed.reads())["result"] == {"action": "cancel"}


async def test_a_url_that_is_done_is_told_once(bed: Bed) -> None:
    bed.inbox()
    bed.says(url(), complete("one"), complete("one"), complete("two"), complete(None), text_update("on"))
    items = await bed.items(texts)
    assert [type(item) for item in items] == [ElicitationAsked, ElicitationCompleted, Updates]
    assert items[1] == ElicitationCompleted("one")
    assert bed.connection.counts["unknown_completions"] == 3
    assert isinstance(items[0], ElicitationAsked)
    bed.connection.respond(items[0].key, {"action": "accept"})


async def test_only_the_newest_urls_are_remembered(bed: Bed) -> None:
    bed.inbox()
    bed.says(*(url(n, f"u{n}") for n in range(150)), complete("u0"), complete("u149"))
    items = await bed.items(lambda got: any(isinstance(item, ElicitationCompleted) for item in got))
    assert [item.elicitation_id for item in items if isinstance(item, ElicitationCompleted)] == ["u149"]
    for item in items:
        if isinstance(item, ElicitationAsked):
            bed.connection.respond(item.key, {"action": "cancel"})
