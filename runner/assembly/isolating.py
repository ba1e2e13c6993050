"""How local cells of this runner are isolated: the settings against what the machine allows (DESIGN 3.10)."""

from __future__ import annotations

import logging
from dataclasses import replace

from runner.config import Settings
from runner.errors import RunnerError
from runner.rules.egress import AllowList
from runner.rules.isolation import Refusal, choose, unfit
from runner.sandbox.isolation import Found, Isolation, probe

log = logging.getLogger("runner")


async def isolation_of(settings: Settings) -> Isolation:
    """Probe this machine, and decide.

    Raises:
        RunnerError: ``invalid_request``: what ``[local]`` names does not work here.
    """
    return decided(settings, await probe())


def decided(settings: Settings, found: Found) -> Isolation:
    """What the settings get of what was found.

    Raises:
        RunnerError: ``invalid_request``.
    """
    local = settings.local
    chosen = choose(
        local.isolation,
        local.network,
        found.probed,
        memory_bytes=local.memory_bytes,
        pids=local.pids,
        cpus=local.cpus,
    )
    if isinstance(chosen, Refusal):
        raise RunnerError("invalid_request", chosen.message, field=chosen.field)
    return replace(found.isolation(chosen), allowed=AllowList.of(local.allow_hosts))


def require(settings: Settings, isolation: Isolation, *, projects: int, beyond_loopback: bool) -> None:
    """Refuse to serve what this isolation is too weak for.

    Raises:
        RunnerError: ``invalid_request``.
    """
    refusal = unfit(
        isolation.level, projects=projects, beyond_loopback=beyond_loopback, allow_weak=settings.local.allow_weak
    )
    if refusal is not None:
        raise RunnerError("invalid_request", refusal.message, field=refusal.field)


def tell(isolation: Isolation) -> None:
    """One line for the log; loud where agents run with this user's rights."""
    limits = isolation.limits
    text = f"isolation {isolation.level}, network {isolation.network}, limits: memory {limits.memory_by}, "
    text += f"pids {limits.pids_by}, cpus {limits.cpus_by}"
    if isolation.level == "none":
        log.warning("%s: agents run with this user's rights (%s)", text, isolation.why)
    elif isolation.level != "cell":
        log.warning("%s (%s)", text, isolation.why)
    else:
        log.info("%s", text)
