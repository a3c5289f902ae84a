"""The results of health checks."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from django_rmq.api.responses import ResponseSerializer, maybe
from django_rmq.operations import Health


class LiveAnswer(ResponseSerializer):
    """This process answers."""

    ok = serializers.BooleanField()


class FindingAnswer(ResponseSerializer):
    """The result of one check."""

    check = serializers.CharField()
    topic = maybe(serializers.CharField)
    ok = serializers.BooleanField(help_text="False: trouble, for which the whole answer is 503")
    severity = serializers.ChoiceField(["ok", "note", "bad"])
    text = serializers.CharField()


class ReadyAnswer(ResponseSerializer):
    """Whether all checks passed. Only users with the permission view_topic get findings, worst first."""

    ok = serializers.BooleanField()
    findings = FindingAnswer(many=True, required=False)


def ready(health: Health, known: set[str] | None) -> dict[str, Any]:
    """Return the findings. ``known``: the topics that may be named; None: only yes or no."""
    if known is None:
        return {"ok": health.is_well}
    return {
        "ok": health.is_well,
        "findings": [one.as_json() for one in health.findings if not one.topic or one.topic in known],
    }
