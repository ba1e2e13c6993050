"""How spares are made as sessions make their agents, and how the first turn of a session gets one (DESIGN 3.10)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from runner.errors import RunnerError
from runner.ids import SPARES
from runner.pool.pool import Pool
from runner.rules.pool import Seat
from runner.rules.spares import PLACE, Kind, adopted, is_new
from runner.sandbox.port import SpareProvider
from runner.session import usage
from runner.session.context import TurnContext
from runner.session.effective import Effective
from runner.session.opening import ResumeStuck
from runner.session.provision import Provisioner
from runner.turn.live import LiveSeat

log = logging.getLogger("runner.session")
MARK_SECONDS: Final = 3.0


class SpareMaker:
    """Makes spares as the first turn of a session makes its agent, with nothing that a dispatch can give."""

    def __init__(
        self,
        provisioner: Provisioner,
        pool: Pool[LiveSeat],
        providers: Mapping[str, SpareProvider],
        vault: Mapping[str, str],
    ) -> None:
        self._provisioner = provisioner
        self._pool = pool
        self._providers = providers
        self._vault = vault

    def facets(self, kind: Kind) -> Mapping[str, str]:
        """See ``pool.spares.Making``."""
        return self._provisioner.facets(self._effective(kind))

    async def start(self, seat: Seat, kind: Kind) -> LiveSeat:
        """See ``pool.spares.Making``; its helpers are told from what a turn will start."""
        pool = self._pool
        try:
            live = await self._provisioner.start(
                seat, seat.key, self._effective(kind), lambda sandbox, verdict: pool.abandon(seat, sandbox, verdict)
            )
        except ResumeStuck as stuck:
            raise RunnerError("harness_start_failed", str(stuck)) from None
        try:
            live.mark(seat.key[1])
            await live.marked(MARK_SECONDS)
        except BaseException:
            live.leave()
            pool.abandon(seat, live.sandbox, "start_given_up")
            raise
        return live

    async def remove(self, kind: Kind, spare_id: str) -> None:
        """See ``pool.spares.Making``."""
        await self._providers[kind.provider].remove(SPARES, spare_id)

    def _effective(self, kind: Kind) -> Effective:
        config = {"harness": kind.harness, "provider": kind.provider, "recipe": kind.recipe, "secrets": dict(kind.refs)}
        return Effective(config, {name: self._vault.get(ref) for name, ref in kind.refs})


def kind_of(effective: Effective) -> Kind | None:
    """The spares that could serve this configuration; None with a secret of its own."""
    given = effective.config.get("secrets", {})
    refs = {name: given.get(name) for name in effective.secrets}
    if None in refs.values():
        return None
    return Kind(effective.harness, effective.provider, effective.recipe, tuple(sorted(refs.items())))


def used(turn: TurnContext) -> None:
    """The turn starts an agent: the next one of its kind may be kept ready."""
    spares, kind = turn.services.spares, kind_of(turn.effective)
    if spares is not None and kind is not None and kind.provider in turn.services.spare_providers:
        spares.used(kind, turn.facets())


def claim(turn: TurnContext, epoch: int) -> None:
    """Give a session's first turn a spare, before it is durable: what is stored of it names its directories.

    A turn that does not become durable gives nothing back: see ``unclaim``.
    """
    session, services = turn.session, turn.services
    if (
        services.spares is None
        or session.written_to
        or not is_new(session.agent_state, epoch=epoch, chain=turn.resumes is not None)
    ):
        return
    kind = kind_of(turn.effective)
    provider = services.spare_providers.get(kind.provider) if kind is not None else None
    if kind is None or provider is None or not provider.untouched(*session.key):
        return
    claimed = services.spares.claim(session.key, kind, turn.facets(), turn.turn_id)
    if claimed is not None:
        turn.spare, live = claimed
        session.agent_state[PLACE] = adopted(kind.provider, turn.spare)
        live.take()
        live.keys.hand_over(session.key)
        session.learn_secrets(live.keys.tokens)
        usage.adopts(turn, live)
        live.mark(turn.turn_id)
        turn.live, turn.start, turn.reason = live, "spare", live.seat.reason


def settle(turn: TurnContext) -> None:
    """The turn is durable: from here on the directories are the session's, also for a runner that boots behind a kill.

    Where the disk refuses that, the turn starts like any other.
    """
    if turn.spare is None:
        return
    try:
        turn.services.spare_providers[turn.effective.provider].adopt(turn.spare)
    except OSError as error:
        log.error("%s could not be taken over: %s", turn.spare, error)
        unclaim(turn)
    used(turn)


def unclaim(turn: TurnContext) -> None:
    """The spare goes: nobody else may have what a session was named to."""
    if turn.spare is None or turn.live is None:
        return
    services, session, live = turn.services, turn.session, turn.live
    provider, spare_id = turn.effective.provider, turn.spare
    turn.spare = turn.live = None
    turn.start, turn.reason = "cold", "miss"
    session.agent_state.pop(PLACE, None)
    services.pool.destroy(live.seat, "claim_failed")
    services.tasks.spawn(f"tidy {spare_id}", _removed(turn, live.seat, provider, spare_id))


async def _removed(turn: TurnContext, seat: Seat, provider: str, spare_id: str) -> None:
    services = turn.services
    await services.pool.torn(seat)
    await services.spare_providers[provider].remove(SPARES, spare_id)
