"""Records on their way from runners to the store: a stream, its sender, its worker (DESIGN 3.9)."""
