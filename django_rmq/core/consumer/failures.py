"""Failures: what a listener's error means for its message, and which part of it is stored. Nothing here raises."""

from __future__ import annotations

import traceback

from django_rmq.core.consumer import outcome_log
from django_rmq.core.model.failure_records import Failure, cut_error
from django_rmq.core.model.limits import delay_ms
from django_rmq.core.model.message import Message
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import Reject, Retry


class Undecodable(ValueError):
    """The body does not match the topic's BODY."""


class Unfit(Undecodable):
    """The body does not fit the type that BODY names. Another try would find the same body, so there is none."""


def describe(error: BaseException) -> str:
    """Return the error's class and message, then the end of its traceback, within 1 KB."""
    head = cut_error(f"{name_of(error)}: {text_of(error)}", 400).decode()
    frames = traceback.format_tb(error.__traceback__, limit=-8)
    tail = "".join(frames).encode("utf-8", "backslashreplace")
    return f"{head}\n{tail[-600:].decode('utf-8', 'ignore')}"


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
                outcome_log.unusable(message.topic, "Retry(delay=...)", wrong)
    else:
        kind = "undecodable" if isinstance(error, Undecodable) else "failed"
        failure = Failure(member, kind, None, describe(error))
    return judged(message, failure, error)


def judged(message: Message, failure: Failure, error: BaseException | None = None) -> Failure:
    """Log a failure and set the delay that the topic's own back-off function chooses."""
    if message.cancelled:
        failure = failure._replace(kind="cancelled")
    elif failure.kind != "rejected":
        if failure.delay_ms is None:
            failure = failure._replace(delay_ms=chosen_delay(message))
        elif failure.delay_ms < 0:
            failure = failure._replace(delay_ms=0)
    outcome_log.failed(message, failure, error)
    return failure


def ran_too_long(topic: Topic) -> str:
    """Return the error of a message whose listener exceeded HARD_TIMEOUT."""
    return f"HardTimeout: the listener ran longer than {topic.hard_timeout or 0:g} s"


def chosen_delay(message: Message) -> int | None:
    """Return the result of the topic's own back-off function in ms. None: the registered exponential back-off applies."""
    function = message.topic.backoff.function
    if function is None:
        return None
    failures = message.max_retries - message.retries_left + 1
    try:
        return delay_ms(function(failures))
    except Exception as wrong:  # noqa: BLE001 - whatever a function of the project raises
        outcome_log.unusable(message.topic, "BACKOFF", wrong)
        return None


__all__ = [
    "Undecodable",
    "Unfit",
    "chosen_delay",
    "describe",
    "failure_of",
    "judged",
    "name_of",
    "ran_too_long",
    "text_of",
]
