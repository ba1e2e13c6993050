"""What the sandboxes of one runner are made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from runner.rules.daytona import minutes
from runner.sandbox.daytona.lifecycle import RECIPE_LABEL
from runner.sandbox.daytona.service import Plan
from runner.sandbox.port import SandboxSpec

STORE_LABEL: Final = "acp-runner-store"
PROJECT_LABEL: Final = "acp-runner-project"
SESSION_LABEL: Final = "acp-runner-session"


@dataclass(frozen=True, slots=True)
class Terms:
    """How sandboxes are made and for how long; seconds.

    Attributes:
        snapshot: their snapshot; empty is the service's own.
        snapshots: those of recipes that have their own.
        root: where an image keeps the agents, and the bridge where it has one; empty: nowhere.
        content: digest of the image that this installation would make.
        capacity: the most that run at once for this runner; 0: the service alone bounds it.
        plain_secrets, secret_hosts: see ``Vault``.
        disk_seconds: how long a sleeping disk is kept.
        orphan_seconds: how long an agent lives without its runner.
        auto_stop_seconds, ttl_seconds: the service's own nets, far beyond every window.
        python: the interpreter over there.
        moved: paths of this machine in commands and variables, and where the same lies over there.
    """

    snapshot: str = ""
    snapshots: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    content: str = ""
    capacity: int = 0
    plain_secrets: bool = False
    secret_hosts: tuple[str, ...] = ()
    disk_seconds: float = 1800.0
    orphan_seconds: float = 120.0
    auto_stop_seconds: float = 900.0
    ttl_seconds: float = 7 * 86_400.0
    python: str = "python3"
    moved: Mapping[str, str] = field(default_factory=dict)


def plan_of(
    terms: Terms, spec: SandboxSpec, name: str, stored: Mapping[str, str], store_id: str, replica_id: str
) -> Plan:
    """What a new sandbox is asked for; ``stored``: variable to name of a secret."""
    labels = {
        STORE_LABEL: store_id,
        "acp-runner-replica": replica_id,
        PROJECT_LABEL: spec.project,
        SESSION_LABEL: spec.session_id,
        RECIPE_LABEL: spec.recipe,
    }
    return Plan(
        name=name,
        labels=labels,
        snapshot=terms.snapshots.get(spec.recipe, terms.snapshot),
        auto_stop=minutes(terms.auto_stop_seconds),
        auto_delete=minutes(terms.disk_seconds) + 1,
        ttl=minutes(terms.ttl_seconds),
        secrets=stored,
    )
