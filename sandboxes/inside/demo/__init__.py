"""What the demo agent is made of; standard library only, and of that only what starts fast."""
