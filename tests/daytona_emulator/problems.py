"""Refusals as the service words them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

API, PROXY, DAEMON = "DAYTONA_API", "DAYTONA_PROXY", "DAYTONA_DAEMON"


class Problem(Exception):
    """An answer that is no success.

    Args:
        status: HTTP status.
        message: the service's text.
        source: ``API`` gives the control plane's body, ``PROXY`` and ``DAEMON`` the toolbox's.
        code: machine-readable code of toolbox errors.
        headers: of the answer.
        body: the raw body instead of the JSON one; ``b""`` for a proxy without a word.
    """

    def __init__(
        self,
        status: int,
        message: str,
        source: str = API,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.source = source
        self.code = code
        self.headers = dict(headers or {})
        self.body = body

    def document(self, method: str, path: str) -> dict[str, Any]:
        """The JSON body: the API's and the toolbox's differ."""
        timestamp = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        phrase = HTTPStatus(self.status).phrase
        if self.source == API:
            head = {"path": path, "timestamp": timestamp, "statusCode": self.status}
            return {**head, "error": phrase, "message": self.message}
        return {
            "statusCode": self.status,
            "message": self.message,
            "code": self.code or phrase.upper().replace(" ", "_"),
            "timestamp": timestamp,
            "path": path,
            "method": method,
            "source": self.source,
        }


def not_found(wanted: str) -> Problem:
    return Problem(404, f"Sandbox with ID or name {wanted} not found")


def changing() -> Problem:
    return Problem(409, "Sandbox state change in progress")


def not_started() -> Problem:
    text = "failed to get runner info: no IP address found. Is the Sandbox started?"
    return Problem(400, f"bad request: {text}", PROXY)


def bare_502() -> Problem:
    """What the proxy says when nobody listens, or the daemon died."""
    return Problem(502, "", PROXY, body=b"")


def rate_limited(retry_after: str = "1", kind: str = "sandbox-create") -> Problem:
    headers = {
        "Retry-After": retry_after,
        f"Retry-After-{kind}": retry_after,
        f"X-RateLimit-Limit-{kind}": "300",
        f"X-RateLimit-Remaining-{kind}": "0",
        f"X-RateLimit-Reset-{kind}": retry_after,
    }
    return Problem(429, "ThrottlerException: Too Many Requests", headers=headers)
