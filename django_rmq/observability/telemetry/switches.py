"""The switches of OpenTelemetry in the settings: spans, and metrics."""

from __future__ import annotations

from django_rmq.conf import get_config


def is_traced() -> bool:
    """Return whether spans are switched on."""
    return get_config().tracing


def is_measured() -> bool:
    """Return whether metrics are switched on."""
    return get_config().metrics.opentelemetry


def is_on() -> bool:
    """Return whether spans or metrics are switched on."""
    config = get_config()
    return config.tracing or config.metrics.opentelemetry


__all__ = ["is_measured", "is_on", "is_traced"]
