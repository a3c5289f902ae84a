"""Schedules of the topics that a user may know of: when they run, and pause, resume and run now."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from django_rmq.api.responses import schedule_responses as answers
from django_rmq.api.schema import documented
from django_rmq.api.view import RmqView
from django_rmq.operations import Permission


class SchedulesView(RmqView):
    """``schedules/``."""

    needs = {"GET": Permission.VIEW}

    @documented("schedules", answers={200: answers.SchedulesAnswer})
    def get(self, request: Request) -> Response:
        """List the schedules that workers have declared, with their next and last runs."""
        return Response(
            {"results": [answers.schedule(one) for one in self.operations.schedules(self.known())]}
        )


class PauseScheduleView(RmqView):
    """``schedules/{name}/pause/``."""

    needs = {"POST": Permission.PAUSE}

    @documented("pause_schedule", answers={200: answers.ScheduleOutcomeAnswer}, errors=[404, 409])
    def post(self, request: Request, name: str) -> Response:
        """Take back the waiting tick of a schedule, and plan no other until it is resumed."""
        outcome = self.operations.pause_schedule(name, self.known())
        return Response({"name": name, "outcome": outcome})


class ResumeScheduleView(RmqView):
    """``schedules/{name}/resume/``."""

    needs = {"POST": Permission.PAUSE}

    @documented("resume_schedule", answers={200: answers.ScheduleOutcomeAnswer}, errors=[404, 409])
    def post(self, request: Request, name: str) -> Response:
        """Continue a paused schedule from now on; what it missed is not sent."""
        outcome = self.operations.resume_schedule(name, self.known())
        return Response({"name": name, "outcome": outcome})


class RunScheduleView(RmqView):
    """``schedules/{name}/run/``."""

    needs = {"POST": Permission.SEND}

    @documented("run_schedule", answers={202: answers.RunAnswer}, errors=[400, 404, 409, 507])
    def post(self, request: Request, name: str) -> Response:
        """Send the message of a schedule now, beside its ticks.

        It counts as a send.
        """
        sent = self.operations.run_schedule(name, self.known(), is_charged=True)
        return Response({"name": name, "id": sent}, status=202)


__all__ = ["PauseScheduleView", "ResumeScheduleView", "RunScheduleView", "SchedulesView"]
