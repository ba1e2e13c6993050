"""The HTTP server: an aiohttp application over the port of the sessions."""
