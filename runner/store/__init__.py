"""The durable store behind one port: sessions, turns, prompts, interactions, records."""
