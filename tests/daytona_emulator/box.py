"""One sandbox and what the API says about it."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.daytona_emulator.clock import iso

ORGANIZATION = "11111111-2222-4333-8444-555555555555"
SETTLED = frozenset({"started", "stopped", "archived", "paused", "error", "build_failed", "destroyed"})


@dataclass(slots=True)
class Traits:
    """What is wrong with one sandbox.

    Attributes:
        stuck_delete: a delete stays ``destroying`` for ever.
        daemon_dead: the toolbox is gone (bare 502) while the API says ``started``.
        container_gone: the API says ``started``, the runner knows no such container (404).
        deaf: refreshes of activity are taken and forgotten.
        idle_links: an open preview connection is no activity.
        fails_start: the next start ends in ``error`` with this reason.
    """

    stuck_delete: bool = False
    daemon_dead: bool = False
    container_gone: bool = False
    deaf: bool = False
    idle_links: bool = False
    fails_start: str = ""


@dataclass(slots=True)
class Box:
    """One sandbox. Times are the emulator's, intervals minutes.

    ``runs_as``: the user of its image; then its processes may change its disk only.
    """

    name: str
    root: Path
    created_at: float
    labels: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    snapshot: str = ""
    dockerfile: str = ""
    runs_as: str = ""
    user: str = "daytona"
    target: str = "us"
    public: bool = False
    network: dict[str, Any] = field(default_factory=dict)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    cpu: int = 1
    memory: int = 1
    disk: int = 3
    gpu: int = 0
    auto_stop: int = 15
    auto_archive: int = 10080
    auto_delete: int = -1
    ttl: int = 0
    queue_timeout: int = 0
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "creating"
    desired: str = "started"
    error_reason: str | None = None
    recoverable: bool | None = None
    updated_at: float = 0.0
    last_activity: float = 0.0
    noted_at: float = 0.0
    stopped_at: float = 0.0
    broken_at: float = 0.0
    recovered_at: float = 0.0
    queued: bool = False
    queue_timed_out_at: float = 0.0
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    change: asyncio.Task[None] | None = None
    traits: Traits = field(default_factory=Traits)
    build_log: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """The disk: home and working directory, kept over a stop."""
        return self.root / "home"

    @property
    def run(self) -> Path:
        """What lives only as long as the sandbox runs."""
        return self.root / "run"

    @property
    def settled(self) -> bool:
        """No state change is in progress."""
        return self.state in SETTLED and (self.change is None or self.change.done())

    def item(self, proxy: str) -> dict[str, Any]:
        """As the list shows it."""
        document: dict[str, Any] = {
            "id": self.id,
            "organizationId": ORGANIZATION,
            "name": self.name,
            "user": self.user,
            "labels": dict(self.labels),
            "public": self.public,
            "networkBlockAll": bool(self.network.get("networkBlockAll", False)),
            "target": self.target,
            "cpu": self.cpu,
            "gpu": self.gpu,
            "memory": self.memory,
            "disk": self.disk,
            "state": self.state,
            "desiredState": self.desired,
            "backupState": "None",
            "autoStopInterval": self.auto_stop,
            "autoArchiveInterval": self.auto_archive,
            "autoDeleteInterval": self.auto_delete,
            "createdAt": iso(self.created_at),
            "updatedAt": iso(self.updated_at),
            "lastActivityAt": iso(self.last_activity),
            "sandboxClass": "container",
            "daemonVersion": "0.190.0",
            "runnerId": "99999999-0000-4000-8000-000000000001",
            "toolboxProxyUrl": proxy,
        }
        # An optional text is absent, never null: the SDK's models are strict.
        optional = {
            "snapshot": self.snapshot or None,
            "errorReason": self.error_reason,
            "recoverable": self.recoverable,
            "networkAllowList": self.network.get("networkAllowList"),
            "domainAllowList": self.network.get("domainAllowList"),
            "autoDestroyAt": iso(self.created_at + self.ttl * 60) if self.ttl else None,
        }
        return document | {name: value for name, value in optional.items() if value is not None}

    def document(self, proxy: str) -> dict[str, Any]:
        """As a single read shows it."""
        document: dict[str, Any] = self.item(proxy) | {
            "env": dict(self.env),
            "volumes": list(self.volumes),
            "kvm": False,
        }
        if self.queue_timeout:
            document["queueTimeout"] = self.queue_timeout
        if self.queue_timed_out_at:
            document["queueTimedOutAt"] = iso(self.queue_timed_out_at)
        if self.dockerfile:
            created = iso(self.created_at)
            info = {"dockerfileContent": self.dockerfile, "createdAt": created, "updatedAt": created}
            document["buildInfo"] = info | {"snapshotRef": f"daytona-{self.id[:8]}:latest"}
        return document
