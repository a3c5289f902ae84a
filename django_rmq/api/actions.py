"""Actions on messages and topics. A long one runs for ``SLICE_SECONDS``, and the same request continues it.

Workers do an action in the background, which requests start, list and stop. The serializers of responses are here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from django_rmq.api import errors, requests
from django_rmq.api.json_format import Json, ResponseSerializer, maybe
from django_rmq.api.requests import Fields, body_for
from django_rmq.api.schema import documented
from django_rmq.api.view import MESSAGE_ID, MessageRoute, RmqView, outcome
from django_rmq.core.model.status import STATE_OF
from django_rmq.core.model.stored_actions import ActionKind, ActionProgress
from django_rmq.operations import ActionResult, BulkProgress, Limits, Permission
from django_rmq.operations.authorization import PERMISSION_OF

UNDO_HELP = "Only if deleted messages are kept: the id for `deletions/{id}/undo/`, for one hour"


class OutcomeAnswer(ResponseSerializer):
    """The outcome of an action on one message."""

    id = serializers.CharField()
    outcome = serializers.CharField()
    undo = serializers.CharField(required=False, help_text=UNDO_HELP)


class ProgressAnswer(ResponseSerializer):
    """The progress of an action on many messages or slots. If `complete` is false, repeat the request to continue."""

    done = serializers.IntegerField()
    total = serializers.IntegerField()
    outcomes = serializers.DictField(child=serializers.IntegerField())
    complete = serializers.BooleanField(source="is_complete")
    problems = serializers.ListField(child=serializers.CharField())
    undo = serializers.CharField(required=False, help_text=UNDO_HELP)
    kept = serializers.IntegerField(required=False, help_text="With `undo`: how many can be brought back")
    results = OutcomeAnswer(many=True, required=False, help_text="Only if the request has `ids`")


def progress(run_progress: BulkProgress) -> Json:
    undo_fields = {"undo": run_progress.undo, "kept": run_progress.kept} if run_progress.undo else {}
    return ProgressAnswer.of(run_progress, problems=run_progress.problems[:20], **undo_fields)


def acted(done: ActionResult) -> Json:
    """Return the outcomes of an action on named messages."""
    progress = BulkProgress(len(done.found), len(done.found), done.outcomes, is_complete=True)
    return ProgressAnswer.of(
        progress, results=[{"id": name, "outcome": word} for name, word in done.found.items()]
    )


SLICE_SECONDS = 2.0
"""Seconds that one request works on many messages."""


class ReplayMessageView(MessageRoute):
    """``topics/{topic}/messages/{id}/replay/``."""

    needs = {"POST": PERMISSION_OF["replay"]}

    @documented(
        "replay_message",
        path=MESSAGE_ID,
        query=requests.NameQuery,
        takes=requests.EditFields,
        answers={200: OutcomeAnswer},
        errors=[404, 409, 507],
        examples={"as it was": {}, "edited": {"body": {"sku": 1, "shop": 8}}},
    )
    def post(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Send a dead message again with all its retries; with a body, the edited message.

        An edited message counts as a send.
        """
        declared, operations = self.topic(topic), self.operations
        fields = self.read(requests.EditFields, request.data)
        one = self.id_of(declared, id)
        if "body" in fields:
            size = int(request.META["CONTENT_LENGTH"])
            result = operations.replay_edited(
                declared.name, one, body_for(declared, fields["body"]), charged_bytes=size
            )
        else:
            result = operations.replay(declared.name, [one])
        return outcome(result, one, {"replayed": 200, "merged": 200})


