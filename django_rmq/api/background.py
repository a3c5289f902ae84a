"""Actions that workers do in the background: start, list and stop."""

from __future__ import annotations

from typing import get_args

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from django_rmq.api import requests
from django_rmq.api.formats import Json, ResponseSerializer, maybe
from django_rmq.api.schema import documented
from django_rmq.api.view import RmqView
from django_rmq.core.model.background_action import ActionKind, ActionProgress
from django_rmq.core.model.status import STATE_OF
from django_rmq.operations import Permission


class BackgroundActionAnswer(ResponseSerializer):
    """An action in the background, and how far it is."""

    action_id = serializers.CharField(source="action.id")
    action = serializers.ChoiceField(get_args(ActionKind), source="action.kind")
    topic = serializers.CharField(source="action.topic")
    state = serializers.CharField(help_text="The state of the messages")
    selection = serializers.CharField(
        source="action.described", help_text="The messages, as the audit trail names them"
    )
    status = serializers.ChoiceField(
        ["waiting", "running", "stopping", "done", "stopped", "failed"],
        help_text="waiting: for a worker. failed: see `problem`",
    )
    done = serializers.IntegerField()
    total = serializers.IntegerField(
        source="action.total", help_text="How many match; if `exact` is false, how many are searched"
    )
    exact = serializers.BooleanField(source="action.is_exact")
    outcomes = serializers.DictField(child=serializers.IntegerField())
    rate = maybe(serializers.FloatField, help_text="Messages per second on average")
    seconds_left = maybe(serializers.FloatField)
    started_by = serializers.CharField(source="action.by")
    started_ms = serializers.IntegerField(source="action.started_ms")
    stopped_by = maybe(serializers.CharField)
    ended_ms = maybe()
    problem = serializers.CharField(allow_blank=True)


class BackgroundActionsAnswer(ResponseSerializer):
    """All actions in the background."""

    results = BackgroundActionAnswer(many=True, help_text="Those that ended in the last hour, too")


def background_action(one: ActionProgress, now_ms: int) -> Json:
    """Return an action in the background."""
    return BackgroundActionAnswer.of(
        one,
        state=STATE_OF.get(one.action.state, one.action.state),
        status=one.state(now_ms),
        rate=one.rate(now_ms),
        seconds_left=one.seconds_left(now_ms),
        stopped_by=one.stopped_by or None,
    )


class BackgroundView(RmqView):
    """``background/``."""

    needs = {"GET": Permission.VIEW}

    @documented("background", answers={200: BackgroundActionsAnswer})
    def get(self, request: Request) -> Response:
        """List the actions in the background, the oldest first."""
        operations = self.operations
        now_ms = operations.broker.now_ms()
        found = operations.background_actions(self.known())
        return Response({"results": [background_action(one, now_ms) for one in found]})


class StartActionView(RmqView):
    """``topics/{topic}/background/``."""

    needs = {"POST": Permission.VIEW}

    @documented(
        "start_action",
        takes=requests.BackgroundFields,
        answers={202: BackgroundActionAnswer},
        errors=[404, 409],
        examples={"replay": {"action": "replay", "filter": {"error": "ConnectTimeout"}, "rate": 200}},
    )
    def post(self, request: Request, topic: str) -> Response:
        """Let workers replay, delete or purge all messages that match, with the permission of that action."""
        declared, operations = self.topic(topic), self.operations
        asked = self.read(requests.BackgroundFields, request.data)
        found = operations.start_action(
            declared.name,
            asked["action"],
            asked["state"],
            requests.wanted(asked["filter"]),
            rate=asked.get("rate"),
            keep=asked["keep"],
        )
        return Response(background_action(found, operations.broker.now_ms()), status=202)


class StopActionView(RmqView):
    """``background/{action}/stop/``."""

    needs = {"POST": Permission.VIEW}

    @documented("stop_action", answers={202: BackgroundActionAnswer}, errors=[409])
    def post(self, request: Request, action: str) -> Response:
        """Stop an action in the background, with its own permission; what it has done stays done."""
        operations = self.operations
        found = operations.stop_action(action, self.known())
        return Response(background_action(found, operations.broker.now_ms()), status=202)
