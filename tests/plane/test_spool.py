"""A store behind a spool: outages, lost answers, fences and order (DESIGN 3.1.7, 3.9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.store.port import Appended, CommandRow
from runner.store.spool import SpooledStore
from runner.store.spool_file import SpoolFile
from runner.store.spooling import hand_in
from tests.plane.remote import Remote
from tests.store.rows import admission, ended, ending, prompt, question, record, session, turn
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


class Replica:
    """A spooled store with what its decisions were asked and what it told."""

    def __init__(self, remote: Remote, path: Path) -> None:
        self.remote = remote
        self.path = path
        self.leases = {"t1"}
        self.granted: dict[str, bool | None] = {}
        self.rejected: list[str] = []
        self.store: SpooledStore = None  # type: ignore[assignment]

    async def open(self, **more: Any) -> SpooledStore:
        self.store = await SpooledStore.open(
            self.remote,
            self.path,
            LoopClock(),
            may_spool=lambda project, session_id, turn_id: turn_id in self.leases,
            granted=lambda project, session_id, turn_id: self.granted.get(turn_id, True),
            on_rejected=lambda project, session_id, turn_id: self.rejected.append(turn_id),
            **more,
        )
        return self.store

    async def long_outage(self) -> None:
        """End an outage while the replay pauses: whoever comes now tries the store first."""
        await asyncio.sleep(60)
        while self.store._spool._is_down():
            await asyncio.sleep(0.1)
        self.remote.unavailable = False

    async def drained(self, seconds: float = 30) -> None:
        async with asyncio.timeout(seconds):
            while self.store.waiting:
                await asyncio.sleep(0.05)


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    made = Replica(Remote(), tmp_path / "spool.sqlite3")
    await made.open()
    yield made
    await made.store.close()


async def unavailable(work: Any) -> RunnerError:
    with pytest.raises(RunnerError) as caught:
        await work
    assert caught.value.code == "store_unavailable"
    return caught.value


async def test_while_the_store_answers_nothing_is_spooled(replica: Replica):
    store = replica.store
    assert await store.admit(admission())
    assert not await store.admit(admission())
    assert await store.append([record(1)]) == Appended(1)
    assert await store.end(ending(turn()))
    assert not await store.end(ending(turn(), "cancelled"))
    assert await store.append([record(2)]) == Appended(0, 1)
    assert store.waiting == 0
    assert replica.rejected == []


async def test_an_outage_in_a_turn_costs_nothing_case_g1(replica: Replica):
    """Case G1: accepted records and the ending survive an outage of the store, once each and in order."""
    store, remote = replica.store, replica.remote
    await store.admit(admission(prompt=prompt()))
    await store.append([record(1)])
    remote.unavailable = True
    assert await store.append([record(2)], [question()]) == Appended(1)
    assert await store.append([record(3)]) == Appended(1)
    last = ending(turn(), prompt=prompt(state="done"), records=[record(4)], interactions=[question(status="cancelled")])
    assert await store.end(last)
    await store.save_session(session(at=3000))
    assert store.waiting == 4
    await asyncio.sleep(60)
    remote.unavailable = False
    await replica.drained()
    assert [row.n for row in await store.records("p", "s", None, 10)] == [1, 2, 3, 4]
    assert await store.turn("p", "s", "t1") == ended(turn())
    row = await store.interaction("p", "i1")
    assert row is not None and row.status == "cancelled"
    assert remote.calls == ["admit t1", "append 1.1", "append 1.2", "append 1.3", "end t1"]
    assert replica.rejected == []


async def test_a_stalled_owner_spools_nothing(replica: Replica):
    """DESIGN 3.9: the lease is asked behind the failed try, so what ran out meanwhile counts."""
    store, remote = replica.store, replica.remote
    await store.admit(admission())
    remote.gate = asyncio.Event()
    late = asyncio.create_task(store.append([record(1)]))
    await asyncio.sleep(1)
    replica.leases.clear()
    remote.deaf = True
    remote.gate.set()
    await unavailable(late)
    remote.unavailable = True
    await unavailable(store.end(ending(turn())))
    await unavailable(store.append([], [question()]))
    await unavailable(store.append([], [], [prompt(turn_id=None)]))
    await unavailable(store.save_session(session(at=9)))
    await unavailable(store.admit(admission("t2", 2)))
    assert store.waiting == 0


async def test_an_admission_is_spooled_where_it_may_and_counts_once_granted(replica: Replica):
    """DESIGN 3.1.7: an unfenced turn's records count only if the plane grants it."""
    store, remote = replica.store, replica.remote
    remote.unavailable = True
    replica.granted["t1"] = None
    assert await store.admit(admission(records=[record(1)]))
    assert await store.append([record(2)]) == Appended(1)
    remote.unavailable = False
    await asyncio.sleep(60)
    assert remote.calls == []
    assert store.waiting == 2
    assert await store.append([record(3)]) == Appended(1)
    replica.granted["t1"] = True
    await replica.drained()
    assert [row.n for row in await store.records("p", "s", None, 10)] == [1, 2, 3]
    assert replica.rejected == []


