"""Whether all is well."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from django_rmq.api.answers import Answer, maybe
from django_rmq.operations import Health


class LiveAnswer(Answer):
    """This process answers."""

    ok = serializers.BooleanField()


class FindingAnswer(Answer):
    """One thing that was looked at."""

    check = serializers.CharField()
    topic = maybe(serializers.CharField)
    ok = serializers.BooleanField()
    text = serializers.CharField()


class ReadyAnswer(Answer):
    """Whether all is well; findings are for those who may see topics."""

    ok = serializers.BooleanField()
    findings = FindingAnswer(many=True, required=False)


def ready(health: Health, known: set[str] | None) -> dict[str, Any]:
    """Return what was found; ``known``: the topics that may be spoken of, None: nothing is told but yes or no."""
    if known is None:
        return {"ok": health.is_well}
    return {
        "ok": health.is_well,
        "findings": [one.as_json() for one in health.findings if not one.topic or one.topic in known],
    }
