"""The survey of topics: what all their slots hold, and their counters, in a bounded number of requests.

A survey takes up to three round trips, and its work grows with the messages that there are, not with the number of slots. Of
very large topics it reads a part. No figure is kept: ``shared_reads`` keeps surveys for dashboards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from django_rmq import connections
from django_rmq.core.commands import history, inspect
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline, run_all
from django_rmq.core.commands.script_call import Answer, AtSlots
from django_rmq.core.model.replies import Counts
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import RmqError, ServerTrouble
from django_rmq.operations.authorization import Permission
from django_rmq.operations.context import OperationContext
from django_rmq.operations.stats import (
    NOTHING,
    Overview,
    TopicCounters,
    TopicStats,
    WorkerList,
    roster_call,
    server_now_ms,
    worker_list,
)

T = TypeVar("T")

LIVE_SLOTS = 4_096
"""The number of slots that an overview reads; of topics with more, an evenly spread part."""

PARTIAL_SLOTS = 256
"""The number of slots of a topic that are read if all would be too many."""

SLOTS_AT_ONCE = 256
"""The number of slots of a topic of which one script sums the counters."""

EMPTY_AT_ONCE = 64
"""The number of slots of which one command says whether any holds messages. If one does, a script looks at each of them."""

COUNTED_AT_ONCE = 16
"""The number of slots that one script counts in a survey. That takes a few ms if much is in flight, and usually far less."""

_held: WeakKeyDictionary[Broker, dict[str, Sequence[int]]] = WeakKeyDictionary()
"""Topic -> the slots that held messages at the last look. What is not true any more costs time only."""


def overview(context: OperationContext, names: Iterable[str] | None = None) -> list[TopicStats]:
    """Return the figures of all topics (or those named), in the order of the settings."""
    return survey(context, names).topics


def survey(context: OperationContext, names: Iterable[str] | None = None) -> Overview:
    """Return the same as ``overview``, and the number of workers."""
    context.actor.require(Permission.VIEW)
    return survey_topics(context.broker, context.present_all(names))


def topic(context: OperationContext, name: str) -> TopicStats:
    """Return the figures of one topic."""
    (stats,) = overview(context, [name])
    return stats


def survey_topics(broker: Broker, topics: Sequence[Topic]) -> Overview:
    """Return the figures of ``topics`` and the number of workers. Raises ``ServerTrouble``.

    Slots that held messages at the last look are counted at once, and one command says of many others whether any holds some
    now: the work grows with what there is, not with the number of slots.
    """
    chosen = slots_to_look_at(topics)
    held = _held.setdefault(broker, {})
    surveyed_topics = [
        _SurveyedTopic(topic, chosen[topic.name], held.get(topic.name, ())) for topic in topics
    ]
    pipeline = broker.pipeline()
    asked = pipeline.add(roster_call(broker))
    take_counts = _count_held(pipeline, surveyed_topics)
    others = [_OtherSlots(pipeline, parts) for parts in _grouped(surveyed_topics)]
    pipeline.execute()
    roster = asked.result()
    live_workers, now_ms = worker_list(broker, roster), server_now_ms(broker, roster)
    take_counts()
    for some in others:
        some.find(pipeline)
    pipeline.execute()
    for some in others:
        some.take_uncounted()
    for surveyed in surveyed_topics:
        surveyed.count_others(pipeline)
    pipeline.execute()
    sums = []
    for surveyed in surveyed_topics:
        counts = surveyed.all_counts()
        # The first six are the depths. A call of the property ``held`` for each slot would take longer.
        held[surveyed.topic.name] = [
            slot for slot, each in counts if isinstance(each, RmqError) or any(each[:6])
        ]
        sums.append(_summed(surveyed, counts, live_workers, now_ms))
    return Overview(
        sums, None if live_workers.problem else len(live_workers.members), live_workers.problem, now_ms
    )


def slots_to_look_at(topics: Iterable[Topic]) -> dict[str, Sequence[int]]:
    """Choose the slots to read: all if there are few, the smallest topics first."""
    chosen: dict[str, Sequence[int]] = {}
    left = 2 * LIVE_SLOTS
    for topic in sorted(topics, key=lambda one: one.slots):
        if topic.slots <= min(left, LIVE_SLOTS):
            left -= topic.slots
            chosen[topic.name] = range(topic.slots)
        else:
            chosen[topic.name] = range(0, topic.slots, max(1, topic.slots // PARTIAL_SLOTS))
    return chosen


class _SurveyedTopic:
    """One topic of a survey, whose slots are read in up to three round trips."""

    __slots__ = ("_counted", "counts", "others", "paused_others", "slots", "topic", "uncounted")

    def __init__(self, topic: Topic, slots: Sequence[int], held: Sequence[int]) -> None:
        self.topic = topic
        self.slots = slots
        self.counts: dict[int, Counts | None] = {slot: None for slot in held if slot in slots}
        """What the slots hold that held messages at the last look. None if they have to be counted one by one."""
        self.others = [slot for slot in slots if slot not in self.counts] if self.counts else slots
        self.paused_others = 0
        """How many of the other slots are paused."""
        self.uncounted: Collection[int] = ()
        """The other slots that hold messages now, or about which something cannot be read: the count says why."""
        self._counted: dict[int, Answer[Counts]] = {}

    def count_others(self, pipeline: BrokerPipeline) -> None:
        """Count one by one the slots that are not counted yet."""
        for slot in {*self.uncounted, *(slot for slot, counts in self.counts.items() if counts is None)}:
            self._counted[slot] = pipeline.add(inspect.count(self.topic, slot))

    def all_counts(self) -> list[tuple[int, Counts | RmqError]]:
        """Return what the slots hold that were counted, in order."""
        counts_of = [(slot, counts) for slot, counts in self.counts.items() if counts is not None]
        return sorted([*counts_of, *((slot, answer.result()) for slot, answer in self._counted.items())])

    def paused(self, counts: Iterable[tuple[int, Counts | RmqError]]) -> int:
        """Return how many slots are paused. The ``counts`` say it of the slots that were counted at once."""
        return self.paused_others + sum(
            slot in self.counts and isinstance(each, Counts) and each.paused for slot, each in counts
        )


def _count_held(pipeline: BrokerPipeline, surveyed_topics: Iterable[_SurveyedTopic]) -> Callable[[], None]:
    """Count the slots that held messages at the last look, those of several topics with one script.

    The function that is returned takes the answers. It raises ``ServerTrouble``.
    """
    alike = defaultdict[tuple[TopicType, int], list[tuple[_SurveyedTopic, int]]](list)
    for surveyed in surveyed_topics:
        # These are the facts that the script takes from the topic.
        alike[surveyed.topic.type, surveyed.topic.timeout] += [(surveyed, slot) for slot in surveyed.counts]
    asked = []
    for slots in alike.values():
        for at in range(0, len(slots), COUNTED_AT_ONCE):
            some = slots[at : at + COUNTED_AT_ONCE]
            call = inspect.count_slots([AtSlots(surveyed.topic, (slot,)) for surveyed, slot in some])
            asked.append((some, pipeline.add(call)))

    def take() -> None:
        for some, answer in asked:
            for (surveyed, slot), counts in zip(some, _known(answer) or (), strict=False):
                surveyed.counts[slot] = counts

    return take


_Parts = list[tuple[_SurveyedTopic, Sequence[int]]]


def _grouped(surveyed_topics: Iterable[_SurveyedTopic]) -> list[_Parts]:
    """Return the other slots of all topics, in groups that are asked about together."""
    groups, room = list[_Parts](), 0
    for surveyed in surveyed_topics:
        for slots in _parts(surveyed.others, EMPTY_AT_ONCE):
            if len(slots) > room:
                groups.append([])
                room = EMPTY_AT_ONCE
            groups[-1].append((surveyed, slots))
            room -= len(slots)
    return groups


class _OtherSlots:
    """Slots of several topics that held no messages at the last look."""

    __slots__ = ("_any", "_occupied", "_parts", "_pauses")

    def __init__(self, pipeline: BrokerPipeline, parts: _Parts) -> None:
        """Ask whether any of them has messages now, and which are paused."""
        self._parts = parts
        self._any = pipeline.add(inspect.any_messages(self._places()))
        self._pauses = pipeline.add(inspect.find_paused(self._places()))
        self._occupied: Answer[list[bool | None]] | None = None

    def find(self, pipeline: BrokerPipeline) -> None:
        """Ask which of them hold messages, if any does. Raises ``ServerTrouble``."""
        if _known(self._any) is not False:
            self._occupied = pipeline.add(inspect.find_occupied(self._places()))

    def take_uncounted(self) -> None:
        """Give the topics the slots that are paused, and those that have to be counted. Raises ``ServerTrouble``."""
        pauses = _known(self._pauses)
        if pauses is not None and not any(pauses) and self._occupied is None:
            return
        slots = [(surveyed, slot) for surveyed, slots in self._parts for slot in slots]
        uncounted = {*range(len(slots))} if pauses is None else {*pauses.unread}
        for place in pauses.paused if pauses else ():
            slots[place][0].paused_others += 1
        if self._occupied:
            occupied = _known(self._occupied) or [None] * len(slots)
            uncounted.update(place for place, holds in enumerate(occupied) if holds is not False)
        for surveyed, slot in (slots[place] for place in uncounted):
            surveyed.uncounted = [*surveyed.uncounted, slot]

    def _places(self) -> list[AtSlots]:
        return [AtSlots(surveyed.topic, slots) for surveyed, slots in self._parts]


def _known(answer: Answer[T]) -> T | None:
    """Return what was answered, or None after an error about some slot. Raises ``ServerTrouble``: it concerns all topics."""
    reply = answer.result()
    if isinstance(reply, ServerTrouble):
        raise reply
    return None if isinstance(reply, RmqError) else reply


def _parts(slots: Sequence[int], size: int) -> list[Sequence[int]]:
    return [slots[at : at + size] for at in range(0, len(slots), size)]


def _summed(
    surveyed: _SurveyedTopic,
    counts: Sequence[tuple[int, Counts | RmqError]],
    live_workers: WorkerList,
    now_ms: int,
) -> TopicStats:
    topic, (counted, problems) = surveyed.topic, _counted(counts)
    total = _total(counted)
    serving = live_workers.serving(topic)
    unowned = live_workers.unowned(topic, counts) if total.due else []
    return TopicStats(
        topic,
        store=total.store,
        due=total.due,
        prepare=total.prepare,
        retry=total.retry,
        dead=total.dead,
        claimed=total.claimed,
        unleased=total.unleased,
        oldest_due_ms=total.oldest_due_ms,
        age_ms=_since(total.oldest_due_ms, now_ms),
        undrained_since_ms=total.undrained_since_ms,
        undrained_ms=_since(total.undrained_since_ms, now_ms),
        running_since_ms=total.running_since_ms,
        running_ms=_since(total.running_since_ms, now_ms),
        paused_slots=surveyed.paused(counts),
        consumers=serving.workers,
        threads=serving.threads,
        owned_slots=live_workers.owned(topic),
        unowned_due=sum(one.due for one in unowned),
        unowned_ms=_since(_earliest(one.oldest_due_ms or one.undrained_since_ms for one in unowned), now_ms),
        workers_problem=live_workers.problem,
        definition_problem=connections.unreadable(topic),
        looked_at=len(surveyed.slots) - len(problems),
        now_ms=now_ms,
        problems=tuple(problems),
    )


def _total(counted: Sequence[Counts]) -> Counts:
    """Return what slots hold together."""
    if len(counted) < 2:  # Most topics have few messages.
        return counted[0] if counted else NOTHING
    return Counts(
        sum(one.store for one in counted),
        sum(one.due for one in counted),
        sum(one.prepare for one in counted),
        sum(one.retry for one in counted),
        sum(one.dead for one in counted),
        sum(one.claimed for one in counted),
        _earliest(one.oldest_due_ms for one in counted),
        undrained_since_ms=_earliest(one.undrained_since_ms for one in counted),
        running_since_ms=_earliest(one.running_since_ms for one in counted),
        unleased=sum(one.unleased for one in counted),
    )


def _counted(counts: Iterable[tuple[int, Counts | RmqError]]) -> tuple[list[Counts], list[str]]:
    """Return the counts of the slots that can be read, and why the others cannot. Raises ``ServerTrouble``."""
    counted, problems = list[Counts](), []
    for slot, answer in counts:
        if isinstance(answer, Counts):
            counted.append(answer)
        # A server that does not answer concerns all topics. Any other error, such as a key of a wrong type, concerns
        # this slot.
        elif isinstance(answer, ServerTrouble):
            raise answer
        else:
            problems.append(f"slot {slot}: {answer}")
    return counted, problems


def _since(at_ms: int | None, now_ms: int) -> int | None:
    return None if at_ms is None else max(0, now_ms - at_ms)


def _earliest(instants: Iterable[int | None]) -> int | None:
    return min((at for at in instants if at is not None), default=None)


_COUNTERS = {"sent": ("sent",), "done": ("committed", "acked"), "failed": ("failed", "expired", "rejected")}


def flow(context: OperationContext, names: Iterable[str] | None = None) -> TopicCounters:
    """Return counters of topics; two calls give rates. Topics with very many slots are left out."""
    context.actor.require(Permission.VIEW)
    return read_counters(context.broker, context.present_all(names))


def read_counters(broker: Broker, topics: Sequence[Topic]) -> TopicCounters:
    """Return the counters of ``topics``; those with very many slots are left out. Raises ``ServerTrouble``."""
    chosen = slots_to_look_at(topics)
    # A rate needs the counters of all slots, so a topic that is read only in part is left out.
    small = [topic for topic in topics if len(chosen[topic.name]) == topic.slots]
    now_ms = broker.now_ms()
    calls = [
        (topic, part, history.sample(topic, part))
        for topic in small
        for part in _parts(chosen[topic.name], SLOTS_AT_ONCE)
    ]
    counted = {topic.name: dict.fromkeys(TopicCounters.RATES, 0) for topic in small}
    problems, unread = [], list[tuple[Topic, int]]()
    for (topic, part, _), answer in zip(calls, run_all(broker, [call for *_, call in calls]), strict=True):
        if isinstance(answer, ServerTrouble):
            raise answer
        if isinstance(answer, RmqError):
            problems.append(f"topic {topic.name}: {answer}")
            continue
        if answer.slots < len(part):
            unread += [(topic, slot) for slot in part]
        for name, counters in _COUNTERS.items():
            counted[topic.name][name] += sum(answer.counters[counter] for counter in counters)
    # A sum does not say which of its slots it leaves out, and why.
    answers = run_all(broker, [inspect.audit_ledger(topic, slot) for topic, slot in unread])
    problems += [
        f"topic {topic.name}, slot {slot}: {answer}"
        for (topic, slot), answer in zip(unread, answers, strict=True)
        if isinstance(answer, RmqError)
    ]
    return TopicCounters(now_ms, counted, tuple(problems))
