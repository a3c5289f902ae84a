"""The mailbox of a dispatcher: other threads report slots that come and go, outcomes of batches, and the end; Redis, wake-ups.

Any thread may put an item into the mailbox, and only the dispatcher's thread reads it. So the state of the dispatcher needs
no locks. The part that registers a handler for a type of items decides what they mean. The report of an executor may be
deferred until something else comes, because waking the dispatcher costs more than processing the report. The dispatcher reads
the subscription to wake-ups itself, because a thread that hands them over would wake it as well. A thread only subscribes
(``WakeupSubscriber``). Redis publishes the slots in which something can be taken; what a wake-up did not announce is found by
``due_poll``.
"""

from __future__ import annotations

import os
import select
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from django_rmq.core.commands.broker_interface import Broker, WakeupSubscription
from django_rmq.core.consumer.batch import Batch, BatchReport
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.replies import Pushed
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, SlotMoved

logger = safe_logger("django_rmq.consumer")


class Own(NamedTuple):
    """Slots that this worker owns from now on, by topic."""

    slots: Mapping[str, array[int]]


class Disown(NamedTuple):
    """Slots that this worker no longer owns."""

    slots: list[tuple[str, int]]


class Wake(NamedTuple):
    """A wake-up: ``number`` says what has happened in which slot of a topic (``keys.read_wakeup``)."""

    topic: str
    number: int


class Resubscribed(NamedTuple):
    """The subscription was renewed; wake-ups until now may have been missed."""

    wakeups: WakeupSubscription | None
    """The subscription, for the dispatcher to read and to close. None if it has no socket, so that its thread reads it."""


class SubscriptionLost(NamedTuple):
    """The subscription that the dispatcher reads has broken."""


class MaxRuntimeExceeded(NamedTuple):
    """A listener has exceeded MAX_RUNTIME."""

    batch: Batch


class HardTimeoutExceeded(NamedTuple):
    """A listener has exceeded HARD_TIMEOUT, and only the end of the process can end it."""

    batch: Batch
    began: float
    """The ``uptime`` at which its call began."""


class LimitsChange(NamedTuple):
    """Topics whose limits a person has changed, with those in effect."""

    topics: list[Topic]


class Stop(NamedTuple):
    """The worker has to end."""


MailboxItem = (
    BatchReport
    | Own
    | Disown
    | Wake
    | Pushed
    | Resubscribed
    | SubscriptionLost
    | MaxRuntimeExceeded
    | HardTimeoutExceeded
    | LimitsChange
    | Stop
)
Item = TypeVar("Item", bound=MailboxItem)


class ShutdownState:
    """Flags that any part of the worker may set and read."""

    def __init__(self) -> None:
        self.begun = False
        """Whether the worker has stopped taking messages."""
        self.forced = False
        """Whether the shutdown time-out cut a listener short, or something could not be settled."""
        self.past_hard_timeout: list[Batch] = []
        """The batches whose listener exceeded HARD_TIMEOUT; nothing waits for them, and the process ends."""
        self.moved: SlotMoved | None = None
        """The error to raise at the end, if a slot was given another slot count."""

    def is_over(self, batches: Iterable[Batch]) -> bool:
        """Return whether nothing is left to wait for among the ``batches`` in flight."""
        # A listener that exceeded HARD_TIMEOUT ends only with the process, so nothing waits for it.
        return all(batch in self.past_hard_timeout for batch in batches)


class Bell:
    """Wakes the thread that polls it. Safe in signal handlers.

    Its descriptors are closed when nothing refers to it any more, so nobody rings those of somebody else.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        """The descriptor to poll."""
        for end in (self.descriptor, self._writer):
            os.set_blocking(end, False)

    def __del__(self) -> None:
        os.close(self.descriptor)
        os.close(self._writer)

    def ring(self) -> None:
        """Wake the thread. A pipe that is full wakes it, too."""
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def silence(self) -> None:
        """Let the next poll wait again."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)


PART_SECONDS = 0.1
"""Maximum seconds of waiting for the rest of a wake-up of which a part has come. What TLS sends for itself is such a part."""

