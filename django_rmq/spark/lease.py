"""The leases of a driver: it renews the name of its consumer and the claims that it holds, for as long as it lives."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from django_rmq.core.commands import claims, registry
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.inspect import walk
from django_rmq.core.model.replies import Driver
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import LostRace, RmqError

logger = logging.getLogger("django_rmq.spark")


def _start_of(pid: int) -> str:
    """Return when a process of this machine was started, in ticks since its boot. Empty: it does not run, or nobody knows."""
    with suppress(OSError, IndexError):
        # The name before the last bracket may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def _machine() -> str:
    """Return what no other machine or container has, since its boot. Empty: nobody knows."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def about_this_process() -> str:
    """Return host, pid, machine and start of this process, as others read it in Redis."""
    pid = os.getpid()
    return f"{platform.node() or '-'} {pid} {_machine() or '-'} {_start_of(pid) or '-'}"


def is_dead(about: str) -> bool:
    """Return whether a process ran on this machine and no longer does. False: it runs, or nobody knows."""
    host, pid, machine, start = (*about.split(" "), *[""] * 4)[:4]
    here = (platform.node() or "-", _machine())
    return (host, machine) == here and pid.isdecimal() and start != "-" and _start_of(int(pid)) != start


class DriverIdentity:
    """The name of a consumer, which one driver has at a time. Thread-safe.

    The word of the checkpoint says whether a driver is that of the same query, started again.
    """

    def __init__(self, broker: Broker, topic: Topic, lease_ms: int) -> None:
        self._broker = broker
        self._topic = topic
        self._lease_ms = lease_ms
        self._word = uuid4().hex
        self._held: tuple[str, str] | None = None
        """Consumer and checkpoint, as soon as this driver has had the name."""
        self._has_left = False
        self._lock = threading.Lock()

    def hold(self, consumer: str, checkpoint: str) -> None:
        """Get or renew the name of the consumer. Raises ``LostRace`` if another driver has it."""
        with self._lock:
            starts = self._held is None
            other = self._ask(consumer, checkpoint, starts=starts)
            if other is not None and starts and is_dead(other.about):
                other = self._ask(consumer, checkpoint, starts=starts, gone=other.name)
            if other is None:
                self._held, self._has_left = (consumer, checkpoint), False
        if other is None:
            return
        if starts:
            raise LostRace(
                f"another query has consumerId {consumer} of topic {self._topic.name}: {other.where}, with another "
                "checkpoint. Stop it, or give each query a consumerId of its own, or none. If it is dead, its name is "
                f"free when its lease ends, or after rmqclaims {self._topic.name} --return --consumer {consumer}"
            )
        raise LostRace(
            f"another query has taken over consumerId {consumer} of topic {self._topic.name}: {other.where}. It was "
            "started from the same checkpoint, or after the lease of this one had ended. This one ends, and loses nothing"
        )

    def _ask(self, consumer: str, checkpoint: str, *, starts: bool, gone: str = "") -> Driver | None:
        call = registry.hold_consumer(
            self._topic,
            consumer,
            self._word,
            checkpoint,
            about_this_process(),
            self._lease_ms,
            starts=starts,
            gone=gone,
        )
        return self._broker.run(call)

    def renew(self) -> None:
        """Renew the name that this driver has; the next ``hold`` reports if it has lost it."""
        with self._lock:
            if self._held is not None and not self._has_left:
                self._ask(*self._held, starts=False)

    def leave(self) -> None:
        """Leave the name to the next query, at the end of this one."""
        with self._lock:
            if self._held is not None:
                self._has_left = True
                self._broker.run(registry.leave_consumer(self._topic, self._held[0], self._word))


class Lease:
    """The claims of this process on a topic. A thread renews them, and its consumer, from the first one that is held."""

    def __init__(self, broker: Broker, topic: Topic, lease_ms: int) -> None:
        self._broker = broker
        self._topic = topic
        self._lease_ms = lease_ms
        self.identity = DriverIdentity(broker, topic, lease_ms)
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
        self.begin()

    def begin(self) -> None:
        """Begin to renew, at the first call."""
        with self._lock:
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
                self.identity.renew()
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
