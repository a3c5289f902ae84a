"""Schedules of the topics that a user may know of: when they run, and pause, resume and run now."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from django_rmq.api.responses import ResponseSerializer, maybe
from django_rmq.api.schema import documented
from django_rmq.api.view import RmqView
from django_rmq.core.model.schedule import CATCH_UP
from django_rmq.operations import Permission, ScheduleStats


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


class SchedulesView(RmqView):
    """``schedules/``."""

    needs = {"GET": Permission.VIEW}

    @documented("schedules", answers={200: SchedulesAnswer})
    def get(self, request: Request) -> Response:
        """List the schedules that workers have declared, with their next and last runs."""
        return Response({"results": [schedule(one) for one in self.operations.schedules(self.known())]})


class PauseScheduleView(RmqView):
    """``schedules/{name}/pause/``."""

    needs = {"POST": Permission.PAUSE}

    @documented("pause_schedule", answers={200: ScheduleOutcomeAnswer}, errors=[404, 409])
    def post(self, request: Request, name: str) -> Response:
        """Take back the waiting tick of a schedule, and plan no other until it is resumed."""
        outcome = self.operations.pause_schedule(name, self.known())
        return Response({"name": name, "outcome": outcome})


class ResumeScheduleView(RmqView):
    """``schedules/{name}/resume/``."""

    needs = {"POST": Permission.PAUSE}

    @documented("resume_schedule", answers={200: ScheduleOutcomeAnswer}, errors=[404, 409])
    def post(self, request: Request, name: str) -> Response:
        """Continue a paused schedule from now on; what it missed is not sent."""
        outcome = self.operations.resume_schedule(name, self.known())
        return Response({"name": name, "outcome": outcome})


class RunScheduleView(RmqView):
    """``schedules/{name}/run/``."""

    needs = {"POST": Permission.SEND}

    @documented("run_schedule", answers={202: RunAnswer}, errors=[400, 404, 409, 507])
    def post(self, request: Request, name: str) -> Response:
        """Send the message of a schedule now, beside its ticks.

        It counts as a send.
        """
        sent = self.operations.run_schedule(name, self.known(), is_charged=True)
        return Response({"name": name, "id": sent}, status=202)
