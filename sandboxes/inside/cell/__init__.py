"""What the cell init is made of; standard library only, and of that only what starts fast."""
