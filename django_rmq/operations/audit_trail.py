"""The audit trail: what is recorded of an action, in the log and in the history of the admin.

Every action is written to the logger ``django_rmq.audit`` and, if there is a user and the admin is installed, as a
LogEntry of the topic: who, what, how many. Sends that programs make over REST are in the log alone. An entry names messages by
the filter, by sealed ids and by the values before and after; never by any content. Who acts, also in a command, is decided by
``authorization``. Nothing here deletes old entries: they are Django's, and the project's to delete.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from django.apps import apps
from django.db import Error

from django_rmq import observability
from django_rmq.core.model.topic import Topic
from django_rmq.operations.authorization import Actor, OperationContext, Trace
from django_rmq.operations.bulk import BulkProgress, BulkRun

logger = logging.getLogger("django_rmq.audit")

MOST_NAMED = 10
"""Maximum number of messages that the audit trail names for one action."""


def record_outcomes(
    context: OperationContext, act: str, topic: str, outcomes: Mapping[str, int], note: str = ""
) -> None:
    """Record the outcomes of an operation, and announce replayed messages."""
    record_and_announce(context.actor, act, topic, outcomes, note, trace=context.trace)


def record_and_announce(
    actor: Actor,
    act: str,
    topic: str,
    outcomes: Mapping[str, int],
    note: str = "",
    *,
    trace: Trace | None = None,
) -> None:
    """Do the same as ``record``, and announce the messages that a replay has sent again."""
    record(actor, act, topic, outcomes, note, trace=trace)
    done = {word: outcomes[word] for word in ("replayed", "merged") if outcomes.get(word)}
    if act.startswith("replay") and done:
        observability.announce_replayed(topic, done, actor.name)


def recorded(
    context: OperationContext, act: str, topic: Topic, what: str, steps: Iterator[BulkProgress]
) -> BulkRun:
    """Return a run that is recorded when it ends, in whatever way."""

    def recorded_steps() -> Iterator[BulkProgress]:
        last: BulkProgress | None = None
        try:
            for last in steps:
                yield last
        finally:
            # A run may be closed before its end. Its steps until then are recorded all the same.
            if last is not None:
                note = what if last.is_complete else f"{what}, incomplete"
                record_outcomes(context, act, topic.name, last.outcomes, note)

    return BulkRun(recorded_steps())


def record(
    actor: Actor,
    act: str,
    topic: str,
    outcomes: Mapping[str, int],
    note: str = "",
    *,
    entry: bool = True,
    trace: Trace | None = None,
) -> None:
    """Record that ``actor`` performed an action on ``topic`` (empty: on a worker), and the outcomes.

    ``entry`` False: without a LogEntry, for actions that programs do many times a second. ``trace``: add the outcomes
    to the LogEntry of this trace instead of writing a new one. If the database is unavailable, its error is
    logged and not raised, because the action itself has been done.
    """
    logger.info(
        "%s by %s (%s)%s",
        _sentence(act, note, outcomes),
        " ".join(actor.name.split()),
        actor.via,
        f" on topic {topic}" if topic else "",
        extra={
            "rmq_event": "audit",
            "rmq_act": act,
            "rmq_topic": topic,
            "rmq_actor": actor.name,
            "rmq_via": actor.via,
            "rmq_note": note,
            "rmq_outcomes": dict(outcomes),
        },
    )
    # A LogEntry refers to a row of a user.
    if not entry or actor.account is None or not apps.is_installed("django.contrib.admin"):
        return
    trace = trace or Trace()
    trace.outcomes = dict(Counter(trace.outcomes) + Counter(outcomes))
    sentence = _sentence(act, note, trace.outcomes)
    try:
        trace.entry = _log_entry(actor.account, topic, f"{sentence} ({actor.via})", trace.entry)
    except Error:
        logger.exception("The LogEntry could not be written: %s", sentence)


def chosen(ids: Sequence[str], detail: str = "") -> str:
    """Return the text of the audit trail about messages that were named: their number, and the first sealed ids."""
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    named = f"{len(ids)} chosen: {', '.join(ids[:MOST_NAMED])}{more}"
    return f"{named}; {detail}" if detail else named


def _sentence(act: str, note: str, outcomes: Mapping[str, int]) -> str:
    # ``admin.audit_log`` reads it back, to translate it.
    counts = ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in outcomes.items() if count)
    what = f"{act} ({note})" if note else act
    return f"{what}: {counts or 'nothing'}"


def _log_entry(account: int | str, topic: str, sentence: str, known: int | None) -> int:
    """Write a LogEntry, or rewrite the ``known`` one of this user and topic; return its primary key."""
    # These models cannot be imported in a project that has not installed the admin.
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    from django_rmq.models import Topic

    # PostgreSQL stores no NUL, and the page shows one line.
    message = f"{sentence[:1].upper()}{sentence[1:]}".replace("\0", "\N{REPLACEMENT CHARACTER}")
    if known is not None:
        own = LogEntry.objects.filter(pk=known, user_id=account, object_id=topic)
        # A person may have deleted the entry between two requests. A new one is written then.
        if own.update(change_message=message):
            return known
    created = LogEntry.objects.create(
        user_id=account,
        content_type_id=ContentType.objects.get_for_model(Topic).pk,
        object_id=topic,
        object_repr=topic or "workers",
        action_flag=CHANGE,
        change_message=message,
    )
    return int(created.pk)
