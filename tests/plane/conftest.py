from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession

from tests.plane.bed import ServedPlane, serve_plane
from tests.server.double import auth


@pytest.fixture
async def plane() -> AsyncIterator[ServedPlane]:
    made = await serve_plane()
    yield made
    await made.stop()


@pytest.fixture
async def http(plane: ServedPlane) -> AsyncIterator[ClientSession]:
    async with ClientSession(plane.url, headers=auth("run-p")) as client:
        yield client
