"""A person logs in: the agent's own way, in a home of its own, of which only the login file is kept.

Synchronous, for the command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from runner.errors import RunnerError
from runner.harness.logins import Shelf, read_file
from runner.harness.spec import HarnessSpec, LaunchContext, Login
from runner.rules import login as rules

SECONDS: Final = 900.0
ANSWER_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.2
_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1
_URL: Final = "open-this"
_TERMINAL: Final = ("PATH", "LANG", "LC_ALL", "TERM", "COLORTERM", "DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
_NETWORK: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE")
_CLIENT: Final = {"name": "acp-runner", "version": "1"}
_INITIALIZE: Final = {"protocolVersion": 1, "clientCapabilities": {}, "clientInfo": _CLIENT}
_BROWSER: Final = '#!/bin/sh\nprintf "%s\\n" "$1" > "$HOME/{name}.part" && mv "$HOME/{name}.part" "$HOME/{name}"\n'


def shelf_of(spec: HarnessSpec, state_dir: Path) -> Shelf:
    """Where the login of a harness is kept.

    Raises:
        RunnerError: ``invalid_request`` with what to do instead, for a harness without logins.
    """
    if spec.login is None or spec.login.form is None:
        hint = spec.login.instructions if spec.login is not None else "Give its keys as secrets of the dispatch."
        raise RunnerError("invalid_request", f"{spec.name} keeps no login. {hint}", field="name")
    return Shelf(state_dir, spec.name, spec.login.form)


def sign_in(
    spec: HarnessSpec,
    state_dir: Path,
    say: Callable[[str], None],
    environ: Mapping[str, str],
    *,
    key: str | None = None,
    seconds: float = SECONDS,
) -> rules.Login:
    """Log in and keep the login; one that is there is replaced only by another.

    Args:
        spec: the harness.
        state_dir: the runner's.
        say: tells the person.
        environ: of the terminal; only what a terminal and a network need is passed on.
        key: an API key to store instead of asking.
        seconds: how long all may take.

    Raises:
        RunnerError: ``invalid_request`` (no logins, or no keys to store), ``harness_missing``,
            ``harness_auth_required``: nothing came of it.
    """
    shelf = shelf_of(spec, state_dir)
    assert spec.login is not None
    with _ended_by_signals(), shelf.home() as home:
        own = {name: environ[name] for name in (*_TERMINAL, *_NETWORK) if name in environ} | {"HOME": str(home)}
        if key is None and spec.login.command is not None:
            _ask_at_the_terminal(spec.login.command(state_dir), own, home)
        else:
            method, more = _method(spec, spec.login, key)
            _authenticate(spec, state_dir, method, {**own, **more}, home, say, time.monotonic() + seconds)
        content = read_file(home / shelf.form.file)
        login = rules.read(shelf.form, content)
        if login is None or content is None:
            raise RunnerError("harness_auth_required", f"{spec.title} ended without a login.")
        with shelf.locked():
            shelf.put(content)
        return login


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A kill, or a terminal that closes, ends the agent and its home like Ctrl-C does."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


def _method(spec: HarnessSpec, login: Login, key: str | None) -> tuple[str, dict[str, str]]:
    if key is None:
        if login.method is None:
            raise RunnerError("invalid_request", f"{spec.name} cannot be asked. {login.instructions}", field="name")
        return login.method, {}
    if login.key_method is None:
        raise RunnerError("invalid_request", f"{spec.name} stores no keys. {login.instructions}", field="name")
    method, variable = login.key_method
    return method, {variable: key}


def _ask_at_the_terminal(command: tuple[str, ...], env: dict[str, str], home: Path) -> None:
    """The agent's own program has the terminal; Ctrl-C is its to handle."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(command, env=env, cwd=home, check=False, preexec_fn=_at_the_terminal)
    except OSError as error:
        raise RunnerError("harness_start_failed", f"{command[0]} cannot be run: {error}") from error
    finally:
        signal.signal(signal.SIGINT, before)
    if done.returncode != 0:
        raise RunnerError("harness_auth_required", f"The login was given up (exit code {done.returncode}).")


def _at_the_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _die_with_the_parent()


def _die_with_the_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _authenticate(
    spec: HarnessSpec,
    state_dir: Path,
    method: str,
    env: dict[str, str],
    home: Path,
    say: Callable[[str], None],
    deadline: float,
) -> None:
    """ACP ``authenticate``; the address that the agent wants to open is shown to the person instead."""
    browser = home / ".browser"
    browser.write_text(_BROWSER.format(name=_URL))
    browser.chmod(0o700)
    launch = spec.launch(LaunchContext(home, home, home, {}, state_dir))
    calm = {name: value for name, value in launch.env.items() if name != "NO_BROWSER"}
    with _agent(launch.argv, {**calm, **env, "BROWSER": str(browser)}, home) as (stdin, lines):
        offered = _call(stdin, lines, 1, "initialize", _INITIALIZE, min(deadline, time.monotonic() + ANSWER_SECONDS))
        ids = [item.get("id") for item in offered.get("authMethods") or () if isinstance(item, dict)]
        if method not in ids:
            text = f"{spec.title} does not offer the login {method}; it offers: {', '.join(map(str, ids)) or 'none'}."
            raise RunnerError("harness_auth_required", text)
        shown = threading.Event()
        teller = threading.Thread(target=_tell_address, args=(home / _URL, say, shown), daemon=True)
        teller.start()
        try:
            _call(stdin, lines, 2, "authenticate", {"methodId": method}, deadline)
        finally:
            shown.set()
            teller.join()


def _tell_address(file: Path, say: Callable[[str], None], over: threading.Event) -> None:
    while not over.wait(_LOOK_SECONDS):
        address = read_file(file)
        if address:
            say(f"Open this address in a browser on this machine:\n{address.decode('utf-8', 'replace').strip()}")
            return


@contextlib.contextmanager
def _agent(
    argv: tuple[str, ...], env: dict[str, str], home: Path
) -> Iterator[tuple[IO[bytes], queue.Queue[bytes | None]]]:
    try:
        process = subprocess.Popen(
            argv,
            env=env,
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_the_parent,  # noqa: PLW1509 - no thread runs yet
        )
    except OSError as error:
        raise RunnerError("harness_start_failed", f"{argv[0]} cannot be run: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    lines: queue.Queue[bytes | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        yield process.stdin, lines
    finally:
        # The group is signalled before its leader is waited for: afterwards its id may be another's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        reader.join(1.0)
        process.stdout.close()


def _read(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while line := stream.readline(rules.MAX_BYTES):
            lines.put(line)
    lines.put(None)


def _call(
    stdin: IO[bytes], lines: queue.Queue[bytes | None], number: int, method: str, params: object, deadline: float
) -> dict[str, Any]:
    message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    with contextlib.suppress(OSError):
        stdin.write(json.dumps(message).encode() + b"\n")
        stdin.flush()
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise RunnerError("harness_unresponsive", f"The agent did not answer {method} in time.") from None
        if line is None:
            raise RunnerError("harness_exited", f"The agent ended before it answered {method}.")
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if not isinstance(answer, dict) or answer.get("id") != number or "method" in answer:
            continue
        result = answer.get("result")
        if not isinstance(result, dict):
            said = answer.get("error")
            why = said.get("message") if isinstance(said, dict) else said
            raise RunnerError("harness_auth_required", f"The agent refused {method}: {str(why)[:500]}")
        return result
