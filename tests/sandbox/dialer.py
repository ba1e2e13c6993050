"""Runs in a cell: opens connections and says what comes back; one JSON request and one answer a line."""

import json
import os
import socket
import sys

SECONDS = 20.0


def recv(sock, count):
    """``count`` bytes, or all until the end."""
    data = b""
    while count is None or len(data) < count:
        chunk = sock.recv(65536 if count is None else count - len(data))
        if not chunk:
            break
        data += chunk
    return data


def handle(request, known):
    name, what = request.get("id"), request["do"]
    if what == "env":
        return os.environ.get(request["variable"])
    if what == "open":
        known[name] = socket.create_connection((request.get("host", "127.0.0.1"), request["port"]), SECONDS)
    elif what == "send":
        known[name].sendall(request["text"].encode() * request.get("times", 1))
    elif what == "shut":
        known[name].shutdown(socket.SHUT_WR)
    elif what == "recv":
        return recv(known[name], request.get("count")).decode()
    elif what == "size":
        return len(recv(known[name], None))
    elif what == "close":
        known.pop(name).close()
    return "ok"


def main():
    known: dict[str, socket.socket] = {}
    for line in sys.stdin:
        try:
            answer = handle(json.loads(line), known)
        except OSError as error:
            answer = type(error).__name__
        print(json.dumps(answer), flush=True)


main()
