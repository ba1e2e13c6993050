"""Questions through real processes: answered in any order, by anybody, with or without the agent that asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.client import ApiError, Client
from runner.session.chain import CONTINUE
from tests.agents import steps
from tests.e2e.conftest import Scripted, Serve
from tests.e2e.server import Server, until
from tests.e2e.talk import Talk


async def asked(talk: Talk, prompt: str = "/ask rm x", count: int = 1) -> list[str]:
    """A paused turn; the ids of its questions."""
    result = await talk.prompt(prompt, prompt_id="asks", keep_on_disconnect=True)
    assert (result["outcome"], result["ok"]) == ("paused", True)
    found = await talk.questions()
    assert len(found) == count
    return [question["interaction_id"] for question in found]


def demo(server: Server, client: Client, session: str = "s") -> Talk:
    return Talk(server, client, session, harness="demo")


@pytest.mark.parametrize("how", ["kill -9", "SIGTERM"])
@pytest.mark.parametrize("earlier", [True, False])
async def test_an_answer_after_a_restart_goes_on_with_the_prompt_case_f9(serve: Serve, how: str, earlier: bool) -> None:
    server = serve()
    async with server.client() as client:
        talk = demo(server, client)
        if earlier:
            await talk.prompt("one")
        [question] = await asked(talk)
    if how == "kill -9":
        server.kill()
    else:
        server.stop()
    server.start()
    async with server.client() as client:
        talk = demo(server, client)
        view = await talk.view()
        assert (view["state"], view["open_interactions"]) == ("awaiting_approval", [question])
        answer = await client.answer("s", question, decision="allow")
        assert answer["status"] == "consumed"
        result = await talk.prompt("/ask rm x", prompt_id="asks")
        assert (result["ok"], result["text"], result["start"]) == (True, "rm x: allow_once. ", "resumed")
        records = await talk.records()
        said = [record["data"]["content"] for record in records if record["type"] == "user_message"]
        assert len(said) == 1 + earlier
        assert CONTINUE not in str(said)
        ended = [record["data"] for record in records if record["type"] == "prompt_ended"]
        assert ended[-1] == {"prompt_id": "asks", "state": "done"}
        await talk.check()


async def test_an_agent_that_died_is_asked_again_without_its_memory(scripted: Scripted) -> None:
    """Cases E5, F9: the chain waits on; an agent that loads nothing is told what happened and sent the prompt again."""
    talk, script = scripted()
    script.on_prompt(steps.ask(raw_input={"command": "rm x"}, allowed=[steps.text("did it")]), steps.reply())
    [question] = await asked(talk, "please")
    await talk.kill_agent()
    await until(lambda: not talk.server.census(), "the seat is free")
    view = await talk.view()
    assert (view["state"], view["open_interactions"]) == ("awaiting_approval", [question])
    answer = await talk.client.answer(talk.session, question, decision="allow")
    assert answer["status"] == "consumed"
    result = await talk.prompt("please", prompt_id="asks")
    assert (result["ok"], result["text"], result["start"], result["context_lost"]) == (True, "did it", "cold", True)
    assert script.log.prompts()[-1].endswith(f"please{CONTINUE}")


async def test_other_arguments_are_asked_anew_case_f9(scripted: Scripted) -> None:
    talk, script = scripted()
    script.on_prompt(steps.ask(raw_input={"command": "rm x"}), steps.reply())
    [question] = await asked(talk, "please")
    await talk.kill_agent()
    await until(lambda: not talk.server.census(), "the seat is free")
    script._on.clear()  # for the agent that starts now
    script.on_prompt(steps.ask(raw_input={"command": "rm -rf /"}, denied=[steps.text("I see")]), steps.reply())
    answering = asyncio.create_task(talk.client.answer(talk.session, question, decision="allow"))
    while not (fresh := [found for found in await talk.questions() if found["interaction_id"] != question]):
        await asyncio.sleep(0.02)
    assert fresh[0]["tool_call"]["raw_input"] == {"command": "rm -rf /"}
    await asyncio.gather(answering, return_exceptions=True)
    await talk.client.answer(talk.session, fresh[0]["interaction_id"], decision="deny")
    await talk.idle()
    listed = (await talk.client.interactions(talk.session))["items"]
    assert {found["interaction_id"]: found["status"] for found in listed} == {
        question: "expired",
        fresh[0]["interaction_id"]: "consumed",
    }


async def test_two_clients_answer_two_questions_in_reverse_order_case_f8(server: Server) -> None:
    async with server.client() as one, server.client() as other:
        talk = demo(server, one, "reverse")
        first, second = await asked(talk, "/ask2 go", 2)
        assert (await other.answer("reverse", second, decision="deny"))["status"] == "consumed"
        assert (await one.answer("reverse", first, decision="allow"))["status"] == "consumed"
        result = await talk.prompt("/ask2 go", prompt_id="asks")
        assert result["text"] == "go 1: allow_once. go 2: reject_once. "
        await talk.check()


async def test_opposite_verdicts_have_one_winner_case_f12(server: Server) -> None:
    async with server.client() as one, server.client() as other:
        talk = demo(server, one, "opposite")
        [question] = await asked(talk)
        calls = [
            one.answer("opposite", question, decision="allow"),
            other.answer("opposite", question, decision="deny"),
        ]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        won = [reply for reply in replies if isinstance(reply, dict)]
        [lost] = [reply for reply in replies if isinstance(reply, ApiError)]
        assert len(won) == 1
        assert (lost.code, lost.status) == ("interaction_conflict", 409)
        verdict = won[0]["answer"]["decision"]
        assert verdict in lost.message
        result = await talk.prompt("/ask rm x", prompt_id="asks")
        assert result["text"] == f"rm x: {'allow_once' if verdict == 'allow' else 'reject_once'}. "
        await talk.check()


async def test_a_stop_while_two_questions_are_open_leaves_no_card_case_f11(server: Server) -> None:
    async with server.client() as client:
        talk = demo(server, client, "cards")
        questions = await asked(talk, "/ask2 go", 2)
        assert (await talk.stop())["outcome"] == "stopped"
        assert await talk.questions() == []
        assert (await client.interactions(status="pending"))["items"] == []
        for question in questions:
            with pytest.raises(ApiError) as caught:
                await client.answer("cards", question, decision="allow")
            assert (caught.value.code, caught.value.status) == ("interaction_closed", 410)
        closed = [record["data"] for record in await talk.records() if record["type"] == "interaction_closed"]
        assert sorted(data["interaction_id"] for data in closed) == sorted(questions)
        assert {data["status"] for data in closed} == {"cancelled"}
        again = await talk.prompt("hello")
        assert (again["ok"], again["start"]) == (True, "hit"), "no agent waits: the same one goes on"
        await talk.check()


async def test_an_answer_needs_no_stream_case_f16(server: Server) -> None:
    async with server.client() as client:
        talk = demo(server, client, "cut")
        turn = talk.dispatch("/ask rm x", prompt_id="asks", keep_on_disconnect=True)
        await turn.event("interaction_requested")
        await turn.drop()
        while not (found := await talk.questions()):
            await asyncio.sleep(0.01)
        assert (await client.answer("cut", found[0]["interaction_id"], option_id="allow_always"))[
            "status"
        ] == "consumed"
        assert (await talk.prompt("/ask rm x", prompt_id="asks"))["text"] == "rm x: allow_always. "
        await talk.check()


async def test_an_unknown_question_disturbs_nobody_case_f10(server: Server) -> None:
    async with server.client() as client:
        talk = demo(server, client, "unknown")

        async def refused() -> ApiError:
            with pytest.raises(ApiError) as caught:
                await client.answer("unknown", "int_nobody", decision="allow")
            return caught.value

        await talk.prompt("hello")
        assert (await refused()).status == 404
        [question] = await asked(talk)
        assert (await refused()).status == 404
        assert [found["interaction_id"] for found in await talk.questions()] == [question]
        await client.answer("unknown", question, decision="allow", idempotency_key="k")
        assert (await client.answer("unknown", question, decision="allow", idempotency_key="k"))["status"] == "consumed"
        assert (await talk.prompt("/ask rm x", prompt_id="asks"))["ok"] is True
        assert (await talk.prompt("hello"))["start"] == "hit"
        await talk.check()


@pytest.mark.parametrize(
    ("prompt", "answer", "said"),
    [
        ("/form", {"action": "accept", "content": {"name": "Ada", "times": 3}}, "accept name=Ada times=3. "),
        ("/form", {"action": "decline"}, "decline. "),
        ("/url https://example.test/", {"action": "accept"}, "accept. "),
    ],
)
async def test_an_elicitation_end_to_end(server: Server, prompt: str, answer: dict[str, Any], said: str) -> None:
    async with server.client() as client:
        talk = demo(server, client, f"{prompt.split()[0][1:]}-{answer['action']}")
        [question] = await asked(talk, prompt)
        [shown] = await talk.questions()
        assert (shown["kind"], shown["mode"]) == ("elicitation", prompt.split()[0][1:])
        if "content" in answer:
            with pytest.raises(ApiError) as caught:
                await client.answer(talk.session, question, action="accept", content={"name": "Ada", "times": 10})
            assert (caught.value.status, "content.times" in caught.value.message) == (400, True)
        assert (await client.answer(talk.session, question, **answer))["status"] == "consumed"
        assert (await talk.prompt(prompt, prompt_id="asks"))["text"] == said
        await talk.check()