class BuryView(MessageRoute):
    """``topics/{topic}/messages/{id}/bury/``."""

    needs = {"POST": PERMISSION_OF["bury"]}

    @documented(
        "bury",
        path=MESSAGE_ID,
        query=requests.NameQuery,
        takes=requests.BuryFields,
        answers={200: OutcomeAnswer, 202: OutcomeAnswer},
        errors=[404, 409],
        examples={"with a reason": {"why": "requested by the customer"}},
    )
    def post(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Move a message to Dead. 202: a consumer has it, and it goes to Dead when that delivery ends."""
        declared = self.topic(topic)
        fields = self.read(requests.BuryFields, request.data)
        one = self.id_of(declared, id)
        result = self.operations.bury(declared.name, [one], fields.get("why", ""))
        return outcome(result, one, {"buried": 200, "running": 202})


class CancelView(MessageRoute):
    """``topics/{topic}/messages/{id}/cancel/``."""

    needs = {"POST": PERMISSION_OF["cancel"]}

    @documented(
        "cancel",
        path=MESSAGE_ID,
        query=requests.NameQuery,
        answers={200: OutcomeAnswer, 202: OutcomeAnswer},
        errors=[404, 409],
    )
    def post(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Delete a waiting message. 202: it runs, and its listener is notified."""
        declared, operations = self.topic(topic), self.operations
        arguments = self.named(declared, id)
        if "id" in arguments:
            result = operations.cancel(declared.name, [id])
        else:
            id = operations.id_of(declared.name, **arguments)  # noqa: A001
            # Unlike an id, these find the message in the outbox as well.
            result = ActionResult({id: operations.cancel_sent(declared.name, **arguments)})
        return outcome(result, id, {"deleted": 200, "notified": 202})


class RescheduleView(MessageRoute):
    """``topics/{topic}/messages/{id}/reschedule/``."""

    needs = {"POST": PERMISSION_OF["reschedule"]}

    @documented(
        "reschedule",
        path=MESSAGE_ID,
        query=requests.NameQuery,
        takes=requests.RescheduleFields,
        answers={200: OutcomeAnswer},
        errors=[404, 409],
        examples={"later": {"due": "2030-01-31T12:00:00Z"}, "before others": {"priority": 10000}},
    )
    def post(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Give a waiting message another due time or another priority."""
        declared = self.topic(topic)
        fields = self.read(requests.RescheduleFields, request.data)
        one, new = self.id_of(declared, id), {"due": fields.get("due"), "priority": fields.get("priority")}
        result = self.operations.reschedule(declared.name, [one], **new)
        return outcome(result, one, {"rescheduled": 200})


def _limits(fields: Fields) -> Limits:
    return Limits(messages=fields.get("limit"), seconds=SLICE_SECONDS)


class ReplayView(RmqView):
    """``topics/{topic}/replay/``."""

    needs = {"POST": PERMISSION_OF["replay"]}

    @documented(
        "replay",
        takes=("Replaying", [requests.ReplayNamedFields, requests.ReplayFilterFields]),
        answers={200: ProgressAnswer},
        errors=[404, 409, 507],
        examples={
            "by a filter": {"filter": {"error": "ConnectionError"}, "limit": 1000},
            "count only": {"filter": {}, "dry_run": True},
        },
    )
    def post(self, request: Request, topic: str) -> Response:
        """Send dead messages again: those with the given ids, or all that match a filter."""
        declared, operations = self.topic(topic), self.operations
        data = request.data
        if isinstance(data, Mapping) and ("ids" in data) == ("filter" in data):
            raise errors.Invalid("Give either `ids` or `filter`. An empty filter selects all.")
        if not (isinstance(data, Mapping) and "ids" in data):
            fields = self.read(requests.ReplayFilterFields, data)
            wanted = requests.wanted(fields["filter"])
            run = operations.replay_all(
                declared.name, wanted, limits=_limits(fields), dry_run=fields["dry_run"]
            )
            return Response(progress(run.result()))
        fields = self.read(requests.ReplayNamedFields, data)
        result = operations.replay(declared.name, fields["ids"])
        return Response(acted(result))


class RescheduleAllView(RmqView):
    """``topics/{topic}/reschedule/``."""

    needs = {"POST": PERMISSION_OF["reschedule"]}

    @documented(
        "reschedule_all",
        takes=requests.RescheduleAllFields,
        answers={200: ProgressAnswer},
        errors=[404, 409],
        examples={
            "a flood of wrong priorities": {"filter": {"priority": 10000}, "priority": 100},
            "later": {"filter": {"text": "newsletter"}, "due": "2030-01-31T12:00:00Z", "limit": 1000},
        },
    )
    def post(self, request: Request, topic: str) -> Response:
        """Give all waiting messages that match a filter another due time or another priority."""
        name = self.topic(topic).name
        fields = self.read(requests.RescheduleAllFields, request.data)
        run = self.operations.reschedule_all(
            name,
            fields["state"],
            requests.wanted(fields["filter"]),
            due=fields.get("due"),
            priority=fields.get("priority"),
            limits=_limits(fields),
            dry_run=fields["dry_run"],
        )
        return Response(progress(run.result()))


class PurgeView(RmqView):
    """``topics/{topic}/purge/``."""

    needs = {"POST": PERMISSION_OF["purge"]}

    @documented(
        "purge",
        takes=requests.PurgeFields,
        answers={200: ProgressAnswer},
        errors=[404, 409],
        examples={"dead for a week": {"state": "dead", "older_than": 604800}},
    )
    def post(self, request: Request, topic: str) -> Response:
        """Delete all messages of one state of a topic."""
        name = self.topic(topic).name
        fields = self.read(requests.PurgeFields, request.data)
        run = self.operations.purge(
            name,
            fields["state"],
            older_than=fields.get("older_than"),
            slot=fields.get("slot"),
            limits=_limits(fields),
            dry_run=fields["dry_run"],
            keep=fields["keep"],
        )
        return Response(progress(run.result()))


class DeletionAnswer(ResponseSerializer):
    """An action whose deleted messages can be brought back."""

    undo = serializers.CharField(source="id", help_text="Its id")
    action = serializers.CharField(source="kind", help_text="delete or purge")
    topic = serializers.CharField()
    selection = serializers.CharField(
        source="described", help_text="The messages, as the audit trail names them"
    )
    kept = serializers.IntegerField(help_text="How many messages can be brought back")
    deleted_by = serializers.CharField(source="by")
    began_ms = serializers.IntegerField()
    until_ms = serializers.IntegerField(help_text="When the messages are forgotten")


class DeletionsAnswer(ResponseSerializer):
    """The actions that can be undone."""

    results = DeletionAnswer(many=True)


class DeletionsView(RmqView):
    """``deletions/``."""

    needs = {"GET": Permission.VIEW}

    @documented("deletions", answers={200: DeletionsAnswer})
    def get(self, request: Request) -> Response:
        """List the actions that can be undone, the newest first."""
        deletions = self.operations.undoable(self.known())
        return Response({"results": [DeletionAnswer.of(one) for one in deletions]})


class UndoView(RmqView):
    """``deletions/{deletion}/undo/``."""

    needs = {"POST": Permission.VIEW}

    @documented("undo", answers={200: ProgressAnswer}, errors=[409])
    def post(self, request: Request, deletion: str) -> Response:
        """Bring back what an action has deleted, with the permission of that action. Newer copies stay."""
        return Response(progress(self.operations.undo(deletion, self.known()).result()))


class PauseView(RmqView):
    """``topics/{topic}/pause/``."""

    needs = {"POST": PERMISSION_OF["pause"]}

    @documented(
        "pause",
        answers={200: ProgressAnswer},
        errors=[404, 409],
    )
    def post(self, request: Request, topic: str) -> Response:
        """Stop the delivery of a topic. The outcomes count slots."""
        return Response(progress(self.operations.pause(self.topic(topic).name).result()))


class ResumeView(RmqView):
    """``topics/{topic}/resume/``."""

    needs = {"POST": PERMISSION_OF["pause"]}

    @documented(
        "resume",
        answers={200: ProgressAnswer},
        errors=[404, 409],
    )
    def post(self, request: Request, topic: str) -> Response:
        """Resume the delivery of a paused topic. The outcomes count slots."""
        return Response(progress(self.operations.resume(self.topic(topic).name).result()))


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
        actions = operations.background_actions(self.known())
        return Response({"results": [background_action(one, now_ms) for one in actions]})


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
        fields = self.read(requests.BackgroundFields, request.data)
        started = operations.start_action(
            declared.name,
            fields["action"],
            fields["state"],
            requests.wanted(fields["filter"]),
            rate=fields.get("rate"),
            keep=fields["keep"],
        )
        return Response(background_action(started, operations.broker.now_ms()), status=202)


class StopActionView(RmqView):
    """``background/{action}/stop/``."""

    needs = {"POST": Permission.VIEW}

    @documented("stop_action", answers={202: BackgroundActionAnswer}, errors=[409])
    def post(self, request: Request, action: str) -> Response:
        """Stop an action in the background, with its own permission; what it has done stays done."""
        operations = self.operations
        stopped = operations.stop_action(action, self.known())
        return Response(background_action(stopped, operations.broker.now_ms()), status=202)
