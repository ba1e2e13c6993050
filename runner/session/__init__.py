"""Sessions: the coordinator, provisioning, prompts, transcript and the live event log."""
