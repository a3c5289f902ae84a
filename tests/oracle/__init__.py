"""The broker in memory: the same rules in plain Python."""
