"""kill -9 before anything is flushed: what was shown reaches the store at the next boot, once (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session import recovery
from runner.store.port import RecordRow
from runner.turn.live_file import left_by, read
from runner.wire.models import AnswerRequest
from tests.normal_form import Final, normal_form
from tests.session.bed import CALLER, Bed
from tests.session.fake_agent import FakeAgent
from tests.session.gates import SlowPlane, SlowStore

pytestmark = pytest.mark.virtual_time
AWAY = RunnerError("store_unavailable", "The disk is away.")
WRITES = ("append", "write_batch", "end", "save_session", "quarantine", "answer_interaction")


@pytest.fixture
def live_dir(tmp_path: Path) -> Path:
    return tmp_path / "live"


def no_writes(store: SlowStore) -> None:
    """From now on nothing more becomes durable."""
    store.broken |= dict.fromkeys(WRITES, AWAY)


class Seen:
    """A client that follows a session."""

    def __init__(self, bed: Bed) -> None:
        self.events: list[dict[str, Any]] = []
        self._task = asyncio.create_task(self._read(bed))

    async def _read(self, bed: Bed) -> None:
        reader = await bed.sessions.follow(CALLER, "s", None, True)
        while True:
            lines = await reader.next(3600)
            assert lines is not None
            self.events += [json.loads(line) for line in lines.splitlines()]

    def over(self) -> list[Final]:
        self._task.cancel()
        return normal_form(self.events)


async def running(bed: Bed, **fields: Any) -> tuple[FakeAgent, dict[str, Any], Seen]:
    """A turn whose prompt is sent and stored, and a client that follows it."""
    await bed.dispatch(keep_on_disconnect=True, prompt_id="x", **fields)
    agent = await bed.agent()
    frame = await agent.prompt()
    await asyncio.sleep(1)
    seen = Seen(bed)
    await asyncio.sleep(1)
    return agent, frame, seen


async def killed(bed: Bed) -> SlowStore:
    """As the disk has it, for the next boot."""
    await bed.die()
    store: SlowStore = bed.store
    store.broken.clear()
    store.gates.clear()
    return store


async def successor(bed: Bed, live_dir: Path) -> Bed:
    return await Bed.make(store=await killed(bed), replica_id="rep_2", live_dir=live_dir)


def ended(items: list[Final]) -> list[Final]:
    """All but the lost turn's ending."""
    at = next(place for place, item in enumerate(items) if item.type == "error")
    assert [item.type for item in items[at:]] == ["error", "prompt_ended", "done", "session_idle"]
    return items[:at]


def failed(items: list[Final]) -> list[Final]:
    return [
        item._replace(data={**item.data, "status": "failed"}) if item.data.get("status") == "in_progress" else item
        for item in items
    ]


async def talks(agent: FakeAgent) -> None:
    """Thoughts, a message in two blocks, a call that ends and one that does not."""
    agent.update(sessionUpdate="agent_thought_chunk", content={"type": "text", "text": "hm"})
    for word in ("one ", "two ", "three"):
        agent.say(word)
    agent.update(sessionUpdate="tool_call", toolCallId="t1", title="ls", status="in_progress")
    agent.update(sessionUpdate="tool_call_update", toolCallId="t1", status="completed")
    agent.update(sessionUpdate="tool_call", toolCallId="t2", title="sleep", status="in_progress")
    agent.update(sessionUpdate="tool_call_update", toolCallId="t2", rawInput={"for": "ever"})
    agent.say("four ")
    await asyncio.sleep(1)
    agent.say("five")
    await asyncio.sleep(1)


async def test_all_that_was_shown_is_history_case_h4(live_dir: Path) -> None:
    bed = await Bed.make(live_dir=live_dir)
    agent, _, seen = await running(bed)
    no_writes(bed.store)
    await talks(agent)
    shown = seen.over()
    assert [item.type for item in shown][-5:] == ["thought", "message", "tool_call", "message", "tool_call"]
    again = await successor(bed, live_dir)
    history = await again.history()
    assert ended(normal_form(history)) == failed(shown)
    assert left_by(live_dir).keys() <= {"rep_2"}, "what is in the store is kept no longer"
    last = seen.events[-1]["cursor"]
    assert normal_form([*seen.events, *await again.history(after=last)]) == normal_form(history)
    assert [row.reason for _, row in await again.store.quarantined("p", 10)] == []
    await again.close()


