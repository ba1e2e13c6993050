"""The fingerprint of a sandbox: a digest of everything baked into it, by facet (DESIGN 2)."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, Final

CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def digest(value: Any) -> str:
    """Digest of a JSON value; key order does not matter."""
    return hashlib.blake2b(_canonical(value), digest_size=16).hexdigest()


def keyed_digest(value: Any, key: bytes) -> str:
    """Digest of secret material under a key that never leaves the process."""
    return hmac.new(key, _canonical(value), hashlib.sha256).hexdigest()


def _canonical(value: Any) -> bytes:
    return CANONICAL.encode(value).encode()


def facets(
    *,
    harness: str,
    provider: str,
    recipe: str,
    isolation: str,
    env: Mapping[str, str],
    secrets: Mapping[str, str],
    mcp_servers: list[Any],
    workspace: Mapping[str, Any],
    patches: str,
    key: bytes,
) -> dict[str, str]:
    """Every facet's digest. ``key`` makes the secrets' digest useless outside this process (memory only)."""
    return {
        "harness": harness,
        "provider": provider,
        "recipe": recipe,
        "isolation": isolation,
        "env": digest(env),
        "secrets": keyed_digest(secrets, key),
        "mcp_servers": keyed_digest(mcp_servers, key),
        "workspace": digest(workspace),
        "patches": patches,
    }
