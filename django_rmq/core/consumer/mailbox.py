"""The inbox: messages from other threads to the dispatcher's thread."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from django_rmq.core.consumer.batch import Batch


class Own(NamedTuple):
    """Slots that this worker owns from now on, by topic."""

    slots: Mapping[str, array[int]]


class Disown(NamedTuple):
    """Slots that this worker no longer owns."""

    slots: list[tuple[str, int]]


class Wake(NamedTuple):
    """Something is due in a slot, or (as ``-1 - slot``) the slot was paused."""

    topic: str
    slot: int


class Resubscribed(NamedTuple):
    """The subscription was renewed; wake-ups until now may have been missed."""


class Overrun(NamedTuple):
    """A listener has exceeded MAX_RUNTIME."""

    batch: Batch


class Unending(NamedTuple):
    """A listener has exceeded HARD_TIMEOUT, and only the end of the process can end it."""

    batch: Batch


class Stop(NamedTuple):
    """The worker has to end."""


class Mailbox:
    """Any thread may put an item into ``queue``; the dispatcher's thread reads it."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self._handlers: dict[type, Callable[[Any], None]] = {}

    def on(self, kind: type, handler: Callable[[Any], None]) -> None:
        """Pass items of this kind to ``handler``."""
        self._handlers[kind] = handler

    def hear(self) -> None:
        """Process the items that are there."""
        self.read(0.0)

    def read(self, timeout: float) -> None:
        """Process the items that are there; if there are none, wait for one, for at most this many seconds."""
        try:
            item = self.queue.get(timeout=timeout) if timeout > 0 else self.queue.get_nowait()
            while True:
                self.note(item)
                item = self.queue.get_nowait()
        except Empty:
            pass

    def note(self, item: Any) -> None:
        """Do what an item asks for."""
        self._handlers[type(item)](item)


__all__ = ["Disown", "Mailbox", "Overrun", "Own", "Resubscribed", "Stop", "Unending", "Wake"]
