"""Sending without Django: from a body to its slot, in as few round trips as possible."""
