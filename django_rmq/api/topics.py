"""Topics, their slots and workers: figures and counters."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from django_rmq.api import requests
from django_rmq.api.answers import topics as answers
from django_rmq.api.schema import documented
from django_rmq.api.view import RmqView
from django_rmq.operations import Permission


class TopicsView(RmqView):
    """``topics/``."""

    needs = {"GET": Permission.VIEW}

    @documented("topics", "All topics, and what they hold", answers={200: answers.TopicsAnswer})
    def get(self, request: Request) -> Response:
        """List topics."""
        return Response({"results": [answers.topic(one) for one in self.operations.overview(self.known())]})


class TopicView(RmqView):
    """``topics/{topic}/``."""

    needs = {"GET": Permission.VIEW}

    @documented("topic", "One topic, and what it holds", answers={200: answers.TopicAnswer}, errors=[404])
    def get(self, request: Request, topic: str) -> Response:
        """Show one topic."""
        return Response(answers.topic(self.operations.topic(self.topic(topic).name)))


class StatsView(RmqView):
    """``stats/``."""

    needs = {"GET": Permission.VIEW}

    @documented(
        "stats",
        "What has passed through topics so far: sent, done and failed. Topics of very many slots are left out",
        answers={200: answers.StatsAnswer},
    )
    def get(self, request: Request) -> Response:
        """Count."""
        return Response(answers.stats(self.operations.flow(self.known())))


class SlotsView(RmqView):
    """``slots/``."""

    needs = {"GET": Permission.VIEW}

    @documented(
        "slots",
        "Slots of a topic: what each holds, and who owns it",
        query=requests.SlotsQuery,
        answers={200: answers.SlotsAnswer},
        errors=[404],
    )
    def get(self, request: Request) -> Response:
        """List slots."""
        asked = self.read(requests.SlotsQuery, request.query_params)
        topic = self.topic(asked["topic"])
        found = self.operations.slots(topic.name, asked["first"], asked["limit"])
        return Response(answers.slots(found, asked["first"]))


class WorkersView(RmqView):
    """``workers/``."""

    needs = {"GET": Permission.VIEW}

    @documented("workers", "Live workers, and what is assigned to them", answers={200: answers.WorkersAnswer})
    def get(self, request: Request) -> Response:
        """List workers."""
        known = set(self.known())
        return Response({"results": [answers.worker(one, known) for one in self.operations.workers()]})
