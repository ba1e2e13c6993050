"""What runs inside a sandbox: the cell init and the demo agent, as real processes."""
