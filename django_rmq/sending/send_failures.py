"""Messages that were not sent or not removed: the reason, and the reports after a commit."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from django_rmq import connections
from django_rmq.core.log.throttle import LogThrottle, counted
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble, SlotMoved, TopicFull
from django_rmq.observability import announcements
from django_rmq.sending.deferred_results import DeferredResult, RemoveResult

logger = logging.getLogger("django_rmq.sending")
_repeated = LogThrottle(logger)

failed_sends: Counter[str] = Counter()
"""For each topic, how many messages of this process were lost because Redis was unavailable when a commit
sent them.

The ledger in Redis cannot count them. Read it, do not write it.
"""
_counting = threading.Lock()


def report(topic: str, results: Sequence[DeferredResult | RemoveResult], error: RmqError) -> None:
    """Report that a commit did not do what ``results`` waited for: in the results, in the log and by signal."""
    for result in results:
        if result.status != "refused":
            result.status = "failed"
    sends = [result for result in results if isinstance(result, DeferredResult)]
    removals = [result for result in results if isinstance(result, RemoveResult)]
    if sends:
        with _counting:
            failed_sends[topic] += len(sends)
        _log("sent", error, extra={"rmq_event": "send_failed", "rmq_topic": topic, "rmq_count": len(sends)})
        announcements.send_failed(topic, sends, error)
    if removals:
        _log(
            "removed",
            error,
            extra={"rmq_event": "remove_failed", "rmq_topic": topic, "rmq_count": len(removals)},
        )
        announcements.remove_failed(topic, removals, error)


def report_waiting(topic: str, results: Sequence[DeferredResult | RemoveResult], error: RmqError) -> None:
    """Report that ``results`` wait in the outbox, from where the relay sends them."""
    for result in results:
        result.status = "in_outbox"
    if (left_out := _repeated.admit(("kept", topic, type(error)))) is not None:
        logger.warning(
            "%d message(s) of topic %s wait in the outbox, because they could not be sent after the database "
            "commit: %s%s",
            len(results),
            topic,
            error,
            counted(left_out, "such commits"),
            extra={"rmq_event": "in_outbox", "rmq_topic": topic, "rmq_count": len(results)},
        )


def _log(done: str, error: RmqError, *, extra: dict[str, Any]) -> None:
    topic = extra["rmq_topic"]
    if (left_out := _repeated.admit((done, topic, type(error)))) is not None:
        logger.error(
            "%d message(s) of topic %s could not be %s after the database commit: %s%s",
            extra["rmq_count"],
            topic,
            done,
            error,
            counted(left_out, "such commits"),
            exc_info=None if left_out else error,
            extra=extra,
        )


def too_full(topic: Topic, result: SendResult) -> TopicFull:
    """Return the error for a slot that was too full for the message of ``result``."""
    if topic.accumulate and topic.max_backlog:
        return TopicFull(
            f"the message has collected ACCUMULATE = {topic.accumulate} bodies or MAX_BODY = {topic.max_body} bytes, or "
            f"slot {result.slot} of topic {topic.name} holds {topic.slot_backlog} messages, its share of MAX_BACKLOG"
        )
    if topic.accumulate:
        return TopicFull(
            f"a message of topic {topic.name} has collected ACCUMULATE = {topic.accumulate} bodies, or MAX_BODY = "
            f"{topic.max_body} bytes: it is due, and takes more once it has been delivered"
        )
    return TopicFull(
        f"slot {result.slot} of topic {topic.name} holds {topic.slot_backlog} messages, its share of "
        f"MAX_BACKLOG = {topic.max_backlog}"
    )


def explained(topic: Topic, error: RmqError) -> RmqError:
    """Return ``error``; if the topic was re-slotted, with both counts and what to do."""
    if not isinstance(error, SlotMoved):
        return error
    connections.forget(topic)
    try:
        registered = connections.get_broker().definitions().get(topic.name, {}).get("slots")
    except ServerTrouble:
        registered = None
    now = f"{registered} slots" if registered not in (None, topic.slots) else "a different number of slots"
    explanation = SlotMoved(
        f"topic {topic.name} now has {now}, but {topic.slots} in the settings of this process. Nothing "
        "was sent. Correct SLOTS and restart the process"
    )
    explanation.__cause__ = error
    return explanation


__all__ = ["explained", "failed_sends", "report", "report_waiting", "too_full"]
