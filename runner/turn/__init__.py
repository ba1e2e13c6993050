"""Drives one ACP prompt, settles it, and fans its events out."""
