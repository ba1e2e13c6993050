"""A Daytona's snapshots, as plain values; see ``service``."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from runner.rules.daytona import Call

if TYPE_CHECKING:
    from daytona import AsyncDaytona

T = TypeVar("T")


class Border(Protocol):
    """Performs a call and turns the vendor's failures into ``CallFailed``."""

    def __call__(self, call: Call, work: Awaitable[T]) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot as the service shows it; ``reason``: why it broke."""

    name: str
    state: str
    reason: str


class Snapshots:
    """The calls about snapshots.

    Args:
        sdk, client: the vendor's.
        border: performs the calls.
    """

    def __init__(self, sdk: ModuleType, client: AsyncDaytona, border: Border) -> None:
        self._sdk = sdk
        self._client = client
        self._border = border

    async def get(self, name: str) -> Snapshot:
        """The snapshot of this name; ``CallFailed`` with status 404 when there is none."""
        found = await self._border("read", self._client.snapshot.get(name))
        return Snapshot(found.name, word(found.state), found.error_reason or "")

    async def build(self, name: str, dockerfile: str, log: Callable[[str], None]) -> None:
        """Build and wait until it is usable; ``log`` gets pieces of the build's log as they come.

        The SDK reads a Dockerfile from a file; one that takes nothing from a context uploads nothing.
        """
        with tempfile.TemporaryDirectory(prefix="acp-runner-image-") as folder:
            path = Path(folder) / "Dockerfile"
            path.write_text(dockerfile)
            image = self._sdk.Image.from_dockerfile(path, strict_context=True)
        params = self._sdk.CreateSnapshotParams(name=name, image=image)
        await self._border("create", self._client.snapshot.create(params, on_logs=log))

    async def activate(self, name: str) -> None:
        """Make a snapshot usable that was put away because nobody used it."""
        await self._border("read", self._client.snapshot.activate(name))

    async def delete(self, name: str) -> None:
        """Ask for its deletion."""
        await self._border("delete", self._client.snapshot.delete(name))


def word(state: Any) -> str:
    """The vendor's name of a state; empty without one."""
    return str(getattr(state, "value", state) or "")
