"""DELETE: everything of a session stops, it ends, and its content goes (DESIGN 3.7)."""

from __future__ import annotations

from dataclasses import replace

from runner.errors import owned_elsewhere
from runner.rules.resume import AgentSession
from runner.session.commands import Commands
from runner.session.port import Reply
from runner.session.services import Services
from runner.session.session import Session


async def delete_session(services: Services, commands: Commands, session: Session) -> Reply:
    """Refuse newcomers, kill, end, remove; what fails is tried again by the next DELETE.

    Raises:
        RunnerError: ``owned_elsewhere``: another replica admitted a turn meanwhile. ``plane_unavailable``,
            ``store_unavailable``.
    """
    if not session.remains:
        now = session.ended_at = services.clock.now_ms()
        try:
            await commands.end(session)
            await session.outbox.flush()
            await _end(services, session, now)
        except BaseException:
            session.ended_at = None
            raise
        session.over = session.remains = True
        session.log.wake()
    places = {name: session.place(name) for name in services.provisioner.providers}
    await services.store.delete_session_content(session.project, session.session_id)
    used = {str(session.effective.config.get("provider", "local"))}
    if (known := AgentSession.of(session.agent_state.get("agent"))) is not None:
        used.add(known.place.provider)
    for name, provider in services.provisioner.providers.items():
        for place in {session.key, places[name]}:
            await provider.remove(*place, name in used)
    session.remains = False
    services.pool.book.forget(session.key)
    services.stories.forget(session.key)
    return Reply(200, {"session_id": session.session_id, "state": session.state.value})


async def _end(services: Services, session: Session, now: int) -> None:
    """Where there are other replicas, under a lease: a turn that one of them admits meanwhile comes first."""
    if services.owners.shared:
        async with services.owners.alone(session.key, session.head.epoch, "delete") as epoch:
            if epoch is None:
                raise owned_elsewhere("Another turn has the session. Try again.")
            await services.reload(session)
            await _save(services, session, now)
    else:
        await _save(services, session, now)


async def _save(services: Services, session: Session, now: int) -> None:
    session.ended_at = now
    await services.store.save_session(replace(session.row(now), ended_at=now))
