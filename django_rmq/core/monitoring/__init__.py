"""Reports of the core about messages: events, which are published as they happen, and the history, which is stored.

Workers and senders write both. ``operations.measurements`` and ``operations.health`` read and judge them, ``metrics`` shows
them to Prometheus, and ``observability`` has what a process itself observes: signals and OpenTelemetry.
"""
