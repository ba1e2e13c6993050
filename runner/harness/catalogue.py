"""The list of harnesses that one runner knows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from runner.config import CustomHarness
from runner.errors import RunnerError
from runner.harness import claude, codex, demo
from runner.harness.custom import custom_spec
from runner.harness.spec import Availability, HarnessSpec

BUILT_IN: Final[tuple[HarnessSpec, ...]] = (claude.SPEC, codex.SPEC, demo.SPEC)


class Catalogue:
    """Harness specs by name: the built-in ones and those of the configuration. Immutable."""

    def __init__(self, specs: Iterable[HarnessSpec], state_dir: Path) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._facets = {name: spec.facet() for name, spec in self._specs.items()}
        self._patches = {name: spec.patches() for name, spec in self._specs.items()}
        self._state_dir = state_dir

    @classmethod
    def build(
        cls,
        config_harnesses: Mapping[str, CustomHarness],
        state_dir: Path,
        *,
        base_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Catalogue:
        """The catalogue of one runner.

        Args:
            config_harnesses: the ``[harness.<name>]`` sections.
            state_dir: the runner's state directory.
            base_dir: where relative paths of those sections start; default the working directory.
            environ: the runner's own environment; default that of this process.

        Raises:
            RunnerError: ``invalid_request`` when a section takes the name of a built-in harness.
        """
        taken = sorted({spec.name for spec in BUILT_IN} & set(config_harnesses))
        if taken:
            raise RunnerError(
                "invalid_request",
                f"[harness.{taken[0]}] has the name of a built-in harness; choose another.",
                field=f"harness.{taken[0]}",
            )
        base = (base_dir or Path.cwd()).absolute()
        own = os.environ if environ is None else environ
        custom = [custom_spec(name, given, base, own) for name, given in config_harnesses.items()]
        return cls([*(_with_base_urls(spec, own) for spec in BUILT_IN), *custom], state_dir)

    @property
    def state_dir(self) -> Path:
        """Where installed harnesses lie."""
        return self._state_dir

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._specs))

    def get(self, name: str) -> HarnessSpec:
        """The spec of a harness.

        Raises:
            RunnerError: ``harness_unknown``; the message lists the known names.
        """
        spec = self._specs.get(name)
        if spec is None:
            known = ", ".join(self.names())
            raise RunnerError("harness_unknown", f"There is no harness {name!r}; known: {known}.", field="harness")
        return spec

    def facet(self, name: str) -> str:
        """The fingerprint's ``harness`` facet: changes with everything of the spec that is baked into an agent.

        Raises:
            RunnerError: ``harness_unknown``.
        """
        return self._facets[self.get(name).name]

    def patches(self, name: str) -> str:
        """The fingerprint's ``patches`` facet: changes with the patches of the harness's packages.

        Raises:
            RunnerError: ``harness_unknown``.
        """
        return self._patches[self.get(name).name]

    def availability(self, name: str) -> Availability:
        """Whether this harness can be started here; reads the disk, starts nothing.

        Raises:
            RunnerError: ``harness_unknown``.
        """
        return self.get(name).availability(self._state_dir)


def _with_base_urls(spec: HarnessSpec, environ: Mapping[str, str]) -> HarnessSpec:
    """A built-in spec that knows which base URLs the runner's own environment has for its keys."""
    names = [name for route in spec.routes for name in route.base_urls]
    return replace(spec, operator={name: environ[name] for name in names if environ.get(name)})
