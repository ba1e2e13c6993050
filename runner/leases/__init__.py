"""Lease planes behind one port, and the heartbeat that renews them."""
