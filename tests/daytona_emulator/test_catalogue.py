"""Images, snapshots with their logs, volumes, secrets and ssh tokens, driven by the real SDK."""

from __future__ import annotations

from pathlib import Path

import pytest
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    CreateSecretParams,
    CreateSnapshotParams,
    Image,
    Resources,
    VolumeMount,
)
from daytona.common.errors import DaytonaBadRequestError, DaytonaConflictError, DaytonaError, DaytonaNotFoundError
from daytona_api_client_async.exceptions import ApiException

from tests.daytona_emulator.building import BuildFailed, read
from tests.daytona_emulator.scenarios import play
from tests.daytona_emulator.server import DaytonaEmulator

DOCKERFILE = Image.base("debian:12").run_commands("echo built")


async def test_an_image_is_built_with_its_log(sdk: AsyncDaytona) -> None:
    log: list[str] = []
    asked = CreateSandboxFromImageParams(image=DOCKERFILE, resources=Resources(cpu=2, memory=4, disk=5))
    box = await sdk.create(asked, on_snapshot_create_logs=log.append)
    assert (box.cpu, box.memory, box.disk) == (2, 4, 5)
    assert "debian:12" in "".join(log)


async def test_a_snapshot_is_built_used_and_deleted(sdk: AsyncDaytona) -> None:
    log: list[str] = []
    asked = CreateSnapshotParams(name="agents", image=DOCKERFILE, resources=Resources(cpu=2, memory=2, disk=4))
    built = await sdk.snapshot.create(asked, on_logs=log.append)
    assert built.name == "agents" and "echo built" in "".join(log)
    box = await sdk.create(CreateSandboxFromSnapshotParams(snapshot="agents"))
    assert (box.snapshot, box.cpu) == ("agents", 2)
    listed = await sdk.snapshot.list()
    assert {one.name for one in listed.items} == {"agents", "daytona-small"}
    with pytest.raises(DaytonaConflictError):
        await sdk.snapshot.create(asked)
    await sdk.snapshot.delete(built)
    with pytest.raises(DaytonaNotFoundError):
        await sdk.snapshot.get("agents")
    with pytest.raises(DaytonaBadRequestError, match=r"Snapshot agents not found\. Did you add it"):
        await sdk.create(CreateSandboxFromSnapshotParams(snapshot="agents"))


async def test_a_build_that_fails(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    await play(emulator, "failing_build", {"reason": "npm exited with 1"})
    with pytest.raises(DaytonaError, match="npm exited with 1"):
        await sdk.snapshot.create(CreateSnapshotParams(name="bad", image=DOCKERFILE))


async def test_a_snapshot_that_went_to_sleep(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    await play(emulator, "inactive_snapshot", {})
    with pytest.raises(DaytonaBadRequestError, match="Snapshot daytona-small is inactive"):
        await sdk.create()
    await sdk.snapshot.activate(await sdk.snapshot.get("daytona-small"))
    await sdk.create()


async def test_a_baked_snapshot_has_its_files_from_the_start(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    emulator.bake("baked", {"bin/hello": b"#!/bin/sh\necho hello\n"})
    box = await sdk.create(CreateSandboxFromSnapshotParams(snapshot="baked"))
    assert (await box.process.exec("bin/hello")).result == "hello\n"
    await box.fs.delete_file("bin/hello")
    await box.stop()
    await box.start()
    assert (await box.process.exec("ls bin")).result == ""


async def test_volumes(sdk: AsyncDaytona) -> None:
    with pytest.raises(DaytonaNotFoundError):
        await sdk.volume.get("data")
    volume = await sdk.volume.get("data", create=True)
    assert [one.name for one in await sdk.volume.list()] == ["data"]
    mount = VolumeMount(volume_id=volume.id, mount_path="/data")
    box = await sdk.create(CreateSandboxFromSnapshotParams(volumes=[mount]))
    await box.refresh_data()
    assert box.volumes is not None and box.volumes[0].volume_id == volume.id
    await sdk.volume.delete(volume)
    assert await sdk.volume.list() == []


async def test_a_secret_is_inside_as_a_placeholder_only(sdk: AsyncDaytona) -> None:
    asked = CreateSecretParams(name="model-key", value="sk-real", hosts=["api.example.com"])
    secret = await sdk.secret.create(asked)
    assert secret.placeholder.startswith("dtn_secret_")
    box = await sdk.create(CreateSandboxFromSnapshotParams(secrets={"MODEL_KEY": "model-key"}))
    assert (await box.process.exec("echo $MODEL_KEY")).result == f"{secret.placeholder}\n"
    assert (await sdk.secret.get(secret.id)).hosts == ["api.example.com"]
    # The SDK does not wrap the errors of this service.
    with pytest.raises(ApiException):
        await sdk.secret.create(asked)
    with pytest.raises(DaytonaBadRequestError, match="Secret other not found"):
        await sdk.create(CreateSandboxFromSnapshotParams(secrets={"KEY": "other"}))
    await sdk.secret.delete(secret.id)
    assert (await sdk.secret.list()).items == []


async def test_ssh_tokens(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    access = await box.create_ssh_access(expires_in_minutes=10)
    assert (await box.validate_ssh_access(access.token)).valid
    await emulator.advance(601)
    assert not (await box.validate_ssh_access(access.token)).valid
    await box.revoke_ssh_access(access.token)


async def test_network_and_visibility(box: AsyncSandbox) -> None:
    await box.update_network_settings(network_block_all=True)
    await box.refresh_data()
    assert box.network_block_all


@pytest.mark.parametrize(
    ("dockerfile", "words"),
    [
        ("FROM a\nRUNN x", "unknown instruction: RUNN"),
        ("RUN x", "no build stage"),
        ("FROM a\nCOPY here there", "not found in build context"),
        ("# nothing\n", "cannot be empty"),
        (f"FROM a\nRUN {'x' * 65_536}", "greater than maximum allowed size"),
    ],
)
def test_a_dockerfile_that_a_builder_would_not_read(dockerfile: str, words: str) -> None:
    with pytest.raises(BuildFailed, match=words):
        read(dockerfile)


async def test_steps_are_run_where_that_was_asked_for(
    emulator: DaytonaEmulator, sdk: AsyncDaytona, tmp_path: Path
) -> None:
    """A step and a sandbox see this machine read-only; the sandbox is its image's user."""
    made, outside = tmp_path / "image", tmp_path / "outside"
    await play(emulator, "run_builds", {"path": "/usr/local/bin:/usr/bin:/bin", "writable": str(made)})
    steps = [f"RUN echo in > {made}/file", f"RUN touch {outside} || echo refused", "RUN useradd nobody2", "USER agent"]
    log: list[str] = []
    image = Image.base("debian:12").dockerfile_commands(steps)
    await sdk.snapshot.create(CreateSnapshotParams(name="run", image=image), on_logs=log.append)
    assert "refused" in "".join(log) and not outside.exists()
    box = await sdk.create(CreateSandboxFromSnapshotParams(snapshot="run"))
    said = await box.process.exec(f"id -u; cat {made}/file; echo out > {made}/file; echo mine > mine && cat mine")
    assert [word in said.result for word in ("1000\nin\n", "Read-only file system", "mine")] == [True] * 3
    failing = Image.base("debian:12").dockerfile_commands(["RUN exit 3"])
    with pytest.raises(DaytonaError, match="non-zero code: 3"):
        await sdk.snapshot.create(CreateSnapshotParams(name="bad", image=failing))
