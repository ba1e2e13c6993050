"""Files of a session at any replica: they lie with the one that holds it, and are had at every door (DESIGN 3.1.10)."""

from __future__ import annotations

import os

import pytest

from runner.client import ApiError
from tests.replicas.bed import Cluster
from tests.replicas.conftest import Sessions
from tests.replicas.test_any_replica import POLITE


async def test_files_at_every_door(cluster: Cluster, sessions: Sessions) -> None:
    session = sessions()
    name, every = session.session, os.urandom(700_000)
    with pytest.raises(ApiError) as caught:
        await session.at(cluster.b).write_file(name, "early", b"")
    assert (caught.value.code, caught.value.status) == ("not_found", 404)
    assert (await session.prompt(cluster.a, POLITE))["ok"]
    made = await session.at(cluster.b).write_file(name, "in/ü.bin", every)
    assert made["created"]
    for door in cluster.doors:
        client = session.at(door)
        assert await client.read_file(name, "in/ü.bin") == every, door.folder.name
        assert [item["path"] for item in (await client.files(name, "in"))["items"]] == ["in/ü.bin"]
        with pytest.raises(ApiError) as caught:
            await client.write_file(name, "in/ü.bin", b"", if_none_match="*")
        assert caught.value.status == 412
        with pytest.raises(ApiError) as caught:
            await client.read_file(name, "../in")
        assert caught.value.status in (400, 404)
    assert (cluster.a.workspace(name) / "in" / "ü.bin").read_bytes() == every
    assert not cluster.b.workspace(name).exists()
    await session.check()
