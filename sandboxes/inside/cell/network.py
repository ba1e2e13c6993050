"""Listening sockets of the cell's own loopback, made inside and accepted on by the runner: the only way out."""

from __future__ import annotations

import socket

from cell.request import BadRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BACKLOG = 128
MAX_PORTS = 128


def ports_of(request: dict[str, Any]) -> list[int]:
    """``ports`` of a request."""
    ports = request.get("ports")
    if not isinstance(ports, list) or not 0 < len(ports) <= MAX_PORTS:
        raise BadRequest(f"ports must be a list of 1 to {MAX_PORTS} numbers")
    if not all(isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536 for port in ports):
        raise BadRequest("a port is a number from 1 to 65535")
    return ports


def listen(ports: list[int]) -> list[socket.socket]:
    """Listen on these ports of 127.0.0.1; the caller closes the sockets.

    Raises:
        BadRequest: the system refuses one; none is left open.
    """
    made: list[socket.socket] = []
    try:
        for port in ports:
            made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made[-1].bind(("127.0.0.1", port))
            made[-1].listen(BACKLOG)
    except OSError as error:
        for item in made:
            item.close()
        raise BadRequest(f"port {ports[len(made) - 1]}: {error}") from None
    return made
