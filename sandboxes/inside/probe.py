"""Looks at a sandbox from inside, for the provider self-check. Standard library only.

One JSON object a line on stdin, one answer a line on stdout. ``{"do": …}`` is ``look``, ``write`` {path, text},
``helper`` (starts a long-lived child), ``ping`` (asks it), ``hostile`` (starts children that are hard to kill, answers
their pids and their pid file), ``alive`` {pids} (which of them still run), ``reach`` {read, list, write, signal} (which
of these paths it can read, list and write, and which pids it may signal; its capabilities, and who it sees).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Message = dict[str, Any]

HELPER = "import sys\nfor line in sys.stdin:\n    print('pong', flush=True)"
NOTE = 'echo $$ >> "$0"; '
SHELL = (
    ["setsid", "sh", "-c", NOTE + "exec sleep 600"],
    ["nohup", "sh", "-c", NOTE + "trap '' TERM HUP INT; while :; do sleep 0.05; done"],
    ["sh", "-c", 'nohup setsid sh -c \'echo $$ >> "$0"; sleep 600 & exec sleep 600\' "$0" >/dev/null 2>&1 &'],
)
LOOP_SECONDS = 0.01

helper: subprocess.Popen[str] | None = None


def names(path: str) -> list[str] | None:
    """Names of the variables in an environ file; None when it cannot be read."""
    try:
        with open(path, "rb") as file:
            items = file.read().split(b"\0")
    except OSError:
        return None
    return sorted(item.partition(b"=")[0].decode("utf-8", "replace") for item in items if item)


def mode(path: str) -> int | None:
    """Permission bits of a path; None when it is not there."""
    try:
        return os.stat(path).st_mode & 0o7777
    except OSError:
        return None


def look(request: Message) -> Message:
    """Environment, directories and files as the agent sees them."""
    home, tmp = os.environ.get("HOME", ""), os.environ.get("TMPDIR", "")
    given: dict[str, list[Any] | None] = {}
    for path in request.get("files", []):
        full = path.replace("~", home, 1)
        try:
            with open(full, encoding="utf-8") as file:
                given[path] = [file.read(), mode(full)]
        except OSError:
            given[path] = None
    return {
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "in_workspace": os.path.realpath(request.get("workspace", "")) == os.getcwd(),
        "environ": dict(os.environ),
        "names": names("/proc/self/environ"),
        "parent_names": names(f"/proc/{os.getppid()}/environ"),
        "home": [home, mode(home), os.access(home, os.W_OK)],
        "tmp": [tmp, mode(tmp), os.access(tmp, os.W_OK)],
        "files": given,
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if held(int(name))),
    }


def held(fd: int) -> bool:
    """Whether a listed descriptor is open beyond the listing itself."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def write(request: Message) -> Message:
    """Write a file and read it back."""
    with open(request["path"], "w", encoding="utf-8") as file:
        file.write(request["text"])
    with open(request["path"], encoding="utf-8") as file:
        return {"read": file.read()}


def reach(request: Message) -> Message:
    """What it can get at of what it is asked to try; nothing is changed."""
    with open("/proc/self/status", encoding="ascii") as file:
        facts = dict(line.split(":", 1) for line in file if line.startswith(("CapEff", "NoNewPrivs")))
    return {
        "read": [path for path in request["read"] if tried(first_byte, path)],
        "list": [path for path in request["list"] if tried(os.listdir, path)],
        "write": [path for path in request["write"] if tried(made, path)],
        "signal": [pid for pid in request["signal"] if tried(os.kill, pid, 0)],
        "capabilities": facts["CapEff"].strip(),
        "init": os.getppid(),
        "pids": pids_here(),
    }


def tried(attempt: Callable[..., object], *arguments: object) -> bool:
    """Whether the system allows it."""
    try:
        attempt(*arguments)
    except OSError:
        return False
    return True


def first_byte(path: str) -> bytes:
    """Read a little of a file."""
    with open(path, "rb") as file:
        return file.read(1)


def made(folder: str) -> None:
    """Make and remove a file in a folder."""
    path = os.path.join(folder, ".acp-runner-probe")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    os.unlink(path)


def start_helper(request: Message) -> Message:
    """A child like an agent's own server, over pipes."""
    global helper
    helper = subprocess.Popen([sys.executable, "-I", "-S", "-c", HELPER], stdin=-1, stdout=-1, text=True)
    return {"helper": helper.pid, **ping(request)}


def ping(request: Message) -> Message:
    """Ask the helper."""
    assert helper is not None and helper.stdin is not None and helper.stdout is not None
    helper.stdin.write("ping\n")
    helper.stdin.flush()
    return {"answer": helper.stdout.readline().strip()}


def note(path: str) -> None:
    """Leave this process's pid."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def deaf() -> None:
    """Ignore what can be ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def forked(body: Callable[[str], None], path: str) -> None:
    """Run ``body`` in a child that never comes back; its parent's pipes are closed."""
    if os.fork() == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            body(path)
        finally:
            os._exit(0)


def daemon(path: str) -> None:
    """Double fork, own session, signals ignored."""
    os.setsid()
    forked(sleeper, path)


def sleeper(path: str) -> None:
    """Sleep on."""
    deaf()
    note(path)
    while True:
        time.sleep(60)


def runaway(path: str) -> None:
    """Fork, let the parent exit, take a new session, for ever."""
    deaf()
    note(path)
    while True:
        if os.fork() > 0:
            os._exit(0)
        os.setsid()
        time.sleep(LOOP_SECONDS)


def hostile(request: Message) -> Message:
    """Start one of each kind; wait until all have told their pid."""
    path = os.path.join(os.environ["TMPDIR"], "hostile")
    open(path, "w", encoding="utf-8").close()
    for argv in SHELL:
        subprocess.Popen([*argv, path], stdin=-3, stdout=-3, stderr=-3)
    forked(daemon, path)
    forked(runaway, path)
    deadline = time.monotonic() + 10
    pids: list[int] = []
    while len(pids) < len(SHELL) + 2 and time.monotonic() < deadline:
        time.sleep(0.005)
        with open(path, encoding="utf-8") as file:
            pids = [int(line) for line in file.read().split()]
    return {"pids": pids}


def alive(request: Message) -> Message:
    """Which of the pids still run, and every process of the cell that is neither the agent, its helper nor its init."""
    mine = [line for line in map(entry, pids_here()) if line is not None]
    known = {os.getpid(), os.getppid(), helper.pid if helper else 0}
    marked = [pid for pid, state in mine if pid not in known and state != "Z"]
    return {"left": sorted(set(marked) | {pid for pid in request["pids"] if running(pid)})}


def pids_here() -> list[int]:
    """Every pid in sight."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def entry(pid: int) -> tuple[int, str] | None:
    """``(pid, state)`` of a process that carries our marker; None for any other."""
    own = os.environ.get("ACP_RUNNER_CELL", "")
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"ACP_RUNNER_CELL={own}".encode() not in file.read().split(b"\0"):
                return None
    except OSError:
        return None
    return pid, state_of(pid)


def state_of(pid: int) -> str:
    """Its state letter; ``Z`` when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def running(pid: int) -> bool:
    """Whether it is more than a zombie."""
    return state_of(pid) != "Z"


ANSWERS = {
    "look": look,
    "reach": reach,
    "write": write,
    "helper": start_helper,
    "ping": ping,
    "hostile": hostile,
    "alive": alive,
}


def main() -> None:
    """Serve until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.write(json.dumps(ANSWERS[request["do"]](request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
