"""Asks an agent for nothing but ``initialize``: the proof that an installation starts.

Synchronous and self-contained, because the command line checks a harness without a server.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from runner.errors import RunnerError
from runner.harness.spec import HarnessSpec, Launch, LaunchContext

MAX_OUTPUT_BYTES: Final = 4 * 1024 * 1024
STDERR_TAIL_BYTES: Final = 2_000
_READ: Final = 65_536
_REQUEST_ID: Final = 1

_INITIALIZE: Final = {
    "jsonrpc": "2.0",
    "id": _REQUEST_ID,
    "method": "initialize",
    "params": {
        "protocolVersion": 1,
        "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
        "clientInfo": {"name": "acp-runner", "version": "1"},
    },
}


@dataclass(frozen=True, slots=True)
class Initialized:
    """What an agent said about itself.

    Attributes:
        agent: its own name, None when it gives none.
        version: its own version, likewise.
        protocol_version: the ACP version it chose.
        elapsed_ms: milliseconds from the spawn to the answer.
    """

    agent: str | None
    version: str | None
    protocol_version: int
    elapsed_ms: int


@dataclass(slots=True)
class _Heard:
    """Bytes of the agent so far: the unfinished line, the tail of stderr, and how much in all."""

    line: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    total: int = 0


def probe(spec: HarnessSpec, state_dir: Path, seconds: float | None = None) -> Initialized:
    """Start the agent in a throw-away home, call ``initialize``, kill it.

    Args:
        spec: the harness.
        state_dir: where it is installed.
        seconds: how long all may take; default the spec's own minimum, at least 20.

    Raises:
        RunnerError: ``harness_missing``; ``harness_start_failed`` (cannot be executed);
            ``harness_exited`` (with its last words); ``harness_unresponsive``;
            ``harness_protocol_error`` (an answer that is none).
    """
    budget = seconds if seconds is not None else max(20.0, spec.min_start_seconds)
    with tempfile.TemporaryDirectory(prefix="acp-runner-check-", ignore_cleanup_errors=True) as made:
        launch, context = _prepare(spec, Path(made), state_dir)
        started = time.monotonic()
        with _agent(spec, launch, context) as process:
            answer = _ask(spec, process, started + budget)
        return _read_answer(spec, answer, round((time.monotonic() - started) * 1000))


def _prepare(spec: HarnessSpec, root: Path, state_dir: Path) -> tuple[Launch, LaunchContext]:
    home, workspace, tmp = (root / part for part in ("home", "workspace", "tmp"))
    for directory in (home, workspace, tmp):
        directory.mkdir()
    context = LaunchContext(home=home, workspace=workspace, tmp=tmp, env={}, state_dir=state_dir)
    launch = spec.launch(context)
    for relative, content in launch.files.items():
        target = home / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return launch, context


@contextlib.contextmanager
def _agent(spec: HarnessSpec, launch: Launch, context: LaunchContext) -> Iterator[subprocess.Popen[bytes]]:
    base = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(context.home),
        "TMPDIR": str(context.tmp),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    try:
        process = subprocess.Popen(
            launch.argv,
            cwd=context.workspace,
            env={**base, **launch.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise RunnerError("harness_start_failed", f"Harness {spec.name!r} cannot be run: {error}") from error
    try:
        yield process
    finally:
        # The group is signalled before its leader is waited for: afterwards its id may be another's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _ask(spec: HarnessSpec, process: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(_INITIALIZE, separators=(",", ":")).encode() + b"\n")
    heard = _Heard()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, heard.line)
        selector.register(process.stderr, selectors.EVENT_READ, heard.stderr)
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if not _read(key.fileobj, key.data, heard):
                    selector.unregister(key.fileobj)
                if (answer := _take_answer(heard)) is not None:
                    return answer
            if process.stdout.fileno() not in selector.get_map() or heard.total > MAX_OUTPUT_BYTES:
                break
    raise _silence(spec, heard, timed_out=time.monotonic() >= deadline)


def _read(source: Any, into: bytearray, heard: _Heard) -> bool:
    stream: IO[bytes] = source
    data = stream.read(_READ)
    into += data
    heard.total += len(data)
    del heard.stderr[:-STDERR_TAIL_BYTES]
    return bool(data)


def _take_answer(heard: _Heard) -> dict[str, Any] | None:
    """The answer among the whole lines so far; anything else on stdout is noise."""
    *lines, rest = bytes(heard.line).split(b"\n")
    heard.line[:] = rest
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict) and message.get("id") == _REQUEST_ID and "method" not in message:
            return message
    return None


def _silence(spec: HarnessSpec, heard: _Heard, *, timed_out: bool) -> RunnerError:
    tail = heard.stderr.decode(errors="replace").strip()
    said = f" Its last words: {tail}" if tail else ""
    if timed_out:
        return RunnerError("harness_unresponsive", f"Harness {spec.name!r} did not answer initialize in time.{said}")
    if heard.total > MAX_OUTPUT_BYTES:
        return RunnerError("harness_protocol_error", f"Harness {spec.name!r} flooded its output.{said}")
    return RunnerError("harness_exited", f"Harness {spec.name!r} ended before it answered initialize.{said}")


def _read_answer(spec: HarnessSpec, message: dict[str, Any], elapsed_ms: int) -> Initialized:
    result = message.get("result")
    if not isinstance(result, dict) or not isinstance(result.get("protocolVersion"), int):
        said = json.dumps(message.get("error", result))[:500]
        raise RunnerError("harness_protocol_error", f"Harness {spec.name!r} answered initialize with: {said}")
    info = result.get("agentInfo")
    named = info if isinstance(info, dict) else {}
    return Initialized(named.get("name"), named.get("version"), result["protocolVersion"], elapsed_ms)
