"""The slots that a worker owns: a thread that changes them, part by part, to the slots that it should own.

It contacts no server. So it also notices the end of the session while the thread that talks to a server is
stuck.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from django_rmq.core.coordination import Owned, Slots, less, pairs
from django_rmq.core.log.safe_logger import safe_logger

logger = safe_logger("django_rmq.coordination")

PART = 8192
"""The number of slots passed on at once. Between two parts it checks for a newer target or the end of the session."""

uptime: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds on a clock that also counts while the machine is suspended, as a session does."""


class SlotOwnership:
    """A thread that calls ``own`` and ``disown`` until the owned slots are those of the last ``want``.

    Serial slots are owned at most until ``until``, shared ones (topics without a gate) until ``end``. A
    callback that raises is logged and counts as done.
    """

    def __init__(self, own: Callable[[Slots], None], disown: Callable[[Slots], None]) -> None:
        self.changed = threading.Condition()
        """Notified after each change of what is owned or wanted. The owner of this object may use it for its
        own conditions too."""
        self._own = own
        self._disown = disown
        self._serial: Owned = {}
        self._shared: Owned = {}
        self._until = 0.0
        self._owned: Owned = {}
        self._ending = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, or go on after the thread has died."""
        thread = threading.Thread(target=self._run, name="rmq-ownership", daemon=True)
        thread.start()
        self._thread = thread

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def want(self, serial: Owned, shared: Owned, until: float) -> None:
        """Own exactly this; the serial part no longer than until ``until`` by ``uptime``."""
        with self.changed:
            self._serial, self._shared, self._until = serial, shared, until
            self.changed.notify_all()

    def lose(self) -> None:
        """Give up the serial slots, because the session is over."""
        with self.changed:
            self._serial = {}
            self.changed.notify_all()

    def end(self, timeout: float) -> bool:
        """Disown everything; return whether all of it was passed on within ``timeout`` seconds."""
        with self.changed:
            self._ending = True
            self.changed.notify_all()
            if not self.is_alive():
                return True
            return self.changed.wait_for(lambda: not self._owned, timeout)

    def owned(self) -> Owned:
        """Return the slots passed to ``own`` and not to ``disown``."""
        with self.changed:
            return dict(self._owned)

    def is_settled(self) -> bool:
        """Return whether nothing is left to pass on. Call it with ``changed`` held."""
        return self._owned == self._wanted()

    def _run(self) -> None:
        while True:
            with self.changed:
                wanted = self._wanted()
                lost, gained = less(self._owned, wanted), less(wanted, self._owned)
                if not lost and not gained:
                    if self._ending:
                        return
                    self.changed.wait(max(0.0, self._until - uptime()) if self._serial else None)
                    continue
            # Lost slots come first, because their new owner waits for them.
            part = _first(lost or gained)
            try:
                (self._disown if lost else self._own)(pairs(part))
            except Exception:
                word = "loses" if lost else "gains"
                logger.exception("Cannot apply a new assignment: the worker %s some slots", word)
            with self.changed:
                self._owned = less(self._owned, part) if lost else _and(self._owned, part)
                self.changed.notify_all()

    def _wanted(self) -> Owned:
        if self._ending:
            return {}
        if self._serial and uptime() >= self._until:
            logger.warning(
                "The coordinator was unreachable for a whole session; the worker gives up all its slots",
                extra={"rmq_event": "session_lost"},
            )
            self._serial = {}
        return {**self._shared, **self._serial}


def _first(owned: Owned) -> Owned:
    """Return the first ``PART`` slots of ``owned``."""
    left, part = PART, {}
    for topic, ranges in owned.items():
        taken: list[range] = []
        for piece in ranges:
            if left == 0:
                break
            taken.append(piece[:left])
            left -= len(taken[-1])
        if taken:
            part[topic] = tuple(taken)
    return part


def _and(owned: Owned, more: Owned) -> Owned:
    both = dict(owned)
    for topic, ranges in more.items():
        both[topic] = tuple(_joined(sorted([*owned.get(topic, ()), *ranges], key=lambda part: part.start)))
    return both


def _joined(ranges: list[range]) -> Iterator[range]:
    at = 0
    while at < len(ranges):
        start, stop = ranges[at].start, ranges[at].stop
        at += 1
        while at < len(ranges) and ranges[at].start == stop:
            stop = ranges[at].stop
            at += 1
        yield range(start, stop)


__all__ = ["PART", "SlotOwnership", "uptime"]
