"""What follows when an item has joined or left a set, and when a set begins or ends.

`manage.py runrmqconsumers` imports this module.
"""

from __future__ import annotations

from django.utils import timezone

from django_rmq import Message, listener
from example_project.selection.changes import relabel
from example_project.selection.sets import turn


@listener("memberships", batch_size=100)
def label(messages: list[Message]) -> None:
    """Make the labels follow the members of this moment."""
    relabel({(message.body["item"], message.body["set"]) for message in messages})


@listener("set-times")
def time_has_come(message: Message) -> None:
    """Let the set begin or end.

    It is due by the clock of Redis: if ours is slow, it is later than we think.
    """
    now = timezone.now()
    turn(message.body["set"], max(message.due or now, now))
