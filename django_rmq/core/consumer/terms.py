"""Terms: how a worker works, and whom it tells of what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django_rmq.core.consumer.polling import POLL_SECONDS
from django_rmq.core.consumer.settling import Watcher
from django_rmq.core.words.answers import Delivery
from django_rmq.core.words.topics import Topic


@dataclass(frozen=True, slots=True)
class Terms:
    """How a worker works. Times in seconds; None: never."""

    threads: int = 4
    burst: bool = False
    """It ends when nothing can be taken any more."""
    shutdown_timeout: float = 30.0
    poll_seconds: float = POLL_SECONDS
    max_messages: int | None = None
    max_idle_time: float | None = None
    swept: Iterable[Topic] = ()
    """Topics that it does not serve, and perhaps nobody does: it only ends what times out there."""


class Ownership(NamedTuple):
    """What a worker and the coordinator, which says what slots are its own, ask and tell each other."""

    settled: Callable[[], bool] = lambda: True
    """Whether all slots that shall be ours have been told: before that no burst ends."""
    confirmed: Callable[[], float] = lambda: float("-inf")
    """For ``Fences``: as of when the slots that were told are known to be ours."""
    leaving: Callable[[], None] = lambda: None
    """Called once, when nothing more will be taken: others may have our slots."""
    on_moved: Callable[[str], None] | None = None
    """Hears of a topic with a slot that was given another slot count (often, and from the loop: it must be quick); the
    slot is worked on. Without it the worker settles what is in hand and raises ``SlotMoved``."""


class Watching(NamedTuple):
    """Who is told what a worker does, by its own thread."""

    beat: Callable[[], None] = lambda: None
    """Each turn of the loop."""
    handed_out: Callable[[Topic, Sequence[Delivery], float], None] = lambda topic, deliveries, now_ms: None
    """Each prepare that brought something, with the server's time in ms."""
    took: Callable[[Topic, Sequence[float]], None] = lambda topic, seconds: None
    """Calls of a listener, with how many seconds each took."""
    watcher: Watcher | None = None
    """What became of messages."""


PLAIN = Terms()
ALONE = Ownership()
"""No coordinator: what was told to be ours is ours."""
UNWATCHED = Watching()

__all__ = ["ALONE", "PLAIN", "UNWATCHED", "Ownership", "Terms", "Watching"]
