"""Commands that start processes, in a session of their own as real agents do."""

from __future__ import annotations

import os
import signal

from demo.loop import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Generator
    from typing import Any

    from demo.session import Session

MAX_OUTPUT = 262_144


def _content(text: str) -> list[dict[str, Any]]:
    return [{"type": "content", "content": {"type": "text", "text": text}}]


def run_tool(session: Session, rest: str) -> Generator[Wait]:
    """Run CMD by the shell as a tool call with streamed output; a cancel kills it."""
    import subprocess

    command = rest or "true"
    call = session.loop.new_name("tool")
    tool = {"toolCallId": call, "title": command, "kind": "execute", "rawInput": {"command": command}}
    session.update("tool_call", status="pending", **tool)
    status, output = "failed", bytearray()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=session.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as failure:
        session.update("tool_call_update", toolCallId=call, status=status, content=_content(str(failure)))
        return
    try:
        session.update("tool_call_update", toolCallId=call, status="in_progress")
        yield from _follow(session, call, process, output)
        status = "completed" if process.returncode == 0 else "failed"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        text = output.decode("utf-8", "replace")
        session.update(
            "tool_call_update",
            toolCallId=call,
            status=status,
            content=_content(text),
            rawOutput={"exit_code": process.returncode, "output": text},
        )
    session.say(f"exit code {process.returncode}")


def _follow(session: Session, call: str, process: subprocess.Popen[bytes], output: bytearray) -> Generator[Wait]:
    """Collect output until the command is gone; a child that holds the pipe open does not matter."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    watch = os.pidfd_open(process.pid)
    try:
        fds: tuple[int, ...] = (pipe, watch)
        while True:
            gone = process.poll() is not None
            block = _drain(pipe)
            if block is None:
                fds = (watch,)
            elif block and len(output) < MAX_OUTPUT:
                output += block
                if not gone:
                    text = bytes(output).decode("utf-8", "replace")
                    session.update("tool_call_update", toolCallId=call, status="in_progress", content=_content(text))
            if gone:
                return
            yield Wait(fds=fds)
    finally:
        os.close(watch)


def _drain(pipe: int) -> bytes | None:
    """What is in the pipe now; None at its end."""
    found = b""
    while len(found) < MAX_OUTPUT:
        try:
            block = os.read(pipe, 65536)
        except BlockingIOError:
            return found
        if not block:
            return found or None
        found += block
    return found


def leak(session: Session, rest: str) -> None:
    """Start CMD in the background so that it survives a cancel."""
    import subprocess

    process = subprocess.Popen(
        ["nohup", "setsid", "/bin/sh", "-c", rest or "sleep 600"],
        cwd=session.cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    session.say(f"left {process.pid} running")
