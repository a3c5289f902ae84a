"""The producer: it builds messages, sends one or many of them, and takes them back, also while their topic is re-slotted.

A send that a slot refuses as moved is repeated in the new slot. A removal that found nothing is repeated too, because its message
may have moved, and so is a removal that follows a repeated send, because it has to come after it. A call whose reply was lost
is not repeated: only the caller knows whether that is safe.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from django_rmq.core.commands import operate, send
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.bounds import BATCH, MAX_REPLICAS, abbreviated
from django_rmq.core.model.replies import Sent
from django_rmq.core.model.send_results import STORED, Durability, SendResult, SendResults, SendStatus
from django_rmq.core.model.topic import Definition, Topic, TopicType
from django_rmq.core.producer.bulk_send import BulkSend, send_trips, takes_bodies, trip_spans
from django_rmq.core.producer.identity import member_of
from django_rmq.core.producer.placement import (
    OPTIONS,
    Outgoing,
    Placement,
    basis_of,
    built,
    score_of,
    slot_crc,
)
from django_rmq.exceptions import InvalidMessage, RmqError, SlotMoved

T = TypeVar("T")


class AsyncRunner(Protocol):
    """A connection on which coroutines run calls."""

    async def run(self, call: Call[T]) -> T:
        """Run a call and return the meaning of its reply."""


def check_durability(replicas: object, fsync: object) -> Durability:
    """Return the durability that a send requests beyond being stored, or raise ``InvalidMessage``."""
    if type(replicas) is int and not replicas and fsync is False:
        return STORED
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 0 <= replicas <= MAX_REPLICAS:
        raise InvalidMessage(
            f"replicas must be a whole number from 0 to {MAX_REPLICAS}, got {abbreviated(replicas)}"
        )
    if not isinstance(fsync, bool):
        raise InvalidMessage(f"fsync must be True or False, got {abbreviated(fsync)}")
    return Durability(replicas, fsync)


class MixedSend:
    """Messages of any topics, each with its own result. The content of one call is a list of indexes."""

    def __init__(self, messages: Sequence[Outgoing], wanted: Durability) -> None:
        self._messages = messages
        self.is_in_line = any(out.topic.is_fifo for out in messages)
        """Whether some of the messages have an order: those behind an error are then not sent."""
        self._spans = list(trip_spans([len(out.member) + len(out.envelope or b"") for out in messages]))
        self.repeats = len(self._spans) > 1 and len({(out[0].name, *out[1:3]) for out in messages}) < len(
            messages
        )
        """Whether two round trips may carry the same message: the second one must not overtake the first."""
        self.results = [SendResult(out.topic.name, out.slot, out.member, wanted=wanted) for out in messages]
        self.errors: dict[int, RmqError] = {}

    @property
    def has_stopped(self) -> bool:
        """Whether an error keeps messages of a fifo topic from being sent out of order."""
        # A send whose slot has moved is repeated in order; any other error leaves a gap, which later messages must not pass.
        # rule: sends_on_behind_an_error
        return self.is_in_line and any(not isinstance(error, SlotMoved) for error in self.errors.values())

    def trips(self) -> Iterator[list[list[int]]]:
        """Yield, per round trip, groups of indexes that one script takes: same slot, range, kind and form.

        Within a slot they keep their order, because the first of two sends of a member decides its time.
        """
        for start, end in self._spans:
            groups: list[list[int]] = []
            latest: dict[tuple[str, int], tuple[tuple[int, str, bool], list[int]]] = {}
            for i in range(start, end):
                topic, slot, _, score, envelope, act, _ = self._messages[i]
                # The scripts of these types take one score for all messages of a call.
                shares = topic.is_fifo or (topic.type is TopicType.RANGE_MERGE and act == "send")
                manner = (score if shares else 0, act, envelope is None)
                open_group = latest.get((topic.name, slot))
                if open_group is not None and open_group[0] == manner and len(open_group[1]) < BATCH:
                    open_group[1].append(i)
                    continue
                # Redis may refuse one call and accept the next one, whose messages would then be ahead in the line.
                if open_group is not None and topic.is_fifo:  # rule: sends_to_a_line_twice_in_a_trip
                    yield groups
                    groups, latest = [], {}
                group = [i]
                groups.append(group)
                latest[topic.name, slot] = (manner, group)
            yield groups

    def calls(self, trip: list[list[int]]) -> Iterable[Call[object]]:
        """Return a call for each group."""
        return (call_of([self._messages[i] for i in indexes]) for indexes in trip)

    def receive(
        self, trip: list[list[int]], replies: Sequence[Any], confirmed: tuple[int | None, bool | None] | None
    ) -> None:
        """Complete the results."""
        for indexes, reply in zip(trip, replies, strict=True):
            if isinstance(reply, RmqError):
                self.errors.update(dict.fromkeys(indexes, reply))
                continue
            for i, answer in zip(indexes, reply, strict=True):
                complete(self.results[i], answer)
                # A refused message was not written, so nobody has confirmed it.
                if confirmed is not None and self.results[i].status != "refused":
                    self.results[i].replicas, self.results[i].fsynced = confirmed

    def fail(self, trip: list[list[int]], error: RmqError) -> None:
        """Record that the answer was lost, so that it is unknown whether these messages arrived."""
        for indexes in trip:
            self.errors.update(dict.fromkeys(indexes, error))

    def give_up(self, trouble: RmqError | None) -> None:
        """Mark all messages without an outcome as failed, with the error ``trouble`` as the reason if no other is known."""
        trouble = trouble or next(iter(self.errors.values()), None)
        for i, result in enumerate(self.results):
            if result.status == "pending":
                result.status = "failed"
                if trouble is not None:
                    self.errors.setdefault(i, trouble)


def call_of(batch: Sequence[Outgoing]) -> Call[Sequence[str | Sent]]:
    """Return the call that sends or removes ``batch``, whose messages share topic, slot and kind."""
    topic, slot, _, score, _, act, _ = batch[0]
    _, _, members, scores, envelopes, _, _ = zip(*batch, strict=True)
    if act == "remove":
        return operate.remove(topic, slot, members, "live")
    if act == "cancel":
        return operate.cancel(topic, slot, members)
    bodies = [envelope for envelope in envelopes if envelope is not None]
    match topic.type:
        case TopicType.FIFO:
            return send.send_fifo(topic, slot, score, members, bodies, ensure=act == "ensure")
        case _ if act == "ensure":
            return send.ensure(topic, slot, scores, members, bodies)
        case TopicType.RANGE_MERGE:
            return send.send_merge(topic, slot, score, members, bodies)
        case _:
            return send.send_replace(topic, slot, scores, members, bodies)


def complete(result: SendResult, answer: str | Sent) -> None:
    """Set a result from a transition's answer: a status and a score, or a word about a removal."""
    word, result.score = (answer, result.score) if isinstance(answer, str) else answer
    result.status = cast("SendStatus", word)


