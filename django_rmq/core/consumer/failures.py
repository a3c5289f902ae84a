"""Failures: the outcome that a listener's error gives its message, the text that is stored, and the log lines of outcomes.

``failure_of`` never raises, because the message has to end whatever its error is. Whether it is tried again or dies is decided in
Redis by ``lua/slot/_deaths.lua``. How long a retry waits is decided here if the listener or a BACKOFF function gives the delay,
else by ``lua/slot/_retries.lua``.

The log line is written before Redis decides. It says what becomes of a message without a newer copy; where a newer copy waits,
Redis drops the one that failed, or joins the two.

Failures that repeat are logged less and less often: the first of a group at once, with its traceback unless the listener raised
Retry or Reject. A group has the same topic, ``Failure.kind``, consequence (another try, or Dead) and place that raised. Each
message is logged at the level DEBUG.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

from django_rmq.core.log import LogThrottle, counted, safe_logger
from django_rmq.core.model.bounds import delay_ms
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Failure, cut_error, error_class
from django_rmq.core.model.topic import Topic
from django_rmq.core.redaction import hides_contents, opaque_name
from django_rmq.exceptions import Reject, Retry

logger = safe_logger("django_rmq.consumer")
_repeated = LogThrottle(logger)


def log_failure(message: Message, failure: Failure, error: BaseException | None) -> None:
    """Log that a message failed, and the expected consequence. ``error``: what its listener raised; None if it returned False."""
    topic = message.topic
    if failure.kind == "cancelled":
        _log_cancelled(message)
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


def _log_cancelled(message: Message) -> None:
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
    """Return the text that the labels of a message add to a log line."""
    labels = getattr(message, "labels", {})
    return f" ({', '.join(f'{name} {value}' for name, value in labels.items())})" if labels else ""


def _label_fields(message: Message) -> dict[str, str]:
    """Return the fields that the labels of a message add to a log line."""
    return {f"rmq_{name}": value for name, value in getattr(message, "labels", {}).items()}


def _shown(
    topic: Topic, failure: Failure, error: BaseException | None
) -> tuple[str, BaseException | None, str]:
    """Return the parts of a failure that may be logged: its text, the error to trace, or frames in its place."""
    what = failure.error.partition("\n")[0][:200]
    if not hides_contents(topic.name):
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


def log_batch_failure(topic: Topic, messages: int, why: str) -> None:
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


def log_unusable_delay(topic: Topic, what: str, error: Exception) -> None:
    """Log that a listener or a setting asked for something impossible, so that the default is used."""
    _repeated(
        (topic.name, what),
        f"{what} of topic {topic.name} failed, so the default back-off is used: %s",
        error,
        exc_info=True,
    )


def log_done(topic: Topic, slot: int, members: Sequence[bytes]) -> None:
    """Log each message whose listener has returned, if the level is enabled."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for member in members:
        shown = opaque_name(topic.name, slot, member)
        logger.debug(
            "Message %s of topic %s done",
            shown,
            topic.name,
            extra={"rmq_event": "done", "rmq_topic": topic.name, "rmq_slot": slot, "rmq_message": shown},
        )


class Undecodable(ValueError):
    """The body does not match the topic's BODY."""


class Unfit(Undecodable):
    """The body does not fit the type that BODY names. Another try would find the same body, so there is none."""


LONGEST_TRACEBACK = 600
"""Bytes of a traceback that are kept with a failure: its end."""


def describe(error: BaseException) -> str:
    """Return the error's class and message, then the end of its traceback, within 1 KB."""
    head = cut_error(f"{name_of(error)}: {text_of(error)}", 400).decode()
    frames = traceback.format_tb(error.__traceback__, limit=-8)
    tail = "".join(frames).encode("utf-8", "backslashreplace")
    if len(tail) > LONGEST_TRACEBACK:
        # It begins with a whole line, if the last one is not longer than all that is kept.
        tail = tail[-LONGEST_TRACEBACK:]
        tail = tail[tail.find(b"\n", 0, -1) + 1 :]
    return f"{head}\n{tail.decode('utf-8', 'ignore')}"


def name_of(error: BaseException) -> str:
    kind = type(error)
    try:
        is_known = kind.__module__ == "builtins"
        return kind.__qualname__ if is_known else f"{kind.__module__}.{kind.__qualname__}"
    except BaseException:  # noqa: BLE001 - a class may have any metaclass
        return "an exception whose class has no name"


def text_of(thing: object) -> str:
    try:
        return str(thing)
    except BaseException:  # noqa: BLE001 - an error whose own text fails must not hide that the listener failed
        return "(its text cannot be shown)"


def failure_of(message: Message, error: BaseException) -> Failure:
    """Log a listener's error and return its meaning for the message. Never raises, whatever the error."""
    try:
        return _understood(message, error)
    # rule: trusts_errors
    except BaseException:  # noqa: BLE001 - its class, its text or the memory fails, and the message still has to end
        return Failure(message.delivery.member, "failed", None, "an exception that cannot be described")


def _understood(message: Message, error: BaseException) -> Failure:
    member = message.delivery.member
    if message.stopped == "overran":
        failure = Failure(member, "overran", None, ran_too_long(message.topic))
    elif isinstance(error, Reject):
        failure = Failure(member, "rejected", None, f"Reject: {text_of(error.reason)}")
    elif isinstance(error, Unfit):  # rule: tries_an_unfit_body_again
        failure = Failure(member, "rejected", None, text_of(error))
    elif isinstance(error, Retry):
        failure = Failure(member, "failed", None, f"Retry: {text_of(error)}")
        if error.delay is not None:
            try:
                failure = failure._replace(delay_ms=delay_ms(error.delay))
            except Exception as wrong:  # noqa: BLE001 - a subclass may have set any delay
                log_unusable_delay(message.topic, "Retry(delay=...)", wrong)
    else:
        kind = "undecodable" if isinstance(error, Undecodable) else "failed"
        failure = Failure(member, kind, None, describe(error))
    return complete_failure(message, failure, error)


def complete_failure(message: Message, failure: Failure, error: BaseException | None = None) -> Failure:
    """Log a failure and set the delay that the topic's own back-off function chooses."""
    if message.cancelled:
        failure = failure._replace(kind="cancelled")
    elif failure.kind != "rejected":
        if failure.delay_ms is None:
            failure = failure._replace(delay_ms=own_backoff_ms(message))
        elif failure.delay_ms < 0:
            failure = failure._replace(delay_ms=0)
    log_failure(message, failure, error)
    return failure


def ran_too_long(topic: Topic) -> str:
    """Return the error of a message whose listener exceeded HARD_TIMEOUT."""
    return f"HardTimeout: the listener ran longer than {topic.hard_timeout or 0:g} s"


def own_backoff_ms(message: Message) -> int | None:
    """Return the result of the topic's own back-off function in ms; None if the registered exponential back-off applies."""
    function = message.topic.backoff.function
    if function is None:
        return None
    failures = message.max_retries - message.retries_left + 1
    try:
        return delay_ms(function(failures))
    except Exception as wrong:  # noqa: BLE001 - whatever a function of the project raises
        log_unusable_delay(message.topic, "BACKOFF", wrong)
        return None
