"""Servers of their own for the tests that look from outside."""

from __future__ import annotations

from tests.e2e.conftest import serve

__all__ = ["serve"]
