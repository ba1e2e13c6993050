"""Sandbox providers behind one port: local now; workspace, census and teardown."""
