"""The lease: this process renews the claims that it holds, for as long as it is alive."""

from __future__ import annotations

import logging
import threading
import time

from django_rmq.core.calls import claims
from django_rmq.core.calls.broker import Broker
from django_rmq.core.calls.walk import walk
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import RmqError

logger = logging.getLogger("django_rmq.spark")


class Lease:
    """The claims of this process on a topic. A thread renews them, from the first one that is held."""

    def __init__(self, broker: Broker, topic: Topic, lease_ms: int) -> None:
        self._broker = broker
        self._topic = topic
        self._lease_ms = lease_ms
        self._holder = ""
        self._held: dict[int, int] = {}
        """Slot -> number of the claim to renew."""
        self._said = 0
        """The newest claim about whose loss a warning was logged."""
        self.lost = 0
        """The number of claims that were lost, wholly or in part."""
        self._lock = threading.Lock()
        self._renewing: threading.Thread | None = None

    def slots(self, number: int | None = None) -> list[int]:
        """Return the slots with a part of a held claim. None: of any claim."""
        with self._lock:
            return [slot for slot, held in self._held.items() if number in (None, held)]

    def hold(self, slot: int, consumer: str, number: int) -> None:
        """Renew a consumer's claim in a slot from now on."""
        with self._lock:
            self._held[slot] = number
            self._holder = consumer
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew, name="rmq-claims", daemon=True)
                self._renewing.start()

    def let_go(self, slot: int) -> None:
        """Stop renewing in a slot."""
        with self._lock:
            self._held.pop(slot, None)

    def warn(self, number: int, why: str) -> None:
        """Warn about a loss: once for each claim, however many slots it concerns and however often it is found."""
        with self._lock:
            if number <= self._said:
                return
            self._said = number
            self.lost += 1
        logger.warning("Claim %d of topic %s: %s", number, self._topic.name, why)

    def _renew(self) -> None:
        """Renew what is held, for as long as this process lives; Spark kills it with the query."""
        while True:
            time.sleep(self._lease_ms / 3_000)
            with self._lock:
                held = dict(self._held)
            try:
                self._renew_all(held)
            except RmqError as error:
                logger.warning("Cannot renew the claims of topic %s: %s", self._topic.name, error)

    def _renew_all(self, held: dict[int, int]) -> None:
        calls = (
            claims.renew(self._topic, slot, self._holder, number, self._lease_ms)
            for slot, number in held.items()
        )
        sizes = list(walk(self._broker, calls))
        gone = [slot for slot, size in zip(held, sizes, strict=True) if size is None]
        if not gone:
            return
        lost = 0
        reads = (claims.read_claim(self._topic, slot, self._holder, held[gone[0]]) for slot in gone)
        for slot, read in zip(gone, walk(self._broker, reads), strict=True):
            # Acknowledged claims are not lost: a listener was faster than the next poll.
            lost += read.state in ("lost", "returned")
            with self._lock:
                if self._held.get(slot) == held[slot]:
                    del self._held[slot]
        if lost:
            self.warn(
                held[gone[0]],
                f"in {lost} slots its lease ended, or it was given back, while Spark processed the batch. Their "
                "messages are delivered again",
            )
