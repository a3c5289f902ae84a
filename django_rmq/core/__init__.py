"""The queue itself. It knows Redis and the protocol, and imports nothing from Django."""
