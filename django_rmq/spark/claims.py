"""The claims of a query on a topic: its driver claims messages, keeps the lease, and acknowledges. Nothing here knows Spark.

A consumer has one driver at a time, and at most one open claim, in any number of slots (decision 0004 says why). While the
driver lives, a thread renews both: the name of the consumer and the claims. A lease that nobody renews is ended in Redis:
``core/lua/slot/claims.lua``.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import random
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from django_rmq.core.commands import ack, claims, inspect
from django_rmq.core.commands.broker_interface import Broker, attempt, concerns_all, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.bounds import BATCH, CLAIM_STEP, LARGEST
from django_rmq.core.model.replies import Claimed, ClaimRead, Counts, Driver
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import LostRace, RmqError, SlotMoved

logger = logging.getLogger("django_rmq.spark")


def _start_of(pid: int) -> str | None:
    """Return when a process of this machine was started, in ticks since its boot; empty if it has ended.

    None if it cannot be read: the process does not run, belongs to another user (``hidepid``), or the system has no /proc.
    """
    with suppress(OSError, IndexError):
        # The name before the last bracket may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        # The fields after the name begin with the third, the state; the 22nd is the start. A zombie has ended.
        return "" if fields[0] in "ZX" else fields[19]
    return None


def _runs(pid: int) -> bool:
    """Return whether there is a process with this number, also one of another user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


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
    if (host, machine) != here or not pid.isdecimal() or start == "-":
        return False
    present = _start_of(int(pid))
    return present != start if present is not None else not _runs(int(pid))


SLOTS_AT_ONCE = 1_024
"""The number of slots asked in one round trip."""

REACH_SECONDS = 30.0
"""Seconds after which slots are given up behind those that cannot be reached: a quarter of a lease of the usual length."""


T = TypeVar("T")


def each_reached(broker: Broker, calls: Iterable[Call[T]]) -> Iterator[T | RmqError]:
    """Yield the answer of each call, or the error of its slot or node.

    Raises an error that concerns the whole server, and any error after ``REACH_SECONDS``.
    """
    began = time.monotonic()
    for answer in attempt(broker, calls, SLOTS_AT_ONCE):
        # A node that does not answer takes seconds of each round trip, and a topic may have a million slots.
        if isinstance(answer, RmqError) and (
            concerns_all(answer) or time.monotonic() - began > REACH_SECONDS
        ):
            raise answer
        yield answer


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
        word, about, lease_ms = self._word, about_this_process(), self._lease_ms
        call = claims.hold_consumer(
            self._topic, consumer, word, checkpoint, about, lease_ms, starts=starts, gone=gone
        )
        return self._broker.run(call)

    def renew(self) -> None:
        """Renew the name that this driver has; the next ``hold`` reports if it has lost it."""
        with self._lock:
            if self._held is not None and not self._has_left:
                self._ask(*self._held, starts=False)

    def report_loss(self, number: int) -> bool:
        """Note that the loss of a claim is reported; return whether no driver of the same checkpoint has noted it before.

        Without the name, or without Redis, nothing is noted, and the answer is True.
        """
        with self._lock:
            if self._held is None:
                return True
            consumer, checkpoint = self._held
        claim = f"{number} {checkpoint}"
        with suppress(RmqError):
            if self._broker.run(claims.reported_loss(self._topic, consumer)) == claim:
                return False
            self._broker.run(claims.report_loss(self._topic, consumer, claim))
        return True

    def leave(self) -> None:
        """Leave the name to the next query, at the end of this one."""
        with self._lock:
            if self._held is not None:
                self._has_left = True
                self._broker.run(claims.leave_consumer(self._topic, self._held[0], self._word))


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
                renewing = threading.Thread(target=self._renew, name="rmq-claims", daemon=True)
                renewing.start()  # if the system has no thread left, the next call tries again
                self._renewing = renewing

    def let_go(self, slot: int) -> None:
        """Stop renewing in a slot."""
        with self._lock:
            self._held.pop(slot, None)

    def warn(self, number: int, why: str) -> None:
        """Warn about a loss: once for each claim, however many slots it concerns, and however many drivers find it."""
        # A driver that repeats a batch finds its loss before it has the name of the consumer, and notes it later.
        is_first = self.identity.report_loss(number)
        with self._lock:
            if number <= self._said or not is_first:
                return
            self._said = number
            self.lost += 1
        logger.warning("Claim %d of topic %s: %s", number, self._topic.name, why)

    def _renew(self) -> None:
        """Renew what is held, for as long as this process lives; Spark kills it with the query."""
        due = time.monotonic()
        while True:
            # Two renewals may fail in a row before the lease ends. A node that does not answer takes seconds of one, which
            # does not put off the next.
            now = time.monotonic()
            due = max(due + self._lease_ms / 3_000, now)
            time.sleep(due - now)
            # In a cluster the name and each slot may be on another node, so the error of one stops no other.
            for renew in (self._renew_all, self.identity.renew):
                try:
                    renew()
                except RmqError as error:
                    logger.warning("Cannot renew the claims of topic %s: %s", self._topic.name, error)
                except Exception:
                    # Without this thread all leases would end.
                    logger.exception("Cannot renew the claims of topic %s", self._topic.name)

    def _renew_all(self) -> None:
        """Renew what is held in all slots that can be reached. Raises the error of another slot afterwards."""
        with self._lock:
            held = dict(self._held)
        calls = (
            claims.renew_claim(self._topic, slot, self._holder, number, self._lease_ms)
            for slot, number in held.items()
        )
        failure, vanished = None, []
        for slot, size in zip(held, each_reached(self._broker, calls), strict=True):
            if isinstance(size, RmqError):
                failure = size
            elif size is None:
                vanished.append(slot)
        if vanished:
            self._let_go_lost(held, vanished)
        if failure is not None:
            raise failure

    def _let_go_lost(self, held: dict[int, int], vanished: list[int]) -> None:
        """Stop renewing in the slots of claims that have ended; warn if some of them were lost."""
        lost = 0
        reads = (claims.read_claim(self._topic, slot, self._holder, held[slot]) for slot in vanished)
        for slot, claim in zip(vanished, each_reached(self._broker, reads), strict=True):
            if isinstance(claim, RmqError):
                # The next renewal asks again.
                continue
            # Acknowledged claims are not lost: a listener was faster than the next poll.
            lost += claim.state in ("lost", "returned")
            with self._lock:
                if self._held.get(slot) == held[slot]:
                    del self._held[slot]
        if lost:
            self.warn(
                held[vanished[0]],
                f"in {lost} slots its lease ended, or it was given back, while Spark processed the batch. Their "
                "messages are delivered again",
            )


