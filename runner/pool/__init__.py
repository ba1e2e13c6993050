"""Seats of live sandboxes: checkout, parking, expiry and proven teardown."""
