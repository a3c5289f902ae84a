"""The outcomes of messages in the worker's log: warnings while retries are left, errors at death.

Failures that repeat are logged less and less often: the first of a kind at once, with its traceback. A kind
is a topic, what follows (another try, or Dead), and the place that raised. Each message is logged at the
level DEBUG.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle, counted
from django_rmq.core.model import redaction
from django_rmq.core.model.failure_records import Failure, error_class
from django_rmq.core.model.message import Message
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import Retry

logger = safe_logger("django_rmq.consumer")
_repeated = LogThrottle(logger)


def failed(message: Message, failure: Failure, error: BaseException | None) -> None:
    """Log that a message failed, and what follows. ``error``: what its listener raised. None: it returned False."""
    topic = message.topic
    if failure.kind == "cancelled":
        _cancelled(message)
        return
    is_dead = failure.kind == "rejected" or message.retries_left <= 0
    left_out = _repeated.admit((topic.name, failure.kind, is_dead, place_of(error)))
    if left_out is not None:
        level = logging.ERROR if is_dead else logging.WARNING
    elif logger.isEnabledFor(logging.DEBUG):
        level = logging.DEBUG
    else:
        return
    if is_dead:
        then = "to Dead"
    else:
        rest = "" if failure.delay_ms is None else f" in {failure.delay_ms / 1000:g} s"
        then = f"tried again{rest}, retries left: {message.retries_left}"
    # A listener that raises Retry or Reject has decided, and a body that does not fit its type has no frames.
    is_traced = left_out == 0 and failure.kind != "rejected" and not isinstance(error, Retry)
    what, traced, frames = _shown(topic, failure, error if is_traced else None)
    logger.log(
        level,
        "Message %s of topic %s%s %s (%s); %s%s%s",
        message.name,
        topic.name,
        _labelled(message),
        failure.kind,
        what,
        then,
        counted(left_out or 0),
        frames,
        exc_info=traced,
        extra={
            "rmq_event": failure.kind,
            "rmq_topic": topic.name,
            "rmq_slot": message.slot,
            "rmq_message": message.name,
            "rmq_retries_left": message.retries_left,
            **_label_fields(message),
        },
    )


def _cancelled(message: Message) -> None:
    logger.info(
        "Message %s of topic %s%s was cancelled while it was in hand; it is not tried again",
        message.name,
        message.topic.name,
        _labelled(message),
        extra={
            "rmq_event": "cancelled",
            "rmq_topic": message.topic.name,
            "rmq_slot": message.slot,
            "rmq_message": message.name,
            **_label_fields(message),
        },
    )


def _labelled(message: Message) -> str:
    """Return what the labels of a message add to the text of a line."""
    labels = getattr(message, "labels", {})
    return f" ({', '.join(f'{name} {value}' for name, value in labels.items())})" if labels else ""


def _label_fields(message: Message) -> dict[str, str]:
    """Return what the labels of a message add to the fields of a line."""
    return {f"rmq_{name}": value for name, value in getattr(message, "labels", {}).items()}


def _shown(
    topic: Topic, failure: Failure, error: BaseException | None
) -> tuple[str, BaseException | None, str]:
    """Return what may be logged of a failure: its text, the error to trace, and frames in its place."""
    what = failure.error.partition("\n")[0][:200]
    if not redaction.hides(topic.name):
        return what, error, ""
    # An error quotes the message, and error reporters collect the variables of its frames.
    frames = "\n" + "".join(traceback.format_tb(error.__traceback__, limit=-8)) if error else ""
    return error_class(what) or "its text is withheld", None, frames


def place_of(error: BaseException | None) -> object:
    """Return the class of an error and the line that raised it."""
    if error is None:
        return None
    raised = error.__traceback__
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    where = None if raised is None else (raised.tb_frame.f_code.co_filename, raised.tb_lineno)
    return type(error), where


def batch_failed(topic: Topic, messages: int, why: str) -> None:
    """Log that a listener failed for a list of messages as a whole."""
    left_out = _repeated.admit((topic.name, "batch", why))
    if left_out is not None:
        logger.warning(
            "A batch of %d of topic %s failed (%s); its messages are delivered one by one%s",
            messages,
            topic.name,
            why,
            counted(left_out),
        )


def unusable(topic: Topic, what: str, error: Exception) -> None:
    """Log that a listener or a setting asked for something impossible, so that the default is used."""
    _repeated(
        (topic.name, what),
        f"{what} of topic {topic.name} failed, so the default back-off is used: %s",
        error,
        exc_info=True,
    )


def done(topic: Topic, slot: int, members: Sequence[bytes]) -> None:
    """Log each message whose listener has returned, if the level is enabled."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for member in members:
        shown = redaction.name(topic.name, slot, member)
        logger.debug(
            "Message %s of topic %s done",
            shown,
            topic.name,
            extra={
                "rmq_event": "done",
                "rmq_topic": topic.name,
                "rmq_slot": slot,
                "rmq_message": shown,
            },
        )


__all__ = ["batch_failed", "done", "failed", "place_of", "unusable"]
