"""Signals, events and traces of this process."""
