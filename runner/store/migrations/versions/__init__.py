"""The revisions, one file each; the chain is written in their ``down_revision``."""
