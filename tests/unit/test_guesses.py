"""What people type who know another queue. No guess is silently wrong: it is right, or the error names the right word.

Units, instants and the reasons of retries are those of ``test_durations``, values of settings those of ``test_conf``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import override_settings

import django_rmq
from django_rmq import (
    Reject,
    Retry,
    Send,
    cancel_message,
    ensure_message,
    listener,
    remove_message,
    schedule,
    send_message,
    send_messages,
)
from django_rmq.conf import read_settings
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.testing import captured_messages, memory_broker
from django_rmq.worker.listener_registry import isolated

TOPICS: dict[str, dict[str, Any]] = {
    "merged": {"TYPE": "range_merge", "TIME_RANGE": "2s"},
    "line": {"TYPE": "fifo"},
    "timed": {"TYPE": "fixed_time", "IDENTITY": "key"},
    "ranked": {"TYPE": "priority"},
}
LATE = datetime(2050, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with (
        override_settings(RMQ={"BROKER": "memory", "TOPICS": TOPICS}),
        memory_broker(),
        captured_messages(),
        isolated(),
    ):
        yield


def sent(topic: str, **options: Any) -> Callable[[], object]:
    return lambda: send_message(topic, {"n": 1}, **options)


def configured(**options: Any) -> Callable[[], object]:
    """Return a function that reads settings with a topic of these options; it raises the first problem as text."""

    def read() -> None:
        with override_settings(RMQ={"BROKER": "memory", "TOPICS": {"a": {"TYPE": "range_merge", **options}}}):
            _, problems = read_settings()
        if problems:
            raise ValueError(f"{problems[0].message} {problems[0].hint}")

    return read


def batched(*given: Any, **options: Any) -> Callable[[], object]:
    return lambda: Message(Topic("t", TopicType.FIFO), 0, 1, Delivery(b"1", 0.0, 3)).retry(*given, **options)


WRONG: list[tuple[str, Callable[[], object], str]] = [
    # Names of other queues for "later".
    *[
        (f"{name}=", sent("timed", key="k", **{name: LATE}), "fixed_time=")
        for name in ("eta", "at", "run_at", "run_after", "when")
    ],
    *[
        (f"{name}=", sent("timed", key="k", **{name: 60}), "fixed_time=")
        for name in ("countdown", "in_", "seconds", "schedule_in")
    ],
    ("delay= of a timed topic", sent("timed", key="k", delay=60), "fixed_time="),
    ("wait= of a merged topic", sent("merged", wait=5), "time_range="),
    ("countdown= of a line", sent("line", countdown=5), "delay="),
    ("debounce= of a merged topic", sent("merged", debounce=5), "time_range="),
    ("fixed_time= of a line", sent("line", fixed_time=LATE), "delay="),
    ("time_range= of priorities", sent("ranked", time_range=5), "priority="),
    # Durations.
    ("delay='5 seconds'", sent("line", delay="5 seconds"), '"2s"'),
    ("timeout=500ms", sent("timed", key="k", fixed_time=LATE, timeout="500ms"), "from 1s"),
    # Instants.
    (
        "fixed_time that has passed",
        sent("timed", key="k", fixed_time=datetime(2020, 1, 1, tzinfo=UTC)),
        "not in the future",
    ),
    # Retries.
    ("Retry(countdown=30)", lambda: Retry(countdown=30), "countdown"),  # type: ignore[call-arg]
    ("Retry(max=3)", lambda: Retry(max=3), "max"),  # type: ignore[call-arg]
    ("Retry(delay=soon)", lambda: Retry(delay="soon"), '"2s"'),
    ("message.retry(countdown=30)", batched(countdown=30), "countdown"),
    # Schedules.
    ("every=0.5", lambda: schedule("s", topic="timed", every=0.5), "whole seconds"),
    ("every='5 minutes'", lambda: schedule("s", topic="timed", every="5 minutes"), '"15m"'),
    ("crontab=", lambda: schedule("s", topic="timed", crontab="* * * * *"), "crontab"),  # type: ignore[call-arg]
    # Other options of a send.
    (
        "retries=",
        sent("timed", key="k", fixed_time=LATE, retries=3),
        "did you mean 'max_retries'? Topic timed has",
    ),
    ("queue=", sent("line", queue="x"), "queue"),
    ("ttl=", sent("line", ttl=5), "ttl"),
    ("priority=high", sent("ranked", priority="high"), "an integer"),
    ("priority=1", sent("ranked", priority=1), "from 17"),
    ("no priority", sent("ranked"), "priority="),
    ("no fixed_time", sent("timed", key="k"), "fixed_time="),
    ("key= of bodies", sent("merged", key="k"), "IDENTITY 'key'"),
    ("key=7", sent("line", key=7), "non-empty str"),
    ("headers={'a': 1}", sent("line", headers={"a": 1}), "pairs of str"),
    ("an unknown topic", lambda: send_message("mergd", 1), "did you mean 'merged'"),
    ("a body that is no JSON", lambda: send_message("line", object()), "JSON"),
    ("one body of many", lambda: send_messages("line", {"n": 1}), "an iterable of bodies"),
    ("Send(delay=5000)", lambda: send_messages("line", [Send(1, delay=5000)]), 'Say 5 or "5s"'),
    ("ensure with countdown=", lambda: ensure_message("line", 1, countdown=5), "delay="),  # type: ignore[call-arg]
    ("remove without a key", lambda: remove_message("timed"), "key"),
    ("cancel without a key", lambda: cancel_message("timed"), "key"),
    # Settings.
    ("TTL: 5", configured(TTL=5), "unknown key 'TTL'"),
    ("TIME_RANG: 5", configured(TIME_RANG=5), "did you mean 'TIME_RANGE'"),
    ("RETRIES: 3", configured(RETRIES=3), "did you mean 'MAX_RETRIES'"),
    ("RATE: 10/m", configured(MAX_RATE="10/m"), "messages per second"),
    # Listeners and names.
    ("@listener without a topic", lambda: listener(print), 'as in @listener("orders")'),  # type: ignore[call-overload]
    ("django_rmq.task", lambda: django_rmq.task, "task"),  # type: ignore[attr-defined]
    ("django_rmq.delay", lambda: django_rmq.delay, "delay"),  # type: ignore[attr-defined]
]
RIGHT: list[tuple[str, Callable[[], object]]] = [
    ("fixed_time=aware", sent("timed", key="k", fixed_time=LATE)),
    ("timeout=20", sent("timed", key="k", fixed_time=LATE, timeout=20)),
    ("Retry('busy')", lambda: Retry("busy")),
    ("Reject('never')", lambda: Reject("never")),
    ("priority=500", sent("ranked", priority=500)),
]


@pytest.mark.parametrize(("guess", "said"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
def test_a_wrong_guess_is_an_error_that_names_the_right_word(guess: Callable[[], object], said: str) -> None:
    with pytest.raises(Exception) as caught:
        guess()
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("guess", [each[1] for each in RIGHT], ids=[each[0] for each in RIGHT])
def test_a_right_guess_is_taken(guess: Callable[[], object]) -> None:
    guess()


def test_a_right_guess_is_meant_as_it_is_typed() -> None:
    with captured_messages() as messages:
        for delay in (5, "5s", timedelta(seconds=5)):
            send_message("line", 1, delay=delay)
    assert [message.options["delay"] for message in messages] == [5, "5s", timedelta(seconds=5)]
    assert Retry(delay=30).delay == Retry(delay="30s").delay == 30
