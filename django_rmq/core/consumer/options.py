"""The options of a worker, and the callbacks by which the layers above follow and direct it. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django_rmq.core.consumer.acks import Watcher
from django_rmq.core.consumer.fetch import POLL_SECONDS
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker. Times are in seconds; None means never."""

    threads: int = 4
    burst: bool = False
    """Whether it ends when no message can be taken."""
    shutdown_timeout: float = 30.0
    poll_seconds: float = POLL_SECONDS
    max_messages: int | None = None
    max_idle_time: float | None = None
    swept: Iterable[Topic] = ()
    """Topics that it does not serve, and perhaps no worker does; it only ends deliveries that time out there."""


class AssignmentCallbacks(NamedTuple):
    """The callbacks between a worker and the coordinator, which decides which slots are the worker's."""

    settled: Callable[[], bool] = lambda: True
    """Whether all slots assigned to this worker have been announced; no burst ends before that."""
    confirmed: Callable[[], float] = lambda: float("-inf")
    """For ``FencedSlots``: as of when the announced slots are known to be this worker's."""
    leaving: Callable[[], None] = lambda: None
    """Called once, when nothing more will be taken: other workers may have the slots."""
    on_moved: Callable[[str], None] | None = None
    """Called for a topic with a slot that was given another slot count (often, and from the loop, so it must
    be quick); the slot is still worked on. Without it the worker settles what is in flight and raises
    ``SlotMoved``."""


class WorkerCallbacks(NamedTuple):
    """Callbacks that report what a worker does, called in its own thread."""

    beat: Callable[[], None] = lambda: None
    """Called on each turn of the loop."""
    handed_out: Callable[[Topic, Sequence[Delivery], float], None] = lambda topic, deliveries, now_ms: None
    """Called for each prepare that returned messages, with the server's time in ms."""
    took: Callable[[Topic, Sequence[float]], None] = lambda topic, seconds: None
    """Called for calls of a listener, with the seconds that each took."""
    watcher: Watcher | None = None
    """Receives the outcomes of messages."""


PLAIN = WorkerOptions()
ALONE = AssignmentCallbacks()
"""No coordinator: the slots that were announced belong to this worker."""
UNWATCHED = WorkerCallbacks()

__all__ = ["ALONE", "PLAIN", "UNWATCHED", "AssignmentCallbacks", "WorkerCallbacks", "WorkerOptions"]
