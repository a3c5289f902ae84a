"""Schedules of the topics that a user may know of: when they run, and pause, resume and run now."""

from __future__ import annotations

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from django_rmq.api.json_format import ResponseSerializer, maybe
from django_rmq.api.schema import documented
from django_rmq.api.view import RmqView
from django_rmq.core.model.schedule import CATCH_UP
from django_rmq.operations import Permission


class ScheduleAnswer(ResponseSerializer):
    """A schedule and its runs, by Redis' clock."""

    name = serializers.CharField()
    topic = serializers.CharField()
    cron = maybe(serializers.CharField, source="schedule.cron")
    every = maybe(source="schedule.every", help_text="Seconds")
    timezone = serializers.CharField(source="schedule.timezone")
    catch_up = serializers.ChoiceField(CATCH_UP, source="schedule.catch_up")
    edited = serializers.ListField(child=serializers.CharField(), help_text="What differs from the settings")
    paused = serializers.BooleanField(source="is_paused")
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
    missing = serializers.BooleanField(
        source="is_missing", help_text="Whether it is declared and Redis does not know it"
    )


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


class SchedulesView(RmqView):
    """``schedules/``."""

    needs = {"GET": Permission.VIEW}

    @documented("schedules", answers={200: SchedulesAnswer})
    def get(self, request: Request) -> Response:
        """List the schedules that workers have declared, with their next and last runs."""
        schedules = self.operations.schedules(self.known())
        rows = [
            ScheduleAnswer.of(one, edited=sorted(one.override), outcome=one.outcome or None)
            for one in schedules
        ]
        return Response({"results": rows})


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
        message_id = self.operations.run_schedule(name, self.known(), is_charged=True)
        return Response({"name": name, "id": message_id}, status=202)
