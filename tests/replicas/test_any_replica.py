"""Every replica answers for every session, and two of them never run one session twice (DESIGN 3.1.10)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runner.client import ApiError
from tests.agents import Gate, directive, steps
from tests.e2e.server import SECONDS
from tests.e2e.talk import Dispatched
from tests.replicas.bed import Cluster, Member, Session, until_async
from tests.replicas.conftest import Sessions

IN_USE = "Another turn is already running in this session. Your message was not sent."
POLITE = directive(steps.text("next"), steps.reply())
ASKING = directive(steps.tool("call-1", "in_progress"), steps.ask(allowed=[steps.text("did it")]), steps.reply())
TWO_QUESTIONS = directive(
    steps.tool("call-1", "in_progress"),
    steps.tool("call-2", "in_progress"),
    steps.ask(
        "call-1", "first", wait=False, allowed=[steps.text("first allowed. ")], denied=[steps.text("first denied. ")]
    ),
    steps.ask(
        "call-2", "second", wait=False, allowed=[steps.text("second allowed. ")], denied=[steps.text("second denied. ")]
    ),
    steps.answers(),
    steps.text("over"),
    steps.reply(),
)


def gated(gate: Gate) -> str:
    return directive(steps.text("one "), steps.gate(gate), steps.text("two"), steps.reply())


class Following:
    """Followers of one session at every replica."""

    def __init__(self, session: Session) -> None:
        self.lines: dict[str, list[dict[str, Any]]] = {door.folder.name: [] for door in session.cluster.doors}
        self.tasks = [asyncio.create_task(self._follow(session, door)) for door in session.cluster.doors]

    async def _follow(self, session: Session, door: Member) -> None:
        async for line in session.at(door).events(session.session, follow=True):
            self.lines[door.folder.name].append(line)

    async def until(self, kind: str, count: int = 1) -> None:
        async with asyncio.timeout(SECONDS):
            while any(sum(line["type"] == kind for line in lines) < count for lines in self.lines.values()):
                for task in self.tasks:
                    assert not task.done(), task
                await asyncio.sleep(0.01)

    async def over(self) -> dict[str, list[dict[str, Any]]]:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        return self.lines


async def test_dispatch_here_and_follow_everywhere(cluster: Cluster, sessions: Sessions, tmp_path: Path) -> None:
    session = sessions()
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached()
    following = Following(session)
    await following.until("message_delta")
    for door in cluster.doors:
        listed = (await session.at(door).sessions())["items"]
        (mine,) = [item for item in listed if item["session_id"] == session.session]
        assert (mine["state"], mine["running_turn"]) == ("running", (await turn.event("turn_admitted"))["turn_id"])
    gate.open()
    result = await turn.result()
    assert (result["ok"], result["text"]) == (True, "one two")
    await following.until("session_idle")
    await session.prompt(cluster.b, POLITE)
    await following.until("session_idle", 2)
    seen = await following.over()
    for name, lines in seen.items():
        assert [line["cursor"] for line in lines] == [line["cursor"] for line in seen["a"]], name
        assert [line["data"] for line in lines] == [line["data"] for line in seen["a"]], name
    await session.check()


async def test_the_next_prompt_is_warm_wherever_it_comes(cluster: Cluster, sessions: Sessions) -> None:
    session = sessions()
    first = await session.prompt(cluster.b, POLITE)
    starts = [(await session.prompt(door, POLITE))["start"] for door in cluster.doors]
    assert (first["start"], set(starts)) == ("cold", {"hit"})
    views = [await session.view(door) for door in cluster.doors]
    for view in views:
        # Reckoned anew each time, to the millisecond.
        del view["pool"]["warm_until"], view["usage"]["warm_seconds"], view["usage"]["sandbox_seconds"]
    assert all(view == views[0] for view in views)
    await session.check()


async def send(session: Session, door: Member, prompt: str, prompt_id: str) -> tuple[str, dict[str, Any]]:
    """Dispatch once; ``admitted`` or ``refused``, with the result."""
    turn = session.dispatch(door, prompt, prompt_id=prompt_id)
    result = await turn.result()
    if result["turn_id"] is not None:
        return "admitted", result
    assert result["error"]["code"] == "session_turn_in_use"
    assert [event["type"] for event in turn.events] == ["error"]
    assert turn.events[0]["data"]["message"] == IN_USE
    return "refused", result


@pytest.mark.parametrize("warm", [False, True], ids=["new", "warm"])
async def test_two_at_once_at_two_replicas_b2(cluster: Cluster, sessions: Sessions, tmp_path: Path, warm: bool) -> None:
    """Case B2: exactly one is admitted, the other is refused and leaves nothing behind."""
    for number in range(5):
        session = sessions()
        if warm:
            await session.prompt(cluster.a, POLITE)
        gate = Gate(tmp_path / f"gate{number}")
        sent = [
            asyncio.create_task(send(session, door, gated(gate), f"p-{door.folder.name}"))
            for door in (cluster.a, cluster.b)
        ]
        await gate.reached(SECONDS)
        done, _ = await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED, timeout=SECONDS)
        assert [task.result()[0] for task in done] == ["refused"]
        gate.open()
        assert sorted([(await task)[0] for task in sent]) == ["admitted", "refused"]
        records = await session.check()
        assert sum(record["type"] == "user_message" for record in records) == (2 if warm else 1)
        again = await session.prompt(cluster.b, POLITE)
        assert (again["ok"], again["start"]) == (True, "hit")


async def test_a_retry_at_another_replica_attaches(cluster: Cluster, sessions: Sessions, tmp_path: Path) -> None:
    """Case B5: the same id and content, while it runs and when it is over: one run, one result."""
    session = sessions()
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate), prompt_id="p1")
    await gate.reached(SECONDS)
    again = [session.dispatch(door, gated(gate), prompt_id="p1") for door in cluster.doors]
    for one in again:
        await one.event("message_delta")
    with pytest.raises(ApiError) as conflict:
        await session.dispatch(cluster.b, "other words", prompt_id="p1").result()
    assert conflict.value.code == "prompt_conflict"
    gate.open()
    result = await turn.result()
    for one in again:
        assert await one.result() == result
    for door in cluster.doors:
        assert await session.dispatch(door, gated(gate), prompt_id="p1").result() == result
    records = await session.check()
    assert sum(record["type"] == "turn_admitted" for record in records) == 1


async def paused(session: Session, door: Member, prompt: str, questions: int = 1) -> Dispatched:
    turn = session.dispatch(door, prompt)
    result = await turn.result()
    assert result["outcome"] == "paused", result
    assert len(await session.questions(door)) == questions
    return turn


async def test_a_question_is_answered_at_another_replica(cluster: Cluster, sessions: Sessions) -> None:
    for door in cluster.doors:
        session = sessions()
        await paused(session, cluster.a, ASKING)
        (question,) = await session.questions(door)
        answered = await session.at(door).answer(session.session, question["interaction_id"], decision="allow")
        assert answered["status"] in ("answered", "consumed")
        records = await session.check()
        assert any(record["type"] == "message" and record["data"]["text"] == "did it" for record in records)
        assert (await session.prompt(cluster.b, POLITE))["start"] == "hit"


async def test_two_questions_are_answered_in_reverse_order_by_two_clients(cluster: Cluster, sessions: Sessions) -> None:
    """One allows the second at one replica, the other denies the first at another."""
    session = sessions()
    await paused(session, cluster.a, TWO_QUESTIONS, 2)
    by_title = {item["tool_call"]["title"]: item["interaction_id"] for item in await session.questions(cluster.b)}
    first, second = by_title["first"], by_title["second"]
    await session.at(cluster.b).answer(session.session, second, decision="allow")
    await session.at(cluster.a).answer(session.session, first, decision="deny")
    records = await session.check()
    text = "".join(record["data"]["text"] for record in records if record["type"] == "message")
    assert sorted(text.removesuffix("over").split()) == sorted(["second", "allowed.", "first", "denied."])
    assert text.endswith("over")
    closed = {
        record["data"]["interaction_id"]: record["data"].get("decision")
        for record in records
        if record["type"] == "interaction_closed"
    }
    assert closed == {first: "deny", second: "allow"}


async def test_a_stop_at_another_replica_keeps_the_agent_warm(
    cluster: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    for number, door in enumerate(cluster.doors):
        session = sessions()
        gate = Gate(tmp_path / f"gate{number}")
        turn = session.dispatch(cluster.a, gated(gate))
        await gate.reached(SECONDS)
        stopped = await session.at(door).cancel(session.session, wait_seconds=SECONDS)
        result = await turn.result()
        assert (stopped["outcome"], stopped["turn_id"]) == ("stopped", result["turn_id"])
        assert (result["outcome"], result["stop_reason"], result["cancel_settled"]) == ("cancelled", "cancelled", True)
        assert (await session.prompt(door, POLITE))["start"] == "hit"
        await session.check()


async def test_a_stop_while_questions_are_open_leaves_no_card(cluster: Cluster, sessions: Sessions) -> None:
    session = sessions()
    await paused(session, cluster.a, TWO_QUESTIONS, 2)
    stopped = await session.at(cluster.b).cancel(session.session, wait_seconds=SECONDS)
    assert stopped["outcome"] == "stopped"
    for door in cluster.doors:
        await until_async(lambda door=door: _no_question(session, door), "no card is left")
    await session.check()
    assert (await session.prompt(cluster.b, POLITE))["ok"]


async def _no_question(session: Session, door: Member) -> bool:
    return not await session.questions(door)


async def test_kill_and_delete_at_another_replica(cluster: Cluster, sessions: Sessions) -> None:
    session = sessions()
    await session.prompt(cluster.a, POLITE)
    await session.at(cluster.b).kill(session.session)
    again = await session.prompt(cluster.b, POLITE)
    assert (again["ok"], again["start"]) == (True, "cold")
    await session.at(cluster.a).delete(session.session)
    for door in cluster.doors:
        with pytest.raises(ApiError) as ended:
            await session.view(door)
        assert (ended.value.status, ended.value.code) == (410, "session_ended")


async def test_a_session_that_nobody_has_is_nowhere(cluster: Cluster, sessions: Sessions) -> None:
    session = sessions()
    for door in cluster.doors:
        with pytest.raises(ApiError) as missing:
            await session.view(door)
        assert missing.value.status == 404
