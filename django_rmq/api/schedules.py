"""Schedules of the topics that a user may know of: when they run, and pause, resume and run now.

The serializers of responses are here, too.
"""

from __future__ import annotations

from rest_framework import serializers

from django_rmq.api.view import Json, ResponseSerializer, RmqView, maybe, route
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
    @route("schedules", Permission.VIEW, answers={200: SchedulesAnswer})
    def get(self) -> Json:
        """List the schedules that workers have declared, and those of this project that Redis does not know, with their runs."""
        schedules = self.operations.schedules(self.known())
        rows = [
            ScheduleAnswer.of(one, edited=sorted(one.override), outcome=one.outcome or None)
            for one in schedules
        ]
        return {"results": rows}


class PauseScheduleView(RmqView):
    @route("pause_schedule", Permission.PAUSE, answers={200: ScheduleOutcomeAnswer}, errors=[404])
    def post(self, name: str) -> Json:
        """Take back the waiting tick of a schedule, and plan no other until it is resumed."""
        return {"name": name, "outcome": self.operations.pause_schedule(name, self.known())}


class ResumeScheduleView(RmqView):
    @route("resume_schedule", Permission.PAUSE, answers={200: ScheduleOutcomeAnswer}, errors=[404])
    def post(self, name: str) -> Json:
        """Continue a paused schedule from now on; what it missed is not sent."""
        return {"name": name, "outcome": self.operations.resume_schedule(name, self.known())}


class RunScheduleView(RmqView):
    @route("run_schedule", Permission.SEND, answers={202: RunAnswer}, errors=[400, 404, 507])
    def post(self, name: str) -> Json:
        """Send the message of a schedule now, beside its ticks.

        It counts as a send.
        """
        return {"name": name, "id": self.operations.run_schedule(name, self.known(), is_charged=True)}
