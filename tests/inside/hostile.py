"""An agent under test that starts every kind of process that is hard to kill; one command a line on stdin.

``helper`` starts a long-lived helper · ``ping`` asks the helper · ``plain``, ``setsid``, ``nohup``, ``daemon``,
``pair``, ``loop``, ``deaf``, ``stopped`` start one hostile process · ``exit N`` ends the agent. Each answers one line.
"""

import os
import signal
import subprocess
import sys
import time

HELPER = "import sys\nfor line in sys.stdin:\n    print('pong', __import__('os').getpid(), flush=True)"
DEVNULL = subprocess.DEVNULL


def forever() -> None:
    """Sleep on, whatever happens."""
    while True:
        time.sleep(60)


def deaf() -> None:
    """Ignore what can be ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def forked(body: object) -> None:
    """Run ``body`` in a child that never comes back."""
    if os.fork() == 0:
        try:
            body()  # type: ignore[operator]
        finally:
            os._exit(0)


def daemon() -> None:
    """Double fork, own session, signals ignored."""

    def second() -> None:
        deaf()
        forever()

    os.setsid()
    forked(second)


def loop() -> None:
    """For ever: fork, let the parent exit, take a new session."""
    deaf()
    while True:
        if os.fork() > 0:
            os._exit(0)
        os.setsid()
        time.sleep(0.01)


def deaf_forever() -> None:
    """A child in the agent's own group that ignores signals."""
    deaf()
    forever()


SHELL = {
    "plain": ["sleep", "600"],
    "setsid": ["setsid", "sleep", "600"],
    "nohup": ["nohup", "sh", "-c", "while :; do sleep 0.05; done"],
    "pair": ["sh", "-c", "nohup setsid sh -c 'sleep 600 & sleep 600' >/dev/null 2>&1 &"],
    "stopped": ["sh", "-c", "kill -STOP $$; sleep 600"],
}
FORKS = {"daemon": daemon, "loop": loop, "deaf": deaf_forever}


def main() -> None:
    """Serve until stdin ends."""
    helper = None
    print("ready", os.getpid(), flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        answer = word
        if word == "helper":
            helper = subprocess.Popen(
                [sys.executable, "-c", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            helper.stdin.write("hello\n")  # type: ignore[union-attr]
            helper.stdin.flush()  # type: ignore[union-attr]
            answer = helper.stdout.readline().strip()  # type: ignore[union-attr]
        elif word == "ping":
            helper.stdin.write("ping\n")  # type: ignore[union-attr]
            helper.stdin.flush()  # type: ignore[union-attr]
            answer = helper.stdout.readline().strip()  # type: ignore[union-attr]
        elif word in SHELL:
            subprocess.Popen(SHELL[word], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        elif word in FORKS:
            forked(FORKS[word])
        elif word == "exit":
            os._exit(int(rest))
        print(answer, flush=True)
    if os.environ.get("STAY"):
        forever()


main()
