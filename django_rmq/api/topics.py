"""Topics, their slots and workers: figures and counters."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from django_rmq.api import requests
from django_rmq.api.responses import topic_responses as answers
from django_rmq.api.schema import documented
from django_rmq.api.view import RmqView
from django_rmq.operations import Permission
from django_rmq.operations.body_schemas import body_schema


class TopicsView(RmqView):
    """``topics/``."""

    needs = {"GET": Permission.VIEW}

    @documented("topics", answers={200: answers.TopicsAnswer})
    def get(self, request: Request) -> Response:
        """List all topics with their figures, which are up to three seconds old: all who look share them."""
        found = self.operations.shared_survey(self.known()).topics
        return Response({"results": [answers.topic(one) for one in found]})


class TopicView(RmqView):
    """``topics/{topic}/``."""

    needs = {"GET": Permission.VIEW}

    @documented("topic", answers={200: answers.OneTopicAnswer}, errors=[404])
    def get(self, request: Request, topic: str) -> Response:
        """Show one topic with its figures, its order and limits, and the type of its bodies."""
        declared = self.topic(topic)
        figures = self.operations.topic(declared.name)
        return Response(answers.one_topic(figures, body_schema(declared)))


class StatsView(RmqView):
    """``stats/``."""

    needs = {"GET": Permission.VIEW}

    @documented(
        "stats",
        answers={200: answers.StatsAnswer},
    )
    def get(self, request: Request) -> Response:
        """Count the messages sent, done and failed per topic. Topics with very many slots are left out."""
        return Response(answers.stats(self.operations.shared_flow(self.known())))


class SlotsView(RmqView):
    """``slots/``."""

    needs = {"GET": Permission.VIEW}

    @documented(
        "slots",
        query=requests.SlotsQuery,
        answers={200: answers.SlotsAnswer},
        errors=[404],
    )
    def get(self, request: Request) -> Response:
        """List slots of a topic: what each holds, and who owns it."""
        asked = self.read(requests.SlotsQuery, request.query_params)
        topic = self.topic(asked["topic"])
        found = self.operations.slots(topic.name, asked["first"], asked["limit"])
        return Response(answers.slots(found, asked["first"]))


class WorkersView(RmqView):
    """``workers/``."""

    needs = {"GET": Permission.VIEW}

    @documented("workers", answers={200: answers.WorkersAnswer})
    def get(self, request: Request) -> Response:
        """List live workers and the slots assigned to them."""
        known = set(self.known())
        return Response({"results": [answers.worker(one, known) for one in self.operations.workers()]})
