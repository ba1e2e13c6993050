"""The commands of a prompt; one that takes time is a generator of waits, and a cancel closes it."""

from __future__ import annotations

import os

from demo.loading import MANNERS
from demo.loop import ROOM, Wait
from demo.questions import ask, ask2, form, url
from demo.tools import leak, run_tool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from demo.session import Session

    Work = Generator[Wait]
    Command = Callable[[Session, str], Work | None]

NOISE = b'\x1b[31mbanner\x1b[0m\n\n"text"\n42\n[1,2]\nnull\n\xef\xbb\xbf\r\n{"cut": \n\xff\xfe\xc3\n'
_BATCH = 2000


def answer(session: Session, text: str) -> None:
    """A short text in three chunks that shows the agent's memory."""
    session.say("You said: ")
    session.say(text)
    session.say(f" (message {session.prompts} of this conversation)")


def stream(session: Session, rest: str) -> Work:
    """N message chunks, the i-th is ``i`` and a blank, filled up with dots to SIZE characters."""
    count, _, size = rest.partition(" ")
    total, width = int(count), int(size or 0)
    head, tail = session.chunk_head, session.chunk_tail
    for first in range(0, total, _BATCH):
        numbers = range(first, min(first + _BATCH, total))
        if width:
            lines = [b"%b%b%b" % (head, (b"%d " % i).ljust(width, b"."), tail) for i in numbers]
        else:
            lines = [b"%b%d %b" % (head, i, tail) for i in numbers]
        data = b"".join(lines)
        for start in range(0, len(data), ROOM):
            session.loop.send(data[start : start + ROOM])
            yield Wait(room=True)


def sleep(session: Session, rest: str) -> Work:
    """Say nothing for some seconds, then say so."""
    yield Wait(seconds=float(rest or 1))
    session.say(f"slept {rest or 1} s")


def hang(session: Session, rest: str) -> Work:
    """Never answer; a cancel ends it."""
    while True:
        yield Wait(seconds=3600)


def deaf(session: Session, rest: str) -> Work:
    """Never answer, whatever the client sends."""
    if session.turn is not None:
        session.turn.deaf = True
    return hang(session, rest)


def crash(session: Session, rest: str) -> None:
    """Exit at once, by default with code 1."""
    session.loop.flush_all()
    os.write(2, b"demo agent: crashing as asked\n")
    os._exit(int(rest or 1))


def exit_idle(session: Session, rest: str) -> None:
    """Exit shortly after the turn."""
    session.say("leaving soon")
    if session.turn is not None:
        session.turn.exit_afterwards = True


def think(session: Session, rest: str) -> None:
    """A thought and nothing else."""
    session.update("agent_thought_chunk", content={"type": "text", "text": rest or "hm"})


def plan(session: Session, rest: str) -> None:
    """A plan of three steps."""
    entries = [("Look", "completed"), ("Think", "in_progress"), ("Do", "pending")]
    session.update(
        "plan", entries=[{"content": text, "priority": "medium", "status": status} for text, status in entries]
    )
    session.say("This is the plan.")


def usage(session: Session, rest: str) -> None:
    """How full the context is."""
    session.update(
        "usage_update",
        used=100 * session.prompts,
        size=8000,
        cost={"amount": 0.01 * session.prompts, "currency": "USD"},
    )


def empty(session: Session, rest: str) -> None:
    """End the turn without any output."""


def error(session: Session, rest: str) -> None:
    """Answer the prompt with a JSON-RPC error."""
    if session.turn is not None:
        session.turn.error = {"code": -32603, "message": rest or "The demo agent failed as asked"}


def show_env(session: Session, rest: str) -> None:
    """One variable of the agent's environment, or all names."""
    session.say(os.environ.get(rest, "(unset)") if rest else " ".join(sorted(os.environ)))


def cwd(session: Session, rest: str) -> None:
    """The session's directory."""
    session.say(session.cwd)


def mode(session: Session, rest: str) -> None:
    """Mode and model in force."""
    session.say(f"mode {session.mode}, model {session.model}")


def pid(session: Session, rest: str) -> None:
    """The agent's process id."""
    session.say(str(os.getpid()))


def write(session: Session, rest: str) -> None:
    """Write TEXT to PATH, relative to the session's directory."""
    path, _, text = rest.partition(" ")
    try:
        with open(os.path.join(session.cwd, path), "w", encoding="utf-8") as file:
            file.write(text + "\n")
        session.say(f"wrote {path}")
    except OSError as failure:
        session.say(f"cannot write {path}: {failure.strerror}")


def read(session: Session, rest: str) -> None:
    """Say what is in PATH."""
    try:
        with open(os.path.join(session.cwd, rest), encoding="utf-8", errors="replace") as file:
            session.say(file.read())
    except OSError as failure:
        session.say(f"cannot read {rest}: {failure.strerror}")


def noise(session: Session, rest: str) -> None:
    """Garbage on stdout between two frames."""
    session.say("before ")
    session.loop.send(NOISE)
    session.say("after")


def stderr(session: Session, rest: str) -> None:
    """N bytes of log lines on stderr."""
    left = int(rest or 1000)
    while left > 0:
        left -= os.write(2, (b"demo agent log line ".ljust(min(left, 100) - 1, b".") + b"\n")[:left])
    session.say(f"wrote {rest or 1000} bytes of log")


def on_load(session: Session, rest: str) -> None:
    """How this conversation loads in a later process: well, fail, empty, hang, crash, silent, flood N, replay."""
    if rest.partition(" ")[0] not in MANNERS:
        raise ValueError(f"one of {', '.join(MANNERS)}")
    session.journal.append({"on_load": rest})
    session.say(f"loads: {rest}")


def told(session: Session, rest: str) -> None:
    """What the client told of an earlier conversation."""
    session.say(session.told or "nothing was told")


def show_help(session: Session, rest: str) -> None:
    """What this agent can do."""
    lines = [f"/{name}: {(work.__doc__ or '').splitlines()[0]}" for name, work in COMMANDS.items()]
    session.say("Plain text is answered. One command a line:\n" + "\n".join(lines))


COMMANDS: dict[str, Command] = {
    "stream": stream,
    "sleep": sleep,
    "tool": run_tool,
    "leak": leak,
    "ask": ask,
    "ask2": ask2,
    "form": form,
    "url": url,
    "hang": hang,
    "deaf": deaf,
    "crash": crash,
    "exit-idle": exit_idle,
    "think": think,
    "plan": plan,
    "usage": usage,
    "empty": empty,
    "error": error,
    "env": show_env,
    "cwd": cwd,
    "mode": mode,
    "pid": pid,
    "write": write,
    "read": read,
    "noise": noise,
    "stderr": stderr,
    "on-load": on_load,
    "told": told,
    "help": show_help,
}


def work_for(session: Session, text: str) -> Work:
    """The turn of a prompt: its commands one after the other, or the plain answer."""
    if not text.startswith("/"):
        answer(session, text)
        return
    for line in text.splitlines():
        name, _, rest = line.strip().removeprefix("/").partition(" ")
        if not line.startswith("/"):
            continue
        command = COMMANDS.get(name)
        if command is None:
            session.say(f"unknown command /{name}; /help lists them. ")
            continue
        try:
            work = command(session, rest.strip())
            if work is not None:
                yield from work
        except (ValueError, OSError) as failure:
            session.say(f"/{name}: {failure}. ")
        if session.turn is not None and (session.turn.error or session.turn.stop_reason != "end_turn"):
            return
