"""How long a Stop of a hostile turn takes in a cell until nobody of it is left, for every installed harness."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from runner.client import Client
from scripts.bench_server import since_ms
from tests.e2e.server import Server, until
from tests.e2e.talk import Talk
from tests.harness_fixture import CACHE, REAL_HARNESSES, model_variables
from tests.model_server import ModelServer

STOPS: Final = 10
DEMO: Final = "demo"
SCRIPT: Final = """\
trap '' TERM HUP INT
setsid sh -c 'trap "" TERM HUP; while :; do sleep 0.1; done' &
nohup sleep 600 >/dev/null 2>&1 &
(setsid sleep 600 &)
python3 -c 'import os, time
if os.fork() == 0:
    while True:
        if os.fork() > 0: os._exit(0)
        os.setsid(); time.sleep(0.01)'
touch started
sleep 600
"""
GATES: Final[dict[str, tuple[str, float]]] = {
    f"stop_{name}_hostile_ms_max": ("<=", 1000) for name in (DEMO, *REAL_HARNESSES)
}


async def _stop(talk: Talk, prompt: str, started: Path) -> float:
    """Milliseconds from the call to the result, behind which the warm agent is alone again."""
    turn = talk.dispatch(prompt)
    await until(started.exists, "the hostile tool runs")
    await asyncio.to_thread(started.unlink)
    began = time.perf_counter()
    await talk.client.cancel(talk.session)
    result = await turn.result()
    taken = since_ms(began)
    if (result["outcome"], result["cancel_settled"]) != ("cancelled", True):
        raise SystemExit(f"a Stop did not settle: {result}")
    return taken


async def _stops(server: Server, client: Client, name: str, **fields: Any) -> list[float]:
    files = [{"path": "hostile.sh", "content": SCRIPT}]
    talk = Talk(
        server, client, name, harness=name, permissions={"default": "allow"}, workspace={"files": files}, **fields
    )
    tool, plain = ("/tool sh hostile.sh", "hello") if name == DEMO else ("[[shell:sh hostile.sh]]", "[[text:hello]]")
    await talk.prompt(plain)
    started, found = server.workspace(name) / "started", []
    for _ in range(STOPS):
        before = server.processes(name)
        found.append(await _stop(talk, tool, started))
        if left := set(server.processes(name)) - set(before):
            raise SystemExit(f"{name}: survivors {left}")
        if (again := await talk.prompt(plain))["start"] != "hit":
            raise SystemExit(f"{name}: the agent did not stay: {again}")
    await client.kill(name)
    return found


async def _measure(folder: Path) -> dict[str, float]:
    server = Server(folder / "server")
    installed = [name for name in REAL_HARNESSES if (CACHE / "harnesses" / name).exists()]
    server.state_dir.mkdir(parents=True)
    if installed:
        (server.state_dir / "harnesses").symlink_to(CACHE / "harnesses")
    server.start()
    figures: dict[str, float] = {}
    try:
        async with server.client() as client, ModelServer() as model:
            for name in (DEMO, *installed):
                variables = model_variables(name, model) if name != DEMO else {}
                taken = await _stops(server, client, name, env=variables)
                figures[f"stop_{name}_hostile_ms_p50"] = round(statistics.median(taken), 1)
                figures[f"stop_{name}_hostile_ms_max"] = round(max(taken), 1)
    finally:
        server.stop()
    return figures


def measure() -> dict[str, float]:
    """Figures by name; real agents where the checkout's cache has them."""
    with tempfile.TemporaryDirectory(prefix="acp-runner-bench-") as folder:
        return asyncio.run(_measure(Path(folder)))
