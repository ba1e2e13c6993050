"""``listen``: sockets of the cell's loopback, made inside and handed over."""

from __future__ import annotations

import os
import socket

import pytest

from tests.inside.cell import Cell
from tests.ports import free_port


def passed(cell: Cell) -> list[int]:
    """Descriptors that come with the byte ahead of the reply."""
    byte, descriptors, _, _ = socket.recv_fds(cell.control, 1, 8, socket.MSG_CMSG_CLOEXEC)
    assert byte == b" "
    return list(descriptors)


def test_the_sockets_listen_and_the_init_keeps_none(cell: Cell) -> None:
    cell.event("ready")
    ports = [free_port(), free_port()]
    asked = cell.send(op="listen", ports=ports)
    listeners = [socket.socket(fileno=fd) for fd in passed(cell)]
    assert cell.reply(asked)["ports"] == ports
    assert [listener.getsockname() for listener in listeners] == [("127.0.0.1", port) for port in ports]
    with socket.create_connection(("127.0.0.1", ports[1]), 5) as client:
        accepted, address = listeners[1].accept()
        assert address == client.getsockname()
        accepted.close()
    for listener in listeners:
        listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), 5)
    assert cell.spawn("cat") > 0
    links = [os.readlink(f"/proc/{cell.process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{cell.process.pid}/fd")]
    assert len([link for link in links if link.startswith("socket:")]) == 1, "the control channel alone"


@pytest.mark.parametrize("ports", [None, [], ["80"], [0], [65536], [True], list(range(1000, 1200))])
def test_what_is_no_list_of_ports_is_refused(cell: Cell, ports: object) -> None:
    reply = cell.ask(op="listen", ports=ports)
    assert not reply["ok"]
    assert "port" in reply["error"]


def test_a_port_that_is_taken_is_named(cell: Cell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in cell.ask(op="listen", ports=[free_port(), port])["error"]
