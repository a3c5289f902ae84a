"""What others see of the work of this process: Django's signals, the stream of events, and OpenTelemetry."""