CHECK_SECONDS = 5.0
"""Seconds between two checks of the subscription. Two of them are shorter than most time-outs of deliveries."""

SELECTABLE = 1024
"""The first descriptor that ``select`` cannot wait for (FD_SETSIZE)."""


class Mailbox:
    """Any thread may ``put`` an item; the dispatcher's thread reads it, and the subscription to wake-ups."""

    def __init__(self) -> None:
        # ``put`` of a SimpleQueue is reentrant, so a signal handler may call it while its own thread is in the queue.
        self._items: SimpleQueue[MailboxItem] = SimpleQueue()
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._is_asleep = self._defers_reports = False
        """Whether the dispatcher waits and nobody has rung, and whether a report of commits lets it sleep on."""
        self._wakeups: tuple[int, WakeupSubscription] | None = None
        """The subscription, and the descriptor of its socket."""
        self._next_check = 0.0
        self._bell, self._poll = Bell(), select.poll()
        self._poll.register(self._bell.descriptor, select.POLLIN)

    def on(self, kind: type[Item], handler: Callable[[Item], None]) -> None:
        """Pass items of this kind to ``handler``."""
        self._handlers[kind] = handler

    def put(self, item: MailboxItem, /) -> None:
        """Take an item. It wakes the dispatcher, unless that defers reports of commits, and the item is one."""
        self._items.put(item)
        # The item is added before the flags are read, and the dispatcher does the reverse, so it sleeps over none.
        # rule: overlooks_what_comes_when_it_falls_asleep
        if self._is_asleep and not (self._defers_reports and _is_of_commits(item)):
            # It is cleared before the bell rings: the dispatcher may fall asleep again while this thread rings.
            self._is_asleep = False
            self._bell.ring()

    def process_items(self) -> None:
        """Process the items and the wake-ups that are there."""
        self.read(0.0)

    def read(self, timeout: float, *, defers_reports: bool = False) -> None:
        """Process what is there; if there is nothing, wait for an item or a wake-up, for at most this many seconds.

        ``defers_reports``: executors' reports of commits do not end this wait, and are processed after it.
        """
        self._defers_reports, self._is_asleep = defers_reports, timeout > 0
        try:
            ready = self._wait(timeout if self._items.empty() else 0.0)
        finally:
            self._is_asleep = False
        try:
            while True:
                self.handle(self._items.get_nowait())
        except Empty:
            pass
        # Reports come first: their batches are no longer in flight when a wake-up asks for the next one.
        for descriptor, _ in ready:
            if self._wakeups is not None and descriptor == self._wakeups[0]:
                self._read_wakeups(self._wakeups[1])
            elif descriptor == self._bell.descriptor:
                self._bell.silence()

    def _wait(self, seconds: float) -> list[tuple[int, int]]:
        """Return the descriptors that can be read, each with its events."""
        ms = int(seconds * 1000)
        ready = self._poll.poll(ms)
        # A poll takes whole milliseconds. What comes within the rest of one has to end it, too.
        if not ready and (rest := seconds - ms / 1000) > 0:
            self._wait_briefly(rest)
            ready = self._poll.poll(0)
        return ready

    def _wait_briefly(self, seconds: float) -> None:
        """Wait until a descriptor can be read, for at most these seconds, which may be a part of a millisecond."""
        descriptors = [self._bell.descriptor]
        if self._wakeups is not None:
            descriptors.append(self._wakeups[0])
        if max(descriptors) < SELECTABLE:
            select.select(descriptors, (), (), seconds)
        else:
            time.sleep(seconds)

    def handle(self, item: MailboxItem) -> None:
        """Do what an item asks for."""
        self._handlers[type(item)](item)

    # --- wake-ups

    def listen(self, wakeups: WakeupSubscription) -> None:
        """Read this subscription from now on, and close the previous one."""
        self.stop_listening()
        self._wakeups = wakeups.fileno(), wakeups
        self._poll.register(wakeups.fileno(), select.POLLIN)

    def check_wakeups(self) -> None:
        """Check every few seconds that the subscription still receives something; its connection may be dead without an error."""
        if self._wakeups is None or time.monotonic() < self._next_check:
            return
        # This process may not have run for a while. Then the answer to the last check has come, and was not read yet.
        self.process_items()
        self._next_check = time.monotonic() + CHECK_SECONDS
        try:
            if self._wakeups is not None:
                self._wakeups[1].check()  # rule: trusts_a_silent_subscription
        except RmqError:
            self._lose_wakeups()

    def stop_listening(self) -> None:
        """Close the subscription, if there is one."""
        if self._wakeups is not None:
            descriptor, wakeups = self._wakeups
            self._wakeups = None
            self._poll.unregister(descriptor)
            wakeups.close()

    def stop_pushes(self) -> None:
        """Let no send push a message any more. Those that were pushed before are still read."""
        try:
            if self._wakeups is not None:
                self._wakeups[1].stop_pushes()
        except RmqError:
            self.stop_listening()

    @property
    def has_pushes(self) -> bool:
        """Whether messages may still come that were pushed."""
        return self._wakeups is not None and self._wakeups[1].has_pushes

    def _read_wakeups(self, wakeups: WakeupSubscription) -> None:
        try:
            for woken in wakeups.get(PART_SECONDS):
                self.handle(woken if isinstance(woken, Pushed) else Wake(*woken))
        except RmqError:
            self._lose_wakeups()

    def _lose_wakeups(self) -> None:
        self.stop_listening()
        self.handle(SubscriptionLost())


