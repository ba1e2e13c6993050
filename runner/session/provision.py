"""From a booked seat to a live agent: sandbox, handshake, agent session, and the settings that apply live."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from runner.acp import updates
from runner.acp.connection import AgentConnection, AgentError
from runner.clock import Clock
from runner.config import Settings
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.spec import STALE_RESULT_AFTER_CANCEL, LaunchContext
from runner.redaction import Redactor
from runner.rules.fingerprint import facets
from runner.rules.pool import Key, Seat
from runner.rules.resume import AgentSession, Place
from runner.sandbox.port import Provider, Sandbox, SandboxSpec
from runner.session.effective import Effective
from runner.session.keys import KeyBook
from runner.session.live_settings import set_mode, take_modes
from runner.session.logins import NO_KEY, Logins
from runner.session.opening import Opened, ResumeStuck, open_agent_session
from runner.session.port import Caller
from runner.tasks import shielded
from runner.turn.leased import Leased
from runner.turn.live import LiveSeat

UNDO_SECONDS: Final = 15.0
PROVIDER_SECONDS: Final = 5.0
"""What a provider may take beyond the deadline that it was given."""
Undo = Callable[[Sandbox, str], "asyncio.Task[bool]"]
RESERVED: Final = frozenset({"HOME", "TMPDIR"})


class Provisioner:
    """Starts agents and judges whether a dispatch can be served at all."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        providers: Mapping[str, Provider],
        recipes: Mapping[str, frozenset[str]],
        settings: Settings,
        state_dir: Path,
        clock: Clock,
        logins: Logins,
        keys: KeyBook | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.providers = providers
        self._recipes = recipes
        self._settings = settings
        self._state_dir = state_dir
        self._clock = clock
        self.logins = logins
        self._keys = keys
        self._key = os.urandom(32)

    def check(self, effective: Effective, caller: Caller) -> None:
        """Refuse what can be known to fail before a turn is admitted.

        Raises:
            RunnerError: ``harness_unknown``, ``harness_missing``, ``recipe_unknown``, ``forbidden`` or
                ``invalid_request`` naming the field.
        """
        if effective.provider not in self.providers:
            text = f"sandbox.provider: {effective.provider} is not set up here; acp-runner doctor says what is missing."
            raise RunnerError("invalid_request", text, field="sandbox.provider")
        condition = self.providers[effective.provider].condition()
        if condition.install_command is not None:
            text = f"sandbox.provider: {effective.provider}: {condition.reason}"
            raise RunnerError("invalid_request", text, field="sandbox.provider")
        spec = self.catalogue.get(effective.harness)
        available = spec.availability(self._state_dir)
        if not available.available:
            hint = f" Install it: {available.install_command}" if available.install_command else ""
            raise RunnerError("harness_missing", f"{effective.harness}: {available.reason}.{hint}")
        offered = self._recipes.get(effective.provider, frozenset())
        if effective.recipe not in offered:
            text = f"{effective.provider} has no recipe {effective.recipe}; known: {', '.join(sorted(offered))}."
            raise RunnerError("recipe_unknown", text)
        for table, names in (("env", effective.config.get("env", {})), ("secrets", effective.secrets)):
            for name in sorted(names):
                if name in RESERVED or name.startswith("ACP_RUNNER_"):
                    field = f"{table}.{name}"
                    raise RunnerError("invalid_request", f"{field}: this variable is the sandbox's own.", field=field)
        if self._keys is not None:
            self._keys.check(spec, effective)
        if effective.workspace_path is not None:
            self.check_path(Path(effective.workspace_path), caller)

    def check_path(self, path: Path, caller: Caller) -> Path:
        """Refuse a directory of the host that the caller may not use, or that is none; its real path.

        Raises:
            RunnerError: ``forbidden``, ``invalid_request``.
        """
        if "operate" not in caller.scopes:
            raise RunnerError("forbidden", "workspace.path: needs the scope operate.", field="workspace.path")
        return self._allowed(path)

    def _allowed(self, path: Path) -> Path:
        real = path.resolve()
        if real.is_relative_to(self._state_dir.resolve()):
            text = f"workspace.path: {path} is the runner's own."
            raise RunnerError("forbidden", text, field="workspace.path")
        roots = [root.resolve() for root in self._settings.local.roots]
        if roots and not any(real.is_relative_to(root) for root in roots):
            raise RunnerError("forbidden", f"workspace.path: {path} is under no [local] root.", field="workspace.path")
        if not real.is_dir():
            raise RunnerError("invalid_request", f"workspace.path: {path} is no directory.", field="workspace.path")
        return real

    def login_of(self, project: str, effective: Effective) -> str | None:
        """The identity of the login that a start takes; None where it takes none."""
        spec, given = self.catalogue.get(effective.harness), (*effective.config.get("env", {}), *effective.secrets)
        return self.logins.identity(project, spec, effective.provider, given)

    def with_help(self, harness: str, error: RunnerError) -> RunnerError:
        """An agent's word that it needs a login, with how its harness gets one; any other error as it is."""
        login = self.catalogue.get(harness).login if error.code == "harness_auth_required" else None
        if login is None or login.instructions in error.message or NO_KEY in error.message:
            return error
        return RunnerError(error.code, f"{error.message.rstrip('. ')}. {login.instructions}")

    def expires_ms(self, key: Key, effective: Effective) -> int | None:
        """When the secrets of a warm sandbox are of no use any more, a login among them."""
        known = [instant for instant in (effective.secrets_expire_ms, self.logins.expires_ms(key)) if instant]
        return min(known, default=None)

    def conditions(self) -> list[dict[str, Any]]:
        """The providers for ``GET /health`` and ``GET /ready``: ``available`` and why not, what runs of how much."""
        return [
            {"name": name, **asdict(provider.condition()), "capacity": provider.capacity}
            for name, provider in self.providers.items()
        ]

    def facets(self, effective: Effective) -> dict[str, str]:
        """The fingerprint of what this configuration bakes into a sandbox."""
        config = effective.config
        return facets(
            harness=self.catalogue.facet(effective.harness),
            provider=effective.provider,
            recipe=effective.recipe,
            isolation=self.providers[effective.provider].isolation,
            env=config.get("env", {}),
            secrets={name: value or "" for name, value in effective.secrets.items()},
            mcp_servers=config.get("mcp_servers", []),
            workspace={"path": effective.workspace_path, "files": config.get("workspace_files")},
            patches=self.catalogue.patches(effective.harness),
            key=self._key,
        )

    async def place(self, key: Key, effective: Effective) -> Place | None:
        """Where an agent session of this configuration is kept; None while there is no home.

        ``key``: of the directories (``Session.place``).
        """
        provider = self.providers[effective.provider]
        home = await provider.home_identity(*key)
        if home is None:
            return None
        path = Path(effective.workspace_path) if effective.workspace_path is not None else None
        workspace = str(provider.paths(*key, path).workspace)
        facet = self.catalogue.facet(effective.harness)
        return Place(effective.harness, facet, effective.provider, workspace, home)

    async def start(
        self, seat: Seat, place: Key, effective: Effective, undo: Undo, known: AgentSession | None = None
    ) -> LiveSeat:
        """Start a sandbox with its agent, up to an open agent session; undone in reverse on failure or cancellation.

        Args:
            seat: the booked seat.
            place: the key of the directories.
            effective: what to start.
            undo: takes a sandbox whose agent did not get that far, and the verdict; its teardown is waited for,
                bounded.
            known: the agent session to go on with; the seat says what came of it.

        Raises:
            ResumeStuck: going on with it failed so that the process had to go; nothing is left.
            RunnerError: ``harness_start_failed``, ``harness_exited``, ``harness_protocol_error``,
                ``harness_auth_required``, ``harness_unresponsive``, ``sandbox_start_failed``, ``credentials_missing``.
        """
        spec = self.catalogue.get(effective.harness)
        leased = self._keys.lease(spec, effective, seat.key) if self._keys is not None else Leased()
        try:
            live = await self._started(seat, place, effective, undo, known, leased)
        except BaseException:
            leased.end()
            raise
        live.keys = leased
        return live

    async def _started(
        self,
        seat: Seat,
        place: Key,
        effective: Effective,
        undo: Undo,
        known: AgentSession | None,
        leased: Leased,
    ) -> LiveSeat:
        seconds = max(self._settings.acp.start_seconds, self.catalogue.get(effective.harness).min_start_seconds)
        secrets = effective.known_secrets()
        try:
            spec, masked = await self._spec(seat, place, effective, secrets, leased, self._clock.monotonic() + seconds)
            async with asyncio.timeout_at(spec.deadline + PROVIDER_SECONDS):
                sandbox = await self.providers[effective.provider].start(spec)
        except BaseException as error:
            await self.logins.give_back(seat.seat_id)
            if isinstance(error, TimeoutError):
                text = f"The sandbox did not start within {seconds:g} s."
                raise RunnerError("sandbox_start_failed", text) from None
            raise
        redactor, steps = Redactor(masked), ["initialize"]
        try:
            connection = AgentConnection(
                sandbox.transport,
                max_line_bytes=self._settings.acp.max_line_bytes,
                redactor=redactor,
                clock=self._clock,
            )
            try:
                async with asyncio.timeout_at(spec.deadline):
                    opened = await self._handshake(
                        sandbox, connection, effective, redactor, known, spec.deadline, steps
                    )
                    steps.append("session/set_mode")
                    at = await self.place(place, effective)
                    return await self._seated(seat, at, sandbox, connection, effective, opened)
            except TimeoutError:
                text = f"The agent did not finish its start within {seconds:g} s: no answer to {steps[-1]}."
                raise RunnerError("harness_unresponsive", text + connection.last_words()) from None
        except BaseException as error:
            await _undone(undo(sandbox, _verdict(error)))
            raise

    async def _spec(
        self, seat: Seat, place: Key, effective: Effective, secrets: dict[str, str], leased: Leased, deadline: float
    ) -> tuple[SandboxSpec, tuple[str, ...]]:
        """What to start, and the values to mask in what its agent says."""
        project, session_id = place
        path = Path(effective.workspace_path) if effective.workspace_path is not None else None
        if path is not None:
            # It was when the dispatch came; a link on the way may lead elsewhere since.
            self._allowed(path)
        places = self.providers[effective.provider].paths(project, session_id, path)
        given = {**effective.config.get("env", {}), **secrets, **leased.variables}
        harness = self.catalogue.get(effective.harness)
        login = await self.logins.borrow(seat, harness, effective.provider, given, places.home)
        launch = harness.launch(
            LaunchContext(places.home, places.workspace, places.tmp, given, self._state_dir, login is not None)
        )
        spec = SandboxSpec(
            project=project,
            session_id=session_id,
            seat_id=seat.seat_id,
            argv=launch.argv,
            env=launch.env,
            secret_names=frozenset({*secrets, *harness.inherited, *harness.key_vars}),
            home_files={**launch.files, **login.files} if login is not None else launch.files,
            read=launch.read,
            write=launch.write,
            workspace_path=path,
            workspace_files=effective.files,
            recipe=effective.recipe,
            spare=seat.spare,
            deadline=deadline,
        )
        return spec, (*secrets.values(), *leased.tokens, *(login.secrets if login is not None else ()))

    async def _handshake(
        self,
        sandbox: Sandbox,
        connection: AgentConnection,
        effective: Effective,
        redactor: Redactor,
        known: AgentSession | None,
        deadline: float,
        steps: list[str],
    ) -> Opened:
        """``steps`` ends with what the agent was asked last."""
        try:
            info = await connection.initialize(seconds=max(0.0, deadline - self._clock.monotonic()))
            steps.append("session/new" if known is None else "the request to open its session")
            return await open_agent_session(
                connection,
                info,
                sandbox.workspace,
                effective.config.get("mcp_servers", []),
                known=known.agent_session_id if known is not None else None,
                proven=self.catalogue.get(effective.harness).resume,
                deadline=deadline,
            )
        except AgentError as error:
            raise RunnerError(
                "harness_start_failed", f"The agent refused to start a session: {redactor.text(str(error))}"
            ) from None
        except RunnerError as error:
            raise self.with_help(effective.harness, error) from None

    async def _seated(
        self,
        seat: Seat,
        place: Place | None,
        sandbox: Sandbox,
        connection: AgentConnection,
        effective: Effective,
        opened: Opened,
    ) -> LiveSeat:
        spec = self.catalogue.get(effective.harness)
        live = LiveSeat(
            seat=seat,
            sandbox=sandbox,
            connection=connection,
            inbox=connection.inbox(opened.agent_session_id),
            agent_session_id=opened.agent_session_id,
            config_options=list(opened.config_options or []),
            agent_session=AgentSession(opened.agent_session_id, place) if place is not None else None,
            resumed=opened.resumed,
            resume_failed=opened.failed,
            minted_input=spec.minted_input,
            answers_twice=STALE_RESULT_AFTER_CANCEL in spec.quirks,
        )
        take_modes(live, opened.modes)
        for _, _, payload in updates.grouped(list(opened.facts)):
            live.learn(payload)
        start_mode = spec.start_mode
        if start_mode in live.modes and start_mode != live.mode and not effective.config.get("mode"):
            await set_mode(live, start_mode)
        return live


def _verdict(error: BaseException) -> str:
    if isinstance(error, ResumeStuck):
        return "resume_failed"
    return error.code if isinstance(error, RunnerError) else "start_given_up"


async def _undone(teardown: asyncio.Task[bool]) -> None:
    # A process that stood still past both bounds finds the outer one gone too; the teardown goes on behind.
    with suppress(TimeoutError):
        await shielded(asyncio.wait({teardown}, timeout=UNDO_SECONDS), UNDO_SECONDS + 1)
