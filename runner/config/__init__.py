"""One settings model, from a file and variables (DESIGN 5)."""

from runner.config.credentials import ProxiedKey
from runner.config.load import load_settings
from runner.config.model import CustomHarness, CustomLogin, Limit, Server, Settings, Windows
from runner.resources import state_dir

__all__ = [
    "CustomHarness",
    "CustomLogin",
    "Limit",
    "ProxiedKey",
    "Server",
    "Settings",
    "Windows",
    "load_settings",
    "state_dir",
]
