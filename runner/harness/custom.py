"""Harnesses from the configuration: any program that speaks ACP on its standard streams."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from runner.config import CustomHarness, CustomLogin, ProxiedKey
from runner.harness.spec import HarnessSpec, Login, Resolved, missing
from runner.rules.credentials import KeyRoute
from runner.rules.login import Form

# A server started from a virtual environment often has no "python" on its PATH.
_OWN_INTERPRETER: Final = ("python", "python3")


def custom_spec(name: str, given: CustomHarness, base_dir: Path, environ: Mapping[str, str]) -> HarnessSpec:
    """The spec of one ``[harness.<name>]`` section.

    Args:
        name: the section's name.
        given: the section.
        base_dir: directory that relative paths start from (that of the configuration file).
        environ: the runner's own environment: the source of ``pass_env``, and of PATH.
    """
    command, path = tuple(given.command), environ.get("PATH")

    def resolve(state_dir: Path) -> Resolved:
        return _resolve(name, command, base_dir, path)

    return HarnessSpec(
        name=name,
        title=name,
        resolve=resolve,
        env=dict(given.env),
        pass_env=tuple(given.pass_env),
        inherited={key: environ[key] for key in given.pass_env if key in environ},
        key_vars=tuple(one.key for one in given.keys),
        setting_vars=tuple(dict.fromkeys(one.base_url for one in given.keys)),
        routes=_routes(given.keys),
        read=_paths(given.read, base_dir),
        write=_paths(given.write, base_dir),
        command=command,
        resume=given.resume,
        login=_login(name, given.login, base_dir, path) if given.login is not None else None,
    )


def _login(name: str, given: CustomLogin, base_dir: Path, path: str | None) -> Login:
    command, secret = tuple(given.command), [*given.secrets, *filter(None, (given.refresh,))]

    def resolve(state_dir: Path) -> tuple[str, ...]:
        return _resolve(name, command, base_dir, path).argv

    return Login(
        f"Log in on the runner's machine: acp-runner harness login {name}.",
        form=Form(given.file, tuple(dict.fromkeys(secret)), given.refresh, given.expires),
        command=resolve,
    )


def _routes(keys: Sequence[ProxiedKey]) -> tuple[KeyRoute, ...]:
    """One route for each base URL variable: keys that share one go to the same place."""
    together: dict[str, list[ProxiedKey]] = {}
    for one in keys:
        together.setdefault(one.base_url, []).append(one)
    return tuple(
        KeyRoute(base_url.lower(), {one.key: one.header for one in group}, (base_url,), group[0].upstream)
        for base_url, group in together.items()
    )


def _resolve(name: str, command: Sequence[str], base_dir: Path, path: str | None) -> Resolved:
    program = _program(command[0], base_dir, path)
    if program is None:
        raise missing(name, f"the program {command[0]!r} was not found", None)
    arguments = [_argument(word, base_dir) for word in command[1:]]
    own_files = [Path(word) for word in (program, *arguments) if Path(word).is_absolute() and Path(word).is_file()]
    return Resolved((program, *arguments), tuple(own_files))


def _program(word: str, base_dir: Path, path: str | None) -> str | None:
    if "/" in word:
        return shutil.which(str(base_dir / Path(word).expanduser()))
    found = shutil.which(word, path=_without_shims(path)) if path else None
    if found is None and word in _OWN_INTERPRETER:
        return sys.executable
    found = found or shutil.which(word, path=path)
    # A relative entry of PATH would be looked up from the agent's workspace.
    return str(Path(found).absolute()) if found else None


def _without_shims(path: str) -> str:
    """PATH without version managers' shims: scripts that need the manager, which a cell does not show."""
    return os.pathsep.join(folder for folder in path.split(os.pathsep) if Path(folder).name != "shims")


def _argument(word: str, base_dir: Path) -> str:
    """A script named relative to the configuration file, by its absolute path; other words as they are."""
    looks_like_a_file = "/" in word or "." in word
    if looks_like_a_file and not word.startswith("-") and (base_dir / word).is_file():
        return str((base_dir / word).absolute())
    return word


def _paths(given: Sequence[Path], base_dir: Path) -> tuple[Path, ...]:
    return tuple((base_dir / path.expanduser()).absolute() for path in given)
