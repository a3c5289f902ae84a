"""Publish and subscribe for wake-ups and events, between threads of this process."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Generic, TypeVar

from django_rmq.core.commands.broker_interface import Woken
from django_rmq.core.model.replies import Pushed

_Told = TypeVar("_Told")


class Channels:
    """The subscriptions of this memory by channel."""

    def __init__(self) -> None:
        self._listening: list[Subscription[Any]] = []
        self._lock = threading.Lock()

    def add(self, subscription: Subscription[_Told]) -> None:
        """Deliver to ``subscription`` what is published from now on."""
        with self._lock:
            self._listening.append(subscription)

    def forget(self, subscription: Subscription[_Told]) -> None:
        """Deliver nothing more to ``subscription``."""
        with self._lock:
            self._listening = [other for other in self._listening if other is not subscription]

    def publish(self, channel: bytes, told: Any) -> int:
        """Deliver an item to the subscriptions of ``channel``; return their number."""
        with self._lock:
            hearing = [listening for listening in self._listening if channel in listening.channels]
            for listening in hearing:
                listening.put(told)
        return len(hearing)


class Subscription(Generic[_Told]):
    """A subscription to channels that is active until ``close``."""

    def __init__(self, heard: Channels, channels: set[bytes]) -> None:
        self.channels = channels
        self._heard = heard
        self._told: deque[_Told] = deque()
        self._changed = threading.Condition()
        heard.add(self)

    def put(self, told: _Told) -> None:
        """Add an item."""
        with self._changed:
            self._told.append(told)
            self._changed.notify_all()

    def fileno(self) -> int:
        """Raise ``OSError``: there is no socket to select on; call ``get`` with a time-out."""
        raise OSError("wake-ups in memory have no file descriptor")

    def get(self, timeout: float = 0.0) -> list[_Told]:
        """Return what was published; wait at most ``timeout`` seconds for the first item."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._told), timeout)
            told = list(self._told)
            self._told.clear()
        return told

    def close(self) -> None:
        """End the subscription."""
        self._heard.forget(self)


class Wakeups(Subscription[Woken]):
    """A subscription to wake-ups: (topic, slot) pairs, and to what sends push to ``inbox``, if that has a name."""

    def __init__(self, heard: Channels, channels: set[bytes], inbox: bytes = b"") -> None:
        super().__init__(heard, channels | ({inbox} - {b""}))
        self._inbox = inbox

    def stop_pushes(self) -> None:
        """Refuse pushes from now on. ``get`` returns those that were made before."""
        self.channels = self.channels - {self._inbox}

    @property
    def has_pushes(self) -> bool:
        """Whether ``get`` may still return what a send has pushed."""
        return self._inbox in self.channels or any(isinstance(told, Pushed) for told in self._told)


class Events(Subscription[bytes]):
    """A subscription to the events of messages."""
