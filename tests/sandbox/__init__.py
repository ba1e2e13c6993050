"""Sandbox providers: one contract for all, and what only a real cell can show."""
