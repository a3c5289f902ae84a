"""Companions: the two threads beside the loop. One extends what is in hand, the other waits for wake-ups."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.heartbeat import Heartbeat
from django_rmq.core.consumer.in_flight import InFlight
from django_rmq.core.consumer.mailbox import (
    Mailbox,
    Overrun,
    Resubscribed,
    Unending,
    Wake,
)
from django_rmq.core.consumer.wakeup_subscriber import WakeupSubscriber
from django_rmq.core.consumer.watchdog import Watchdog, Watched
from django_rmq.core.model.topic import Topic
from django_rmq.core.model.wakeups import read


class BackgroundThreads:
    """Both threads put what they find into ``inbox``. ``lookout`` replaces them."""

    def __init__(
        self, broker: Broker, topics: Iterable[Topic], hand: InFlight, inbox: Mailbox, lookout: Watchdog
    ) -> None:
        self._broker = broker
        self._topics = list(topics)
        self._hand = hand
        self._inbox = inbox
        self._listening = Watched(self._new_listening)
        self._heartbeat = Watched(self._new_heartbeat)
        lookout.add("heartbeat", self._heartbeat.is_alive, self._heartbeat.replace)
        lookout.add("wake-up", self._listening.is_alive, self._listening.replace)

    def start(self) -> None:
        """Start both."""
        self._heartbeat.thread.start()
        self._listening.thread.start()

    def wait_subscribed(self, seconds: float) -> None:
        """Wait until the subscription to wake-ups is active, for at most ``seconds``."""
        self._listening.thread.subscribed.wait(seconds)

    def renew(self) -> None:
        """Subscribe again, because the connection may be dead without an error."""
        self._listening.thread.renew()

    def stop(self, *, keeps_beating: bool) -> list[threading.Thread]:
        """End both, and return them. ``keeps_beating``: the heartbeat ends with the process."""
        self._listening.thread.stop()
        if keeps_beating:
            return [self._listening.thread]
        self._heartbeat.thread.stop()
        return [self._heartbeat.thread, self._listening.thread]

    def _new_heartbeat(self) -> Heartbeat:
        def overrun(batch: Batch) -> None:
            self._inbox.queue.put(Overrun(batch))

        def unending(batch: Batch) -> None:
            self._inbox.queue.put(Unending(batch))

        in_hand = self._hand.batches
        return Heartbeat(self._broker, self._topics, lambda: in_hand.copy().values(), overrun, unending)

    def _new_listening(self) -> WakeupSubscriber:
        def woken(topic: str, told: int) -> None:
            what, slot = read(told)
            if what == "look_again":
                self._heartbeat.thread.look_again(topic, slot)
            else:
                self._inbox.queue.put(Wake(topic, told))

        def subscribed() -> None:
            self._inbox.queue.put(Resubscribed())
            self._heartbeat.thread.look_everywhere()

        return WakeupSubscriber(self._broker, self._topics, woken, subscribed)


__all__ = ["BackgroundThreads"]
