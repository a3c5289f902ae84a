"""The work of this process as others see it: Django's signals, the stream of events, and OpenTelemetry."""
