"""``[local] network = proxy`` with whole servers and real agents."""

from __future__ import annotations

from typing import Any

import pytest

from runner.client import Client
from tests.e2e.conftest import Serve
from tests.harness_fixture import REAL_HARNESSES, InstalledHarnesses, model_variables
from tests.model_server import ModelServer


def network(*allowed: str) -> str:
    return f'[local]\nnetwork = "proxy"\nallow_hosts = [{", ".join(f"{item!r}" for item in allowed)}]\n'.replace(
        "'", '"'
    )


async def say(client: Client, text: str, **fields: Any) -> dict[str, Any]:
    result = await client.prompt("s", text, permissions={"default": "allow"}, keep_on_disconnect=True, **fields)
    return dict(result)


@pytest.mark.parametrize("name", REAL_HARNESSES)
async def test_keys_stay_outside_and_their_proxy_is_reached_although_nothing_is_allowed_case_k1(
    serve: Serve, installed_harnesses: InstalledHarnesses, name: str
) -> None:
    async with ModelServer() as model:
        server = serve(network() + '[credentials]\nhosts = ["127.0.0.1"]\n')
        installed_harnesses.link_into(server.state_dir)
        env = model_variables(name, model)
        secrets = {key: env.pop(key) for key in list(env) if key.endswith("_KEY")}
        async with server.client() as client:
            result = await say(client, "[[text:by the runner]]", harness=name, env=env, secrets=secrets)
            assert (result["ok"], result["text"]) == (True, "by the runner"), result
            assert {request.api_key for request in model.requests} == set(secrets.values())
            assert (await client.session("s"))["proxied_keys"] == sorted(secrets)
            shell = await client.shell("s", f"curl -sS -m 5 {model.url}/")
            assert "Failed to connect" in shell["output"], shell


@pytest.mark.parametrize("name", REAL_HARNESSES)
async def test_a_real_agent_reaches_its_model_and_nothing_else(
    serve: Serve, installed_harnesses: InstalledHarnesses, name: str
) -> None:
    async with ModelServer() as model, ModelServer() as other:
        port = model.url.rpartition(":")[2]
        server = serve(network(f"127.0.0.1:{port}"))
        installed_harnesses.link_into(server.state_dir)
        async with server.client() as client:
            result = await say(client, "[[text:from inside]]", harness=name, env=model_variables(name, model))
            assert (result["ok"], result["text"]) == (True, "from inside"), result
            assert model.requests
            shell = await client.shell(
                "s", f"curl -sS -m 5 {other.url}/; curl -sS -m 5 --noproxy '*' {server.url}/health"
            )
            assert "ok" not in shell["output"], shell
            shell = await client.shell("s", "curl -sS -m 20 http://evil.example/ --proxy $HTTP_PROXY")
            assert "evil.example:80 is not in [local] allow_hosts" in shell["output"]
            assert (await client.health())["network"] == "proxy"
        assert not other.requests
