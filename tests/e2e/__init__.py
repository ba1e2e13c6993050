"""Black-box tests: a real server process, real sandboxes, scripted and real agents."""
