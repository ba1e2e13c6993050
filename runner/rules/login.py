"""Who may refresh a login, and which copy of it counts (case K4).

A login is one JSON file that a harness keeps in its home. Its refresh token is spent by each refresh: two agents that
hold the same one log each other out. So the token is in one place only, the *kept* login of the state directory, or it
is *lent* to one sandbox; all others get the login without it. What the borrower's agent refreshes is taken back.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

Verdict = Literal["same", "adopt", "keep", "conflict"]
MARGIN_MS: Final = 60_000
MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 32
LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999: an agent may write any number, and what comes later comes then."""
_MILLISECONDS: Final = 100_000_000_000


@dataclass(frozen=True, slots=True)
class Form:
    """What the login file of one harness looks like; members are named by dotted paths.

    Attributes:
        file: where it lies below the home.
        secrets: members that are secret; a file without any of them is no login.
        refresh: the member that a refresh spends; empty: this login is never refreshed.
        expires: when the access token expires: seconds or milliseconds since 1970, or a token (JWT) that says so
            itself; empty: it does not.
    """

    file: str
    secrets: tuple[str, ...]
    refresh: str = ""
    expires: str = ""


@dataclass(frozen=True, slots=True)
class Login:
    """What one copy says.

    Attributes:
        digest: of the whole file.
        rotates: it holds a refresh token.
        expires_ms: when its access token expires, milliseconds since 1970; None: nobody knows.
        secrets: the values to mask.
    """

    digest: str
    rotates: bool
    expires_ms: int | None
    secrets: tuple[str, ...]

    def expired(self, now_ms: int, margin_ms: int = 0) -> bool:
        """Whether the access token is of no use any more, or will not be in ``margin_ms``."""
        return self.expires_ms is not None and self.expires_ms - margin_ms <= now_ms


def read(form: Form, content: bytes | None) -> Login | None:
    """The login in this file; None for half a file, one that an agent emptied at a logout, or none at all."""
    data = _parsed(content)
    if content is None or data is None:
        return None
    secrets = tuple(value for path in form.secrets if isinstance(value := _member(data, path), str) and value)
    if not secrets:
        return None
    rotates = bool(form.refresh and _member(data, form.refresh))
    return Login(hashlib.sha256(content).hexdigest(), rotates, _instant(_member(data, form.expires)), secrets)


def without_refresh(form: Form, content: bytes) -> bytes:
    """The same login for those who may not refresh it: the member stays, empty, for agents insist on it."""
    data = _parsed(content)
    *folders, name = form.refresh.split(".")
    inner = _member(data, ".".join(folders)) if folders else data
    if not isinstance(inner, dict) or not inner.get(name):
        return content
    inner[name] = ""
    return json.dumps(data, indent=2).encode()


def judge(form: Form, lent: str, kept: bytes | None, found: bytes | None) -> Verdict:
    """What becomes of the copy that the borrower has.

    Args:
        form: the harness's.
        lent: digest of what was lent.
        kept: the file in the state directory.
        found: the file in the borrower's home.

    Returns:
        ``same``: nothing to do. ``adopt``: its agent refreshed the login, this is the one that counts. ``keep``: it is
        no login (half written, logged out) or has no refresh token, and ours stays. ``conflict``: somebody logged in
        anew meanwhile; that counts, and the borrower's copy is dropped.
    """
    ours, theirs = read(form, kept), read(form, found)
    if ours is None or ours.digest != lent:
        return "same" if ours is not None and theirs is not None and theirs.digest == ours.digest else "conflict"
    if theirs is None:
        return "keep"
    if theirs.digest == lent:
        return "same"
    return "adopt" if theirs.rotates else "keep"


def wanted(key_vars: Collection[str], given: Collection[str]) -> bool:
    """Whether a start takes the login: only without a key of its own."""
    return not any(name in given for name in key_vars)


def _parsed(content: bytes | None) -> dict[str, Any] | None:
    if content is None or len(content) > MAX_BYTES:
        return None
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and _shallow(data) else None


def _shallow(data: Any) -> bool:
    """Whether it can be written again: what nests deeper than any login can be read, and breaks the writer."""
    level, depth = [data], 0
    while level and depth < MAX_DEPTH:
        depth += 1
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
    return not level


def _member(data: Any, path: str) -> Any:
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _instant(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        if value != value:  # NaN, which JSON of Python's knows
            return None
        near = max(0, min(value, LAST_MS))
        return int(near) if near >= _MILLISECONDS else int(near * 1000)
    if not isinstance(value, str):
        return None
    expiry = _claims(value).get("exp") if value.count(".") == 2 else None
    return _instant(expiry) if isinstance(expiry, int | float) else None


def _claims(token: str) -> dict[str, Any]:
    """What a JWT says of itself; it is shown to nobody and decides nothing but when to ask anew."""
    body = token.split(".")[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}
