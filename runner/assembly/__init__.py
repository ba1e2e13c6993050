"""Puts the parts together: one replica, and the process that serves it."""

from runner.assembly.replica import Replica, build
from runner.assembly.serving import log_to_stderr, serve

__all__ = ["Replica", "build", "log_to_stderr", "serve"]
