"""Undeclared topics: those that Redis has and the settings do not have any more, what they hold, and how they end.

``retire`` moves or deletes their messages, step by step, and then removes their definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from django_rmq.core.commands import inspect, limits, operate, reslot
from django_rmq.core.commands.broker_interface import Broker, attempt, batched, walk
from django_rmq.core.model.envelope import stored_basis
from django_rmq.core.model.replies import Death, DescribeReply, Entry, read_record
from django_rmq.core.model.topic import Topic, TopicType, former_slot_counts, slot_counts
from django_rmq.core.producer.placement import Outgoing, score_at_once, slot_crc, slot_of_crc
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError, ServerTrouble, WrongType
from django_rmq.message_ids import LOOKED_AT_ONCE
from django_rmq.operations.authorization import OperationContext, Permission
from django_rmq.operations.bulk import SLOTS_PER_TRIP, BulkProgress
from django_rmq.operations.message_view import from_entry

PAGE = 250
"""The number of messages that are moved or deleted in one step; see ``bulk.PER_SLOT``."""

MOST_STRANDED = 100
"""The number of undeclared topics at which a page looks, in the order of their names."""

STRANDED_SLOTS = 2_000
"""The number of their slots that a page reads together. Of topics with more slots it reads an evenly spread part."""

COMMON = {"TYPE": "type", "BODY": "body", "IDENTITY": "identity", "ACCUMULATE": "collects"}
"""Settings that two topics must share for the messages of one to be valid in the other."""


@dataclass(frozen=True, slots=True)
class UndeclaredTopic:
    """A topic that is registered and not declared, and how many messages it holds."""

    topic: Topic
    """The topic as registered, with all slots that it has had."""
    waiting: int
    in_flight: int
    """The number of messages held by a worker, a REST client or Spark."""
    resting: int
    dead: int
    is_partial: bool = False
    """Whether not all slots were read, so that there may be more."""
    problems: tuple[str, ...] = ()
    """Slots that cannot be read, and the reasons."""

    @property
    def held(self) -> int:
        """The number of messages in any state."""
        return self.waiting + self.in_flight + self.resting + self.dead

    def __str__(self) -> str:
        states = {
            "waiting": self.waiting,
            "in flight": self.in_flight,
            "resting": self.resting,
            "dead": self.dead,
        }
        counts_text = ", ".join(f"{count} {state}" for state, count in states.items() if count) or "empty"
        return f"at least {counts_text}" if self.is_partial else counts_text


def stranded(context: OperationContext) -> list[UndeclaredTopic]:
    """Return the topics that are registered in Redis and not declared in the settings, with their contents."""
    context.actor.require(Permission.VIEW)
    context.require_all_topics()
    broker, registered = context.broker, context.broker.definitions()
    return [_undeclared_topic(broker, name, registered[name]) for name in _undeclared(context, registered)]


def some_stranded(context: OperationContext) -> list[UndeclaredTopic]:
    """Return the same as ``stranded`` for at most ``MOST_STRANDED`` topics, of which ``STRANDED_SLOTS`` slots are read."""
    broker, registered = context.broker, context.broker.definitions()
    names = _undeclared(context, registered)[:MOST_STRANDED]
    return [_undeclared_topic(broker, name, registered[name], STRANDED_SLOTS // len(names)) for name in names]


def _undeclared(context: OperationContext, registered: Iterable[str]) -> list[str]:
    return sorted(set(registered).difference(context.config.topics))


def find_stranded(context: OperationContext, name: str) -> UndeclaredTopic:
    """Return one of these topics. Raises ``OperationRefused`` if it is declared, unknown or being re-slotted."""
    context.actor.require(Permission.VIEW)
    return find_undeclared(context, name)


def find_undeclared(context: OperationContext, name: str) -> UndeclaredTopic:
    """Return the same as ``find_stranded`` to an actor with any permission."""
    context.require_all_topics()
    broker = context.broker
    definition = broker.definitions().get(name)
    if name in context.config.topics:
        raise OperationRefused(f"topic {name} is declared in the settings: remove it there first")
    if definition is None:
        raise OperationRefused(f"no topic {name} is registered in Redis")
    if len(slot_counts(definition)) > 1:
        raise OperationRefused(
            f"topic {name} is being re-slotted: declare it, and let `rmqreslot` finish first"
        )
    undeclared = _undeclared_topic(broker, name, definition)
    if undeclared.problems:
        # A topic of which a part cannot be read is not forgotten.
        raise WrongType(f"topic {name}: {undeclared.problems[0]}")
    return undeclared


def _undeclared_topic(
    broker: Broker, name: str, definition: Mapping[str, object], most_slots: int | None = None
) -> UndeclaredTopic:
    slots = max((*slot_counts(definition), *former_slot_counts(definition)))
    try:
        topic = Topic.registered(name, definition, slots)
    except WrongType:
        # Messages are counted in the same way in every topic. If the definition cannot be used, they cannot be moved.
        topic = Topic(name, TopicType.PRIORITY, slots=slots, body="", identity="")
    counted: Counter[str] = Counter()
    chosen_slots = range(0, topic.slots, -(-topic.slots // most_slots) if most_slots else 1)
    problems = []
    answers = attempt(broker, (inspect.count(topic, slot) for slot in chosen_slots))
    for slot, counts in zip(chosen_slots, answers, strict=True):
        if isinstance(counts, ServerTrouble):
            raise counts
        if isinstance(counts, RmqError):
            problems.append(f"slot {slot}: {counts}")
            continue
        counted["waiting"] += counts.store
        counted["running"] += counts.prepare + counts.claimed
        counted["resting"] += counts.retry
        counted["dead"] += counts.dead
    return UndeclaredTopic(
        topic,
        counted["waiting"],
        counted["running"],
        counted["resting"],
        counted["dead"],
        len(chosen_slots) - len(problems) < topic.slots,
        tuple(problems),
    )


def _check_target(topic: Topic, target: Topic) -> None:
    """Raise ``OperationRefused`` if messages of ``topic`` cannot be moved to ``target``."""
    if topic.is_strict:
        raise OperationRefused(
            f"messages of topic {topic.name} cannot be moved, because it keeps their order (ORDER 'strict') and a "
            "move does not: let workers finish them"
        )
    different = [key for key, field in COMMON.items() if getattr(topic, field) != getattr(target, field)]
    if different:
        raise OperationRefused(
            f"messages of topic {topic.name} cannot be moved to {target.name}: the topics differ in "
            f"{', '.join(different)}"
        )


def retire(
    broker: Broker,
    producer: Callable[[], Producer],
    undeclared: UndeclaredTopic,
    target: Topic | None,
    *,
    delete: bool,
    dead: str,
) -> Iterator[BulkProgress]:
    """Return the steps of ``Operations.retire``; raises its errors."""
    name = undeclared.topic.name
    if dead not in ("", "move", "delete") or (dead == "move" and target is None):
        raise InvalidRequest("dead must be 'delete' or, if a target topic is given, 'move'")
    if delete and target is not None:
        raise InvalidRequest("choose between moving and deleting the messages")
    if target is not None:
        _check_target(undeclared.topic, target)
    if undeclared.in_flight:
        raise OperationRefused(
            f"topic {name} holds messages in flight ({undeclared}): wait until they finish"
        )
    if undeclared.waiting + undeclared.resting and not (delete or target):
        raise OperationRefused(f"topic {name} holds messages ({undeclared}): move or delete them")
    if undeclared.dead and not (delete or dead):
        raise OperationRefused(f"topic {name} holds messages ({undeclared}): move or delete the dead ones")
    # A rested message goes from Retry to Store. In this order it is found even if it does so meanwhile.
    live = ("retry", "store")
    parts: list[Iterator[BulkProgress]] = []
    if target is not None:
        parts.append(
            _moved(broker, producer(), undeclared, target, (*live, "dead") if dead == "move" else live)
        )
    if delete or dead == "delete":
        parts.append(_deleted(broker, undeclared, (*live, "dead") if delete else ("dead",)))
    return _all(broker, undeclared, parts)


def _all(
    broker: Broker, undeclared: UndeclaredTopic, parts: list[Iterator[BulkProgress]]
) -> Iterator[BulkProgress]:
    """Empty the topic part by part, and forget it if nothing was left behind."""
    outcomes: Counter[str] = Counter()
    for part in parts:
        before = outcomes.copy()
        for step in part:
            outcomes = before + Counter(step.outcomes)
            yield BulkProgress(outcomes.total(), undeclared.held, dict(outcomes))
    # A message that was left behind could not be found again if its topic were forgotten.
    if not outcomes["kept"]:
        for step in _forgotten(broker, undeclared.topic):
            yield BulkProgress(
                undeclared.held, undeclared.held, {**outcomes, **step.outcomes}, step.is_complete
            )


def _deleted(broker: Broker, undeclared: UndeclaredTopic, states: tuple[str, ...]) -> Iterator[BulkProgress]:
    """Delete the messages in these states. Outcome: ``purged``."""
    topic, done = undeclared.topic, 0
    for slot in range(topic.slots):
        for state in states:
            while gone := broker.run(operate.purge(topic, slot, state, limit=PAGE)):
                done += gone
                yield BulkProgress(done, undeclared.held, {"purged": done})
    yield BulkProgress(done, undeclared.held, {"purged": done}, True)


def _moved(
    broker: Broker, producer: Producer, undeclared: UndeclaredTopic, target: Topic, states: tuple[str, ...]
) -> Iterator[BulkProgress]:
    """Send the messages in these states to ``target``, and delete those that have arrived there.

    Outcomes: those of sends, and ``kept`` for a message that has no slot there, was refused, or was sent again before it was
    deleted. A message
    keeps its due time or priority; resting and dead messages get their full number of retries again. If this
    ends early, some messages may be in both topics; when it is repeated they merge, if their identity is
    their body or a key.
    """
    outcomes: Counter[str] = Counter()
    for slot in range(undeclared.topic.slots):
        for state in states:
            after: tuple[str, bytes] | None = None
            while True:
                page = broker.run(
                    inspect.list_messages(undeclared.topic, slot, state, after=after, limit=PAGE)
                )
                outcomes.update(
                    _move_some(broker, producer, undeclared.topic, slot, state, target, page.entries)
                )
                yield BulkProgress(outcomes.total(), undeclared.held, dict(outcomes))
                after = page.cursor
                if after is None:
                    break
    yield BulkProgress(outcomes.total(), undeclared.held, dict(outcomes), True)


def _move_some(
    broker: Broker,
    producer: Producer,
    source: Topic,
    slot: int,
    state: str,
    target: Topic,
    entries: Sequence[Entry],
) -> Counter[str]:
    now_ms = broker.now_ms()
    placed = [(entry, _placed(source, slot, state, entry, target, now_ms)) for entry in entries]
    sends = [(entry, out) for entry, out in placed if out is not None]
    outcomes = Counter({"kept": len(placed) - len(sends)})
    if sends:
        results, errors = producer.attempt([out for _entry, out in sends])
        arrived = [
            (entry, result.status)
            for i, ((entry, _out), result) in enumerate(zip(sends, results, strict=True))
            if i not in errors and result.status != "refused"
        ]
        outcomes["kept"] += len(sends) - len(arrived)
        # The messages are deleted after they were sent: a crash in between leaves them in both topics, and loses
        # none.
        changed = _delete_moved(broker, source, slot, state, [entry for entry, _status in arrived])
        outcomes.update("kept" if entry.member in changed else status for entry, status in arrived)
    # The plus leaves out outcomes with the count 0.
    return +outcomes


def _delete_moved(
    broker: Broker, source: Topic, slot: int, state: str, entries: Sequence[Entry]
) -> set[bytes]:
    """Delete messages that were moved, and return the members of those that stay, because they have changed since they were read.

    A program that still sends to the topic may have sent another body with the same key, or another time.
    """
    changed: set[bytes] = set()
    for some in batched(entries, LOOKED_AT_ONCE):
        members = [entry.member for entry in some]
        if state == "dead":
            words = broker.run(operate.discard(source, slot, [entry.score for entry in some], members))
            changed |= {member for member, word in zip(members, words, strict=True) if word == "changed"}
            continue
        replies = broker.run(inspect.describe_messages(source, slot, members))
        changed |= {
            entry.member
            for entry, reply in zip(some, replies, strict=True)
            if _has_changed(state, entry, reply)
        }
        if unchanged := [member for member in members if member not in changed]:
            broker.run(operate.remove(source, slot, unchanged, "live"))
    return changed


def _has_changed(state: str, entry: Entry, reply: DescribeReply) -> bool:
    """Return whether a waiting or resting message is there and differs from the entry that was read."""
    if reply.store is None and reply.retry is None:
        return False
    # Meanwhile a message of Retry may have rested, and be in Store.
    is_other = state == "store" and reply.store != entry.score
    return is_other or reply.envelope != entry.envelope  # rule: a_move_deletes_the_newer


def _placed(
    source: Topic, slot: int, state: str, entry: Entry, target: Topic, now_ms: int
) -> Outgoing | None:
    """Return a message as ``target`` takes it, or None if its slot there cannot be computed."""
    envelope = entry.envelope
    # The body of a dead message is kept with its death: a live copy with the same key has another one.
    if state == "dead" and (death := read_record(Death.parse, entry.record)):
        envelope = death.envelope
    basis = stored_basis(target, entry.member, envelope)
    if basis is None:
        return None
    copy = from_entry(source, slot, state, entry)
    if state == "dead" or copy.is_retry:
        score = score_at_once(target, copy.priority if copy.priority is not None else copy.scored, now_ms)
    elif target.type in (TopicType.RANGE_MERGE, TopicType.FIFO):
        score = max(0, int(entry.score) - now_ms)
    else:
        score = int(entry.score)
    crc = slot_crc(basis, entry.member)
    return Outgoing(target, slot_of_crc(crc, target.slots), entry.member, score, envelope, crc=crc)


def _forgotten(broker: Broker, topic: Topic) -> Iterator[BulkProgress]:
    """Forget an empty topic: its definition, its counters and its history. Outcome, of slots: ``retired``.

    Raises ``OperationRefused`` if it holds messages; it then stays registered.
    """
    for first in range(0, topic.slots, SLOTS_PER_TRIP):
        slots = range(first, min(first + SLOTS_PER_TRIP, topic.slots))
        calls = [reslot.retire(topic, slot) for slot in slots]
        for slot, answer in zip(slots, walk(broker, calls), strict=True):
            # A message has come since the slot was emptied.
            if answer != "retired":
                raise OperationRefused(
                    f"slot {slot} of topic {topic.name} holds messages: a program still sends to it"
                )
        yield BulkProgress(slots.stop, topic.slots, {"retired": slots.stop})
    broker.run(limits.delete_changed_limits(topic.name))
    broker.undefine(topic)
    yield BulkProgress(topic.slots, topic.slots, {"retired": topic.slots}, True)
