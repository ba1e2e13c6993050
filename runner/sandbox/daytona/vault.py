"""Secrets of a session as the service keeps them: a sandbox sees a placeholder, the value is put in at egress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from runner.errors import RunnerError
from runner.sandbox.daytona.lifecycle import Lifecycle
from runner.sandbox.daytona.service import CallFailed, DaytonaService
from runner.sandbox.port import SandboxSpec

HELP: Final = "[daytona] plain_secrets = true would pass them as they are"
log = logging.getLogger("runner.sandbox.daytona")


class Vault:
    """Stores, attaches and forgets.

    Args:
        service: the vendor.
        hosts: where the values may go, and nowhere else; without any, secrets are refused, for a value without hosts
            could be sent anywhere by whoever has its placeholder.
        plain: pass the values as they are.
    """

    def __init__(self, service: DaytonaService, hosts: Sequence[str], plain: bool) -> None:
        self._service = service
        self._hosts = list(hosts)
        self._plain = plain

    async def hide(self, spec: SandboxSpec, name: str) -> tuple[SandboxSpec, dict[str, str]]:
        """Store the secrets of ``spec`` for the sandbox ``name``.

        Returns:
            The spec with placeholders instead of values, and variable to name of the stored secret.

        Raises:
            RunnerError: ``credentials_missing``: the account takes no secrets, or no host is named.
        """
        wanted = sorted(spec.secret_names & spec.env.keys())
        if not wanted or self._plain:
            return spec, {}
        if not self._hosts:
            raise RunnerError("credentials_missing", f"{', '.join(wanted)}: no [daytona] secret_hosts; {HELP}.")
        stored = {variable: f"{prefix(name)}{variable}" for variable in wanted}
        env = dict(spec.env)
        try:
            for variable, secret in stored.items():
                env[variable] = await self._service.keep_secret(secret, spec.env[variable], self._hosts)
        except CallFailed as failed:
            text = f"{', '.join(wanted)}: the Daytona account did not take the secrets ({failed}); {HELP}."
            raise RunnerError("credentials_missing", text) from failed
        return replace(spec, env=env), stored

    async def attach(self, lifecycle: Lifecycle, name: str, stored: dict[str, str], deadline: float) -> None:
        """Give an existing sandbox these secrets: while it sleeps, for what runs may not see new ones."""
        if not stored or await self._service.get(name) is None:
            return
        if await lifecycle.bring_down(name, "sleep", deadline) == "stopped":
            found = await self._service.get(name)
            if found is not None:
                await self._service.attach_secrets(found.id, stored)

    async def forget(self, name: str) -> None:
        """Delete what was stored for this sandbox; what fails is logged."""
        try:
            async with asyncio.timeout(30.0):
                await self._service.drop_secrets(prefix(name))
        except (CallFailed, TimeoutError) as error:
            log.warning("secrets of sandbox %s were not all deleted: %s", name, error)


def prefix(name: str) -> str:
    """What the names of a sandbox's secrets begin with; the service allows letters, digits, ``_`` and ``-``."""
    return f"{name.replace('-', '_')}_"
