"""Which recipes a dispatch may ask for, by provider."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Final

from runner.config import Settings
from runner.resources import resource_path

PROVIDERS: Final = ("local", "daytona")


def recipes(settings: Settings) -> Mapping[str, frozenset[str]]:
    """Provider to the names of its recipes: those that travel with the package, and ``[daytona] snapshots``."""
    table = tomllib.loads(resource_path("sandboxes", "recipes.toml").read_text())["recipe"]
    own = {"daytona": frozenset(settings.daytona.snapshots)}
    return {
        provider: frozenset(name for name, recipe in table.items() if provider in recipe["providers"])
        | own.get(provider, frozenset())
        for provider in PROVIDERS
    }
