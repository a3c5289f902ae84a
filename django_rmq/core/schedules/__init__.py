"""Schedules: when they tick, which tick is next, and the steps by which each tick becomes one message."""
