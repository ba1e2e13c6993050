"""One client through everything the emulator answers: no route is there that the real SDK did not go through."""

from __future__ import annotations

import aiohttp
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    CreateSecretParams,
    CreateSnapshotParams,
    Image,
    SessionExecuteRequest,
    UpdateSecretParams,
)

from tests.daytona_emulator.contract import openapi_violations, sdk_violations
from tests.daytona_emulator.scenarios import play
from tests.daytona_emulator.server import DaytonaEmulator

# The SDK reaches for these only when an answer lacks a field, or in its other half.
BY_HAND = {
    ("GET", "/api/sandbox/{id}/toolbox-proxy-url"),
    ("GET", "/api/secret"),
    ("GET", "/api/volumes/{id}"),
    ("GET", "/toolbox/{id}/files/download"),
}


async def through_commands(box: AsyncSandbox) -> None:
    await box.get_work_dir()
    await box.get_user_home_dir()
    await box.update_env({"A": "1"})
    await box.process.exec("true")
    await box.process.create_session("s")
    asked = SessionExecuteRequest(command="read a", run_async=True)
    command = (await box.process.execute_session_command("s", asked)).cmd_id
    await box.process.send_session_command_input("s", command, "b")
    await box.process.get_session_command_logs_async("s", command, lambda _: None, lambda _: None)
    await box.process.get_session_command_logs("s", command)
    await box.process.get_session_command("s", command)
    await box.process.get_session("s")
    await box.process.list_sessions()
    await box.process.delete_session("s")


async def through_files(box: AsyncSandbox) -> None:
    await box.fs.create_folder("d", "755")
    await box.fs.upload_file(b"1", "d/a")
    await box.fs.download_file("d/a")
    await box.fs.list_files("d")
    await box.fs.get_file_info("d/a")
    await box.fs.search_files("d", "*")
    await box.fs.set_file_permissions("d/a", mode="600")
    await box.fs.move_files("d/a", "d/b")
    await box.fs.delete_file("d/b")


async def through_settings(box: AsyncSandbox) -> None:
    await box.set_labels({"a": "b"})
    await box.set_autostop_interval(10)
    await box.set_auto_archive_interval(60)
    await box.set_auto_delete_interval(120)
    await box.set_ttl(600)
    await box.refresh_activity()
    await box.update_network_settings(network_block_all=True)
    await box.update_secrets({"KEY": "key"})
    access = await box.create_ssh_access()
    await box.validate_ssh_access(access.token)
    await box.revoke_ssh_access(access.token)
    await box.get_preview_link(1)
    signed = await box.create_signed_preview_url(1)
    await box.expire_signed_preview_url(1, signed.token)


async def through_the_catalogue(sdk: AsyncDaytona, emulator: DaytonaEmulator) -> None:
    log: list[str] = []
    image = Image.base("debian:12")
    await sdk.snapshot.create(CreateSnapshotParams(name="built", image=image), on_logs=log.append)
    await play(emulator, "inactive_snapshot", {"snapshot": "built"})
    await sdk.snapshot.activate(await sdk.snapshot.get("built"))
    await sdk.snapshot.list()
    await sdk.snapshot.delete(await sdk.snapshot.get("built"))
    await sdk.create(CreateSandboxFromImageParams(image=image), on_snapshot_create_logs=log.append)
    volume = await sdk.volume.get("v", create=True)
    await sdk.volume.list()
    await sdk.volume.delete(volume)
    secret = await sdk.secret.create(CreateSecretParams(name="key", value="v"))
    await sdk.secret.list()
    await sdk.secret.update(secret.id, UpdateSecretParams(value="w"))
    await sdk.secret.get(secret.id)


async def through_its_life(sdk: AsyncDaytona, emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await box.stop()
    await box.archive()
    while box.state != "archived":
        await box.refresh_data()
    await box.start()
    await play(emulator, "errored", {"sandbox": box.id, "recoverable": True})
    await box.recover()
    assert [one.name async for one in sdk.list()]
    await (await sdk.get("tour")).delete(wait=True)


async def by_hand(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    headers = {"Authorization": f"Bearer {emulator.api_key}"}
    await box.fs.upload_file(b"1", "here")
    volume_url, one = f"{emulator.api_url}/volumes", f"{emulator.api_url}/sandbox/{box.id}"
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.post(volume_url, json={"name": "hand"}) as answer:
            volume = (await answer.json())["id"]
        file = f"{emulator.origin}/toolbox/{box.id}/files/download?path=here"
        urls = [f"{one}/toolbox-proxy-url", f"{emulator.api_url}/secret", f"{volume_url}/{volume}", file]
        for url in urls:
            async with client.get(url) as answer:
                assert answer.status == 200
        async with client.post(f"{one}/public/false") as answer:
            assert answer.status == 200


async def test_through_everything(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    await through_the_catalogue(sdk, emulator)
    box = await sdk.create(CreateSandboxFromSnapshotParams(name="tour"))
    await through_commands(box)
    await through_files(box)
    await through_settings(box)
    by_sdk = {(one.method, one.template) for one in emulator.recording.all()}
    assert not by_sdk & BY_HAND
    await by_hand(emulator, box)
    await through_its_life(sdk, emulator, box)
    await sdk.secret.delete((await sdk.secret.list()).items[0].id)

    exchanges = emulator.recording.all()
    assert [one for one in exchanges if one.status >= 400 and one.template != "/api/volumes/by-name/{name}"] == []
    went = {(one.method, one.template) for one in exchanges}
    assert emulator.operations() - went == set()
    assert len(went) > 50
    assert sdk_violations(exchanges) == openapi_violations(exchanges) == []
