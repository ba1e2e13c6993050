"""The Agent Client Protocol over any transport: sans-I/O peer, shells, client calls, updates to events."""
