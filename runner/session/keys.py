"""The book of model keys that stay outside of sandboxes: which token stands for which key (DESIGN 3.10).

Memory only. A token is minted for one start of one sandbox, and means nothing any more when that is torn down.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from runner.errors import RunnerError
from runner.harness.spec import HarnessSpec
from runner.redaction import Redactor
from runner.rules.credentials import Header, HostPattern, Proxied, Refusal, Upstream, cell_variables, plan
from runner.rules.pool import Key
from runner.session.effective import Effective
from runner.turn.leased import Leased

TOKEN_BYTES: Final = 32
LOCAL: Final = "local"
"""Only its sandboxes reach the runner's loopback interface."""


def mint() -> str:
    """A fresh token."""
    return f"acp-cell-{secrets.token_urlsafe(TOKEN_BYTES)}"


@dataclass(slots=True, eq=False)
class Grant:
    """What one token stands for.

    Attributes:
        project, session_id, harness: whose sandbox has it.
        route: name of the key route; the token is good under it alone.
        header: how the key travels.
        upstream: the only place that it is sent to.
        masks: what no answer may hold.
        requests: the tasks that answer requests with it now.
    """

    project: str
    session_id: str
    harness: str
    route: str
    header: Header
    upstream: Upstream
    key: str = field(repr=False)
    masks: Redactor = field(repr=False)
    requests: set[asyncio.Task[object]] = field(default_factory=set, repr=False)


class KeyBook:
    """Owner of all tokens of one runner.

    Args:
        hosts: where keys may go besides a route's own host and the operator's base URL.
        mint: makes a token.

    Attributes:
        port: of the loopback listener that the tokens are for; set before the first start.
    """

    def __init__(self, hosts: Sequence[HostPattern] = (), mint: Callable[[], str] = mint) -> None:
        self.port = 0
        self._hosts = tuple(hosts)
        self._mint = mint
        self._grants: dict[str, Grant] = {}

    def __len__(self) -> int:
        return len(self._grants)

    def find(self, token: str) -> Grant | None:
        """What a token stands for; None when it is worth nothing."""
        return self._grants.get(token)

    def check(self, spec: HarnessSpec, effective: Effective) -> None:
        """Refuse a start whose keys may not go where it wants them to.

        Raises:
            RunnerError: ``invalid_request`` naming the field.
        """
        self._plan(spec, effective)

    def lease(self, spec: HarnessSpec, effective: Effective, key: Key) -> Leased:
        """Mint tokens for one start of a session's sandbox; whoever starts it ends them.

        Raises:
            RunnerError: ``invalid_request``: see ``check``.
        """
        planned = self._plan(spec, effective)
        if not planned:
            return Leased()
        masks = Redactor(_as_bytes(item.key) for item in planned)
        tokens = [(item, self._mint()) for item in planned]
        for item, token in tokens:
            self._grants[token] = Grant(*key, spec.name, item.route.name, item.header, item.upstream, item.key, masks)
        env = {**spec.inherited, **spec.env, **_given(effective)}
        names = tuple(item.variable for item in planned)
        minted = tuple(token for _, token in tokens)
        return Leased(
            cell_variables(tokens, self.port, env),
            names,
            minted,
            lambda: self._end(minted),
            partial(self._hand_over, minted),
        )

    def _end(self, tokens: Sequence[str]) -> None:
        for token in tokens:
            grant = self._grants.pop(token, None)
            for task in list(grant.requests) if grant is not None else ():
                task.cancel()

    def _hand_over(self, tokens: Sequence[str], key: Key) -> None:
        for token in tokens:
            if (grant := self._grants.get(token)) is not None:
                grant.project, grant.session_id = key

    def _plan(self, spec: HarnessSpec, effective: Effective) -> list[Proxied]:
        if effective.provider != LOCAL or not spec.routes:
            return []
        referred = {name for name, ref in effective.config.get("secrets", {}).items() if ref}
        own = {**spec.operator, **spec.inherited, **spec.env}
        found = plan(spec.routes, own=own, given=_given(effective), referred=referred, hosts=self._hosts)
        if isinstance(found, Refusal):
            table = "secrets" if found.variable in effective.secrets else "env"
            field = f"{table}.{found.variable}"
            raise RunnerError("invalid_request", f"{field}: {found.message}", field=field)
        return found


def _given(effective: Effective) -> dict[str, str]:
    """The dispatch's variables; a secret goes before a plain one of its name."""
    return {**effective.config.get("env", {}), **{name: value or "" for name, value in effective.secrets.items()}}


def _as_bytes(key: str) -> str:
    """The key as it stands in a body that is read byte by byte."""
    return key.encode().decode("latin-1")
