"""The queue, the shell and an explicit resume, asked for at a replica that does not hold the session."""

from __future__ import annotations

from pathlib import Path

from tests.agents import Gate
from tests.e2e.server import SECONDS
from tests.replicas.bed import Cluster, until_async
from tests.replicas.conftest import Sessions
from tests.replicas.test_any_replica import POLITE, gated


async def test_a_queued_and_a_running_prompt_are_aborted_at_another_replica(
    cluster: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    """The watchdog of another replica stops the hung prompt, and the one that waits runs."""
    for number, door in enumerate(cluster.doors):
        session, gate = sessions(), Gate(tmp_path / f"gate{number}")
        api = session.at(door)
        running = session.dispatch(cluster.a, gated(gate), prompt_id="A")
        await gate.reached(SECONDS)
        waits = {name: session.dispatch(door, POLITE, prompt_id=name, on_busy="queue") for name in ("B", "C")}
        for turn in waits.values():
            await turn.event("turn_queued")
        queue = await api.prompts(session.session)
        assert (queue["active"], {item["prompt_id"] for item in queue["items"]}) == ("A", {"B", "C"})
        assert [await api.abort_prompt(session.session, name) for name in ("B", "A", "A")] == [True, True, False]
        assert (await running.result())["outcome"] == "cancelled"
        assert (await waits["B"].result())["outcome"] == "cancelled"
        result = await waits["C"].result()
        assert (result["ok"], result["start"], result["prompt_ids"]) == (True, "hit", ["C"])
        await session.check()


async def test_a_command_runs_where_the_session_is(cluster: Cluster, sessions: Sessions, tmp_path: Path) -> None:
    session, gate = sessions(), Gate(tmp_path / "gate")
    running = session.dispatch(cluster.a, gated(gate), prompt_id="A")
    await gate.reached(SECONDS)
    api = session.at(cluster.b)
    assert await api.abort_prompt(session.session, "A")
    await running.result()
    assert (await api.shell(session.session, "echo $((6 * 7)); exit 3"))["output"] == "42\n"
    turn_id = await api.resume(session.session)
    assert turn_id is not None

    async def over() -> bool:
        view = await session.view(cluster.b)
        return view["state"] == "idle" and (view["last_turn"] or {})["turn_id"] == turn_id

    await until_async(over, "the resumed turn is over")
    await session.check()