def found_nothing(removed: SendResult) -> bool:
    """Return whether the result of a removal says that there was no message."""
    # The words of removals are not in the type of ``status``, which is that of sends.
    return str(removed.status) == "not_found"


def missed(
    messages: Sequence[Outgoing], results: Sequence[SendResult], errors: Mapping[int, RmqError]
) -> list[int]:
    """Return the indexes of removals that found nothing, although their message may be in another slot.

    If a later send of the same message was accepted, its slot had not moved. The removal has then looked in the right slot,
    and a repetition would remove the message of the later send.
    """
    indexes: list[int] = []
    accepted: set[tuple[str, bytes]] = set()
    for index in reversed(range(len(messages))):
        out = messages[index]
        if not out.removes:
            if not isinstance(errors.get(index), SlotMoved):
                accepted.add((out.topic.name, out.member))
        elif found_nothing(results[index]) and (out.topic.name, out.member) not in accepted:
            indexes.append(index)
    return indexes


def with_later(messages: Sequence[Outgoing], moved: Iterable[int]) -> list[int]:
    """Return these indexes in order, and those of the removals that must come after them."""
    again, late, moved_indexes = [], set(), set(moved)
    for index, out in enumerate(messages):
        if index in moved_indexes:
            late.add((out.topic.name, out.member))
        elif not out.removes or (out.topic.name, out.member) not in late:
            continue
        again.append(index)
    return again


REDIRECTS = 6
"""How often a send follows a topic that is being re-slotted, at most. Each time it reads the definition."""

Outcomes = tuple[list[SendResult], dict[int, RmqError]]
"""A result for each message, and by index the errors of those that have no outcome."""


NOTE_SECONDS = 60.0
"""Seconds after which a sender notes explicit slot bases again, because Redis may have lost its data."""


