"""The metrics of OpenTelemetry: instruments that are made when they are first used."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from django_rmq.conf import get_config
from django_rmq.observability.telemetry import semantic_conventions

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram, Meter

    Attributes = dict[str, str | int]

EDGES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Bounds of the histograms in seconds, as the conventions advise."""


class Instruments(NamedTuple):
    """The instruments of this process."""

    sent: Counter
    consumed: Counter
    operation: Histogram
    process: Histogram
    processed_before: Counter


def _meter() -> Meter:
    from opentelemetry import metrics

    from django_rmq import __version__

    return metrics.get_meter("django_rmq", __version__, schema_url=semantic_conventions.SCHEMA_URL)


@cache
def instruments() -> Instruments:
    """Return the instruments. They find the project's SDK, whenever it is set up."""
    meter = _meter()
    return Instruments(
        meter.create_counter(
            semantic_conventions.SENT_MESSAGES,
            "{message}",
            "Number of messages producer attempted to send to the broker.",
        ),
        meter.create_counter(
            semantic_conventions.CONSUMED_MESSAGES,
            "{message}",
            "Number of messages that were delivered to the application.",
        ),
        meter.create_histogram(
            semantic_conventions.OPERATION_DURATION,
            "s",
            "Duration of messaging operation initiated by a producer or consumer client.",
            explicit_bucket_boundaries_advisory=EDGES,
        ),
        meter.create_histogram(
            semantic_conventions.PROCESS_DURATION,
            "s",
            "Duration of processing operation.",
            explicit_bucket_boundaries_advisory=EDGES,
        ),
        meter.create_counter(
            semantic_conventions.PROCESSED_BEFORE,
            "{message}",
            "Number of messages for which a listener with once was not called, because they were processed before.",
        ),
    )


def with_error(attributes: Attributes, error: str | None) -> Attributes:
    """Return ``attributes``, with the type of the error if there is one."""
    return attributes if error is None else {**attributes, semantic_conventions.ERROR_TYPE: error}


def _counted(attributes: Attributes) -> Attributes:
    """Return the attributes of a counter, which has no type of operation."""
    return {name: value for name, value in attributes.items() if name != semantic_conventions.OPERATION_TYPE}


def count_sent(topic: str, messages: int, error: BaseException | None = None) -> None:
    """Count messages that were written to Redis, or could not be because of ``error``."""
    failure = None if error is None else semantic_conventions.error_type(error)
    attributes = with_error(_counted(semantic_conventions.attributes(topic, "send")), failure)
    instruments().sent.add(messages, attributes)


def count_processed(topic: str, messages: int) -> None:
    """Count messages that a listener with ``once`` had processed before."""
    if get_config().metrics.opentelemetry:
        instruments().processed_before.add(
            messages, _counted(semantic_conventions.attributes(topic, "process"))
        )


def note_operation(attributes: Attributes, seconds: float, error: str | None) -> None:
    """Record how long a send, a commit or a rollback took."""
    instruments().operation.record(seconds, with_error(attributes, error))


def note_processing(attributes: Attributes, messages: int, seconds: float, error: str | None) -> None:
    """Record a call of a listener."""
    found = instruments()
    found.consumed.add(messages, with_error(_counted(attributes), error))
    found.process.record(seconds, with_error(attributes, error))


__all__ = ["count_processed", "count_sent", "instruments", "note_operation", "note_processing"]
