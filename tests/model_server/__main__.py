"""``python -m tests.model_server``: the server as a program, until SIGINT or SIGTERM.

Prints ``{"ready":true,"url":...,"openai_url":...}``. Each line on standard input that says
``release`` lets every held request go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys

from tests.model_server.server import ModelServer


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with ModelServer(port) as model:
        ready = {"ready": True, "url": model.url, "openai_url": model.openai_url}
        print(json.dumps(ready, separators=(",", ":")), flush=True)

        def command() -> None:
            line = sys.stdin.readline()
            if not line:
                loop.remove_reader(sys.stdin)
            elif line.strip() == "release":
                model.release()

        # A regular file or /dev/null as standard input cannot be watched.
        with contextlib.suppress(PermissionError):
            loop.add_reader(sys.stdin, command)
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.model_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    asyncio.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
