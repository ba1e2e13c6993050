from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession

from runner.config import Settings
from runner.server.app import build_app, start_site, stop_site
from tests.server.double import TOKENS, FakeSessions, auth


@pytest.fixture
async def sessions() -> FakeSessions:
    return FakeSessions()


@pytest.fixture
def settings() -> Settings:
    return Settings.model_validate({"server": {"ping_seconds": 0.05, "max_body_bytes": 4096}})


@pytest.fixture
async def url(sessions: FakeSessions, settings: Settings) -> AsyncIterator[str]:
    runner, url = await start_site(build_app(sessions, settings, TOKENS), "127.0.0.1", 0, close_seconds=1)
    try:
        yield url
    finally:
        await stop_site(runner)


@pytest.fixture
async def http(url: str) -> AsyncIterator[ClientSession]:
    async with ClientSession(url, headers=auth()) as client:
        yield client