@pytest.mark.parametrize("by", ["plane", "store"])
async def test_an_unfenced_turn_that_is_not_granted_leaves_only_quarantine(replica: Replica, by: str):
    """DESIGN 3.1.7, case N3: another replica took the session meanwhile; what this one spooled is kept, and hidden."""
    store, remote = replica.store, replica.remote
    remote.unavailable = True
    assert await store.admit(admission(records=[record(1)], prompt=prompt("p9")))
    await store.append([record(2)], [question("i9")], [prompt("p9", "done")])
    await store.append([], [question("i8")])
    await store.end(ending(turn(), records=[record(3)], prompt=prompt("p9", "done")))
    remote.unavailable = False
    if by == "plane":
        replica.granted["t1"] = False
    else:
        await remote.admit(admission("other", 1))
    await replica.drained()
    assert set(replica.rejected) == {"t1"}
    assert await remote.records("p", "s", None, 10) == []
    assert [row.record.n for _, row in await remote.quarantined("p", 10)] == [1, 2, 3]
    assert await remote.interactions("p") == []
    assert await remote.prompt("p", "s", "p9") is None
    assert [row.turn_id for row in await remote.open_turns()] == ([] if by == "plane" else ["other"])


async def test_an_ending_that_lost_is_told_and_its_records_are_set_aside_case_n3(replica: Replica):
    """Case N3: the sweep ended the turn as lost while its owner was cut off."""
    store, remote = replica.store, replica.remote
    await store.admit(admission())
    remote.unavailable = True
    await store.append([record(1)])
    assert await store.end(ending(turn(), records=[record(2)]))
    remote.unavailable = False
    lost = ended(turn(), "lost", stop_reason=None, ended_at=5000)
    await remote.end(replace(ending(turn()), turn=lost))
    await replica.drained()
    stored = await store.turn("p", "s", "t1")
    assert stored is not None and stored.outcome == "lost"
    assert await remote.records("p", "s", None, 10) == []
    assert len(await remote.quarantined("p", 10)) == 2
    assert set(replica.rejected) == {"t1"}


async def test_a_write_whose_answer_was_lost_counts_once(replica: Replica):
    """No retry repeats a side effect: the store had it although nobody was told."""
    store, remote = replica.store, replica.remote
    remote.deaf = True
    assert await store.admit(admission(prompt=prompt()))
    assert await store.append([record(1)]) == Appended(1)
    await asyncio.sleep(2)
    assert await store.end(ending(turn(), records=[record(2)]))
    await asyncio.sleep(5)
    remote.deaf = False
    await replica.drained()
    assert [row.n for row in await store.records("p", "s", None, 10)] == [1, 2]
    assert await remote.quarantined("p", 10) == []
    assert replica.rejected == []
    assert await store.open_turns() == []


async def test_behind_a_waiting_write_everything_of_its_session_waits(replica: Replica):
    """A store that is back does not take the newer write before the older one."""
    store, remote = replica.store, replica.remote
    await store.admit(admission())
    remote.unavailable = True
    await store.append([record(1)])
    await replica.long_outage()
    remote.calls.clear()
    await store.append([record(2)])
    assert await store.end(ending(turn()))
    assert remote.calls == ["append 1.1", "append 1.2", "end t1"]
    assert store.waiting == 0


