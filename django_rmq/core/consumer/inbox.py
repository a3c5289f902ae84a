"""The inbox: what other threads tell the dispatcher's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from django_rmq.core.consumer.batches import Batch


class Own(NamedTuple):
    """Slots that are ours from now on, by topic."""

    slots: Mapping[str, array[int]]


class Disown(NamedTuple):
    """Slots that are not ours any more."""

    slots: list[tuple[str, int]]


class Wake(NamedTuple):
    """Something is due in a slot, or (as ``-1 - slot``) it was paused."""

    topic: str
    slot: int


class Resubscribed(NamedTuple):
    """Wake-ups were missed until now."""


class Overrun(NamedTuple):
    """A listener has exceeded MAX_RUNTIME."""

    batch: Batch


class Stop(NamedTuple):
    """The worker is to end."""


class Inbox:
    """Anybody may put something into ``queue``; the dispatcher's thread reads it."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self._handlers: dict[type, Callable[[Any], None]] = {}

    def on(self, kind: type, handler: Callable[[Any], None]) -> None:
        """Let ``handler`` have what is of this kind."""
        self._handlers[kind] = handler

    def hear(self) -> None:
        """Read what is there."""
        self.read(0.0)

    def read(self, timeout: float) -> None:
        """Read what is there; if there is nothing, wait for it for so many seconds."""
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


__all__ = ["Disown", "Inbox", "Overrun", "Own", "Resubscribed", "Stop", "Wake"]
