"""``GET /metrics`` of a served replica: its numbers are those of what happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from runner.config import Settings
from runner.errors import RunnerError
from runner.metrics import FAMILIES, Metrics
from runner.server.app import build_app, start_site, stop_site
from runner.server.auth import ALL_BUT_RUNNER, AccessToken
from runner.store.counted import CountedStore
from runner.store.port import Appended, RecordRow
from tests.server.double import FakeReader, FakeSessions, auth, line
from tests.server.scraped import Scraped, scrape
from tests.session.bed import CALLER, Bed
from tests.session.gates import SlowStore

OTHERS = AccessToken("others", "q", frozenset({"read"}))
TOKENS = [AccessToken("all", CALLER.project, ALL_BUT_RUNNER), OTHERS]


class PoisonedStore(SlowStore):
    """Refuses records of the type ``poison``."""

    poison = ""

    async def append(self, records: Sequence[RecordRow], *more: Any) -> Appended:
        if any(row.type == self.poison for row in records):
            raise RunnerError("internal", "The store refused a row.")
        return await super().append(records, *more)


@dataclass
class Served:
    bed: Bed
    store: PoisonedStore
    metrics: Metrics
    http: ClientSession

    async def now(self, **headers: str) -> Scraped:
        return await scrape(self.http, **headers)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A whole replica over doubles, behind a real server."""
    metrics, store = Metrics(), PoisonedStore()
    settings = {"pool": {"max_seats": 7}, "server": {"max_turns": 5, "ring_bytes": 2000, "reader_buffer_bytes": 2000}}
    bed = await Bed.make(settings=settings, store=CountedStore(store, metrics), metrics=metrics)
    app = build_app(bed.sessions, Settings.model_validate(settings), TOKENS, metrics=metrics)
    runner, url = await start_site(app, "127.0.0.1", 0, close_seconds=1)
    async with ClientSession(url, headers=auth()) as http:
        yield Served(bed, store, metrics, http)
    await stop_site(runner)
    await bed.close()


async def test_every_metric_is_told_and_all_begin_at_nothing(served: Served) -> None:
    now = await served.now()
    told = {name for name in now.families if name.startswith("acp_runner_")}
    assert told == {family.name.removesuffix("_total") for family in FAMILIES}
    for family in FAMILIES:
        made = now.families[family.name.removesuffix("_total")]
        assert made.type == family.kind
        assert made.documentation == family.text
        if family.kind == "counter" and not family.labels:
            assert now.of(family.name.removeprefix("acp_runner_")) == 0
    assert (now.of("seats_max"), now.of("turns_max"), now.of("turns_running")) == (7, 5, 0)
    assert now.all("build_info") != []
    assert now.families["process_resident_memory_bytes"].samples[0].value > 0


