"""Serves with embedded defaults and shows one demo turn over HTTP; run through ``scripts/start``.

Standard library only: it is a client like any other, and speaks to the server through its documented routes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMAND = Path(sys.prefix) / "bin" / "acp-runner"
HOST = "127.0.0.1"
READY_SECONDS = 60
TURN_SECONDS = 60
STOP_SECONDS = 45
SHOWN_CHARS = 200
PROMPT = "/stream 3\n/tool echo hello from the sandbox"


class Failed(Exception):
    """The demo did not do what it should; the argument says what."""


@dataclass
class Server:
    """The running ``acp-runner serve``."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    url: str
    replica_id: str

    @property
    def token_file(self) -> Path:
        return self.state_dir / "token"

    @property
    def token(self) -> str:
        return self.token_file.read_text(encoding="utf-8").strip()


@dataclass
class Seen:
    """What a turn's stream brought."""

    events: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None

    def types(self) -> list[str]:
        return [event["type"] for event in self.events]


def free_port(wanted: int | None) -> int:
    """``wanted`` as given, else 8765, else any port that is free now."""
    if wanted is not None:
        return wanted
    for port in (8765, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            number: int = probe.getsockname()[1]
            return number
    raise Failed("no free port on the loopback interface")


def start_server(port: int, state_dir: Path, log: Path | None) -> Server:
    """Start ``serve`` and wait for its ready line; its logs go to ``log``, or to the terminal."""
    argv = [str(COMMAND), "serve", "--host", HOST, "--port", str(port), "--state-dir", str(state_dir)]
    print(f"start: {shlex.join(argv)}", flush=True)
    # Its own process group: Ctrl-C reaches this program, which then stops the server in order.
    with log.open("wb") if log else open(os.dup(2), "wb") as stderr:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, process_group=0
        )
    try:
        ready = read_ready(process)
    except BaseException:
        stop_process(process)
        raise
    return Server(process, state_dir, ready["url"], ready["replica_id"])


