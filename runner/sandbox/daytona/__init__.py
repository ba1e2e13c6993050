"""The Daytona provider: remote sandboxes that keep a session's disk while they sleep (DESIGN 3.4, 3.10)."""
