"""The control channel of a cell: JSON lines both ways over one stream socket.

A turn has a mark, or ``since``: clock ticks since boot, older processes are not the turn's.
Requests carry an ``id`` that the reply repeats: ``{"id", "ok": true, …}`` or ``{"id", "ok": false, "error"}``.

=========  ==========================================================  ===============================
op         members                                                     reply
=========  ==========================================================  ===============================
spawn      argv, env, cwd, keep? [text], helpers? [text]               pid
listen     ports [number]                                              ports [number]
run        run, argv, env, cwd, limit?                                 code, signal, truncated
mark       turn                                                        count
kill_turn  turn, since?, seconds?, spare_agent?                        killed, survivors [pid]
signal     signal                                                      delivered
teardown   grace_seconds?, seconds?                                    proof, killed, survivors [pid]
ps         turn?                                                       processes, truncated, agent
=========  ==========================================================  ===============================

``listen`` makes listening sockets on 127.0.0.1 inside, and passes them along with its reply.
``run`` starts one command at a time beside the agent, and is answered when its own process is gone.
``confine``: {read?, write?, processes?, keyrings?}: Landlock paths, RLIMIT_NPROC, and whether the kernel's keyrings may
be used, of the agent and of every later ``run``.
``memory_bytes``: what all processes may have together; beyond it all are killed.

Events have no id: ``ready`` {pid, subreaper}, ``exited`` {pid, code, signal}, ``output`` {run, data in base64},
``limit`` {memory_bytes}, ``fault`` {error}.
The end of the channel, SIGTERM, SIGINT and SIGHUP tear the cell down at once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time

from cell.channel import Channel
from cell.command import Command
from cell.confine import Confinement
from cell.kill import Children, Teardown, TurnKill
from cell.memory import MemoryWatch
from cell.network import listen, ports_of
from cell.processes import command_line, descendants, living, read_stat
from cell.request import BadRequest, confinement_of, count_of, program_of, seconds_of, text_of, texts_of
from cell.spawn import SpawnError, close_on_exec, let_go_of_stdio, spawn, take_stdio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from cell.processes import Identity

MAX_MARKS = 16
MAX_LISTED = 2000
LAST_WORDS_SECONDS = 1.0
LINGER_SECONDS = 30.0
MAX_OUTPUT = 1024 * 1024
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


class Init:
    """Carries out requests one at a time; kills run as jobs between its waits."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children = Children()
        self._spawned = False
        self._confined = Confinement()
        self._memory: MemoryWatch | None = None
        self._keep: tuple[str, ...] = ()
        self._helpers: tuple[str, ...] = ()
        self._marks: dict[str, set[Identity]] = {}
        self._kills: list[tuple[Any, TurnKill]] = []
        self._command: Command | None = None
        self._teardown: Teardown | None = None
        self._teardown_ids: list[Any] = []
        self._terminated = False
        self._listening = True

    def run(self, subreaper: bool) -> NoReturn:
        """Serve until the cell is torn down."""
        wakeup = self._watch_signals()
        self._channel.send({"event": "ready", "pid": os.getpid(), "subreaper": subreaper})
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        poll.register(self._channel.fileno(), 0)
        while True:
            if not self._channel.ended:
                poll.register(self._channel.fileno(), self._channel.events)
            said = self._command.fd if self._command is not None else None
            if said is not None:
                poll.register(said, select.POLLIN)
            ready = dict(poll.poll(self._timeout()))
            if said is not None:
                poll.unregister(said)
            if wakeup in ready:
                os.read(wakeup, 4096)
            happened = ready.get(self._channel.fileno(), 0)
            if happened & select.POLLOUT:
                self._channel.flush()
            if happened & ~select.POLLOUT:
                for line in self._channel.receive():
                    self._handle(line)
            if said in ready and self._command is not None:
                self._say(self._command.read())
            self._children.drain()
            self._report_exit()
            self._report_command()
            if self._terminated or self._channel.ended:
                self._abandon(poll)
            self._step()

    def _timeout(self) -> int | None:
        if self._teardown is not None or any(kill.busy for _, kill in self._kills):
            return 2
        if self._kills:
            return 0
        return self._memory.wait_ms(time.monotonic()) if self._memory is not None else None

    def _watch_signals(self) -> int:
        wakeup, alarm = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(alarm, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._terminate)
        return wakeup

    def _terminate(self, number: int, frame: object) -> None:
        self._terminated = True

    def _abandon(self, poll: select.poll) -> None:
        """Nobody listens or the init was told to go: no grace, no reply needed."""
        if self._channel.ended and self._listening:
            self._listening = False
            poll.unregister(self._channel.fileno())
        if self._teardown is None:
            self._teardown = Teardown(self._children, 0.0, time.monotonic() + LINGER_SECONDS)
        self._teardown.hurry()

    def _report_exit(self) -> None:
        if self._children.agent_status is not None:
            pid, status = self._children.agent_status
            self._children.agent_status = None
            code = os.waitstatus_to_exitcode(status)
            how = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
            self._channel.send({"event": "exited", "pid": pid, **how})

    def _say(self, event: dict[str, object] | None) -> None:
        if event is not None:
            self._channel.send(event)

    def _report_command(self) -> None:
        """Its own process is gone: what it said, then how it ended."""
        command = self._command
        status = self._children.watched.get(command.pid) if command is not None else None
        if command is None or status is None:
            return
        self._command = None
        del self._children.watched[command.pid]
        for event in command.rest():
            self._channel.send(event)
        self._channel.send(command.ended(status))

    def _step(self) -> None:
        now = time.monotonic()
        if self._memory is not None:
            self._say(self._memory.step(now))
        if self._teardown is not None:
            outcome = self._teardown.step(now)
            self._report_exit()
            if outcome is not None:
                self._finish(outcome)
            return
        for item in list(self._kills):
            outcome = item[1].step(now)
            if outcome is not None:
                self._kills.remove(item)
                self._channel.send({"id": item[0], "ok": True, **outcome})
        self._report_exit()

    def _finish(self, outcome: dict[str, object]) -> None:
        for identity in self._teardown_ids:
            self._channel.send({"id": identity, "ok": True, **outcome})
        if outcome["proof"] is not None or self._channel.ended or self._terminated:
            self._channel.flush_within(LAST_WORDS_SECONDS)
            os._exit(0 if outcome["proof"] is not None else 1)
        self._teardown_ids = []
        self._teardown = Teardown(self._children, 0.0, time.monotonic() + LINGER_SECONDS)

    def _handle(self, line: bytes | None) -> None:
        identity: Any = None
        try:
            if line is None:
                raise BadRequest("the line is too long")
            try:
                request = json.loads(line)
            except (ValueError, RecursionError):
                raise BadRequest("not a JSON line") from None
            if not isinstance(request, dict):
                raise BadRequest("not a JSON object")
            identity = request.get("id")
            operation = _OPERATIONS.get(text_of(request, "op"))
            if operation is None:
                raise BadRequest("unknown op")
            reply = operation(self, request)
        except (BadRequest, SpawnError) as error:
            reply = {"ok": False, "error": str(error)}
        except Exception as error:
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        if reply is not None:
            self._channel.send({"id": identity, **reply})

    def _listen(self, request: dict[str, Any]) -> dict[str, Any]:
        ports = ports_of(request)
        listeners = listen(ports)
        try:
            if not self._channel.hand_over([item.fileno() for item in listeners]):
                raise BadRequest("the listening sockets were not taken")
        finally:
            for item in listeners:
                item.close()
        return {"ok": True, "ports": ports}

    def _spawn(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._spawned:
            raise BadRequest("the agent was started already")
        if self._teardown is not None:
            raise BadRequest("the cell is being torn down")
        argv, env = program_of(request)
        keep, helpers = texts_of(request, "keep"), texts_of(request, "helpers")
        if "" in keep + helpers:
            raise BadRequest("an empty pattern would spare every process")
        confined, memory = confinement_of(request), count_of(request, "memory_bytes")
        pid = spawn(argv, env, text_of(request, "cwd"), confined)
        let_go_of_stdio()
        self._confined = confined
        self._memory = MemoryWatch(memory) if memory else None
        self._spawned = True
        self._keep, self._helpers = keep, helpers
        stat = read_stat(pid)
        self._children.agent = (pid, stat[3] if stat is not None else 0)
        return {"ok": True, "pid": pid}

    def _run(self, request: dict[str, Any]) -> None:
        """Only behind the agent's start: until then the init still holds the agent's pipes."""
        if not self._spawned or self._teardown is not None:
            raise BadRequest("there is no agent, or the cell is being torn down")
        if self._command is not None:
            raise BadRequest("a command runs already")
        argv, env = program_of(request)
        name, cwd, limit = text_of(request, "run"), text_of(request, "cwd"), request.get("limit", MAX_OUTPUT)
        if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_OUTPUT:
            raise BadRequest(f"limit must be between 0 and {MAX_OUTPUT}")
        fd, output = os.pipe()
        try:
            pid = spawn(argv, env, cwd, self._confined, output)
        except BaseException:
            os.close(fd)
            raise
        finally:
            os.close(output)
        self._children.watched[pid] = None
        self._command = Command(request.get("id"), name, pid, fd, limit)

    def _mark(self, request: dict[str, Any]) -> dict[str, Any]:
        turn = text_of(request, "turn")
        self._marks.pop(turn, None)
        while len(self._marks) >= MAX_MARKS:
            del self._marks[next(iter(self._marks))]
        self._marks[turn] = living(os.getpid())
        return {"ok": True, "count": len(self._marks[turn])}

    def _kill_turn(self, request: dict[str, Any]) -> dict[str, Any] | None:
        if self._teardown is not None:
            raise BadRequest("the cell is being torn down")
        turn, since = text_of(request, "turn"), request.get("since", 0)
        if isinstance(since, bool) or not isinstance(since, int):
            raise BadRequest("since must be clock ticks since boot")
        if turn not in self._marks and not since:
            raise BadRequest("the turn has no mark")
        deadline = time.monotonic() + seconds_of(request, "seconds", 1.0)
        spare = request.get("spare_agent", True) is not False
        kept = self._marks.get(turn, set())
        job = TurnKill(self._children, kept, since, deadline, spare, self._keep, self._helpers)
        self._kills.append((request.get("id"), job))
        return None

    def _signal(self, request: dict[str, Any]) -> dict[str, Any]:
        number = request.get("signal")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < signal.NSIG:
            raise BadRequest("signal must be a signal number")
        self._children.drain()
        if self._children.agent is None:
            return {"ok": True, "delivered": False}
        os.kill(self._children.agent[0], number)
        return {"ok": True, "delivered": True}

    def _tear_down(self, request: dict[str, Any]) -> None:
        now = time.monotonic()
        grace = seconds_of(request, "grace_seconds", 0.0)
        deadline = now + max(grace, seconds_of(request, "seconds", 5.0))
        for identity, _ in self._kills:
            self._channel.send({"id": identity, "ok": False, "error": "the cell is being torn down"})
        self._kills.clear()
        if self._command is not None:
            self._command.close()
            self._channel.send({"id": self._command.identity, "ok": False, "error": "the cell is being torn down"})
            self._command = None
        self._teardown_ids.append(request.get("id"))
        if self._teardown is None:
            self._teardown = Teardown(self._children, now + grace, deadline)
        else:
            self._teardown.hurry()

    def _ps(self, request: dict[str, Any]) -> dict[str, Any]:
        self._children.drain()
        entries = descendants(os.getpid())
        marks = list(self._marks.values())
        turn = request.get("turn")
        kept = self._marks.get(turn, set()) if isinstance(turn, str) else marks[-1] if marks else set()
        processes = [
            {
                "pid": entry.pid,
                "ppid": entry.parent,
                "start": entry.start,
                "state": entry.state,
                "command": command_line(entry.pid)[:200],
                "marked": (entry.pid, entry.start) in kept,
            }
            for entry in entries[:MAX_LISTED]
        ]
        agent = self._children.agent[0] if self._children.agent is not None else None
        return {"ok": True, "processes": processes, "truncated": len(entries) > MAX_LISTED, "agent": agent}


_OPERATIONS = {
    "spawn": Init._spawn,
    "listen": Init._listen,
    "run": Init._run,
    "mark": Init._mark,
    "kill_turn": Init._kill_turn,
    "signal": Init._signal,
    "teardown": Init._tear_down,
    "ps": Init._ps,
}


def become_subreaper() -> bool:
    """Let every orphan of the cell become this process's child; False where the system has no such thing."""
    try:
        import ctypes

        return int(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0
    except (ImportError, OSError, AttributeError):
        return os.getpid() == 1


def keep_to_itself() -> None:
    """As process 1: let nobody of the cell, who has the same user, read its memory or take it over."""
    if os.getpid() != 1:
        return
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def main(arguments: list[str]) -> NoReturn:
    """``--control-fd N``, and ``--stdio N N N`` when 0, 1 and 2 are not the agent's; never returns."""
    numbers = arguments[1:2] + arguments[3:]
    options = (arguments[:1], arguments[2:3]) if len(arguments) in (2, 6) else ()
    if options not in ((["--control-fd"], []), (["--control-fd"], ["--stdio"])) or not all(map(str.isdigit, numbers)):
        os.write(2, b"usage: init.py --control-fd N [--stdio N N N]\n")
        os._exit(2)
    subreaper = become_subreaper()
    keep_to_itself()
    take_stdio([int(number) for number in numbers[1:]])
    close_on_exec()
    try:
        os.setsid()
    except PermissionError:
        pass
    channel = Channel(int(arguments[1]))
    try:
        Init(channel).run(subreaper)
    except BaseException as error:
        channel.send({"event": "fault", "error": f"{type(error).__name__}: {error}"})
        job = Teardown(Children(), 0.0, time.monotonic() + LINGER_SECONDS)
        while job.step(time.monotonic()) is None:
            time.sleep(0.002)
        os._exit(1)
