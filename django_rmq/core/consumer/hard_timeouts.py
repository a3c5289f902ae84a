"""Unending calls: listeners that exceeded HARD_TIMEOUT in a thread, which only the end of the process can end."""

from __future__ import annotations

from django_rmq.core.consumer.mailbox import Mailbox, Unending
from django_rmq.core.consumer.progress import SharedProgress, mark_of
from django_rmq.core.consumer.shutdown import ShutdownState


class HardTimeouts:
    """Makes the worker end, and records in ``notes`` which messages to charge for it."""

    def __init__(self, inbox: Mailbox, ending: ShutdownState, notes: SharedProgress | None) -> None:
        self._ending = ending
        self._notes = notes
        inbox.on(Unending, self._note)

    def _note(self, item: Unending) -> None:
        batch = item.batch
        if self._notes is not None:
            topic, slot, receipt = batch.topic.name, batch.place.slot, batch.receipt
            members = [message.delivery.member for message in batch.running()]
            # rule: forgives_what_ran_too_long
            self._notes.charge([mark_of(topic, slot, receipt, member) for member in members])
        self._ending.overran.append(batch)
        self._ending.begun = True


__all__ = ["HardTimeouts"]