def _is_of_commits(item: MailboxItem) -> bool:
    return isinstance(item, BatchReport) and not (item.failures or item.released)


PAUSE_SECONDS = 0.2
"""Seconds between the end of a subscription and the next one."""


class WakeupSubscriber(threading.Thread):
    """Subscribes to wake-ups, because that may take long, and puts each new subscription into ``mailbox``.

    It reads only a subscription without a socket by itself: that of a broker in memory. ``on_subscribed`` is called after each
    new subscription.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Sequence[Topic],
        mailbox: Mailbox,
        on_subscribed: Callable[[], None],
        inbox: bytes,
    ) -> None:
        super().__init__(name="rmq-wakeups", daemon=True)
        self.subscribed = threading.Event()
        """Set from the first subscription on."""
        self._broker = broker
        self._topics = topics
        self._inbox = inbox
        self._mailbox = mailbox
        self._on_subscribed = on_subscribed
        self._is_stopped = False
        self._renewed = threading.Event()
        self._complain = LogThrottle(logger)

    def stop(self) -> None:
        """End soon. The dispatcher reads wake-ups no more."""
        self._is_stopped = True
        self._renewed.set()

    def renew(self) -> None:
        """Subscribe again, because the connection may be dead without an error."""
        self._renewed.set()

    def run(self) -> None:
        wakeups = None
        while True:
            # The flag is cleared before anything is done, so that what is requested meanwhile is not overlooked.
            self._renewed.clear()
            if self._is_stopped:
                break
            try:
                wakeups = self._broker.wakeups(self._topics, self._inbox)
                self.subscribed.set()
                self._on_subscribed()
                self._attend(wakeups)
            except RmqError:
                # Redis is unavailable, and it is tried again.
                pass
            except Exception as error:  # noqa: BLE001 - logged, not raised
                self._complain(
                    "wake-ups", "The wake-up subscription failed; polling continues: %s", error, exc_info=True
                )
            if not self._is_stopped:
                time.sleep(PAUSE_SECONDS)
        if wakeups is not None:
            # The dispatcher has ended, and perhaps did not see this one.
            wakeups.close()

    def _attend(self, wakeups: WakeupSubscription) -> None:
        """Give a subscription to the dispatcher, and wait until there has to be another one."""
        try:
            wakeups.fileno()
        except OSError:
            self._read(wakeups)
            return
        # The dispatcher closes it, because it may read it at any time.
        self._mailbox.put(Resubscribed(wakeups))
        self._renewed.wait()

    def _read(self, wakeups: WakeupSubscription) -> None:
        self._mailbox.put(Resubscribed(None))
        try:
            while not self._renewed.is_set():
                for woken in wakeups.get(timeout=0.1):
                    self._mailbox.put(woken if isinstance(woken, Pushed) else Wake(*woken))
        finally:
            wakeups.close()
