"""How every table of the file is read."""

from __future__ import annotations

from typing import Final

from pydantic import ConfigDict

STRICT: Final = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
"""Unknown names are refused, nothing is changed afterwards, no error quotes what was given."""
