"""Signals, events and traces of what the process does."""
