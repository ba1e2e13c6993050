"""The credential proxy of one runner, where the settings want it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from urllib.request import getproxies, proxy_bypass

from runner.config import Settings
from runner.metrics import Metrics
from runner.rules.credentials import LOOPBACK, host_pattern
from runner.server.credential_proxy import CredentialProxy
from runner.session.keys import KeyBook


async def opened(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> KeyBook | None:
    """The book of a proxy that listens until ``stack`` is closed; None where keys enter cells.

    Raises:
        OSError: no port is free.
    """
    if not settings.credentials.proxy:
        return None
    book = KeyBook([host_pattern(text) for text in settings.credentials.hosts])
    proxy = CredentialProxy(book, metrics, proxy_for=_proxy_for)
    await proxy.start()
    stack.push_async_callback(proxy.close)
    return book


def _proxy_for(scheme: str, host: str) -> str | None:
    """The HTTP proxy of the runner's own environment; none for this machine itself."""
    if host.rpartition(":")[0] in LOOPBACK or proxy_bypass(host):
        return None
    known = getproxies()
    return known.get(scheme) or known.get("all")
