"""Actions on messages and topics. A replay, a deletion or a purge of many messages runs for ``SLICE_SECONDS``,
and the same request continues it. To undo, to pause and to resume are done in one request.

Workers do an action in the background, which requests start, list and stop. The serializers of responses are here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from rest_framework import serializers
from rest_framework.response import Response

from django_rmq.api import errors, requests
from django_rmq.api.requests import Fields, body_for
from django_rmq.api.view import (
    Json,
    MessageRoute,
    ResponseSerializer,
    RmqView,
    maybe,
    message_route,
    outcome,
    route,
)
from django_rmq.core.model.status import STATE_OF
from django_rmq.core.model.stored_actions import ActionKind, ActionProgress
from django_rmq.core.model.topic import Topic
from django_rmq.operations import ActionResult, BulkProgress, Limits, Permission
from django_rmq.operations.authorization import PERMISSION_OF
from django_rmq.operations.filters import filter_of

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
    @message_route(
        "replay_message",
        PERMISSION_OF["replay"],
        takes=requests.EditFields,
        answers={200: OutcomeAnswer},
        errors=[404, 507],
        examples={"as it was": {}, "edited": {"body": {"sku": 1, "shop": 8}}},
    )
    def post(self, topic: Topic, message_id: str, query: Fields, fields: Fields) -> Response:
        """Send a dead message again with all its retries; with a body, the edited message.

        An edited message counts as a send.
        """
        one = self.id_of(topic, message_id, query)
        if "body" in fields:
            body, size = body_for(topic, fields["body"]), int(self.request.META["CONTENT_LENGTH"])
            result = self.operations.replay_edited(topic.name, one, body, charged_bytes=size)
        else:
            result = self.operations.replay(topic.name, [one])
        return outcome(result, one, {"replayed": 200, "merged": 200})


class BuryView(MessageRoute):
    @message_route(
        "bury",
        PERMISSION_OF["bury"],
        takes=requests.BuryFields,
        answers={200: OutcomeAnswer, 202: OutcomeAnswer},
        errors=[404],
        examples={"with a reason": {"why": "requested by the customer"}},
    )
    def post(self, topic: Topic, message_id: str, query: Fields, fields: Fields) -> Response:
        """Move a message to Dead. 202: a consumer has it, and it goes to Dead when that delivery ends."""
        one = self.id_of(topic, message_id, query)
        result = self.operations.bury(topic.name, [one], fields.get("why", ""))
        return outcome(result, one, {"buried": 200, "running": 202})


class CancelView(MessageRoute):
    @message_route(
        "cancel", PERMISSION_OF["cancel"], answers={200: OutcomeAnswer, 202: OutcomeAnswer}, errors=[404]
    )
    def post(self, topic: Topic, message_id: str, query: Fields) -> Response:
        """Delete a waiting message. 202: it runs, and its listener is notified."""
        arguments = self.named(topic, message_id, query)
        if "id" in arguments:
            result = self.operations.cancel(topic.name, [message_id])
        else:
            message_id = self.operations.id_of(topic.name, **arguments)
            # Unlike an id, these find the message in the outbox as well.
            result = ActionResult({message_id: self.operations.cancel_sent(topic.name, **arguments)})
        return outcome(result, message_id, {"deleted": 200, "notified": 202})


class RescheduleView(MessageRoute):
    @message_route(
        "reschedule",
        PERMISSION_OF["reschedule"],
        takes=requests.RescheduleFields,
        answers={200: OutcomeAnswer},
        errors=[404],
        examples={"later": {"due": "2030-01-31T12:00:00Z"}, "before others": {"priority": 10000}},
    )
    def post(self, topic: Topic, message_id: str, query: Fields, fields: Fields) -> Response:
        """Give a waiting message another due time or another priority."""
        one = self.id_of(topic, message_id, query)
        result = self.operations.reschedule(topic.name, [one], **fields)
        return outcome(result, one, {"rescheduled": 200})


def _bounds(fields: Fields) -> Fields:
    """Return the bounds of a long action: for how many messages, how long, and whether it only counts them."""
    limits = Limits(messages=fields.get("limit"), seconds=SLICE_SECONDS)
    return {"limits": limits, "dry_run": fields["dry_run"]}


class ReplayView(RmqView):
    @route(
        "replay",
        PERMISSION_OF["replay"],
        takes=("Replaying", [requests.ReplayNamedFields, requests.ReplayFilterFields]),
        answers={200: ProgressAnswer},
        errors=[404, 507],
        examples={
            "by a filter": {"filter": {"error": "ConnectionError"}, "limit": 1000},
            "count only": {"filter": {}, "dry_run": True},
        },
    )
    def post(self, topic: Topic) -> Json:
        """Send dead messages again: those with the given ids, or all that match a filter."""
        data = self.request.data
        if isinstance(data, Mapping) and ("ids" in data) == ("filter" in data):
            raise errors.Invalid("Give either `ids` or `filter`. An empty filter selects all.")
        if isinstance(data, Mapping) and "ids" in data:
            ids = self.read(requests.ReplayNamedFields, data)["ids"]
            return acted(self.operations.replay(topic.name, ids))
        fields = self.read(requests.ReplayFilterFields, data)
        wanted = filter_of(fields["filter"])
        return progress(self.operations.replay_all(topic.name, wanted, **_bounds(fields)).result())


class RescheduleAllView(RmqView):
    @route(
        "reschedule_all",
        PERMISSION_OF["reschedule"],
        takes=requests.RescheduleAllFields,
        answers={200: ProgressAnswer},
        errors=[404],
        examples={
            "a flood of wrong priorities": {"filter": {"priority": 10000}, "priority": 100},
            "later": {"filter": {"text": "newsletter"}, "due": "2030-01-31T12:00:00Z", "limit": 1000},
        },
    )
    def post(self, topic: Topic, fields: Fields) -> Json:
        """Give all waiting messages that match a filter another due time or another priority."""
        new: Fields = {name: fields.get(name) for name in ("due", "priority")}
        wanted = filter_of(fields["filter"])
        run = self.operations.reschedule_all(topic.name, fields["state"], wanted, **new, **_bounds(fields))
        return progress(run.result())


class PurgeView(RmqView):
    @route(
        "purge",
        PERMISSION_OF["purge"],
        takes=requests.PurgeFields,
        answers={200: ProgressAnswer},
        errors=[404],
        examples={"dead for a week": {"state": "dead", "older_than": 604800}},
    )
    def post(self, topic: Topic, fields: Fields) -> Json:
        """Delete all messages of one state of a topic."""
        chosen: Fields = {name: fields.get(name) for name in ("older_than", "slot", "keep")}
        return progress(
            self.operations.purge(topic.name, fields["state"], **chosen, **_bounds(fields)).result()
        )


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
    @route("deletions", Permission.VIEW, answers={200: DeletionsAnswer})
    def get(self) -> Json:
        """List the actions that can be undone, the newest first."""
        return {"results": [DeletionAnswer.of(one) for one in self.operations.undoable(self.known())]}


class UndoView(RmqView):
    @route("undo", Permission.VIEW, answers={200: ProgressAnswer})
    def post(self, deletion: str) -> Json:
        """Bring back what an action has deleted, with the permission of that action. Newer copies stay."""
        return progress(self.operations.undo(deletion, self.known()).result())


class PauseView(RmqView):
    @route("pause", PERMISSION_OF["pause"], answers={200: ProgressAnswer}, errors=[404])
    def post(self, topic: Topic) -> Json:
        """Stop the delivery of a topic. The outcomes count slots."""
        return progress(self.operations.pause(topic.name).result())


class ResumeView(RmqView):
    @route("resume", PERMISSION_OF["pause"], answers={200: ProgressAnswer}, errors=[404])
    def post(self, topic: Topic) -> Json:
        """Resume the delivery of a paused topic. The outcomes count slots."""
        return progress(self.operations.resume(topic.name).result())


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
    @route("background", Permission.VIEW, answers={200: BackgroundActionsAnswer})
    def get(self) -> Json:
        """List the actions in the background, the oldest first."""
        now_ms, actions = self.operations.broker.now_ms(), self.operations.background_actions()
        return {"results": [background_action(one, now_ms) for one in actions]}


class StartActionView(RmqView):
    @route(
        "start_action",
        Permission.VIEW,
        takes=requests.BackgroundFields,
        answers={202: BackgroundActionAnswer},
        errors=[404],
        examples={"replay": {"action": "replay", "filter": {"error": "ConnectTimeout"}, "rate": 200}},
    )
    def post(self, topic: Topic, fields: Fields) -> Json:
        """Let workers replay, delete or purge all messages that match, with the permission of that action."""
        wanted, how = filter_of(fields["filter"]), {"rate": fields.get("rate"), "keep": fields["keep"]}
        started = self.operations.start_action(topic.name, fields["action"], fields["state"], wanted, **how)
        return background_action(started, self.operations.broker.now_ms())


class StopActionView(RmqView):
    @route("stop_action", Permission.VIEW, answers={202: BackgroundActionAnswer})
    def post(self, action: str) -> Json:
        """Stop an action in the background, with its own permission; what it has done stays done."""
        stopped = self.operations.stop_action(action)
        return background_action(stopped, self.operations.broker.now_ms())
