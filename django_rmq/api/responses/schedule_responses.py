"""Schedules and what came of actions on them."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from django_rmq.api.responses import ResponseSerializer, maybe
from django_rmq.core.model.schedule import CATCH_UP
from django_rmq.operations import ScheduleStats


class ScheduleAnswer(ResponseSerializer):
    """A schedule and its runs, by Redis' clock."""

    name = serializers.CharField()
    topic = serializers.CharField()
    cron = maybe(serializers.CharField)
    every = maybe(help_text="Seconds")
    timezone = serializers.CharField()
    catch_up = serializers.ChoiceField(CATCH_UP)
    edited = serializers.ListField(child=serializers.CharField(), help_text="What differs from the settings")
    paused = serializers.BooleanField()
    next_ms = maybe()
    last_ms = maybe()
    late_ms = serializers.IntegerField(
        help_text="How much later than its time the latest tick came into the queue, or is overdue"
    )
    outcome = maybe(
        serializers.CharField,
        help_text="What became of the latest run that has ended: dead, done, removed or cancelled; resting if none "
        "of the last ones has ended and one has failed; null if it is not known",
    )
    outcome_ms = maybe(help_text="When this run was due")
    missing = serializers.BooleanField(help_text="Whether it is declared and Redis does not know it")


class SchedulesAnswer(ResponseSerializer):
    """All schedules."""

    results = ScheduleAnswer(many=True)


class ScheduleOutcomeAnswer(ResponseSerializer):
    """The outcome of an action on a schedule."""

    name = serializers.CharField()
    outcome = serializers.CharField()


class RunAnswer(ResponseSerializer):
    """The message that was sent."""

    name = serializers.CharField()
    id = serializers.CharField()


def schedule(one: ScheduleStats) -> dict[str, Any]:
    """Return a schedule's figures."""
    chosen = one.schedule
    return {
        "name": one.name,
        "topic": one.topic,
        "cron": chosen.cron,
        "every": chosen.every,
        "timezone": chosen.timezone,
        "catch_up": chosen.catch_up,
        "edited": sorted(one.override),
        "paused": one.is_paused,
        "next_ms": one.next_ms,
        "last_ms": one.last_ms,
        "late_ms": one.late_ms,
        "outcome": one.outcome or None,
        "outcome_ms": one.outcome_ms,
        "missing": one.is_missing,
    }


__all__ = ["RunAnswer", "ScheduleOutcomeAnswer", "SchedulesAnswer", "schedule"]
