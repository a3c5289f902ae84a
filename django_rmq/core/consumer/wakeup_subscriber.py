"""The thread that waits for wake-ups, so that the dispatcher does not have to."""

from __future__ import annotations

import threading
from collections.abc import Callable

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

logger = safe_logger("django_rmq.consumer")


class WakeupSubscriber(threading.Thread):
    """Calls ``woken`` with topic and slot of each wake-up, and ``subscribed`` after each new subscription."""

    def __init__(
        self,
        broker: Broker,
        topics: list[Topic],
        woken: Callable[[str, int], None],
        subscribed: Callable[[], None],
    ) -> None:
        super().__init__(name="rmq-wakeups", daemon=True)
        self.subscribed = threading.Event()
        self._broker = broker
        self._topics = topics
        self._on_wake = woken
        self._on_subscribed = subscribed
        self._stopped = threading.Event()
        self._renewed = threading.Event()
        self._complain = LogThrottle(logger)

    def stop(self) -> None:
        """End soon."""
        self._stopped.set()

    def renew(self) -> None:
        """Subscribe again, because the connection may be dead without an error."""
        self._renewed.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            wakeups = None
            try:
                self._renewed.clear()
                wakeups = self._broker.wakeups(self._topics)
                self.subscribed.set()
                self._on_subscribed()
                while not (self._stopped.is_set() or self._renewed.is_set()):
                    for topic, slot in wakeups.get(timeout=0.1):
                        self._on_wake(topic, slot)
            except RmqError:
                self._stopped.wait(0.2)
            except Exception as error:  # noqa: BLE001 - logged, not raised
                self._complain(
                    "wake-ups",
                    "The wake-up subscription failed; polling continues: %s",
                    error,
                    exc_info=True,
                )
                self._stopped.wait(1.0)
            finally:
                if wakeups is not None:
                    wakeups.close()


__all__ = ["WakeupSubscriber"]
