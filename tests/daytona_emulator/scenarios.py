"""What goes wrong with the real service, by name (each as it was seen there)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tests.daytona_emulator.box import Box
from tests.daytona_emulator.faults import Fault
from tests.daytona_emulator.problems import Problem, rate_limited

if TYPE_CHECKING:
    from tests.daytona_emulator.server import DaytonaEmulator

CREATE = r"^POST /api/sandbox$"
POLL = r"^GET /api/sandbox/[^/]+$"
Scenario = Callable[["DaytonaEmulator", dict[str, Any]], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}
"""Name → what makes it happen. Those about one sandbox take ``sandbox`` (id or name), repeatable ones ``times``."""


def _scenario(scenario: Scenario) -> Scenario:
    SCENARIOS[scenario.__name__] = scenario
    return scenario


def _box(emulator: DaytonaEmulator, asked: dict[str, Any]) -> Box:
    return emulator.boxes.find(str(asked.get("sandbox", "")))


def _times(asked: dict[str, Any]) -> int:
    return int(asked.get("times", 1))


@_scenario
async def quota(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The organization's processors are used up, on create and start. ``cpu``: the limit; ``status``: 400 or 403."""
    emulator.boxes.limits.status = int(asked.get("status", 400))
    emulator.boxes.limits.cpu = int(asked.get("cpu", 0))


