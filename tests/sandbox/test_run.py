"""A command in a local cell: where it runs, as what, and how much of it is heard."""

from __future__ import annotations

import asyncio
import os

from runner.sandbox.local import LocalProvider
from runner.sandbox.port import OUTPUT_BYTES, Ran
from tests.sandbox.bed import SECONDS, spec


async def test_a_command_has_the_agents_environment_and_workspace(provider: LocalProvider) -> None:
    """Case K1: nothing of the runner's own environment reaches it."""
    sandbox = await provider.start(spec("seat_1", "cat", env={"GIVEN": "yes"}))
    heard: list[bytes] = []
    os.environ["LEAKED_FROM_RUNNER"] = "secret"
    try:
        script = 'pwd; echo "$GIVEN $HOME [$LEAKED_FROM_RUNNER]"'
        async with asyncio.timeout(SECONDS):
            assert await sandbox.run("t1", ["/bin/sh", "-c", script], heard.append) == Ran(0)
    finally:
        del os.environ["LEAKED_FROM_RUNNER"]
    home = provider.paths("default", "of_seat_1", None).home
    assert b"".join(heard).decode() == f"{sandbox.workspace}\nyes {home} []\n"


async def test_output_is_bounded(provider: LocalProvider) -> None:
    sandbox = await provider.start(spec("seat_1", "cat"))
    heard: list[bytes] = []
    async with asyncio.timeout(SECONDS):
        ended = await sandbox.run("t1", ["/bin/sh", "-c", "head -c 4000000 /dev/zero"], heard.append)
    assert ended == Ran(0, truncated=True)
    assert sum(map(len, heard)) == OUTPUT_BYTES
