"""Metrics of schedules."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from django_rmq.exceptions import RmqError
from django_rmq.operations import Operations, ScheduleStats

logger = logging.getLogger("django_rmq.metrics")

LABELS = ("schedule", "topic")


def schedules(operations: Operations) -> list[ScheduleStats]:
    """Return the schedules of the topics of the settings. Empty also if they cannot be read."""
    try:
        return operations.schedules(operations.config.topics)
    except RmqError as error:
        logger.warning("Metrics of schedules cannot be read: %s", error)
        return []


def families(found: list[ScheduleStats]) -> Iterable[Metric]:
    """Return the metrics of schedules."""
    following = GaugeMetricFamily(
        "rmq_schedule_next_timestamp_seconds",
        "When the schedule runs next; none for one that is paused.",
        labels=LABELS,
    )
    last = GaugeMetricFamily(
        "rmq_schedule_last_timestamp_seconds",
        "When the schedule was due last; none before its first run.",
        labels=LABELS,
    )
    late = GaugeMetricFamily(
        "rmq_schedule_lateness_seconds",
        "How much later than its time the latest tick of the schedule came into the queue, or is overdue.",
        labels=LABELS,
    )
    paused = GaugeMetricFamily("rmq_schedule_paused", "1 if the schedule is paused, else 0.", labels=LABELS)
    missing = GaugeMetricFamily(
        "rmq_schedule_missing",
        "1 if the schedule is declared and Redis does not know it, else 0.",
        labels=LABELS,
    )
    died = GaugeMetricFamily(
        "rmq_schedule_last_run_dead",
        "1 if the latest run of the schedule that has ended is dead, else 0.",
        labels=LABELS,
    )
    for one in found:
        labels = (one.name, one.topic)
        missing.add_metric(labels, int(one.is_missing))
        if one.is_missing:
            continue
        died.add_metric(labels, int(one.outcome == "dead"))
        for family, ms in ((following, one.next_ms), (last, one.last_ms), (late, one.late_ms)):
            if ms is not None:
                family.add_metric(labels, ms / 1000)
        paused.add_metric(labels, int(one.is_paused))
    yield from (following, last, late, paused, missing, died)


__all__ = ["families", "schedules"]