async def test_an_ending_waits_for_its_compare_and_set_once_the_store_is_back(replica: Replica):
    """DESIGN 3.9: the result line follows the spool only while the store is unreachable."""
    store, remote = replica.store, replica.remote
    await store.admit(admission())
    remote.unavailable = True
    await store.append([record(1)])
    await replica.long_outage()
    await remote.end(ending(turn(), "lost"))
    assert not await store.end(ending(turn()))


async def test_sessions_do_not_wait_for_each_other(replica: Replica):
    store, remote = replica.store, replica.remote
    replica.leases |= {"a", "b"}
    replica.granted["a"] = None
    remote.unavailable = True
    for name in ("a", "b"):
        await store.admit(replace(admission(name), session=session(name), turn=turn(name, in_session=name)))
    remote.unavailable = False
    await asyncio.sleep(10)
    assert remote.calls == ["admit b"]
    assert store.waiting == 1


async def test_reads_of_a_waiting_session_answer_from_what_waits_or_not_at_all(replica: Replica):
    store, remote = replica.store, replica.remote
    await store.admit(admission(records=[record(1)]))
    remote.unavailable = True
    await store.append([record(2)], [question()], [prompt(state="active")])
    newest = session(at=2000, head_epoch=1, head_n=3)
    await store.end(ending(turn(), session=newest, prompt=prompt(state="done")))
    assert await store.session("p", "s") == newest
    assert await store.turn("p", "s", "t1") == ended(turn())
    assert await store.last_turn("p", "s") == ended(turn())
    assert await store.prompt("p", "s", "p1") == prompt(state="done")
    assert await store.interaction("p", "i1") == question()
    assert await store.open_turns(("p", "s")) == []
    for unknown in (
        store.turn("p", "s", "t0"),
        store.prompt("p", "s", "p0"),
        store.interaction("p", "i0"),
        store.records("p", "s", None, 10),
        store.interactions("p", "s"),
        store.interactions("p"),
        store.sessions("p", 10),
        store.session("p", "other"),
        store.open_turns(),
        store.paused_turns(),
        store.open_commands(),
        store.answer_interaction(question(status="answered"), "pending"),
        store.submit_command(CommandRow("p", "s9", "c", "cancel", "pending", "t9", 1)),
        store.settle_command("p", "c", "applied", "stopped", 1),
        store.delete_session_content("p", "s"),
    ):
        await unavailable(unknown)
    assert not await store.ready()
    remote.unavailable = False
    await asyncio.sleep(1.1)
    assert [row.n for row in await store.records("p", "s", None, 10)] == [1, 2]


async def test_a_store_that_never_answers_costs_one_caller_at_a_time(replica: Replica):
    """A black hole instead of a refusal: whoever may spool waits only if he is the one who finds out."""
    store, remote = replica.store, replica.remote
    replica.leases |= {f"t{n}" for n in range(2, 40)}
    for n in range(2, 40):
        own = replace(admission(f"t{n}"), session=session(f"s{n}"), turn=turn(f"t{n}", in_session=f"s{n}"))
        await store.admit(own)
    remote.hang = 5.0
    slow = []
    for n in range(2, 40):
        before = asyncio.get_running_loop().time()
        await store.append([record(1, in_session=f"s{n}", turn_id=f"t{n}")])
        slow.append(asyncio.get_running_loop().time() - before)
        await asyncio.sleep(0.5)
    assert sum(seconds > 0 for seconds in slow) <= 4
    remote.hang = 0.0
    await replica.drained()
    assert replica.rejected == []


async def test_a_read_across_sessions_sees_what_waited(replica: Replica):
    """A sweep must not end a turn as lost whose ending waits here."""
    store, remote = replica.store, replica.remote
    await store.admit(admission())
    remote.unavailable = True
    await store.end(ending(turn()))
    remote.unavailable = False
    await asyncio.sleep(1.1)
    assert await store.open_turns() == []


