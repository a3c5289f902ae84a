"""The producer: sends messages of any topics to their slots, and follows topics that are being re-slotted.

Django, transactions and settings are handled in ``sending``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.send_results import (
    STORED,
    Durability,
    SendResult,
    SendResults,
)
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer import repeated_removals
from django_rmq.core.producer.bulk_send import BulkSend
from django_rmq.core.producer.placement import (
    OPTIONS,
    Outgoing,
    Placement,
    basis_of,
    built,
    member_of,
)
from django_rmq.core.producer.send_trips import (
    Mixed,
    call_of,
    complete,
    fly,
)
from django_rmq.core.producer.validation import check_score
from django_rmq.exceptions import InvalidMessage, RmqError, SlotMoved

REDIRECTS = 6
"""How often a send follows a topic that is being re-slotted, at most. Each time it reads the definition."""

Outcomes = tuple[list[SendResult], dict[int, RmqError]]
"""A result for each message, and by index the errors of those that have no outcome."""


NOTE_SECONDS = 60.0
"""Seconds after which a sender notes explicit slot bases again, because Redis may have lost its data."""


class Producer:
    """Validates messages and sends them to their slots.

    Safe to share between threads. It keeps two things: which topics have messages with an explicit slot basis
    (the first ``send`` after such a message records this in Redis), and how Redis has topics that were
    re-slotted or whose consumers' options differ (``counts`` and ``followed``: see ``Placement``; several producers may
    share them).
    """

    def __init__(
        self,
        broker: Broker,
        counts: dict[str, tuple[int, ...]] | None = None,
        followed: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.broker = broker
        self._places = Placement({} if counts is None else counts, {} if followed is None else followed)
        self._to_note: dict[str, Topic] = {}
        self._noted: dict[str, float] = {}
        """Topic whose explicit slot bases were noted -> until when they need not be noted again (monotonic)."""

    def build(self, topic: Topic, body: object, **options: Any) -> Outgoing:
        """Return ``body`` as a validated message of ``topic``, or raise ``InvalidMessage``; contacts no server.

        ``options`` are those of ``Send``, with times in ms (see ``in_milliseconds``). ``slot_basis`` chooses the
        slot instead of the topic's SLOT_BASIS field, the key or the body; equal bodies with different bases do not
        merge. ``headers`` and ``expires`` need a keyed topic.
        """
        if options and not options.keys() <= OPTIONS.keys():
            raise TypeError(f"unknown option for a message: {', '.join(options.keys() - OPTIONS.keys())}")
        out = built(self._places, topic, body, options)
        if (
            options.get("slot_basis") is not None
            and topic.identity == "body"
            and time.monotonic() >= self._noted.get(topic.name, 0.0)
        ):
            self._to_note[topic.name] = topic
        return out

    def address(
        self, topic: Topic, body: object = None, *, key: str | None = None, slot_basis: object = None
    ) -> tuple[int, bytes]:
        """Return the slot and the member of a message: of ``body``, or of ``key`` on a keyed topic.

        A keyed message whose slot follows from its body (SLOT_BASIS) needs that body, or that field of it.
        """
        out = self.outgoing(topic, body, 0, key=key, slot_basis=slot_basis)
        return out.slot, out.member

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
        """Return a message with the slot and the member from ``address``, and this score and envelope."""
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
        """Return a message that exists as it is sent again: in the slot of ``body``, with this member."""
        basis = basis_of(topic, body, slot_basis, names=True)
        return self._places.outgoing(topic, basis, member, score, envelope)

    def restore(self, out: Outgoing) -> Outgoing:
        """Return a message that was built by another process, and stored without its slot, in its slot.

        Its ``crc`` must be known.
        """
        topic, crc = out.topic, out.crc
        assert crc is not None
        is_explicit = topic.identity == "body" and topic.slot_basis is None and crc != crc32(out.member)
        if is_explicit and topic.name not in self._noted:
            self._to_note[topic.name] = topic
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
        ``wanted`` requests durability beyond being stored: the call waits for it, and the results say what
        was reached, without an error.
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
        looked = {out.topic.name: set(self._places.counts(out.topic)) for out in latest if out.removes}
        results, errors = attempt(latest, wanted)
        for _ in range(REDIRECTS if errors or removes else 0):
            moved, again = self._followed(latest, results, errors, looked)
            if not again:
                break
            found, failed = attempt(again, wanted)
            for at, index in enumerate(moved):
                results[index], latest[index] = found[at], again[at]
                errors.pop(index, None)
                if at in failed:
                    errors[index] = failed[at]
        return results, errors

    def send_bodies(
        self,
        topic: Topic,
        bodies: Sequence[Any],
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
        score = check_score(topic, priority, time_range, fixed_time, delay)
        results = SendResults(topic.name) if results is None else results
        bulk = BulkSend(topic, bodies, score, self._places, results, self.attempt)
        error = fly(self.broker, bulk, in_order=topic.is_fifo) or bulk.error
        if error is not None:
            raise error
        return results

    def _followed(
        self,
        messages: Sequence[Outgoing],
        results: Sequence[SendResult],
        errors: dict[int, RmqError],
        looked: dict[str, set[int]],
    ) -> tuple[list[int], Sequence[Outgoing]]:
        """Return the indexes of what has to be done again, and these messages in their current placement.

        Those are what a slot refused, and removals that found nothing where a topic has slot counts by which
        nothing was ``looked`` for; the definitions are read for both.
        """
        moved = [index for index, error in errors.items() if isinstance(error, SlotMoved)]
        unfound = repeated_removals.missed(messages, results, errors) if looked else []
        if not (moved or unfound):
            return [], ()
        try:
            definitions = self.broker.definitions()
        except RmqError as error:
            for index in unfound:
                # What was not found may be elsewhere.
                results[index].status, errors[index] = "failed", error
            return [], ()
        if looked:
            new = self._places.learn(looked, definitions)
            moved += [index for index in unfound if messages[index].topic.name in new]
            moved = repeated_removals.with_later(messages, moved)
        return moved, self._places.moved([messages[index] for index in moved], definitions) or ()

    def _attempt_removing(self, messages: Sequence[Outgoing], wanted: Durability) -> Outcomes:
        """Attempt like ``_attempt``, in order, and remove from every slot that may hold the message."""
        placed: list[Outgoing] = []
        owners: list[int] = []
        for index, out in enumerate(messages):
            slots = self.slots(out) if out.removes else (out.slot,)
            placed += [out._replace(slot=slot) for slot in slots]
            owners += [index] * len(slots)
        found, failed = self._attempt(placed, wanted, in_order=True)
        results: list[SendResult] = []
        errors: dict[int, RmqError] = {}
        for at, (index, result) in enumerate(zip(owners, found, strict=True)):
            if index == len(results):
                results.append(result)
            elif not repeated_removals.found_nothing(result):
                results[index] = result
            if at in failed:
                errors[index] = failed[at]
        return results, errors

    def _attempt(
        self, messages: Sequence[Outgoing], wanted: Durability, *, in_order: bool = False
    ) -> Outcomes:
        if len(messages) == 1 and wanted == STORED:
            return self._attempt_one(messages[0])
        mixed = Mixed(messages, wanted)
        try:
            self.note_slot_bases()
        except RmqError as error:
            mixed.give_up(error)
        else:
            is_ordered = in_order or mixed.is_in_line or mixed.repeats
            mixed.give_up(fly(self.broker, mixed, wanted, in_order=is_ordered))
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

    def note_slot_bases(self) -> None:
        """Record in Redis which topics have messages with an explicit slot basis; each send does it first."""
        while self._to_note:
            name, topic = next(iter(self._to_note.items()))
            self.broker.note_slot_basis(topic)
            self._noted[name] = time.monotonic() + NOTE_SECONDS
            self._to_note.pop(name, None)


def takes_bodies(topic: Topic) -> bool:
    """Return whether ``send_bodies`` can send to ``topic``: its messages have no key, or only generated ones."""
    return not topic.keyed or (topic.is_fifo and not topic.origin)