ANY_SIZE = LARGEST
"""The size limit of a claim in bytes: none, because the Store of a slot is renamed as a whole, however large
it is."""


RETURNS = 8
"""The number of slots that one round trip asks to bring messages back."""


def _trip(left: dict[int, int], budget: int) -> dict[int, int]:
    """Return how much to ask of which slots at once: whole slots, or a step of those that do not fit into the budget.

    Redis runs the calls of one round trip one after another before it serves others, so together they ask for
    about one step. ``left``: what each slot is still to give, in the order in which to ask.
    """
    asked: dict[int, int] = {}
    room = CLAIM_STEP
    for slot, quota in left.items():
        quantity = min(quota, budget)
        if quota - quantity > CLAIM_STEP:
            quantity = min(quantity, CLAIM_STEP)
        if not quantity or (asked and quantity > room) or len(asked) == SLOTS_AT_ONCE:
            break
        asked[slot] = quantity
        budget -= quantity
        room -= quantity
    return asked


class Claims:
    """The claims of the consumers of one query, as far as this process knows them."""

    def __init__(self, broker: Broker, topic: Topic, lease_ms: int) -> None:
        self._broker = broker
        self._topic = topic
        self._lease_ms = lease_ms
        self._newest = 0
        self._known: set[str] = set()
        """Consumers whose claims are known, because this process made them."""
        self._empty_parts: set[int] = set()
        """The first slots of parts that were empty at the last poll."""
        self.lease = Lease(broker, topic, lease_ms)

    def each(self, calls: Iterable[Call[T]]) -> list[T]:
        return list(walk(self._broker, calls, SLOTS_AT_ONCE))

    def counts(self, slots: Iterable[int]) -> list[Counts]:
        """Return the number of messages of each slot by state."""
        return self.each(inspect.count(self._topic, slot) for slot in slots)

    def reads(self, slots: Iterable[int], consumer: str, number: int = 0) -> list[ClaimRead]:
        """Return the state of the consumer's claim in each slot: of its newest one, or of that ``number``."""
        return self.each(claims.read_claim(self._topic, slot, consumer, number) for slot in slots)

    def forget(self) -> None:
        """Look up everything at the next ``settle``, because a request has failed and its effect is unknown."""
        self._known.clear()

    # --- the end of a claim

    def settle(self, consumer: str, committed: int, own: Collection[int]) -> int:
        """Acknowledge the claim ``committed``; return the number of the newest claim.

        ``own``: the slots that the checkpoint names for it. Only these are acknowledged at the first call, because
        another query may use the same consumerId, and has not recorded its batches here.

        Raises ``LostRace`` if a later one was already acknowledged: the checkpoint is older than that; or if
        another process made one since the last call. Raises the error of a slot that cannot be reached at the end, because
        what Spark has recorded in the others would come again if the query ends.
        """
        slots: list[int] = list(range(self._topic.slots))
        if consumer in self._known:
            own = slots = self.lease.slots()
        newest = 0
        lost = 0
        ending: list[tuple[int, int]] = []
        reads, failure = self._reached(slots, consumer)
        for slot, claim in reads.items():
            newest = max(newest, claim.number)
            if claim.number > self._newest and consumer in self._known:
                raise self._used_twice(consumer)
            if claim.number > committed > 0 and claim.state == "acked":
                raise self._too_old(claim.number)
            is_own = claim.number == committed and slot in own
            if claim.number > committed and claim.state in ("open", "sealed"):
                self.lease.hold(slot, consumer, claim.number)
            elif is_own and claim.state in ("open", "sealed", "acked"):
                ending.append((slot, claim.number))
            elif claim.number <= committed and claim.state in ("open", "sealed"):
                # An open claim came too late for its batch, and was never read. A sealed one is of another query, which had
                # the name of this consumer before, and has not recorded it here.
                self._return(slot, consumer, claim.number)
            else:
                lost += is_own and claim.state in ("lost", "returned")
                self.lease.let_go(slot)
        lost += self._end(consumer, ending)
        if lost:
            self.lease.warn(
                committed,
                f"Spark has recorded its batch, but in {lost} slots its lease had ended, or it had been given back. "
                "Their messages are delivered again",
            )
        if failure is not None:
            raise failure
        self._known.add(consumer)
        self._newest = max(self._newest, newest)
        return self._newest

    def acknowledge(self, consumer: str, committed: int, slots: Sequence[int]) -> int:
        """Acknowledge the claim ``committed`` in ``slots``, without holding any; return how many slots had one.

        Raises the error of a slot that cannot be reached, after the others.
        """
        reads, failure = self._reached(slots, consumer)
        ending = [
            (slot, claim.number)
            for slot, claim in reads.items()
            if 0 < claim.number == committed and claim.state in ("open", "sealed", "acked")
        ]
        # Another process, or the query itself, has acknowledged it first.
        self._end(consumer, list(ending))
        if failure is not None:
            raise failure
        return len(ending)

    def _reached(self, slots: Sequence[int], consumer: str) -> tuple[dict[int, ClaimRead], RmqError | None]:
        """Return the consumer's newest claim in each slot that can be reached, and the error of another slot, or None."""
        reads: dict[int, ClaimRead] = {}
        failure = None
        calls = (claims.read_claim(self._topic, slot, consumer) for slot in slots)
        for slot, claim in zip(slots, each_reached(self._broker, calls), strict=True):
            if isinstance(claim, RmqError):
                failure = claim
            else:
                reads[slot] = claim
        return reads, failure

    def _end(self, consumer: str, ending: list[tuple[int, int]]) -> int:
        """Acknowledge claims, in steps if failures have to be tidied up; give messages that were never sealed
        back to their slots.

        Returns in how many slots there was nothing left to acknowledge. Raises the error of a slot after the others.
        """
        lost, failure = 0, None
        while ending:
            asked = ending[:SLOTS_AT_ONCE]
            acks = [claims.ack_claim(self._topic, slot, consumer, number) for slot, number in asked]
            rest: list[tuple[int, int]] = []
            for (slot, number), answer in zip(asked, each_reached(self._broker, acks), strict=True):
                if isinstance(answer, RmqError):
                    failure = answer
                    continue
                word, left = answer
                while word == "open" and left:
                    # The request came too late for its batch, and what it took was never read.
                    _, left = self._broker.run(claims.return_claim(self._topic, slot, consumer, number))
                lost += word == "stale"
                if word == "ok" and left:
                    rest.append((slot, number))
                else:
                    self.lease.let_go(slot)
            ending = rest + ending[SLOTS_AT_ONCE:]
        if failure is not None:
            raise failure
        return lost

    def _used_twice(self, consumer: str) -> LostRace:
        return LostRace(
            f"another query claims messages of topic {self._topic.name} as consumer {consumer}: both would read the "
            "same messages. Give each query a consumerId of its own, or none, and a checkpoint of its own"
        )

    def _too_old(self, number: int) -> LostRace:
        return LostRace(
            f"claim {number} of topic {self._topic.name} has ended, but this checkpoint has no record of its batch. If another "
            "query runs from the same checkpoint, stop one of the two. Otherwise the checkpoint is older (restored from a "
            "copy?) and would use its batch numbers again. Start with a new checkpoint: no message is lost, and "
            "acknowledged ones are not repeated"
        )

    # --- claiming

    def now_ms(self) -> int:
        """Return the time of Redis."""
        return self._broker.now_ms()

    def due(self) -> int:
        """Return how many messages can be claimed, once all is back whose rest, time-out or lease is over."""
        counts = self.counts(range(self._topic.slots))
        occupied = [
            slot for slot, count in enumerate(counts) if count.retry or count.prepare or count.claimed
        ]
        if self.bring_back(occupied):
            for slot, count in zip(occupied, self.counts(occupied), strict=True):
                counts[slot] = count
        return sum(count.due for count in counts)

    def bring_back(self, slots: Iterable[int]) -> int:
        """End deliveries and claims whose time is over, and return what has rested to Store; return how many messages.

        A script takes some hundred at most, so this repeats it until nothing is left.
        """
        total, rest = 0, list(slots)
        while rest:
            # Each moves some hundred messages, and Redis serves nobody else between the calls of one round trip.
            ended = list(walk(self._broker, (ack.time_out(self._topic, slot) for slot in rest), RETURNS))
            rested = list(walk(self._broker, (ack.promote(self._topic, slot) for slot in rest), RETURNS))
            moved = {slot: sum(pair) for slot, *pair in zip(rest, ended, rested, strict=True)}
            total += sum(moved.values())
            rest = [slot for slot, count in moved.items() if count]
        return total

    def due_slots(self) -> dict[int, int]:
        """Return the slots in which something is due, and since when (ms).

        Most of many slots are empty, and stay so. Parts that were empty at the last poll are only asked whether
        they still are.
        """
        slots, now = range(self._topic.slots), self._broker.now_ms()
        due: dict[int, int] = {}
        for first in slots[:: inspect.HEADS]:
            part = slots[first : first + inspect.HEADS]
            if first in self._empty_parts and not self._broker.run(inspect.any_in_use(self._topic, part)):
                continue
            heads = self._broker.run(inspect.heads(self._topic, part))
            due |= {slot: at for slot, at in zip(part, heads, strict=True) if at is not None and at <= now}
            is_empty = not any(at is not None for at in heads)
            (self._empty_parts.add if is_empty else self._empty_parts.discard)(first)
        return due

    def claim(self, consumer: str, number: int, budget: int) -> bool:
        """Claim up to ``budget`` due messages; return whether there were any.

        Raises ``SlotMoved``, or ``LostRace`` if another process has used the number.
        """
        self._newest = max(self._newest, number)
        due = self.due_slots()
        if not due or budget < 1:
            return False
        left = self._shares(due, self._counts_of(list(due)), budget)
        taken = 0
        stepped: set[int] = set()
        while left and taken < budget:
            if 4 * taken >= budget and next(iter(left)) in stepped:
                # A batch may be smaller than its limit, and the next one begins with whole steps again.
                break
            asked = _trip(left, budget - taken)
            answers = self.each(
                claims.claim(self._topic, slot, consumer, number, self._lease_ms, wanted, ANY_SIZE)
                for slot, wanted in asked.items()
            )
            for slot, answer in zip(asked, answers, strict=True):
                self._note(slot, consumer, number, answer)
                taken += answer.taken
                rest = left.pop(slot) - answer.taken
                if answer.taken and answer.more and rest > 0:
                    left[slot] = rest
            # A slot that gave a step comes after the others: from now on each of its messages is examined. One
            # that gave less is examined already, and is continued first.
            claimed = {
                slot: left[slot]
                for slot, answer in zip(asked, answers, strict=True)
                if slot in left and answer.taken < asked[slot]
            }
            stepped |= asked.keys() - claimed.keys()
            left = claimed | left
            if any(answer.status == "moved" for answer in answers):
                self._give_back(consumer, number)
                raise self.moved()
            if any(answer.status == "stale" for answer in answers):
                raise self._used_twice(consumer)
        return taken > 0

    def moved(self) -> SlotMoved:
        """Return the error for a topic that was re-slotted under the query."""
        return SlotMoved(
            f"topic {self._topic.name} no longer has the {self._topic.slots} slots with which the query "
            "started. Recorded batches are acknowledged; start again with a new checkpoint"
        )

    def _counts_of(self, slots: list[int]) -> dict[int, Counts]:
        """Return the counts of slots, after what a dead consumer held there is back: until then it shuts them."""
        counts = dict(zip(slots, self.counts(slots), strict=True))
        occupied = [slot for slot, count in counts.items() if count.claimed]
        if self.bring_back(occupied):
            counts.update(zip(occupied, self.counts(occupied), strict=True))
        return counts

    def _shares(self, due: dict[int, int], counts: dict[int, Counts], budget: int) -> dict[int, int]:
        """Return how much to claim of each slot, in the order in which to ask; ``due``: slot -> when its first one was due.

        If the budget is smaller than the total: on a topic with times, the slots with the oldest messages
        come first, and as a whole if they fit, as a worker goes from slot to slot. On a priority topic each slot gives
        its part, so that the most urgent messages of all slots are taken.
        """
        slots = list(due)
        sizes = {slot: max(1, count.due) for slot, count in counts.items()}
        total = sum(sizes.values())
        if total <= budget:
            # This includes messages that came after the count, but takes no other slot's share for them. With more, a round
            # trip would ask fewer slots, of which most have only a few messages.
            more = min(BATCH // 4, (budget - total) // len(slots))
            return {slot: size + more for slot, size in sizes.items()}
        if self._topic.is_priority:
            # In any order, because each part is rounded up, and nothing may be left for the last ones.
            random.shuffle(slots)
            return {slot: math.ceil(budget * sizes[slot] / total) for slot in slots}
        # These slots give nothing now; asked in their turn they would only use up the budget of the others.
        shut = {
            slot
            for slot, count in counts.items()
            if count.paused or count.claimed or (self._topic.serial and count.prepare)
        }
        # Messages that timed out keep these slots shut, and otherwise they might not be asked for a long
        # time.
        self.each(ack.time_out(self._topic, slot) for slot in shut)
        slots.sort(key=lambda slot: (slot in shut, due[slot]))
        return {slot: sizes[slot] for slot in slots}

    def _give_back(self, consumer: str, number: int) -> None:
        """Return a claim that no batch will ever read, in every slot that has a part of it."""
        for slot in self.lease.slots(number):
            self._return(slot, consumer, number)

    def _return(self, slot: int, consumer: str, number: int) -> None:
        while self._broker.run(claims.return_claim(self._topic, slot, consumer, number))[1]:
            pass
        self.lease.let_go(slot)

    def _note(self, slot: int, consumer: str, number: int, answer: Claimed) -> None:
        if answer.taken:
            self.lease.hold(slot, consumer, number)
        elif answer.status == "unfinished":
            raise LostRace(
                f"slot {slot} of topic {self._topic.name} still has an earlier claim of consumer {consumer}, which has "
                "to end first. Start the query again"
            )
        elif answer.status not in ("ok", "busy", "paused", "moved", "stale"):
            # A script of another version may refuse for a reason that this one does not know.
            raise LostRace(f"slot {slot} of topic {self._topic.name} cannot be claimed: {answer.status}")

    def seal(self, consumer: str, number: int) -> int:
        """Seal a claim in every slot that has a part of it; return how many messages it holds."""
        slots = self.lease.slots(number)
        rows = 0
        sizes = self.each(
            claims.renew_claim(self._topic, slot, consumer, number, self._lease_ms, seal=True)
            for slot in slots
        )
        for slot, size in zip(slots, sizes, strict=True):
            if size is None:
                self.lease.let_go(slot)
            else:
                rows += size
        self._newest = max(self._newest, number)
        return rows

    def read(self, consumer: str, number: int, slots: Sequence[int]) -> dict[int, int]:
        """Return how many rows of a sealed claim each slot has; renew and hold them.

        Raises ``LostRace`` if it was acknowledged.
        """
        sizes: dict[int, int] = {}
        reads = self.reads(slots, consumer, number)
        for slot, claim in zip(slots, reads, strict=True):
            if claim.number > number or (claim.number == number and claim.state == "acked"):
                raise self._too_old(number)
            if claim.state == "sealed" and claim.size:
                sizes[slot] = claim.size
        # A driver before this one made what is not held here, and its lease may end before the next renewal of all.
        held = set(self.lease.slots(number))
        taken_over = [slot for slot in sizes if slot not in held]
        renewed = self.each(
            claims.renew_claim(self._topic, slot, consumer, number, self._lease_ms) for slot in taken_over
        )
        for slot, size in zip(taken_over, renewed, strict=True):
            if size is None:
                del sizes[slot]
            else:
                self.lease.hold(slot, consumer, number)
        return sizes
