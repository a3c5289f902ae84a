"""The form of a script that a topic uses."""

from __future__ import annotations

from django_rmq.core.lua import SECOND
from django_rmq.core.model.topic import Topic


def form(script: str, topic: Topic) -> str:
    """Return the name of ``script`` in the form that notes what becomes of messages, if ``topic`` keeps that."""
    return script + SECOND if topic.outcome_retention_ms else script
