"""acp-runner: runs coding agents in sandboxes, one turn per request, behind one HTTP API."""

__version__ = "0.1.0"
