"""What a harness is: how it is started, what it needs, and what is odd about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.harness.installed import NpmInstall, harness_directory, read_manifest
from runner.rules.credentials import KeyRoute
from runner.rules.login import Form
from runner.rules.patches import patches_digest
from runner.rules.resume import Proven

# Measured manners of real adapters; the runner relies on none, tests and reports name them.
TOOL_OUTLIVES_CANCEL: Final = "tool_outlives_cancel"
MODEL_STREAM_OUTLIVES_CANCEL: Final = "model_stream_outlives_cancel"
SECOND_PROMPT_UNANSWERED: Final = "second_prompt_unanswered"
STDIN_EOF_IGNORED: Final = "stdin_eof_ignored"
TOOLS_IN_OWN_SESSION: Final = "tools_in_own_session"
DENIAL_CANCELS_TURN: Final = "denial_cancels_turn"
STALE_RESULT_AFTER_CANCEL: Final = "stale_result_after_cancel"
"""The one that the runner minds: such a result is no answer, and the prompt is sent once more (``rules.stale``)."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """Where and with what one agent starts.

    Attributes:
        home: the agent's private home; ``Launch.files`` are written below it.
        workspace: the directory it works in.
        tmp: its private temporary directory; never an ancestor of ``home``.
        env: the dispatch's ``env`` merged with its resolved secrets.
        state_dir: the runner's state directory, where installed harnesses lie.
        login: the home holds the login of ``harness login``.
    """

    home: Path
    workspace: Path
    tmp: Path
    env: Mapping[str, str] = field(repr=False)
    state_dir: Path
    login: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one agent.

    Attributes:
        argv: the command, absolute where it is a file of this machine.
        env: all that the agent gets besides the provider's base (PATH, HOME, TMPDIR, LANG, TERM):
            the inherited allow-list, the harness's own variables and, last, the dispatch's.
        files: path relative to the private home to content, written before the start. May hold
            addresses, never secrets: keys stay in ``env``.
        read: host paths outside workspace and home that the agent must be able to read.
        write: host paths outside them that it may write.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    files: dict[str, bytes] = field(default_factory=dict)
    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """The command as found on this machine, and the host paths it lives in."""

    argv: tuple[str, ...]
    read: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a harness adds for one start: variables, and files of its private home."""

    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a harness can be started here, and if not, why and what helps."""

    available: bool
    version: str | None = None
    reason: str | None = None
    install_command: str | None = None


@dataclass(frozen=True, slots=True)
class Login:
    """How a person gets credentials for a harness.

    Attributes:
        instructions: what to run or set, and which secret a dispatch then carries.
        form: the login file that its agent keeps in its home; None: it keeps none.
        command: from the state directory to a program that asks a person at a terminal and writes that file.
        method: an ACP authentication method of the agent that does so, where it has no such program.
        key_method: likewise one that stores a key, and the variable that it takes the key from.
        keyless: variables with which a start needs neither key nor login.
    """

    instructions: str
    form: Form | None = None
    command: Callable[[Path], tuple[str, ...]] | None = None
    method: str | None = None
    key_method: tuple[str, str] | None = None
    keyless: tuple[str, ...] = ()


def no_preparation(context: LaunchContext) -> Prepared:
    """A harness that needs nothing written."""
    return Prepared()


@dataclass(frozen=True, slots=True)
class HarnessSpec:
    """A coding-agent product and how it is run (DESIGN 2, 5).

    Attributes:
        name: the word that a dispatch uses.
        title: the name for people.
        resolve: from the state directory to the command; raises ``harness_missing``.
        version: the pinned version of the adapter, as its ``initialize`` answers; None: unknown.
        command: the command as configured, for a harness of the configuration.
        env: literal variables of every start.
        pass_env: names that may be taken from the runner's own environment.
        inherited: the values found for ``pass_env`` when the catalogue was built.
        key_vars: secrets that the harness takes; a client forwards them from its environment.
        setting_vars: variables that are no secrets, forwarded likewise.
        routes: the model APIs whose keys need not enter its sandbox.
        operator: base URLs of those that the runner's own environment has.
        read, write: more host paths for its sandbox.
        install: pinned packages, None when there is nothing to install.
        start_mode: mode to set after ``session/new`` unless the dispatch names one.
        min_start_seconds: a start gets at least this long, whatever the configuration says.
        resume: how it was seen to go on with the agent session of a killed process, its history in the next model
            request; measured, not what it advertises (case M6).
        minted_input: members of a tool call's raw input that are made anew for each call; an approval is not bound to
            them, for the same call asked again has others.
        quirks: measured odd manners.
        prepare: makes the files and variables of one start; must not do I/O.
        login: how to get credentials.
    """

    name: str
    title: str
    resolve: Callable[[Path], Resolved]
    version: str | None = None
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    inherited: Mapping[str, str] = field(default_factory=dict, repr=False)
    key_vars: tuple[str, ...] = ()
    setting_vars: tuple[str, ...] = ()
    routes: tuple[KeyRoute, ...] = ()
    operator: Mapping[str, str] = field(default_factory=dict, repr=False)
    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    install: NpmInstall | None = None
    start_mode: str | None = None
    min_start_seconds: float = 0.0
    resume: Proven = "none"
    minted_input: frozenset[str] = frozenset()
    quirks: frozenset[str] = frozenset()
    prepare: Callable[[LaunchContext], Prepared] = no_preparation
    login: Login | None = None

    @property
    def install_command(self) -> str | None:
        """The command that installs it, None when there is nothing to install."""
        return None if self.install is None else f"acp-runner harness install {self.name}"

    def patches(self) -> str:
        """The fingerprint's ``patches`` facet: what is changed in its packages, which is often nothing."""
        return self.install.patches_digest() if self.install else patches_digest(())

    def launch(self, context: LaunchContext) -> Launch:
        """The command, environment and files of one start; reads the state directory only.

        Raises:
            RunnerError: ``harness_missing`` with the install command in its message;
                ``invalid_request`` when a variable of the dispatch has no usable value.
        """
        resolved = self.resolve(context.state_dir)
        prepared = self.prepare(context)
        return Launch(
            argv=resolved.argv,
            env={**self.inherited, **self.env, **prepared.env, **context.env},
            files=dict(prepared.files),
            read=resolved.read + self.read,
            write=self.write,
        )

    def availability(self, state_dir: Path) -> Availability:
        """Whether it can be started now; reads the disk, starts nothing."""
        try:
            self.resolve(state_dir)
        except RunnerError as error:
            return Availability(False, self.version, error.message, self.install_command)
        return Availability(True, self.version, None, self.install_command)

    def facet(self) -> str:
        """A digest of what here is baked into a running agent; inherited values, fixed for a process, stay out."""
        parts = {
            "name": self.name,
            "version": self.version,
            "command": self.command,
            "env": dict(self.env),
            "pass_env": self.pass_env,
            "paths": [[str(path) for path in paths] for paths in (self.read, self.write)],
            "install": self.install.digest() if self.install else None,
            "start_mode": self.start_mode,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def missing(name: str, reason: str, install_command: str | None) -> RunnerError:
    """The error of a harness that cannot be started here."""
    cure = f" Install it with: {install_command}" if install_command else ""
    return RunnerError("harness_missing", f"Harness {name!r}: {reason}.{cure}", harness=name)


def installed_directory(name: str, install: NpmInstall, state_dir: Path) -> Path:
    """The directory of a complete installation of exactly these packages.

    Raises:
        RunnerError: ``harness_missing``.
    """
    directory = harness_directory(state_dir, name)
    manifest = read_manifest(directory)
    command = f"acp-runner harness install {name}"
    if manifest is None:
        raise missing(name, "it is not installed", command)
    if manifest.lock_digest != install.digest():
        raise missing(name, "another version is installed than this runner needs", command)
    if patches_digest(manifest.patches) != install.patches_digest():
        raise missing(name, "it is installed with other patches than this runner has", command)
    return directory


def installed_file(name: str, directory: Path, relative: str) -> Path:
    """A file of an installation.

    Raises:
        RunnerError: ``harness_missing`` when it is gone.
    """
    path = directory / relative
    if not path.is_file():
        command = f"acp-runner harness install {name}"
        raise missing(name, f"its installation lacks {relative}", command)
    return path
