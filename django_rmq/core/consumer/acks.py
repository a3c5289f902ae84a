"""Acknowledgements: commits, rollbacks and releases wait here until the next round trip sends them to Redis.

A slot that Redis refuses is left alone for a while, and so are the slots of a node that does not answer. The round trips
are made by ``fetch_round_trips``: one trip sends acknowledgements and asks for messages. ``SlotErrors`` serves the other calls of
slots, too: those of ``slot_acquisition`` and ``due_poll``.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar

from django_rmq.core.commands import ack
from django_rmq.core.commands.broker_interface import BrokerPipeline
from django_rmq.core.commands.script_call import Answer, Call
from django_rmq.core.consumer.batch import BatchReport
from django_rmq.core.consumer.mailbox import ShutdownState
from django_rmq.core.consumer.slots import ConsumedSlot, SlotSchedule
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Failure
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerRefused, ServerTrouble

T = TypeVar("T")

REST_SECONDS = 5.0
"""Seconds for which a slot is left alone if Redis refuses to access its keys."""

NODE_REST_SECONDS = 0.25
"""Seconds for which a slot is left alone if its node of a Redis Cluster does not answer; the other slots are served."""

RENEWAL_SECONDS = 5.0
"""Seconds between two new subscriptions while nodes do not answer."""


@dataclass(eq=False)
class SlotErrors:
    """Handles errors of slots. ``renew`` subscribes to wake-ups again: the node that fails may be that of the subscription."""

    schedule: SlotSchedule
    shutdown: ShutdownState
    complain: LogThrottle
    renew: Callable[[], None]
    _next_renewal: float = 0.0

    def of(self, slot: ConsumedSlot, error: RmqError) -> ServerTrouble | None:
        """Return an error that concerns the whole server; for any other, leave the slot alone for a while."""
        # A stopping worker has no time to leave a node alone: it tries again until its shutdown time-out.
        if isinstance(error, NodeUnavailable) and not self.shutdown.begun:
            self._leave_node_alone(slot, error)
            return None
        if isinstance(error, ServerTrouble) and not isinstance(error, ServerRefused):
            return error
        self.complain(
            f"{slot.topic.name}/{type(error).__name__}",
            f"Cannot process topic {slot.topic.name} slot {slot.number}: %s",
            error,
        )
        self.schedule.leave_alone(slot, REST_SECONDS)
        return None

    def _leave_node_alone(self, slot: ConsumedSlot, error: NodeUnavailable) -> None:
        """Leave a slot alone whose node does not answer, while the slots of other nodes are served."""
        self.complain("node", "Some slots are unavailable (%s); trying again", error)
        self.schedule.leave_alone(slot, NODE_REST_SECONDS, is_node_away=True)
        now = time.monotonic()
        # The node may be the one of the subscription. All of its slots report the same failure, so one renewal serves them all.
        if now >= self._next_renewal:
            self._next_renewal = now + RENEWAL_SECONDS
            self.renew()


logger = safe_logger("django_rmq.consumer")


class Watcher(Protocol):
    """Receives the ends of deliveries that Redis has confirmed, in the dispatcher's own thread, so it must be quick."""

    def wants(self, topic: str) -> bool:
        """Return whether the ends of deliveries of a topic are wanted; called once per report of a thread."""

    def ended(self, committed: list[Message], failed: list[tuple[Message, Failure]], began_ns: int) -> None:
        """Receive deliveries of one slot that this worker ended with its own receipt.

        ``began_ns``: when the worker sent the acknowledgement, in ns since the epoch.
        """


@dataclass(slots=True, eq=False)
class Settlement:
    """How deliveries of one receipt have ended, each by its member."""

    committed: list[bytes] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    released: list[bytes] = field(default_factory=list)
    """The members that are given back."""

    def __len__(self) -> int:
        return len(self.committed) + len(self.failures) + len(self.released)

    def add(self, other: Settlement) -> None:
        """Add the ends of another settlement."""
        self.committed += other.committed
        self.failures += other.failures
        self.released += other.released

    def calls(self, slot: ConsumedSlot, receipt: int) -> Iterator[tuple[Settlement, Call[list[str]]]]:
        """Yield the calls that send it, with the part that each sends: ends of one kind, and as many as one call takes."""
        topic, number = slot.topic, slot.number
        for members in _parts(self.committed):
            yield Settlement(committed=members), ack.commit(topic, number, receipt, members)
        for failures in _parts(self.failures):
            yield Settlement(failures=failures), ack.rollback(topic, number, receipt, failures)
        for members in _parts(self.released):
            yield Settlement(released=members), ack.release(topic, number, receipt, members)