def read_ready(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The one JSON line that ``serve`` prints when it accepts requests."""
    assert process.stdout is not None
    deadline = time.monotonic() + READY_SECONDS
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise Failed(f"the server was not ready within {READY_SECONDS} s")
        if not select.select([process.stdout], [], [], left)[0]:
            continue
        piece = os.read(process.stdout.fileno(), 4096)
        if not piece:
            raise Failed(f"the server ended before it was ready, with exit code {process.wait()}")
        line += piece
    ready: dict[str, Any] = json.loads(line)
    if ready.get("ready") is not True:
        raise Failed(f"unexpected ready line: {line!r}")
    return ready


def stop_process(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM, which drains; SIGKILL when that takes too long. Returns the exit code."""
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise Failed(f"the server did not end within {STOP_SECONDS} s after SIGTERM") from None


def stream_turn(server: Server, session_id: str, prompt: str) -> Iterator[dict[str, Any]]:
    """Dispatch ``prompt`` and yield the lines of its NDJSON stream."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or HOST, parts.port, timeout=TURN_SECONDS)
    try:
        connection.request(
            "POST",
            f"/v1/sessions/{session_id}/turns",
            json.dumps({"prompt": prompt, "permissions": {"default": "allow"}}),
            {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            raise Failed(f"dispatch was answered {response.status}: {response.read().decode(errors='replace')}")
        while line := response.readline():
            yield json.loads(line)
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"the stream broke: {error!r}") from error
    finally:
        connection.close()


def show(line: dict[str, Any]) -> None:
    """One line of the stream, for a person."""
    if line["kind"] == "result":
        text = json.dumps(line["result"], ensure_ascii=False)
        print(f"  result {text}", flush=True)
    elif line["kind"] == "event":
        text = json.dumps(line["data"], ensure_ascii=False)
        text = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + " …"
        print(f"  {line.get('cursor') or '-':>8} {line['type']:<18} {text}", flush=True)


def demo_turn(server: Server) -> None:
    """Run one turn in a new session, show its stream and check it."""
    session_id = f"hello-{uuid.uuid4().hex[:8]}"
    print(f"start: one turn of the demo agent in session {session_id}", flush=True)
    seen = Seen()
    for line in stream_turn(server, session_id, PROMPT):
        show(line)
        if line["kind"] == "event":
            seen.events.append(line)
        elif line["kind"] == "result":
            seen.result = line["result"]
    check_turn(seen)


def check_turn(seen: Seen) -> None:
    """Admitted, a tool call, done once and after all else, result ok (DESIGN 4.1)."""
    if seen.result is not None and seen.result.get("error"):
        raise Failed(f"the turn ended with an error: {seen.result['error']}")
    types = seen.types()
    for wanted in ("turn_admitted", "tool_call", "message_delta"):
        if wanted not in types:
            raise Failed(f"the stream has no {wanted}: {types}")
    turn_id = seen.events[types.index("turn_admitted")]["data"]["turn_id"]
    if types.count("done") != 1:
        raise Failed(f"the stream has {types.count('done')} endings instead of one: {types}")
    done = seen.events[types.index("done")]
    if done["data"]["turn_id"] != turn_id or done["data"]["outcome"] != "completed":
        raise Failed(f"the turn did not complete: {done}")
    if seen.result is None or seen.result["ok"] is not True or seen.result["turn_id"] != turn_id:
        raise Failed(f"the result is not ok: {seen.result}")


def census(server: Server) -> list[str]:
    """Processes that belong to this server: its state directory or replica id is in their environment or command."""
    marks = (str(server.state_dir).encode(), server.replica_id.encode())
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            told = command + b"\0" + (entry / "environ").read_bytes()
        except OSError:
            continue
        if any(mark in told for mark in marks):
            words = command.replace(b"\0", b" ").decode(errors="replace").strip()
            found.append(f"{entry.name} {words}")
    return found


def check_gone(server: Server) -> None:
    """The port is closed and nobody is left."""
    deadline = time.monotonic() + 2
    while left := census(server):
        if time.monotonic() > deadline:
            raise Failed("processes were left: " + "; ".join(left))
        time.sleep(0.05)
    parts = urlsplit(server.url)
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((parts.hostname or HOST, parts.port or 0)) == 0:
            raise Failed(f"the port of {server.url} is still open")


def once(port: int, state_dir: Path) -> None:
    """One checked turn on a state directory of its own, then an orderly end."""
    log = state_dir / "serve.log"
    try:
        server = start_server(port, state_dir, log)
        try:
            demo_turn(server)
            if len(census(server)) < 2:
                raise Failed("the census does not see the server and its warm agent: it cannot prove that none is left")
        finally:
            code = stop_process(server.process)
        if code != 0:
            raise Failed(f"the server ended with exit code {code} after SIGTERM")
        check_gone(server)
    except Failed:
        if log.exists():
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-8000:])
        raise
    print("start: ok: the turn streamed and completed, the port is closed, no process is left", flush=True)


def keep_serving(port: int, state_dir: Path) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the server's exit code."""
    server = start_server(port, state_dir, None)
    try:
        demo_turn(server)
        curl = [
            "curl -N",
            f'-H "Authorization: Bearer $(cat {shlex.quote(str(server.token_file))})"',
            "-H 'Content-Type: application/json'",
            """-d '{"prompt": "/stream 5"}'""",
            f"{server.url}/v1/sessions/demo/turns",
        ]
        print(f"\nstart: serving at {server.url} (Ctrl-C stops it). Try:\n\n  {' '.join(curl)}\n", flush=True)
        return server.process.wait()
    except KeyboardInterrupt:
        print("\nstart: stopping", flush=True)
        return stop_process(server.process)
    finally:
        if server.process.poll() is None:
            stop_process(server.process)


def default_state_dir() -> Path:
    """As the server finds it (DESIGN 5)."""
    named = os.environ.get("ACP_RUNNER_STATE_DIR")
    return Path(named) if named else Path.home() / ".local" / "state" / "acp-runner"


def interrupt(signum: int, frame: object) -> None:
    """SIGTERM ends this program as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> int:
    """Parse the arguments and run; 0 when all went well."""
    parser = argparse.ArgumentParser(prog="scripts/start", description="Set-up, serve, and one demo turn.")
    parser.add_argument("--port", type=int, help="default: 8765, or another free one when that is taken")
    parser.add_argument("--state-dir", type=Path, help="default: the user's; with --once a temporary one")
    parser.add_argument("--once", action="store_true", help="check the turn, stop the server, check that all is gone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    made = Path(tempfile.mkdtemp(prefix="acp-runner-start-")) if options.once and options.state_dir is None else None
    state_dir: Path = (made or options.state_dir or default_state_dir()).absolute()
    try:
        if not options.once:
            return keep_serving(free_port(options.port), state_dir)
        state_dir.mkdir(parents=True, exist_ok=True)
        once(free_port(options.port), state_dir)
    except Failed as error:
        print(f"start: FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
