"""What follows when an item has joined or left a set. `manage.py runrmqconsumers` imports this module."""

from __future__ import annotations

from django_rmq import Message, listener
from example_project.product_sets.sets import MEMBERSHIPS, update_labels


@listener(MEMBERSHIPS, batch_size=100)
def label(messages: list[Message]) -> None:
    """Make the labels follow the members of this moment."""
    update_labels({(message.body["item"], message.body["set"]) for message in messages})
