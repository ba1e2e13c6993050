"""What each harness claims to prove about resuming, proved: its process is killed, and its next one remembers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner.acp.connection import AgentConnection, AgentError, PromptAnswered, Updates
from runner.clock import SystemClock
from runner.harness.catalogue import BUILT_IN, Catalogue
from runner.harness.spec import LaunchContext
from runner.rules.resume import Way, way
from runner.sandbox.local import LocalProvider
from runner.sandbox.port import SandboxSpec
from tests.harness_fixture import REAL_HARNESSES, InstalledHarnesses, model_variables
from tests.model_server import ModelServer

SECONDS = 60.0
WAYS: tuple[Way, ...] = ("load", "resume")
PROVEN = [(spec.name, one) for spec in BUILT_IN for one in WAYS if spec.resume in (one, "resume")]


class Bench:
    """Starts one process of a harness after the other, in one home."""

    def __init__(self, name: str, state_dir: Path, provider: LocalProvider, env: dict[str, str]) -> None:
        self.spec = Catalogue(BUILT_IN, state_dir).get(name)
        self.state_dir = state_dir
        self.provider = provider
        self.env = env
        self.started = 0

    async def start(self) -> tuple[AgentConnection, Any, Any]:
        """Connection, sandbox, and what the agent says about itself."""
        self.started += 1
        paths = self.provider.paths("default", "s", None)
        launch = self.spec.launch(LaunchContext(paths.home, paths.workspace, paths.tmp, self.env, self.state_dir))
        sandbox = await self.provider.start(
            SandboxSpec(
                project="default",
                session_id="s",
                seat_id=f"seat_{self.started}",
                argv=launch.argv,
                env=launch.env,
                home_files=launch.files,
                deadline=SystemClock().monotonic() + SECONDS,
            )
        )
        connection = AgentConnection(sandbox.transport)
        return connection, sandbox, await connection.initialize(seconds=SECONDS)


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as model:
        yield model


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    made = LocalProvider(tmp_path / "state", f"store-{uuid.uuid4().hex}", "rep_1", clock=SystemClock())
    yield made
    await made.close()
    assert made.live == ()


async def prompt(connection: AgentConnection, session: str, text: str) -> list[dict[str, Any]]:
    """A whole turn; its updates."""
    inbox = connection.inbox(session)
    request = connection.prompt(session, [{"type": "text", "text": text}])
    updates: list[dict[str, Any]] = []
    while True:
        await inbox.wait()
        for item in inbox.drain():
            if isinstance(item, Updates):
                updates += item.updates
            if isinstance(item, PromptAnswered) and item.request_id == request:
                assert item.error is None
                return updates


def text_of(updates: list[dict[str, Any]]) -> str:
    chunks = [update for update in updates if update["sessionUpdate"] == "agent_message_chunk"]
    return "".join(update["content"]["text"] for update in chunks)


async def remembers(bench: Bench, chosen: Way, model: ModelServer | None) -> None:
    connection, sandbox, info = await bench.start()
    cwd = sandbox.workspace
    assert way(bench.spec.resume, loads=info.loads, resumes=info.resumes) == bench.spec.resume
    session = (await connection.new_session(cwd, [], seconds=SECONDS)).agent_session_id
    assert "remember-me" in text_of(await prompt(connection, session, "[[text:remember-me]]"))
    await sandbox.destroy(0.0)
    connection, sandbox, _ = await bench.start()
    calls = {"load": connection.load_session, "resume": connection.resume_session}
    opened = await calls[chosen](session, cwd, [], seconds=SECONDS)
    assert (opened.replayed > 0) == (chosen == "load")
    updates = await prompt(connection, session, "[[text:and now]]")
    assert "remember-me" not in text_of(updates) or model is None
    assert "and now" in text_of(updates)
    if model is not None:
        assert any("[[text:remember-me]]" in text for text in model.turns[-1].user_texts)
    else:
        assert "message 2 of this conversation" in text_of(updates)


async def refuses_the_unknown(bench: Bench, chosen: Way) -> None:
    """One that answered well to an id that it does not know would lose the memory without a word."""
    connection, sandbox, _ = await bench.start()
    unknown = "00000000-0000-4000-8000-000000000000"
    calls = {"load": connection.load_session, "resume": connection.resume_session}
    with pytest.raises(AgentError):
        await calls[chosen](unknown, sandbox.workspace, [], seconds=SECONDS)
    session = (await connection.new_session(sandbox.workspace, [], seconds=SECONDS)).agent_session_id
    assert "fresh" in text_of(await prompt(connection, session, "[[text:fresh]]"))


@pytest.mark.parametrize(("name", "chosen"), [proven for proven in PROVEN if proven[0] not in REAL_HARNESSES])
async def test_a_harness_of_ours_does_what_it_proved(
    provider: LocalProvider, tmp_path: Path, name: str, chosen: Way
) -> None:
    await remembers(Bench(name, tmp_path / "state", provider, {}), chosen, None)
    await refuses_the_unknown(Bench(name, tmp_path / "state", provider, {}), chosen)


@pytest.mark.parametrize(("name", "chosen"), [proven for proven in PROVEN if proven[0] in REAL_HARNESSES])
@pytest.mark.parametrize("what", ["remembers", "refuses the unknown"])
async def test_a_real_harness_does_what_it_proved(
    provider: LocalProvider,
    installed_harnesses: InstalledHarnesses,
    model: ModelServer,
    name: str,
    chosen: Way,
    what: str,
) -> None:
    """Case M6: by the next model request, not by what it advertises."""
    bench = Bench(name, installed_harnesses.state_dir, provider, model_variables(name, model))
    if what == "remembers":
        await remembers(bench, chosen, model)
    else:
        await refuses_the_unknown(bench, chosen)
