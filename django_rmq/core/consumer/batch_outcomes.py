"""What becomes of a list of messages that a listener was called with."""

from __future__ import annotations

from collections import deque

from django_rmq.core.consumer.batch import BatchResults, Outcome
from django_rmq.core.consumer.invoke import holds, in_line
from django_rmq.core.consumer.progress import BEGUN, DONE
from django_rmq.core.model.message import Message


def noted(
    tally: BatchResults, lists: deque[list[Message]], group: list[Message], outcomes: list[Outcome]
) -> list[Outcome]:
    """Add the outcomes of a list that count, and return them.

    On a strict fifo topic they end with the first one that holds the slot, and no further list runs.
    """
    if outcomes and tally.batch.topic.is_strict:  # rule: commits_behind_a_failure
        outcomes = in_line(group, outcomes)
        if len(outcomes) < len(group) or holds(outcomes[-1][1]):
            lists.clear()
    tally.note(outcomes)
    return outcomes


def states_after(group: list[Message], outcomes: list[Outcome]) -> bytes:
    """Return what to record for the messages of a list that was called, a byte for each."""
    if len(outcomes) == len(group) and all(failure is None for _, failure in outcomes):
        return bytes([DONE]) * len(group)
    done = {id(message) for message, failure in outcomes if failure is None}
    return bytes(DONE if id(each) in done else BEGUN for each in group)


__all__ = ["noted", "states_after"]