async def test_turns_starts_seats_usage_and_times_move(served: Served) -> None:
    bed = served.bed
    handle = await bed.dispatch("s", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    during = await served.now()
    assert (during.of("turns_running"), during.of("seats", state="busy"), during.of("sessions_loaded")) == (1, 1, 1)
    agent.say("ok")
    agent.update(sessionUpdate="usage_update", used=10, size=100, cost={"amount": 0.25, "currency": "USD"})
    usage = {"inputTokens": 7, "outputTokens": 3, "totalTokens": 10}
    agent.result(frame["id"], {"stopReason": "end_turn", "usage": usage})
    assert (await handle.result())["ok"]
    await bed.turn("s", nth=2)
    stored = (await bed.sessions.records(CALLER, "s", None, 100))["items"]
    now = await served.now()
    assert (now.of("turns_total", outcome="completed", harness="demo"), now.of("turns_total")) == (2, 2)
    assert (now.of("starts_total", start="cold", reason="miss"), now.of("starts_total", start="hit")) == (1, 1)
    assert (now.of("seats", state="idle"), now.of("seats", state="busy"), now.of("turns_running")) == (1, 0, 0)
    assert now.of("admission_seconds_count") == 2
    assert now.of("ready_seconds_count", start="cold") == now.of("ready_seconds_count", start="hit") == 1
    assert now.of("first_update_seconds_count") == now.of("turn_seconds_count", outcome="completed") == 2
    assert now.of("turn_seconds_bucket", outcome="completed", le="+Inf") == 2
    assert (now.of("tokens_total", kind="input"), now.of("tokens_total", kind="output")) == (7, 3)
    assert now.of("tokens_total") == 10
    assert now.of("cost_total", currency="USD", project="p") == 0.25
    assert now.of("sandbox_seconds_total", use="turn") > 0
    assert now.of("records_written_total") == len(stored)
    assert now.of("store_errors_total") == now.of("turn_errors_total") == 0


async def test_what_is_counted_by_project_is_for_its_own_tokens(served: Served) -> None:
    await served.bed.turn("s")
    own, foreign = await served.now(), await served.now(**auth("others"))
    assert {labels["project"] for labels in own.all("sandbox_seconds_total")} == {"p"}
    assert foreign.all("sandbox_seconds_total") == []
    assert foreign.of("turns_total") == 1


async def test_a_failed_turn_and_refusals_have_their_codes(served: Served) -> None:
    bed, http = served.bed, served.http
    handle = await bed.dispatch("s")
    agent = await bed.agent()
    await agent.prompt()
    for accept in ("application/x-ndjson", "application/json"):
        async with http.post("/v1/sessions/s/turns", json={"prompt": "x"}, headers={"Accept": accept}) as answer:
            assert answer.status == (409 if accept == "application/json" else 200)
            await answer.read()
    async with http.post("/v1/sessions/s/turns", json={"prompt": "x", "harness": "nobody"}) as answer:
        assert answer.status == 422
    async with http.get("/v1/sessions/nobody") as answer:
        assert answer.status == 404
    async with http.get("/nowhere") as answer:
        assert answer.status == 404
    async with http.post("/v1/sessions") as answer:
        assert answer.status == 405
    agent.exit(3)
    assert (await handle.result())["outcome"] == "failed"
    now = await served.now()
    assert now.of("dispatch_refusals_total", code="session_turn_in_use") == 2
    assert now.of("dispatch_refusals_total", code="harness_unknown") == 1
    assert now.of("dispatch_refusals_total") == 3
    problems = {labels["code"] for labels in now.all("http_problems_total")}
    assert problems == {"session_turn_in_use", "harness_unknown", "not_found", "invalid_request"}
    assert now.of("http_problems_total", code="not_found") == 2
    assert (now.of("turns_total", outcome="failed"), now.of("turn_errors_total", code="harness_exited")) == (1, 1)


async def test_prompts_that_wait_are_a_gauge(served: Served) -> None:
    bed = served.bed
    first = await bed.dispatch("s", keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    second = await bed.dispatch("s", "later", on_busy="queue", keep_on_disconnect=True)
    assert (await served.now()).of("prompts_queued") == 1
    await agent.finish()
    await first.result()
    await agent.finish(2)
    await second.result()
    now = await served.now()
    assert (now.of("prompts_queued"), now.of("turns_total")) == (0, 2)


async def test_a_poisoned_row_is_set_aside_and_counted(served: Served) -> None:
    """Case G2: the rest of its turn is written."""
    bed, store = served.bed, served.store
    handle = await bed.dispatch("s", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    store.poison = "tool_call"
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", kind="execute", status="completed")
    async with asyncio.timeout(20):
        while not (await served.now()).of("records_quarantined_total"):
            await asyncio.sleep(0.02)
    store.poison = ""
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["ok"]
    now = await served.now()
    assert now.of("records_quarantined_total", reason="refused") == len(await store.quarantined("p", 10)) == 1
    assert now.of("store_errors_total", code="internal") >= 1


async def test_a_store_that_is_away_is_counted(served: Served) -> None:
    served.store.failing["sessions"] = 1
    async with served.http.get("/v1/sessions") as answer:
        assert answer.status == 503
    now = await served.now()
    assert now.of("store_errors_total", code="store_unavailable") == 1
    assert now.of("http_problems_total", code="store_unavailable") == 1


async def test_a_scrape_is_text_or_openmetrics(served: Served) -> None:
    await served.bed.turn("s")
    async with served.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as answer:
        assert answer.content_type == "application/openmetrics-text"
        told = {family.name: family for family in open_metrics(await answer.text())}
    assert told["acp_runner_turns"].samples[0].value == 1
    async with served.http.get("/metrics?x=1") as answer:
        assert answer.status == 400
    async with ClientSession(served.http._base_url) as nobody, nobody.get("/metrics") as answer:
        assert answer.status == 401


async def test_a_follower_that_is_cut_is_counted(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.follow_reader = FakeReader
    async with http.get("/v1/sessions/s1/events?follow=1") as following:
        sessions.reader.feed(line(1, "plan", {}))
        await following.content.readline()
        assert (await scrape(http)).of("streams_open") == 1
        sessions.reader.cut("too far behind")
        with pytest.raises(ClientError):
            await following.read()
    async with asyncio.timeout(20):
        while (await scrape(http)).of("streams_open"):
            await asyncio.sleep(0.01)
    assert (await scrape(http)).of("streams_cut_total", reason="behind") == 1
