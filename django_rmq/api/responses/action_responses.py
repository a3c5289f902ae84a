"""The results of actions."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from django_rmq.api.responses import ResponseSerializer
from django_rmq.operations import ActionResult, BulkProgress


class OutcomeAnswer(ResponseSerializer):
    """The outcome of an action on one message."""

    id = serializers.CharField()
    outcome = serializers.CharField()


class ProgressAnswer(ResponseSerializer):
    """The progress of an action on many messages or slots. If `complete` is false, repeat the request to continue."""

    done = serializers.IntegerField()
    total = serializers.IntegerField()
    outcomes = serializers.DictField(child=serializers.IntegerField())
    complete = serializers.BooleanField()
    problems = serializers.ListField(child=serializers.CharField())
    results = OutcomeAnswer(many=True, required=False, help_text="Only if the request has `ids`")


def progress(found: BulkProgress) -> dict[str, Any]:
    """Return the progress of an action."""
    return {
        "done": found.done,
        "total": found.total,
        "outcomes": found.outcomes,
        "complete": found.is_complete,
        "problems": list(found.problems[:20]),
    }


def acted(done: ActionResult) -> dict[str, Any]:
    """Return the outcomes of an action on named messages."""
    found = BulkProgress(len(done.found), len(done.found), done.outcomes, is_complete=True)
    results = [{"id": name, "outcome": word} for name, word in done.found.items()]
    return {**progress(found), "results": results}
