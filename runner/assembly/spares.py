"""Spares of a replica, as the settings ask for them (DESIGN 3.10)."""

from __future__ import annotations

import logging
from dataclasses import replace

from runner.errors import RunnerError
from runner.pool.spares import Spares
from runner.rules.spares import Kind, Shelf
from runner.sandbox.port import SpareProvider
from runner.session.services import Services
from runner.session.spares import SpareMaker

log = logging.getLogger("runner")
PROVIDER = "local"
RECIPE = "default"


async def added(services: Services) -> Services:
    """The services with the spares that ``[pool] spares`` asks for; nothing is left of an earlier runner's.

    Raises:
        RunnerError: ``invalid_request``: ``[pool] spare_harnesses`` names a harness that there is not.
    """
    known = services.provisioner.providers
    providers = {name: provider for name, provider in known.items() if isinstance(provider, SpareProvider)}
    for name, provider in providers.items():
        swept = await provider.sweep_spares()
        if swept:
            log.info("%d spares of an earlier runner were removed (%s)", swept, name)
    wanted = services.settings.pool
    if wanted.spares == 0 or not providers:
        return services
    for name in wanted.spare_harnesses:
        if name not in services.provisioner.catalogue.names():
            text = f"[pool] spare_harnesses: there is no harness {name}."
            raise RunnerError("invalid_request", text, field="pool.spare_harnesses")
    vault = {name: value.get_secret_value() for name, value in services.settings.secrets.items()}
    spares = Spares(
        Shelf(wanted.spares, wanted.spare_seconds),
        services.pool,
        SpareMaker(services.provisioner, services.pool, providers, vault),
        clock=services.clock,
        ids=services.ids,
        metrics=services.metrics,
        always=[Kind(name, PROVIDER, RECIPE) for name in wanted.spare_harnesses if PROVIDER in providers],
    )
    return replace(services, spares=spares, spare_providers=providers)
