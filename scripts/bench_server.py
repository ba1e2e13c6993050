"""What the sections of the bench share: a real server on a state directory of its own, its load, and percentiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOAD_SECONDS = 300
AGENT = json.dumps([sys.executable, "-I", "-S", str(HERE / "bench_agent.py")])
TOKEN = "the token of the bench"
SHARED_TOKEN = f"""
[[auth.tokens]]
token = "{TOKEN}"
project = "default"
scopes = ["dispatch", "read", "operate"]
"""
"""For servers that pass requests on to each other: all know the same token."""


class Server:
    """``acp-runner serve`` with the bench's agent as harness ``bench``.

    Args:
        folder: for the configuration, the log and the state directory.
        config: more TOML; with ``SHARED_TOKEN`` the server makes no token of its own.
        module: what is run instead of the command line's own module.
    """

    def __init__(self, folder: Path, config: str = "", module: str = "runner.cli.main") -> None:
        self._module = module
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "bench.toml"
        self._config.write_text(f"[harness.bench]\ncommand = {AGENT}\n{config}")
        self._state = folder / "state"
        self._log = folder / "server.log"
        self.start()
        self.token = TOKEN if SHARED_TOKEN in config else (self._state / "token").read_text().strip()

    def start(self) -> None:
        """Start it, again after ``kill``, and wait for its ready line; the port is a new one."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("ACP_RUNNER_")}
        command = [sys.executable, "-m", self._module, "serve", "--port", "0"]
        command += ["--state-dir", str(self._state), "--config", str(self._config)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=own)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a server did not start:\n{self._log.read_text()[-2000:]}")
        self.host, self.port = json.loads(line)["url"].removeprefix("http://").split(":")

    @property
    def door(self) -> str:
        """``HOST:PORT``."""
        return f"{self.host}:{self.port}"

    def load(self, mode: str, number: int, *doors: str, by: str = "bench_load") -> Any:
        """Run a load generator in its own process; ``doors`` are the addresses of others that it talks to."""
        command = [sys.executable, "-m", f"scripts.{by}", mode, self.host, self.port, self.token]
        command += [str(number), *doors]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_SECONDS, check=False)
        if done.returncode:
            raise SystemExit(f"the load {mode} failed: {done.stderr.strip() or done.stdout.strip()}")
        return json.loads(done.stdout)

    def rss_mb(self) -> float:
        """Resident memory of the server process."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise SystemExit("the server is gone")

    def stop(self) -> None:
        """Drain it; ``start`` makes another one over the same state."""
        self.close()

    def close(self) -> None:
        """Drain it, if it runs."""
        self.process.terminate()
        self.process.wait(60)


def since_ms(began: float) -> float:
    """Milliseconds since a moment of ``time.perf_counter``."""
    return (time.perf_counter() - began) * 1000


def percentile(values: list[float], share: float) -> float:
    """The value at a share of the sorted list."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
