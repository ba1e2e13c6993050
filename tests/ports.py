"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket

BELOW_EPHEMERAL = range(20_000, 32_000)
"""No outgoing connection is given one of these between the look and the server's own bind."""


def free_port() -> int:
    """One that nobody listens on now."""
    for port in random.sample(BELOW_EPHEMERAL, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port of {BELOW_EPHEMERAL} is free")