async def test_a_first_try_that_fails_anywhere_is_repeated(live_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A boot that is killed, or whose store fails, at each write of the recovery in turn; each begins from there."""
    monkeypatch.setattr(recovery, "BATCH", 2)
    bed = await Bed.make(live_dir=live_dir)
    agent, _, seen = await running(bed)
    no_writes(bed.store)
    await talks(agent)
    shown, store = failed(seen.over()), await killed(bed)
    real, writes, nth = store.write_batch, 0, 0

    async def failing(records: Sequence[RecordRow]) -> Any:
        nonlocal writes
        answer = await real(records)
        writes += 1
        if writes == nth:
            raise AWAY
        return answer

    while writes == nth:
        writes, nth = 0, nth + 1
        store.failing["end"] = 1
        monkeypatch.setattr(store, "write_batch", failing)
        with pytest.raises(RunnerError):
            await Bed.make(store=store, replica_id=f"rep_{nth}0", live_dir=live_dir)
        assert "rep_1" in left_by(live_dir), "kept until its turn has its ending"
    assert nth > 2
    again = await Bed.make(store=store, replica_id="rep_2", live_dir=live_dir)
    assert ended(normal_form(await again.history())) == shown
    assert await again.store.quarantined("p", 10) == []
    await again.close()


async def test_a_boot_that_is_killed_behind_the_ending_repeats_nothing(live_dir: Path, tmp_path: Path) -> None:
    bed = await Bed.make(live_dir=live_dir)
    agent, _, _ = await running(bed)
    no_writes(bed.store)
    await talks(agent)
    store, kept = await killed(bed), tmp_path / "kept"
    [path] = left_by(live_dir)["rep_1"]
    kept.write_bytes(path.read_bytes())
    once = await Bed.make(store=store, replica_id="rep_2", live_dir=live_dir)
    history = await once.history()
    await once.die()
    path.write_bytes(kept.read_bytes())
    again = await Bed.make(store=store, replica_id="rep_3", live_dir=live_dir)
    assert await again.history() == history
    assert await store.quarantined("p", 10) == []
    await again.close()


async def test_what_comes_when_the_turn_has_its_ending_is_set_aside(live_dir: Path) -> None:
    """The replica was on another machine: the sweep there ended its turn long ago; its records are kept and hidden."""
    bed = await Bed.make(live_dir=live_dir)
    agent, _, seen = await running(bed)
    stored = normal_form(await bed.history())
    no_writes(bed.store)
    await talks(agent)
    shown, store = seen.over(), await killed(bed)
    elsewhere = await Bed.make(store=store, replica_id="rep_b")
    history = await elsewhere.history()
    assert ended(normal_form(history)) == stored, "nobody there had the file"
    await elsewhere.die()
    for replica_id in ("rep_2", "rep_3"):
        again = await Bed.make(store=store, replica_id=replica_id, live_dir=live_dir)
        assert await again.history() == history
        aside = [row for _, row in await store.quarantined("p", 100)]
        assert {row.reason for row in aside} == {"turn_ended"}
        events = [
            {"cursor": f"{row.epoch}.{row.n}", "turn_id": row.turn_id, "type": row.type, "data": json.loads(row.data)}
            for row in (item.record for item in aside)
        ]
        assert [*stored, *normal_form(events)] == failed(shown)
        await again.die()


async def test_a_deleted_session_stays_deleted(live_dir: Path) -> None:
    bed = await Bed.make(live_dir=live_dir)
    agent, _, _ = await running(bed)
    no_writes(bed.store)
    await talks(agent)
    store = await killed(bed)
    row = await store.session("p", "s")
    assert row is not None
    await store.save_session(replace(row, ended_at=1))
    await store.delete_session_content("p", "s")
    again = await Bed.make(store=store, replica_id="rep_2", live_dir=live_dir)
    assert await store.records("p", "s", None, 10) == []
    assert await store.quarantined("p", 10) == []
    assert left_by(live_dir).keys() <= {"rep_2"}
    await again.close()


async def test_a_row_that_the_store_refuses_takes_no_neighbour_with_it(
    live_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = await Bed.make(live_dir=live_dir)
    agent, _, seen = await running(bed)
    no_writes(bed.store)
    await talks(agent)
    shown, store = failed(seen.over()), await killed(bed)
    real = store.write_batch

    async def poisoned(records: Sequence[RecordRow]) -> Any:
        if any(row.type == "thought" for row in records):
            raise RunnerError("internal", "poison")
        return await real(records)

    monkeypatch.setattr(store, "write_batch", poisoned)
    again = await Bed.make(store=store, replica_id="rep_2", live_dir=live_dir)
    assert ended(normal_form(await again.history())) == [item for item in shown if item.type != "thought"]
    assert [row.record.type for _, row in await store.quarantined("p", 10)] == ["thought"]
    await again.close()


@pytest.mark.parametrize("damage", ["empty", "garbage", "no event", "not readable"])
async def test_a_file_that_makes_no_sense_keeps_no_boot_back(live_dir: Path, damage: str) -> None:
    bed = await Bed.make(live_dir=live_dir)
    agent, _, _ = await running(bed)
    no_writes(bed.store)
    await talks(agent)
    store = await killed(bed)
    [path] = left_by(live_dir)["rep_1"]
    if damage == "no event":
        path.write_bytes(path.read_bytes().replace(b'{"kind":', b'{"king"!'))
    elif damage == "not readable":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(b"" if damage == "empty" else b"x" * 5000)
    again = await Bed.make(store=store, replica_id="rep_2", live_dir=live_dir)
    assert normal_form(await again.history())[-2].data["outcome"] == "lost"
    await again.close()


async def test_a_prompt_whose_ending_was_told_never_runs(live_dir: Path) -> None:
    """It waited, its abort was shown, and the row was not written: who saw that is not contradicted."""
    bed = await Bed.make(live_dir=live_dir)
    _, _, seen = await running(bed)
    await bed.dispatch(prompt="two", prompt_id="y", on_busy="queue", keep_on_disconnect=True)
    await asyncio.sleep(1)
    no_writes(bed.store)
    aborting = asyncio.create_task(bed.sessions.abort_prompt(CALLER, "s", "y"))
    await asyncio.sleep(1)
    shown = seen.over()
    assert shown[-1].data == {"prompt_id": "y", "state": "cancelled"}
    again = await successor(bed, live_dir)
    await asyncio.sleep(5)
    await asyncio.wait({aborting})
    assert ended(normal_form(await again.history())) == shown
    assert again.provider.sandboxes == []
    row = await again.store.prompt("p", "s", "y")
    assert row is not None
    assert (row.state, row.result["outcome"] if row.result else None) == ("cancelled", "cancelled")
    retry = await again.dispatch(prompt="two", prompt_id="y")
    assert (await retry.result())["outcome"] == "cancelled"
    await again.close()


async def test_a_closing_that_was_told_is_told_once(live_dir: Path) -> None:
    """The agent took its question back, and goes on: the question is not closed a second time."""
    bed = await Bed.make(live_dir=live_dir)
    agent, _, seen = await running(bed)
    agent.update(sessionUpdate="tool_call", toolCallId="other", title="build", status="in_progress")
    agent.ask(1, "t1")
    await asyncio.sleep(1)
    no_writes(bed.store)
    agent.send({"method": "$/cancel_request", "params": {"requestId": 1}})
    await asyncio.sleep(1)
    shown = seen.over()
    closed = [item for item in shown if item.type == "interaction_closed"]
    assert len(closed) == 1
    again = await successor(bed, live_dir)
    assert [item for item in normal_form(await again.history()) if item.type == "interaction_closed"] == closed
    [row] = await again.store.interactions("p", "s")
    assert row.status == closed[0].data["status"]
    await again.close()


async def test_an_ending_that_is_not_durable_is_not_history(live_dir: Path) -> None:
    """Only while the store takes nothing: the turn is lost, and has one ending."""
    bed = await Bed.make(live_dir=live_dir)
    agent, frame, seen = await running(bed)
    no_writes(bed.store)
    agent.say("all of it")
    agent.answer(frame)
    await asyncio.sleep(10)
    assert seen.over()[-1].type in ("done", "session_idle")
    again = await successor(bed, live_dir)
    items = normal_form(await again.history())
    assert [item.data["outcome"] for item in items if item.type == "done"] == ["lost"]
    assert [item.data["text"] for item in items if item.type == "message"] == ["all of it"]
    assert len([item for item in items if item.type == "prompt_ended"]) == 1
    await again.close()


async def test_no_secret_is_in_the_file(live_dir: Path) -> None:
    bed = await Bed.make(live_dir=live_dir)
    key = "sk-live-0123456789"
    agent, _, seen = await running(bed, secrets={"KEY": key})
    no_writes(bed.store)
    for part in ("the key is sk-li", "ve-0123", "456789 and sk-live-"):
        agent.say(part)
        await asyncio.sleep(1)
    agent.update(sessionUpdate="tool_call", toolCallId="t1", title=f"use {key}", status="completed")
    await asyncio.sleep(1)
    shown = seen.over()
    [path] = left_by(live_dir)["rep_1"]
    assert key.encode() not in path.read_bytes()
    again = await successor(bed, live_dir)
    assert ended(normal_form(await again.history())) == shown
    await again.close()


async def test_nothing_is_kept_of_what_is_durable(live_dir: Path) -> None:
    """Behind a turn, a pause, an answer, a Stop and an abort, once all is flushed."""
    bed = await Bed.make(live_dir=live_dir)

    def kept() -> list[bytes]:
        return [entry.lines for entry in read(sorted(live_dir.iterdir()))]

    agent, frame, seen = await running(bed)
    assert kept()
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)
    assert kept() == []
    await bed.dispatch(keep_on_disconnect=True, prompt_id="y")
    frame = await agent.prompt(2)
    agent.ask(1)
    await asyncio.sleep(1)
    assert kept() == [], "paused"
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    await bed.sessions.answer(CALLER, "s", question, AnswerRequest(decision="allow"))
    agent.answer(frame)
    await asyncio.sleep(1)
    assert kept() == []
    await bed.dispatch(keep_on_disconnect=True, prompt_id="z")
    await agent.prompt(3)
    stopping = asyncio.create_task(bed.cancel())
    agent.answer(await agent.prompt(3), "cancelled")
    await stopping
    await asyncio.sleep(1)
    assert kept() == []
    seen.over()
    await bed.close()
    assert left_by(live_dir) == {}


@pytest.mark.parametrize("how", ["it was there", "it comes later, and is asked at once"])
async def test_another_replica_of_the_machine_hands_it_in(tmp_path: Path, how: str) -> None:
    """It proved the death by the lock, and reads what is in the state directory of that lock (cases L2, M1)."""
    plane, dead = SlowPlane(), set[str]()
    plane.shared = True
    states = {name: tmp_path / name for name in ("rep_1", "rep_2")}

    async def replica(name: str, store: SlowStore | None) -> Bed:
        return await Bed.make(
            store=store,
            plane=plane,
            replica_id=name,
            proven_dead=lambda info: info.replica_id in dead,
            live_dir=states[name] / "live",
        )

    one = await replica("rep_1", None)
    two = await replica("rep_2", one.store) if how == "it was there" else None
    agent, _, seen = await running(one)
    store: SlowStore = one.store
    no_writes(store)
    await talks(agent)
    shown = failed(seen.over())
    await killed(one)
    dead.add("rep_1")
    await asyncio.sleep(3 if two is not None else 25)
    if two is None:
        two = await replica("rep_2", store)
        await two.turn(prompt="next")
        await asyncio.sleep(3)
    history = normal_form(await two.history())
    assert history[: [item.type for item in history].index("error")] == shown
    assert await store.quarantined("p", 10) == []
    assert left_by(states["rep_1"] / "live") == {}
    await two.close()


async def test_a_disk_that_takes_nothing_stops_no_turn(tmp_path: Path) -> None:
    """It is told, and the turn is as it would be without the file."""
    (tmp_path / "live").write_text("in the way")
    bed = await Bed.make(live_dir=tmp_path / "live")
    assert (await bed.sessions.ready())["live_file"] is True
    assert (await bed.turn())["ok"]
    ready = await bed.sessions.ready()
    assert (ready["ready"], ready["live_file"]) == (True, False)
    await bed.close()
