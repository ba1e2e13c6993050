"""Start the agent on the stdio that the init was given, and commands beside it."""

from __future__ import annotations

import errno
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cell.confine import Confinement

_STAGES = {b"c": "cwd", b"e": "exec", b"r": "confine"}


class SpawnError(Exception):
    """The agent could not be started; the text names the path and the system's reason."""


def close_on_exec() -> None:
    """Let no descriptor but 0, 1 and 2 reach the agent, whatever the init inherited."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                pass


def take_stdio(fds: Sequence[int]) -> None:
    """Make inherited descriptors the standard streams, for a program whose own ones belong to a wrapper around it."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def let_go_of_stdio() -> None:
    """Give up the init's own copies, so that the agent's end of a pipe is the only one."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd, inheritable=False)
    os.close(null)


def _candidates(program: str, env: Mapping[str, str]) -> list[str]:
    if "/" in program:
        return [program]
    return [os.path.join(folder or ".", program) for folder in env.get("PATH", os.defpath).split(":")]


def spawn(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, confined: Confinement, output: int | None = None
) -> int:
    """Fork and exec ``argv`` in a session of its own, with default signals and only descriptors 0 to 2.

    ``output``: a descriptor that becomes its stdout and stderr, behind an empty stdin; None leaves all as they are.

    Raises:
        SpawnError: the directory or the program cannot be used; nothing is left running.
    """
    programs = [os.fsencode(path) for path in _candidates(argv[0], env)]
    arguments = [os.fsencode(argument) for argument in argv]
    variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    directory = os.fsencode(cwd)
    if any(b"\0" in item for item in (*programs, *arguments, directory)):
        raise SpawnError("a NUL character in the command")
    report, child_report = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(child_report, programs, arguments, variables, directory, confined, output)
    os.close(child_report)
    try:
        told = os.read(report, 16)
    finally:
        os.close(report)
    if told:
        os.waitpid(pid, 0)
        stage, number = _STAGES[told[:1]], int(told[1:])
        culprit = cwd if stage == "cwd" else argv[0]
        raise SpawnError(f"{stage}: {errno.errorcode.get(number, number)}: {os.strerror(number)}: {culprit}")
    return pid


def _child(
    report: int,
    programs: list[bytes],
    arguments: list[bytes],
    variables: dict[bytes, bytes],
    directory: bytes,
    confined: Confinement,
    output: int | None,
) -> None:
    """In the child: never returns; an error goes to the parent as stage letter and errno."""
    stage, number = b"c", 0
    try:
        os.setsid()
        for member in range(1, signal.NSIG):
            try:
                signal.signal(member, signal.SIG_DFL)
            except (OSError, ValueError):
                pass
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if output is not None:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.chdir(directory)
        stage = b"r"
        confined.apply()
        stage, number = b"e", errno.ENOENT
        for program in programs:
            try:
                os.execve(program, arguments, variables)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    number = error.errno or errno.EINVAL
    except OSError as error:
        number = error.errno or errno.EINVAL
    except BaseException:
        number = errno.EINVAL
    finally:
        os.write(report, b"%s%d" % (stage, number))
        os._exit(127)
