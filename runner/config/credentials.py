"""The settings about model keys that stay out of sandboxes (docs/harnesses.md)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, Field

from runner.config.strict import STRICT
from runner.rules.credentials import host_pattern, upstream_of

VARIABLE: Final = "^[A-Za-z_][A-Za-z0-9_]*$"


def _base_url(text: str) -> str:
    if upstream_of(text) is None:
        raise ValueError("must be http(s)://host[:port][/path]")
    return text


def _host(text: str) -> str:
    host_pattern(text)
    return text


class ProxiedKey(BaseModel):
    """One of a harness's ``keys``: a model key that stays out of its sandbox, and how the harness uses it.

    ``key``, ``base_url``: variables of the agent; ``upstream``: the base URL where ``base_url`` has no value.
    """

    model_config = STRICT

    key: Annotated[str, Field(pattern=VARIABLE)]
    base_url: Annotated[str, Field(pattern=VARIABLE)]
    upstream: Annotated[str, AfterValidator(_base_url)]
    header: Literal["bearer", "x-api-key"] = "bearer"


def _told_apart(keys: list[ProxiedKey]) -> list[ProxiedKey]:
    if len({one.key for one in keys}) != len(keys):
        raise ValueError("the same key is listed twice")
    places = {(one.base_url, one.upstream) for one in keys}
    if len({base_url.lower() for base_url, _ in places}) != len(places):
        raise ValueError("keys with one base_url have one upstream")
    return keys


ProxiedKeys = Annotated[list[ProxiedKey], AfterValidator(_told_apart)]


class Credentials(BaseModel):
    """``[credentials]``: whether model keys stay out of local sandboxes, and where else they may be sent."""

    model_config = STRICT

    proxy: bool = True
    hosts: list[Annotated[str, AfterValidator(_host)]] = []
