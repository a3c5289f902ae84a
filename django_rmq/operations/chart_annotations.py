"""What happened while a chart was drawn: actions of people, and new versions of the project's code.

Actions are those of Django's LogEntry, which the admin and REST write; actions of commands are in the log alone. Versions are
those that workers report (``RMQ["CODE_VERSION"]``).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Literal, NamedTuple

from django.apps import apps
from django.db import DatabaseError

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.reports import read_code_versions
from django_rmq.core.log import safe_logger
from django_rmq.exceptions import RmqError
from django_rmq.operations import shared_reads
from django_rmq.operations.authorization import Permission
from django_rmq.operations.context import OperationContext

logger = safe_logger("django_rmq.operations")

MOST_ACTIONS = 200
"""The number of actions of people that are looked at: the newest ones on any topic."""


class Annotation(NamedTuple):
    """Something that happened at ``at_ms``, by the clock of the database or of Redis."""

    at_ms: int
    kind: Literal["action", "version"]
    text: str
    """What was done, with its outcomes, or the version."""
    topic: str = ""
    """The topic of an action."""
    actor: str = ""
    """Who did it."""


def annotations_of(context: OperationContext, names: Collection[str], since_ms: float) -> list[Annotation]:
    """Return what has happened to topics since ``since_ms``, the first first, up to five seconds late."""
    context.actor.require(Permission.VIEW)
    known = context.topics()
    names = [name for name in names if name in known]
    annotations = shared_reads.share_answer(
        ("annotations", context.broker, *names),
        partial(_read_annotations, context.broker, names),
        shared_reads.OTHERS_SECONDS,
    )
    return [one for one in annotations if one.at_ms >= since_ms]


def _read_annotations(broker: Broker, names: Collection[str]) -> list[Annotation]:
    """Return the newest actions on the topics ``names``, and the versions that workers have reported, the first first.

    A database or a Redis that does not answer leaves its part out: a chart is drawn without it.
    """
    return sorted([*_versions(broker), *reversed(_actions(names))], key=lambda one: one.at_ms)


def _actions(names: Collection[str]) -> list[Annotation]:
    # Where Django's admin is not installed, there is no table, and nobody writes to it.
    if not apps.is_installed("django.contrib.admin"):
        return []
    from django.contrib.admin.models import LogEntry
    from django.contrib.contenttypes.models import ContentType

    from django_rmq.models import Topic

    try:
        of_topics = ContentType.objects.get_for_model(Topic, for_concrete_model=False)
        # The newest by their keys: the table has no index of times.
        rows = LogEntry.objects.filter(content_type=of_topics, object_id__in=names).order_by("-pk")
        return [
            Annotation(
                round(row.action_time.timestamp() * 1000),
                "action",
                row.change_message,
                row.object_id or "",
                str(row.user),
            )
            for row in rows.select_related("user")[:MOST_ACTIONS]
        ]
    except DatabaseError:
        logger.warning("The actions of people could not be read for a chart", exc_info=True)
        return []


def _versions(broker: Broker) -> list[Annotation]:
    try:
        versions = broker.run(read_code_versions())
    except RmqError:
        return []  # the page says itself that Redis does not answer
    return [Annotation(one.since_ms, "version", one.name) for one in versions]
