"""The queue itself: it knows Redis and the protocol, and nothing of Django."""
