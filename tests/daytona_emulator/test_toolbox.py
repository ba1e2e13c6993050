"""Commands, sessions and files inside a sandbox, driven by the real SDK."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from daytona import AsyncDaytona, AsyncSandbox, FileUpload, SessionExecuteRequest
from daytona.common.errors import (
    DaytonaBadGatewayError,
    DaytonaBadRequestError,
    DaytonaCommandAlreadyCompletedError,
    DaytonaConflictError,
    DaytonaError,
    DaytonaFileAccessDeniedError,
    DaytonaFileNotFoundError,
    DaytonaProcessExecutionTimeoutError,
    DaytonaProcessNotFoundError,
    DaytonaSessionEndedError,
)

from tests.daytona_emulator.server import DaytonaEmulator
from tests.sandbox import bed


async def session(box: AsyncSandbox, name: str = "s") -> str:
    await box.process.create_session(name)
    return name


async def in_background(box: AsyncSandbox, command: str, **fields: bool) -> str:
    asked = SessionExecuteRequest(command=command, run_async=True, **fields)
    return (await box.process.execute_session_command("s", asked)).cmd_id


async def follow(box: AsyncSandbox, command: str, begun: asyncio.Event | None = None) -> tuple[str, str]:
    """Both outputs to their end; ``begun`` is set with the first of them."""
    outputs: dict[str, list[str]] = {"out": [], "err": []}

    def take(stream: str, text: str) -> None:
        outputs[stream].append(text)
        if begun is not None:
            begun.set()

    await box.process.get_session_command_logs_async("s", command, partial(take, "out"), partial(take, "err"))
    return "".join(outputs["out"]), "".join(outputs["err"])


async def test_exec(box: AsyncSandbox) -> None:
    home = await box.get_work_dir()
    assert home == await box.get_user_home_dir()
    done = await box.process.exec("echo $WORD; pwd; echo no >&2; exit 3", env={"WORD": "yes"})
    assert (done.exit_code, done.result) == (3, f"yes\n{home}\nno\n")
    await box.fs.create_folder("deep", "755")
    assert (await box.process.exec("pwd", cwd="deep")).result == f"{home}/deep\n"
    with pytest.raises(DaytonaBadRequestError):
        await box.process.exec("pwd", cwd="nowhere")


async def test_exec_that_takes_too_long_is_killed(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    with pytest.raises(DaytonaProcessExecutionTimeoutError):
        await box.process.exec("sleep 300", timeout=1)
    assert emulator.processes.alive() == []


async def test_nothing_of_the_emulators_own_environment_is_inside(
    box: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSIDE_KEY", "never-inside")
    assert "never-inside" not in (await box.process.exec("env")).result


async def test_a_python_with_websockets_is_inside(box: AsyncSandbox) -> None:
    assert (await box.process.exec("python3 -c 'import websockets'")).exit_code == 0


async def test_a_session_keeps_its_state(box: AsyncSandbox) -> None:
    name = await session(box)
    run = box.process.execute_session_command
    done = await run(name, SessionExecuteRequest(command="cd /; export A=1; echo out; echo err >&2; false"))
    assert (done.exit_code, done.stdout, done.stderr) == (1, "out\n", "err\n")
    assert (await run(name, SessionExecuteRequest(command="pwd; echo $A"))).stdout == "/\n1\n"
    assert (await run(name, SessionExecuteRequest(command="if then"))).exit_code != 0
    assert (await run(name, SessionExecuteRequest(command="echo still here"))).stdout == "still here\n"
    with pytest.raises(DaytonaConflictError):
        await box.process.create_session(name)
    listed = await box.process.list_sessions()
    assert [len(one.commands) for one in listed] == [4]
    await box.process.delete_session(name)
    with pytest.raises(DaytonaProcessNotFoundError):
        await box.process.get_session(name)


async def test_a_command_in_the_background_is_followed_and_fed(box: AsyncSandbox) -> None:
    await session(box)
    command = await in_background(box, "read a; echo got $a; echo bad >&2", suppress_input_echo=True)
    following = asyncio.create_task(follow(box, command))
    assert (await box.process.get_session_command("s", command)).exit_code is None
    await box.process.send_session_command_input("s", command, "hello")
    assert await following == ("got hello\n", "bad\n")
    assert await follow(box, command) == ("got hello\n", "bad\n")
    assert (await box.process.get_session_command("s", command)).exit_code == 0
    with pytest.raises(DaytonaCommandAlreadyCompletedError):
        await box.process.send_session_command_input("s", command, "late")


async def test_input_is_echoed_unless_told_otherwise(box: AsyncSandbox) -> None:
    await session(box)
    command = await in_background(box, "read a")
    await box.process.send_session_command_input("s", command, "seen")
    assert (await follow(box, command))[0] == "seen\n"


async def test_markers_in_an_output_are_lost(box: AsyncSandbox) -> None:
    await session(box)
    command = await in_background(box, r"printf 'A\001\001\001B'")
    assert (await follow(box, command))[0] == "AB"


async def test_much_output(box: AsyncSandbox) -> None:
    await session(box)
    command = await in_background(box, "head -c 3000000 /dev/zero | tr '\\0' x")
    assert len((await follow(box, command))[0]) == 3_000_000


async def test_a_session_whose_shell_ended(box: AsyncSandbox) -> None:
    await session(box)
    done = await box.process.execute_session_command("s", SessionExecuteRequest(command="exit 7"))
    assert done.exit_code == 7
    with pytest.raises(DaytonaSessionEndedError):
        await box.process.execute_session_command("s", SessionExecuteRequest(command="true"))


async def test_a_deleted_session_takes_its_processes_along(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await session(box)
    command = await in_background(box, "trap '' TERM; echo begun; while :; do sleep 0.1; done")
    begun = asyncio.Event()
    following = asyncio.create_task(follow(box, command, begun))
    await begun.wait()
    await box.process.delete_session("s")
    await following
    # What was killed may take a moment to be gone.
    await bed.until(lambda: emulator.processes.alive() == [], "they are gone")


async def test_a_stop_breaks_what_is_in_flight(box: AsyncSandbox) -> None:
    await session(box)
    command = await in_background(box, "while [ ! -e here ]; do sleep 0.01; done; echo begun; sleep 300")
    begun = asyncio.Event()
    following = asyncio.create_task(follow(box, command, begun))
    running = asyncio.create_task(box.process.exec("touch here; sleep 300"))
    await begun.wait()
    await box.stop()
    with pytest.raises(DaytonaError, match="1011"):
        await following
    with pytest.raises(DaytonaBadGatewayError):
        await running


async def test_files(box: AsyncSandbox) -> None:
    home = await box.get_work_dir()
    await box.fs.upload_files([FileUpload(b"a" * 2_000_000, "big"), FileUpload(b"\x00\xff", f"{home}/in/ä b.bin")])
    assert await box.fs.download_file("big") == b"a" * 2_000_000
    assert await box.fs.download_file("in/ä b.bin") == b"\x00\xff"
    assert sorted(one.name for one in await box.fs.list_files(".")) == ["big", "in"]
    assert (await box.fs.get_file_info("big")).size == 2_000_000
    await box.fs.set_file_permissions("big", mode="600")
    assert (await box.fs.get_file_info("big")).permissions == "0600"
    await box.fs.move_files("big", "in/bigger")
    assert (await box.fs.search_files(".", "bigg*")).files == [f"{home}/in/bigger"]
    with pytest.raises(DaytonaFileNotFoundError):
        await box.fs.download_file("big")
    with pytest.raises(DaytonaBadRequestError):
        await box.fs.delete_file("in")
    await box.fs.delete_file("in", recursive=True)
    assert await box.fs.list_files(".") == []
    with pytest.raises(DaytonaFileNotFoundError):
        await box.fs.get_file_info("in")


async def test_the_machines_own_files_are_out_of_reach(box: AsyncSandbox) -> None:
    await box.process.exec("ln -s / out")
    for path in ("/etc/passwd", "../../../escape", "out/etc/passwd"):
        with pytest.raises(DaytonaFileAccessDeniedError):
            await box.fs.download_file(path)
    with pytest.raises(DaytonaError, match="permission denied"):
        await box.fs.upload_file(b"", "/escape")


async def test_environment_for_what_starts_later(sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    await box.update_env({"LATER": "1"})
    assert (await box.process.exec("echo $LATER")).result == "1\n"
    await box.update_env({}, unset=["LATER"])
    assert (await box.process.exec("echo $LATER")).result == "\n"
