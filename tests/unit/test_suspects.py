"""Which messages that timed out may run side by side in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.run_order import Suspects
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType

TOPIC = Topic("work", TopicType.RANGE_MERGE, slots=1)


def suspect(failures: int, max_retries: int = 16) -> Batch:
    """A message that has failed so often, the last time by a time-out."""
    topic = replace(TOPIC, max_retries=max_retries)
    message = Message(topic, 0, 1, Delivery(b"x", 0.0, max_retries - failures, None))
    nobody: Any = None
    return Batch(nobody, nobody, 1, [message], 0.0)


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (suspect(1), suspect(1), True),
        (suspect(1), suspect(9), True),
        (suspect(9), suspect(1), True),
        (suspect(2), suspect(2), False),
        (suspect(2), suspect(9), False),
        (suspect(16), suspect(1), False),
        (suspect(1), suspect(16), False),
        (suspect(1, max_retries=1), suspect(1), False),
        (suspect(1), suspect(1, max_retries=1), False),
    ],
)
def test_suspects_run_together_unless_both_failed_repeatedly_or_one_has_no_retry_left(
    one: Batch, other: Batch, together: bool
) -> None:
    suspects = Suspects()
    assert suspects.add(one)
    assert suspects.add(other) is together
    assert suspects.remove(one) == ([] if together else [other])
    assert suspects.remove(other) == [] and not suspects


def test_who_waits_is_not_overtaken_by_one_that_it_is_kept_apart_from() -> None:
    suspects = Suspects()
    running, last, late = suspect(1), suspect(16), suspect(1)
    assert suspects.add(running)
    assert not suspects.add(last)
    assert not suspects.add(late), "else the last try of a message could wait for ever"
    assert suspects.remove(running) == [last]
    assert suspects.remove(last) == [late]


def test_several_wait_and_run_in_their_order() -> None:
    suspects = Suspects()
    batches = [suspect(2) for _ in range(4)]
    assert [suspects.add(batch) for batch in batches] == [True, False, False, False]
    assert suspects.remove(batches[1]) == [], "it was given back, and the first still runs"
    assert suspects.remove(batches[0]) == [batches[2]]
    assert suspects.remove(batches[2]) == [batches[3]]
    assert suspects.remove(batches[2]) == [], "it is none any more"