@_scenario
async def disk_quota(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The disk is used up, by stopped sandboxes too: 400 on create. ``disk``: the limit."""
    emulator.boxes.limits.disk = int(asked.get("disk", 0))


@_scenario
async def no_runners(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """No capacity: 400 on create."""
    emulator.boxes.limits.runners = False


@_scenario
async def queue(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """No capacity, the newer way: creates are admitted and wait for a runner until their ``queueTimeout``."""
    emulator.boxes.limits.queue = True


@_scenario
async def suspended(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The organization is suspended: 403 on create."""
    emulator.boxes.limits.suspended = str(asked.get("reason", "Payment method required"))


@_scenario
async def restored(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Limits, rules and builds are as at the start; sandboxes keep what happened to them."""
    emulator.boxes.limits = type(emulator.boxes.limits)()
    emulator.faults.clear()
    emulator.events.muted = False
    emulator.catalogue.fail_builds = ""
    emulator.catalogue.hang_builds = False


@_scenario
async def rate_limit(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """429 with Retry-After. ``match``: which requests (creates); ``retry_after``: seconds."""
    problem = rate_limited(str(asked.get("retry_after", 1)))
    match = str(asked.get("match", CREATE))
    emulator.faults.add(Fault(match, _times(asked), 0, 429, problem.message, headers=problem.headers))


@_scenario
async def server_error(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """5xx of the control API. ``status`` (500), ``match`` (every request)."""
    match, status = str(asked.get("match", " /api/(?!socket)")), int(asked.get("status", 500))
    emulator.faults.add(Fault(match, _times(asked), 0, status, "Internal server error"))


@_scenario
async def dropped(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The connection is cut. ``when``: ``before`` (nothing was done) or ``after``."""
    match = str(asked.get("match", " /api/(?!socket)"))
    emulator.faults.add(Fault(match, _times(asked), drop=str(asked.get("when", "before"))))


@_scenario
async def slow(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Answers come late. ``seconds``."""
    match = str(asked.get("match", " /(api|toolbox)/(?!socket)"))
    emulator.faults.add(Fault(match, _times(asked), delay=float(asked.get("seconds", 1.0))))


@_scenario
async def create_dies_polling(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The create is admitted and the client's wait for it is refused: a sandbox whose id nobody was told."""
    problem = rate_limited(kind="authenticated")
    emulator.faults.add(Fault(POLL, _times(asked), 0, 429, problem.message, headers=problem.headers))


@_scenario
async def create_answer_lost(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The create is admitted and its answer never arrives."""
    emulator.faults.add(Fault(CREATE, _times(asked), drop="after"))


@_scenario
async def start_fails(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The next start of a sandbox ends in ``error``, recoverable. ``reason``."""
    _box(emulator, asked).traits.fails_start = str(asked.get("reason", "Timeout while starting sandbox"))


@_scenario
async def errored(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """A sandbox is in ``error``. ``reason``, ``recoverable``."""
    reason = str(asked.get("reason", "Sandbox has no runner and backup is not completed"))
    await emulator.boxes.fail(_box(emulator, asked), reason, bool(asked.get("recoverable", False)))


@_scenario
async def stuck_delete(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """A delete stays ``destroying`` and counts in the quota; ``stuck: false`` lets it end."""
    _box(emulator, asked).traits.stuck_delete = bool(asked.get("stuck", True))


@_scenario
async def auto_stop(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The service stops a sandbox as idle, whatever it does; returns when it is stopped."""
    box = _box(emulator, asked)
    if box.settled and box.state == "started":
        emulator.boxes.stop(box)
        assert box.change is not None
        # Something else may end the change: that is no reason for whoever waits here to be cancelled.
        await asyncio.wait([box.change])


@_scenario
async def deaf(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Refreshes of a sandbox's activity are taken and lost."""
    _box(emulator, asked).traits.deaf = True


@_scenario
async def idle_links(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Open preview connections of a sandbox are no activity, as one page of the service's own says."""
    _box(emulator, asked).traits.idle_links = True


@_scenario
async def vanished(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """A sandbox is gone without a word: 404 from now on."""
    await emulator.boxes.vanish(_box(emulator, asked))


@_scenario
async def daemon_dead(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Memory ran out: processes dead, bare 502, ``started`` for minutes, then ``stopped`` without a reason."""
    await emulator.boxes.kill_daemon(_box(emulator, asked))


@_scenario
async def container_gone(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """``started``, but the runner knows no such container: 404."""
    await emulator.boxes.lose_container(_box(emulator, asked))


@_scenario
async def expired_link(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Signed links are over and the preview token is another: the next connection is sent to a login page."""
    box = _box(emulator, asked)
    emulator.previews.expire(box)
    emulator.boxes.rotate(box)


@_scenario
async def dropped_links(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Open preview connections and log streams break; the sandbox runs on."""
    box = _box(emulator, asked)
    emulator.previews.cut(box)
    await emulator.toolbox.drop_followers(box)


@_scenario
async def stalled_links(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Preview connections stay open and nothing passes; ``stalled: false`` lets everything through."""
    emulator.previews.stall(_box(emulator, asked), bool(asked.get("stalled", True)))


@_scenario
async def in_state(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """A sandbox is in a state and stays there. ``state``, ``desired``."""
    box = _box(emulator, asked)
    box.state, box.desired = str(asked["state"]), str(asked.get("desired", box.desired))


@_scenario
async def muted_events(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The event channel connects and tells nothing."""
    emulator.events.muted = bool(asked.get("muted", True))


@_scenario
async def dropped_events(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """The event channel breaks; clients connect again by themselves."""
    await emulator.events.drop()


@_scenario
async def failing_build(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Builds of snapshots fail. ``reason``."""
    emulator.catalogue.fail_builds = str(asked.get("reason", "process exited with code 1"))


@_scenario
async def hanging_build(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Snapshots stay ``pending`` for ever."""
    emulator.catalogue.hang_builds = True


@_scenario
async def run_builds(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """Builds run their steps. ``path``: of the steps; ``writable``: the folder that they may change."""
    emulator.catalogue.workshop.path = str(asked.get("path", ""))
    emulator.catalogue.workshop.writable = str(asked.get("writable", ""))


@_scenario
async def snapshot_state(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """A snapshot came into another state by itself. ``snapshot``, ``state``."""
    emulator.catalogue.put_into(str(asked["snapshot"]), str(asked["state"]))


@_scenario
async def inactive_snapshot(emulator: DaytonaEmulator, asked: dict[str, Any]) -> None:
    """A snapshot was not used for weeks. ``snapshot``."""
    emulator.catalogue.usable(str(asked.get("snapshot", ""))).state = "inactive"


async def play(emulator: DaytonaEmulator, name: str, asked: dict[str, Any]) -> None:
    """Make one scenario happen; a ``Problem`` for an unknown one or an unknown sandbox."""
    if name not in SCENARIOS:
        raise Problem(400, f"no such scenario: {name}; there are: {', '.join(SCENARIOS)}")
    await SCENARIOS[name](emulator, asked)
