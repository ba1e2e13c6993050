"""Model keys that stay outside: tokens live and die with sandboxes, and a start is refused before it begins."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session.keys import KeyBook
from tests.session.bed import CALLER, Bed

pytestmark = pytest.mark.virtual_time

UPSTREAM = "https://model.example/v1"
KEYS = [{"key": "MODEL_KEY", "base_url": "MODEL_URL", "upstream": UPSTREAM}]
SETTINGS: dict[str, Any] = {
    "secrets": {"SHARED": "sk-shared-key"},
    "harness": {
        "mine": {"command": ["sh"], "env": {"MODEL_KEY": "sk-operators"}, "keys": KEYS},
        "bare": {"command": ["sh"], "keys": KEYS},
    },
}


@pytest.fixture
def book() -> KeyBook:
    numbers = itertools.count(1)
    book = KeyBook(mint=lambda: f"token-{next(numbers)}")
    book.port = 4711
    return book


@pytest.fixture
async def bed(book: KeyBook) -> AsyncIterator[Bed]:
    made = await Bed.make(settings=SETTINGS, keys=book)
    yield made
    await made.close()
    assert len(book) == 0, "a token is left behind its sandbox"


async def turn(bed: Bed, prompt: str = "hello", *, agents: int = 1, nth: int = 1, **fields: Any) -> dict[str, Any]:
    handle = await bed.dispatch(prompt=prompt, keep_on_disconnect=True, **({"harness": "mine"} | fields))
    agent = await bed.agent(agents)
    frame = await agent.prompt(nth)
    agent.say("ok")
    agent.answer(frame)
    return await handle.result()


def env(bed: Bed, count: int = 1) -> dict[str, str]:
    given = bed.sandbox(count).spec.env
    return {name: given[name] for name in ("MODEL_KEY", "MODEL_URL") if name in given}


async def test_the_token_of_a_spare_is_the_sessions_from_the_claim_on(book: KeyBook) -> None:
    """Whose keys an agent uses is counted by its session, and its token is shown to nobody."""
    spares = {"pool": {"spares": 1, "spare_harnesses": ["mine"]}}
    bed = await Bed.make(settings=SETTINGS | spares, keys=book)
    await asyncio.sleep(1)
    assert env(bed) == {"MODEL_KEY": "token-1", "MODEL_URL": env(bed)["MODEL_URL"]}
    grant = book.find("token-1")
    assert grant is not None
    assert (grant.project, grant.key) == (".spares", "sk-operators")
    handle = await bed.dispatch(harness="mine", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("I have token-1")
    agent.answer(frame)
    result = await handle.result()
    assert result["start"] == "spare"
    assert "token-1" not in result["text"]
    assert (grant.project, grant.session_id) == ("p", "s")
    await asyncio.sleep(1)
    assert len(book) == 2
    await bed.sessions.kill(CALLER, "s")
    assert book.find("token-1") is None
    await bed.close()
    assert len(book) == 0


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, "sk-operators"),
        ({"secrets": {"MODEL_KEY": {"ref": "SHARED"}}}, "sk-shared-key"),
        ({"secrets": {"MODEL_KEY": "sk-callers"}}, "sk-callers"),
        ({"env": {"MODEL_KEY": "sk-plain"}}, "sk-plain"),
        ({"env": {"MODEL_KEY": "sk-plain"}, "secrets": {"MODEL_KEY": "sk-callers"}}, "sk-callers"),
    ],
)
async def test_a_cell_gets_a_token_for_the_key_that_counts(
    bed: Bed, book: KeyBook, fields: dict[str, Any], key: str
) -> None:
    await turn(bed, **fields)
    assert env(bed) == {"MODEL_KEY": "token-1", "MODEL_URL": "http://127.0.0.1:4711/model_url"}
    assert key not in repr(bed.sandbox().spec)
    grant = book.find("token-1")
    assert grant is not None
    assert (grant.key, grant.upstream.url(""), grant.header) == (key, UPSTREAM, "bearer")
    assert (grant.project, grant.session_id, grant.harness) == ("p", "s", "mine")
    assert key not in repr(grant)
    assert (await bed.sessions.view(CALLER, "s"))["proxied_keys"] == ["MODEL_KEY"]


async def test_without_a_key_nothing_is_changed(bed: Bed, book: KeyBook) -> None:
    await turn(bed, harness="bare", env={"MODEL_URL": "http://elsewhere.example"})
    assert env(bed) == {"MODEL_URL": "http://elsewhere.example"}
    assert len(book) == 0
    assert (await bed.sessions.view(CALLER, "s"))["proxied_keys"] == []


async def test_a_warm_sandbox_keeps_its_token_and_its_end_ends_it(bed: Bed, book: KeyBook) -> None:
    await turn(bed)
    assert (await turn(bed, nth=2))["start"] == "hit"
    assert len(book) == 1
    await asyncio.sleep(61)
    assert len(book) == 0
    assert book.find("token-1") is None
    assert (await turn(bed, agents=2))["reason"] == "expired"
    assert env(bed, 2)["MODEL_KEY"] == "token-2"


async def test_another_key_is_another_fingerprint(bed: Bed, book: KeyBook) -> None:
    await turn(bed, secrets={"MODEL_KEY": "sk-one"})
    result = await turn(bed, agents=2, secrets={"MODEL_KEY": "sk-two"})
    assert (result["start"], result["reason"]) == ("cold", "changed:secrets")
    grant = book.find("token-2")
    assert grant is not None
    assert grant.key == "sk-two"
    assert book.find("token-1") is None


@pytest.mark.parametrize("how", ["provider", "handshake", "cancelled"])
async def test_a_start_that_fails_leaves_no_token(bed: Bed, book: KeyBook, how: str) -> None:
    if how == "provider":
        bed.provider.start_error = RunnerError("sandbox_start_failed", "no")
    elif how == "handshake":
        bed.provider.manners["silent"] = True
    else:
        bed.provider.start_gate = asyncio.Event()
    handle = await bed.dispatch(harness="mine", prompt_id="p1")
    if how == "handshake":
        (await bed.agent()).exit(1)
    if how == "cancelled":
        await asyncio.sleep(1)
        assert len(book) == 1
        await bed.cancel()
    assert (await handle.result())["ok"] is False
    await asyncio.sleep(1)
    assert len(book) == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"env": {"MODEL_URL": "https://elsewhere.example"}}, "env.MODEL_URL"),
        ({"secrets": {"MODEL_URL": "https://elsewhere.example"}}, "secrets.MODEL_URL"),
        ({"env": {"MODEL_URL": "http://model.example/v1"}}, "env.MODEL_URL"),
        (
            {"secrets": {"MODEL_KEY": {"ref": "SHARED"}}, "env": {"MODEL_URL": "https://elsewhere.example"}},
            "env.MODEL_URL",
        ),
        ({"secrets": {"MODEL_KEY": "sk\nkey"}}, "secrets.MODEL_KEY"),
    ],
)
async def test_refused_before_a_turn_is_admitted(bed: Bed, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch(harness="mine", **fields)
    assert (caught.value.code, caught.value.extra["field"]) == ("invalid_request", field)
    assert "sk" not in caught.value.message.replace("asks", "")
    assert bed.provider.sandboxes == []


async def test_a_callers_key_goes_with_the_callers_server(bed: Bed, book: KeyBook) -> None:
    given: dict[str, Any] = {"env": {"MODEL_URL": "https://elsewhere.example"}, "secrets": {"MODEL_KEY": "sk-callers"}}
    await turn(bed, **given)
    assert env(bed) == {"MODEL_KEY": "sk-callers", "MODEL_URL": "https://elsewhere.example"}
    assert len(book) == 0


async def test_neither_key_nor_token_is_shown_case_k2(bed: Bed) -> None:
    handle = await bed.dispatch(harness="mine", secrets={"MODEL_KEY": "sk-callers"}, keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("MODEL_KEY=tok")
    agent.say("en-1 or sk-callers")
    agent.answer(frame)
    assert (await handle.result())["text"] == "MODEL_KEY=[secret] or [secret]"
    text = str([await bed.history(), await bed.sessions.records(CALLER, "s", None, 100)])
    assert "token-1" not in text
    assert "sk-callers" not in text