@dataclass(slots=True, eq=False)
class PendingAcks(Settlement):
    """The acknowledgements of one delivery of one slot that Redis does not have yet."""

    is_whole: bool = False
    """Whether ``committed`` is the whole delivery. If it is alone in its slot, ``commit_delivery`` sends a count only."""
    repeated: bool = False
    """Whether they have been sent before, and the answer was lost."""
    messages: dict[bytes, Message] = field(default_factory=dict)
    """The messages of ``committed`` and ``failures``, if there is a watcher."""
    began_ns: int = 0
    """When these messages were acknowledged, in ns since the epoch, if there are any."""


def _parts(items: list[T]) -> Iterator[list[T]]:
    """Yield the items in lists that one call can send."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


SentAcks = dict[tuple[ConsumedSlot, int], PendingAcks]
"""The acknowledgements that one round trip sends, by slot and receipt."""


class AckCall(NamedTuple):
    """A call that acknowledges deliveries of one receipt, and its answer."""

    slot: ConsumedSlot
    receipt: int
    settlement: Settlement
    """What it sends."""
    repeated: bool
    answer: Answer[list[str]]
    """A word for each end."""


@dataclass(eq=False)
class AckQueue:
    """The acknowledgements of one worker: those to be sent, those under way, and the number that Redis has confirmed.

    ``commit_delay`` returns for how many seconds a commit of a topic may wait.
    """

    slot_errors: SlotErrors
    shutdown: ShutdownState
    watcher: Watcher | None
    commit_delay: Callable[[str], float]
    processed: int = 0
    """The number of deliveries so far whose commit or rollback Redis has answered, even if they had ended before."""
    due: float = float("inf")
    """The monotonic time at which to send what is pending, if no fetch has taken it along before."""
    pending: defaultdict[tuple[ConsumedSlot, int], PendingAcks] = field(
        default_factory=lambda: defaultdict(PendingAcks)
    )
    _under_way: list[SentAcks] = field(default_factory=list)
    """The acknowledgements that were sent and are not answered yet, by round trip."""

    def note(self, report: BatchReport, released: list[bytes]) -> None:
        """Queue the outcomes of an executor's report, and the members to give back (``released``)."""
        if not (report.committed or report.failures or released):
            return
        batch = report.batch
        pending = self.pending[batch.slot, batch.receipt]
        pending.committed += report.committed
        # rule: takes_each_report_for_a_whole_delivery
        pending.is_whole = len(report.committed) == len(batch.messages)
        pending.failures += report.failures
        pending.released += released
        if report.failures or released:
            batch.slot.sleeping_until = None
            self.due = 0.0
        else:
            self.due = min(self.due, time.monotonic() + self.commit_delay(batch.slot.topic.name))
        if self.watcher is not None and self.watcher.wants(batch.slot.topic.name):
            pending.messages.update((each.delivery.member, each) for each in batch.messages)

    def release(self, slot: ConsumedSlot, receipt: int, members: Iterable[bytes]) -> None:
        """Give back members that have not begun."""
        slot.sleeping_until = None
        self.pending[slot, receipt].released += members
        self.due = 0.0

    def hurry(self) -> None:
        """Send what is pending in the next turn."""
        if self.pending:
            self.due = 0.0

    def unsettled(self, topic: str) -> int:
        """Return how many messages of a topic have ended without having been acknowledged.

        What a round trip acknowledges that is under way does not count. The limits of its topics are asked after its answer.
        """
        return sum(len(pending) for (slot, _), pending in self.pending.items() if slot.topic.name == topic)

    def unconfirmed(self) -> set[ConsumedSlot]:
        """Return the slots of which something is to be sent, or is not confirmed yet."""
        return {slot for slot, _ in chain(self.pending, *self._under_way)}

    def send(self, pipeline: BrokerPipeline) -> tuple[SentAcks, list[AckCall]]:
        """Queue the acknowledgements of all slots that are not left alone; return them, and their calls in order."""
        sent_acks: SentAcks = {}
        postponed: defaultdict[tuple[ConsumedSlot, int], PendingAcks] = defaultdict(PendingAcks)
        parts: list[AckCall] = []
        now = 0.0
        for (slot, receipt), pending in self.pending.items():
            if slot.left_alone_until:
                now = now or time.monotonic()
                # Redis has refused this slot a moment ago. A stopping worker tries it all the same, because it ends soon.
                if slot.left_alone_until > now and not self.shutdown.begun:
                    postponed[slot, receipt] = pending
                    continue
            sent_acks[slot, receipt] = pending
            if pending.messages:
                pending.began_ns = time.time_ns()
            # The slot has a later delivery by now if this worker has asked for one.
            if pending.is_whole and slot.sole_receipt == receipt:
                members = pending.committed
                is_noted_once = slot.topic.outcome_retention_ms and len(members) >= ack.ENOUGH
                call = ack.commit_delivery(
                    slot.topic, slot.number, receipt, len(members), members if is_noted_once else ()
                )
                parts.append(AckCall(slot, receipt, pending, pending.repeated, pipeline.add(call)))
                continue
            for settlement, call in pending.calls(slot, receipt):
                parts.append(AckCall(slot, receipt, settlement, pending.repeated, pipeline.add(call)))
        self.pending = postponed
        self.due = min((slot.left_alone_until for slot, _ in postponed), default=float("inf"))
        if sent_acks:
            self._under_way.append(sent_acks)
        return sent_acks, parts

    def lost(self, sent_acks: SentAcks) -> None:
        """Queue acknowledgements again whose answer was lost. Redis changes nothing for an end that it has already recorded."""
        self._answered(sent_acks)
        self.due = 0.0
        for key, pending in sent_acks.items():
            queued = self.pending[key]
            queued.add(pending)
            queued.messages |= pending.messages
            # Redis may have executed the calls. Then they are stale the next time, which is no reason for a warning.
            queued.repeated = True  # rule: forgets_what_it_told_before

    def confirm(self, sent_acks: SentAcks, parts: list[AckCall]) -> ServerTrouble | None:
        """Record the answers of Redis, and queue failed calls again, since sending twice is harmless.

        Return an error that concerns more than one slot, if there is one.
        """
        self._answered(sent_acks)
        trouble: ServerTrouble | None = None
        for part in parts:
            slot, receipt, settlement, _, answer = part
            words = answer.result()
            pending = sent_acks[slot, receipt]
            messages = pending.messages
            if isinstance(words, RmqError) or not words:  # rule: takes_no_answer_for_an_end
                # `commit_delivery` answers nothing if it must not end the slot as a whole, for example because of a
                # mark. The next call names the members.
                queued = self.pending[slot, receipt]
                self.due = 0.0
                queued.add(settlement)
                queued.messages |= messages
                if isinstance(words, RmqError):
                    queued.repeated = True
                    trouble = self.slot_errors.of(slot, words) or trouble
                continue
            if slot.left_alone_until:
                self.slot_errors.schedule.use_again(slot)
            self.processed += len(settlement.committed) + len(settlement.failures)
            self._notify_watcher(pending, settlement, words)
            if stale := words.count("stale"):
                _log_stale(part, stale)
                # The delivery timed out, or a fail-over has lost it. Its message may wait, and this worker was not woken for it.
                # rule: sleeps_over_what_a_fail_over_brings_back
                self.slot_errors.schedule.make_ready(slot)
        return trouble

    def _answered(self, sent_acks: SentAcks) -> None:
        self._under_way = [other for other in self._under_way if other is not sent_acks]

    def _notify_watcher(self, pending: PendingAcks, settlement: Settlement, words: list[str]) -> None:
        """Pass the messages whose end Redis has confirmed to the watcher."""
        messages, began_ns = pending.messages, pending.began_ns
        if self.watcher is None or not messages:
            return
        # A stale delivery had ended before: it timed out, or an earlier call ended it whose answer was lost. A call sends ends
        # of one kind, so the words belong to one of these lists.
        committed = [
            messages[member]
            for member, word in zip(settlement.committed, words, strict=False)
            if word != "stale" and member in messages
        ]
        failed = [
            (messages[failure.member], failure.answered(word))
            for failure, word in zip(settlement.failures, words, strict=False)
            if word != "stale" and failure.member in messages
        ]
        if committed or failed:
            self.watcher.ended(committed, failed, began_ns)


def _log_stale(part: AckCall, stale: int) -> None:
    settlement = part.settlement
    logger.log(
        # A repeated call is stale if Redis executed the first one and only its answer was lost.
        logging.INFO if part.repeated else logging.WARNING,
        "%d %s of topic %s slot %s came too late: the delivery had ended already",
        stale,
        "commits" if settlement.committed else "failures" if settlement.failures else "releases",
        part.slot.topic.name,
        part.slot.number,
        extra={"rmq_event": "stale", "rmq_topic": part.slot.topic.name, "rmq_slot": part.slot.number},
    )