async def test_a_row_that_the_store_refuses_holds_nothing_up(replica: Replica):
    """Cases G2 and G8: its neighbours land, it is kept in quarantine."""
    store, remote = replica.store, replica.remote
    await store.admit(admission(records=[record(1)]))
    remote.unavailable = True
    await store.append([record(1, record_id="rec_twin"), record(2)], [question()])
    await store.end(ending(turn(), records=[record(2, record_id="rec_twin2"), record(3)]))
    remote.unavailable = False
    await replica.drained()
    assert [row.n for row in await remote.records("p", "s", None, 10)] == [1, 2, 3]
    assert await remote.interaction("p", "i1") is not None
    stored = await remote.turn("p", "s", "t1")
    assert stored is not None and stored.outcome == "completed"
    aside = [row.record.record_id for _, row in await remote.quarantined("p", 10)]
    assert aside == ["rec_twin", "rec_twin2"]


@pytest.mark.parametrize("code", ["internal", "too_large"])
async def test_what_no_store_can_take_is_kept_aside(replica: Replica, monkeypatch: pytest.MonkeyPatch, code: str):
    store, remote = replica.store, replica.remote
    await store.admit(admission())
    remote.unavailable = True
    await store.append([record(1)])
    await store.save_session(session(at=2))
    await store.append([record(2)])

    async def refuses(row: Any) -> None:
        raise RunnerError(code, "the store refused a row")

    monkeypatch.setattr(remote, "save_session", refuses)
    remote.unavailable = False
    await replica.drained()
    assert [row.n for row in await remote.records("p", "s", None, 10)] == [1, 2]
    assert await store._spool._file.refused() == [("s", "save_session")]


async def test_the_spool_is_bounded(tmp_path: Path):
    replica = Replica(Remote(), tmp_path / "spool")
    store = await replica.open(max_bytes=3000)
    await store.admit(admission())
    replica.remote.unavailable = True
    done = await asyncio.gather(*(store.append([record(n)]) for n in range(1, 50)), return_exceptions=True)
    kept = done.count(Appended(1))
    assert {str(item) for item in done[kept:]} == {"The store is unreachable and the spool is full (3000 bytes)."}
    assert store.waiting == kept
    assert 3 < kept < 20
    replica.remote.unavailable = False
    await replica.drained()
    assert len(await store.records("p", "s", None, 100)) == kept
    replica.remote.unavailable = True
    assert await store.append([record(60)]) == Appended(1)
    await store.close()


async def test_the_next_start_replays_what_was_left(tmp_path: Path):
    first = Replica(Remote(), tmp_path / "spool")
    store = await first.open()
    await store.admit(admission())
    first.remote.unavailable = True
    await store.append([record(1)])
    await store.end(ending(turn(), records=[record(2)]))
    await store.close()
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o600
    second = Replica(first.remote, tmp_path / "spool")
    store = await second.open()
    assert store.waiting == 2
    assert await store.turn("p", "s", "t1") == ended(turn())
    first.remote.unavailable = False
    await second.drained()
    assert await store.turn("p", "s", "t1") == ended(turn())
    assert [row.n for row in await store.records("p", "s", None, 10)] == [1, 2]
    await store.close()


async def test_what_was_spooled_for_one_store_is_not_given_to_another(tmp_path: Path):
    replica = Replica(Remote(), tmp_path / "spool")
    store = await replica.open()
    await store.admit(admission())
    replica.remote.unavailable = True
    await store.append([record(1)])
    await store.close()
    assert await SpooledStore.known_id(tmp_path / "spool") == "store_remote"
    other = Remote()
    other.store_id = "store_other"
    error = await unavailable(SpooledStore.open(other, tmp_path / "spool", LoopClock()))
    assert "store_remote" in error.message


async def test_a_spool_is_handed_in_only_for_the_dead_and_to_its_own_store(tmp_path: Path):
    replica = Replica(Remote(), tmp_path / "spool")
    store = await replica.open()
    await store.admit(admission())
    replica.remote.unavailable = True
    await store.append([record(1)])
    heir, clock = replica.remote, LoopClock()
    assert await hand_in(tmp_path / "spool", heir, clock) == 0, "its owner lives"
    assert await hand_in(tmp_path / "none", heir, clock) == 0
    assert not (tmp_path / "none").exists()
    await store.close()
    other = Remote()
    other.store_id = "store_other"
    assert await hand_in(tmp_path / "spool", other, clock) == 0
    await unavailable(hand_in(tmp_path / "spool", heir, clock))
    heir.unavailable = False
    assert await hand_in(tmp_path / "spool", heir, clock) == 1
    assert await heir.records("p", "s", None, 10) == [record(1)]
    assert await hand_in(tmp_path / "spool", heir, clock) == 0