class Producer:
    """Validates messages and sends them to their slots.

    Safe to share between threads. It remembers which topics have messages with an explicit slot basis (the first ``send`` after
    such a message records this in Redis), and the definitions of topics that were re-slotted or whose consumers' options differ
    (``counts`` and ``followed``: see ``Placement``; several producers may share them).
    """

    def __init__(
        self,
        broker: Broker,
        counts: dict[str, tuple[int, ...]] | None = None,
        followed: Mapping[str, Definition] | None = None,
    ) -> None:
        self.broker = broker
        self._places = Placement({} if counts is None else counts, {} if followed is None else followed)
        self._to_note: dict[str, Topic] = {}
        self._noted: dict[str, float] = {}
        """Topic whose explicit slot bases were noted -> until when they need not be noted again (monotonic)."""

    def build(self, topic: Topic, body: object, **options: object) -> Outgoing:
        """Return ``body`` as a validated message of ``topic``, or raise ``InvalidMessage``; contacts no server.

        ``options`` are those of ``Send``, with times in ms (see ``in_milliseconds``). ``slot_basis`` chooses the
        slot instead of the topic's SLOT_BASIS field, the key or the body; equal bodies with different bases do not
        merge. ``headers`` and ``expires`` need a keyed topic.
        """
        if options and not options.keys() <= OPTIONS.keys():
            raise TypeError(f"unknown option for a message: {', '.join(options.keys() - OPTIONS.keys())}")
        out = built(self._places, topic, body, options)
        if options.get("slot_basis") is not None and topic.identity == "body":
            self._note_later(topic)
        return out

    def outgoing(
        self,
        topic: Topic,
        body: object,
        score: int,
        envelope: bytes | None = None,
        *,
        key: str | None = None,
        slot_basis: object = None,
    ) -> Outgoing:
        """Return a message with this score and envelope, and with its slot and member.

        A keyed message whose slot follows from its body (SLOT_BASIS) needs that body, or that field of it.
        """
        return self.again(topic, body, member_of(topic, body, key), score, envelope, slot_basis)

    def again(
        self,
        topic: Topic,
        body: object,
        member: bytes,
        score: int,
        envelope: bytes | None,
        slot_basis: object = None,
    ) -> Outgoing:
        """Return an existing message for another send: in the slot of ``body``, with this member."""
        basis = basis_of(topic, body, slot_basis, names=True)
        return self._places.outgoing(topic, basis, member, score, envelope)

    def restore(self, out: Outgoing) -> Outgoing:
        """Return a message that another process has built and stored without a slot, placed in its present slot.

        Its ``crc`` must be known.
        """
        topic, crc = out.topic, out.crc
        assert crc is not None
        # Another CRC than that of the member means that the send gave a slot basis.
        is_explicit = (
            topic.identity == "body" and topic.slot_basis is None and crc != slot_crc(None, out.member)
        )
        if is_explicit:
            self._note_later(topic)
        return out.placed(self._places.present(topic))

    def slots(self, out: Outgoing) -> list[int]:
        """Return the slots that may hold a message.

        While its topic is being re-slotted there are two, the old one first.
        """
        return self._places.slots(out)

    def send(
        self, messages: Sequence[Outgoing], *, ensure: bool = False, wanted: Durability = STORED
    ) -> list[SendResult]:
        """Send validated messages of any topics, in about one round trip per thousand.

        Returns a result for each, in order. Raises ``ServerTrouble`` if a lost connection leaves the outcome
        unknown; a message that is sent again merges with the first one while that is still waiting.
        ``wanted`` requests durability beyond being stored: the call waits for it, and the results have the durability that was
        reached, without an error.
        """
        if ensure:
            messages = [out._replace(act="ensure") for out in messages]
        results, errors = self.attempt(messages, wanted)
        for error in errors.values():
            raise error
        return results

    def attempt(
        self, messages: Sequence[Outgoing], wanted: Durability = STORED, *, removes: bool = False
    ) -> Outcomes:
        """Send like ``send``, but return errors: by index, for the messages that have no outcome.

        The results of those have the status ``failed``; whether a message whose reply was lost arrived is
        unknown. A message whose topic is being re-slotted follows it, and so does a removal that found nothing.

        ``removes``: some of ``messages`` are to be removed. The operations on one message then run in order,
        and the status of a removal says in which state the message was found.
        """
        latest = self._places.renewed(messages)
        attempt = self._attempt_removing if removes else self._attempt
        slot_counts = {out.topic.name: set(self._places.counts(out.topic)) for out in latest if out.removes}
        results, errors = attempt(latest, wanted)
        # The re-slotting continues meanwhile, so a message may have to follow it more than once.
        for _ in range(REDIRECTS if errors or removes else 0):
            again = self._followed(latest, results, errors, slot_counts)
            if not again:
                break
            again_results, failed = attempt(list(again.values()), wanted)
            for at, index in enumerate(again):
                results[index], latest[index] = again_results[at], again[index]
                errors.pop(index, None)
                if at in failed:
                    errors[index] = failed[at]
        return results, errors

    def send_bodies(
        self,
        topic: Topic,
        bodies: Sequence[object],
        *,
        priority: int | None = None,
        time_range: int | None = None,
        fixed_time: int | None = None,
        delay: int | None = None,
        results: SendResults | None = None,
    ) -> SendResults:
        """Send many bodies with the same options (times in ms), of a topic that ``takes_bodies``; the fast way to send in bulk.

        All bodies are validated before anything is written: ``InvalidMessage`` names the index of a bad one.
        A result object is made when it is first read. ``results`` of earlier calls are extended, and the
        indexes continue. Errors as in ``send``.
        """
        if not takes_bodies(topic):
            raise InvalidMessage(f"topic {topic.name} has IDENTITY 'key': send its messages with send")
        score = score_of(topic, priority, time_range, fixed_time, delay)
        results = SendResults(topic.name) if results is None else results
        bulk = BulkSend(topic, bodies, score, self._places, results, self.attempt)
        error = send_trips(self.broker, bulk, in_order=topic.is_fifo) or bulk.error
        if error is not None:
            raise error
        return results

    def _followed(
        self,
        messages: Sequence[Outgoing],
        results: Sequence[SendResult],
        errors: dict[int, RmqError],
        looked: dict[str, set[int]],
    ) -> dict[int, Outgoing]:
        """Return the messages that have to be repeated, by index, in their current placement.

        Those are messages that a slot refused, and removals that found nothing although their topic has slot counts that were
        not ``looked`` at. The definitions are read for both.
        """
        moved = [index for index, error in errors.items() if isinstance(error, SlotMoved)]
        unfound = missed(messages, results, errors) if looked else []
        if not (moved or unfound):
            return {}
        try:
            definitions = self.broker.definitions()
        except RmqError as error:
            for index in unfound:
                # Without the definitions it is unknown whether the message is in another slot.
                results[index].status, errors[index] = "failed", error
            return {}
        if looked:
            new = self._places.learn(looked, definitions)
            moved += [index for index in unfound if messages[index].topic.name in new]
            moved = with_later(messages, moved)
        return self._places.moved({index: messages[index] for index in moved}, definitions)

    def _attempt_removing(self, messages: Sequence[Outgoing], wanted: Durability) -> Outcomes:
        """Attempt like ``_attempt``, in order, and remove from every slot that may hold the message."""
        placed: list[Outgoing] = []
        owners: list[int] = []
        for index, out in enumerate(messages):
            slots = self.slots(out) if out.removes else (out.slot,)
            placed += [out._replace(slot=slot) for slot in slots]
            owners += [index] * len(slots)
        placed_results, failed = self._attempt(placed, wanted, in_order=True)
        results: list[SendResult] = []
        errors: dict[int, RmqError] = {}
        for at, (index, result) in enumerate(zip(owners, placed_results, strict=True)):
            if index == len(results):
                results.append(result)
            elif not found_nothing(result):
                results[index] = result
            if at in failed:
                errors[index] = failed[at]
        return results, errors

    def _attempt(
        self, messages: Sequence[Outgoing], wanted: Durability, *, in_order: bool = False
    ) -> Outcomes:
        # WAIT and WAITAOF count what the same connection has written, so a send that wants more goes with them in a
        # pipeline.
        if len(messages) == 1 and wanted == STORED:
            return self._attempt_one(messages[0])
        mixed = MixedSend(messages, wanted)
        try:
            self.note_slot_bases()
        except RmqError as error:
            mixed.give_up(error)
        else:
            is_ordered = in_order or mixed.is_in_line or mixed.repeats
            mixed.give_up(send_trips(self.broker, mixed, wanted, in_order=is_ordered))
        return mixed.results, mixed.errors

    def _attempt_one(self, out: Outgoing) -> Outcomes:
        """Send one message without the cost of a pipeline."""
        result = SendResult(out.topic.name, out.slot, out.member)
        try:
            self.note_slot_bases()
            (answer,) = self.broker.run(call_of((out,)))
        except RmqError as error:
            result.status = "failed"
            return [result], {0: error}
        complete(result, answer)
        return [result], {}

    async def attempt_shared(self, out: Outgoing, connection: AsyncRunner) -> SendResult:
        """Send one message that was just built, over a connection that several coroutines share. Raises ``RmqError``.

        It notes no slot bases (``has_bases_to_note``), and follows no topic that is being re-slotted: ``attempt`` does both.
        """
        result = SendResult(out.topic.name, out.slot, out.member)
        (answer,) = await connection.run(call_of((out,)))
        complete(result, answer)
        return result

    @property
    def has_bases_to_note(self) -> bool:
        """Whether the next send has to call ``note_slot_bases`` first."""
        return bool(self._to_note)

    def _note_later(self, topic: Topic) -> None:
        """Have the next send note that this topic has explicit slot bases, unless that was noted lately."""
        if time.monotonic() >= self._noted.get(topic.name, 0.0):
            self._to_note[topic.name] = topic

    def note_slot_bases(self) -> None:
        """Record in Redis which topics have messages with an explicit slot basis; each send does it first."""
        # Another thread may add an entry meanwhile, or note the same one.
        for name, topic in list(self._to_note.items()):
            # The entry goes only after Redis has the note, so that the next send tries again if the connection is lost.
            self.broker.note_slot_basis(topic)
            self._noted[name] = time.monotonic() + NOTE_SECONDS
            self._to_note.pop(name, None)