async def test_a_spool_in_use_is_waited_for_and_then_refused(tmp_path: Path):
    held = await SpoolFile.open(tmp_path / "spool")
    second = asyncio.create_task(SpoolFile.open(tmp_path / "spool"))
    await asyncio.sleep(3)
    await held.close()
    held = await second
    error = await unavailable(SpoolFile.open(tmp_path / "spool"))
    assert "another process" in error.message
    await held.close()


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be looked at", b""])
async def test_a_file_that_is_no_spool_is_refused_or_made_one(tmp_path: Path, content: bytes):
    path = tmp_path / "spool"
    path.write_bytes(content)
    if content:
        await unavailable(SpoolFile.open(path))
    else:
        await (await SpoolFile.open(path)).close()
    await unavailable(SpoolFile.open(tmp_path / "none" / "spool"))


async def test_a_cancelled_write_is_whole_and_nothing_overtakes_it(replica: Replica):
    store, remote = replica.store, replica.remote
    await store.admit(admission())
    remote.unavailable = True
    await store.append([record(1)])
    for n in range(2, 30):
        task = asyncio.create_task(store.append([record(n)]))
        for _ in range(n % 4):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await store.append([record(30)])
    remote.unavailable = False
    await replica.drained()
    numbers = [row.n for row in await store.records("p", "s", None, 100)]
    assert numbers[0] == 1 and numbers[-1] == 30
    replayed = [call.removeprefix("append 1.") for call in remote.calls if call.startswith("append")]
    assert [int(n) for n in replayed] == sorted(int(n) for n in replayed)


async def test_a_late_record_is_kept_for_good_although_the_store_is_away(replica: Replica):
    """What is set aside shows nothing to anybody, so it needs no lease."""
    store, remote = replica.store, replica.remote
    replica.leases.clear()
    remote.unavailable = True
    await store.quarantine([record(1)], "ended_otherwise", 5)
    await store.quarantine([], "nothing", 5)
    remote.unavailable = False
    await replica.drained()
    assert [row.reason for _, row in await store.quarantined("p", 10)] == ["ended_otherwise"]


async def test_a_stop_in_an_outage_is_kept_and_settled_with_its_turn(replica: Replica):
    store, remote = replica.store, replica.remote
    await store.admit(admission())
    remote.unavailable = True
    row = CommandRow("p", "s", "c1", "cancel", "claimed", "t1", 5, claimed_by="r1", claimed_until=99)
    assert await store.submit_command(row) == row
    await unavailable(store.submit_command(replace(row, command_id="c2", turn_id="t7")))
    settled = replace(row, state="applied", outcome="stopped", finished_at=9)
    await store.end(ending(turn(), "cancelled", commands=[settled]))
    assert await store.session("p", "s") == session(at=2000)
    remote.unavailable = False
    await replica.drained()
    stored = await store.command("p", "c1")
    assert stored is not None and (stored.state, stored.outcome) == ("applied", "stopped")
    assert await store.open_commands() == []


async def test_a_caller_that_fails_on_a_rejection_stops_nothing(tmp_path: Path):
    replica = Replica(Remote(), tmp_path / "spool")
    store = await replica.open()

    def fails(project: str, session_id: str, turn_id: str) -> None:
        raise KeyError(turn_id)

    store.decide(on_rejected=fails)
    replica.remote.unavailable = True
    await store.admit(admission())
    await store.append([record(1)])
    replica.granted["t1"] = False
    replica.remote.unavailable = False
    await replica.drained()
    await store.close()
    await store.close()


async def test_without_decisions_nothing_is_spooled(tmp_path: Path):
    remote = Remote()
    store = await SpooledStore.open(remote, tmp_path / "spool", LoopClock())
    await store.admit(admission())
    remote.unavailable = True
    await unavailable(store.append([record(1)]))
    await store.close()
