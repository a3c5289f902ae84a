"""The relay: it sends what the processes that sent a message have left in the outbox, oldest first.

Several relays may run. One step holds all rows of the messages that it sends until Redis has answered, so a
row is sent after every older row of its message that anybody holds. Where the database cannot skip locked
rows, a step holds what its first write locks: the rows, or with SQLite the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from django.db import DatabaseError, close_old_connections, transaction
from django.db import connections as databases
from django.db.models import F

from django_rmq.core.consumer.duties import Duty
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.producer.placing import Outgoing
from django_rmq.core.words.results import Durability, SendResult
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import CallerError, LostRace, RmqError, ServerTrouble, TopicFull
from django_rmq.project import connections
from django_rmq.project.outbox.databases import aliases, has_table, model
from django_rmq.project.outbox.folding import Stored, folded, next_attempt, outgoing
from django_rmq.project.outbox.rows import now_ms
from django_rmq.project.outbox.statements import delete
from django_rmq.project.settings import get_config
from django_rmq.project.watching import announcing, telemetry

logger = safe_logger("django_rmq.outbox")

BATCH = 500
"""The number of rows with which a step begins. It takes all other rows of their messages along."""


_LIGHT = [name for name in Stored._fields if name not in ("member", "envelope")]


class _Unconfirmed(LostRace):
    """Redis has the message, but not as durably as its row requires."""


@dataclass(slots=True)
class Step:
    """What one step did."""

    sent: int = 0
    """The number of messages sent or removed."""
    rows: int = 0
    """The number of rows deleted."""
    failed: int = 0
    """The number of messages that Redis did not take; their rows stay."""
    is_full: bool = False
    """Whether more rows may be due."""
    trouble: ServerTrouble | None = None
    """Why some messages could not be tried."""
    results: defaultdict[str, list[SendResult]] = field(default_factory=lambda: defaultdict(list))
    """For each topic, what was sent."""


@dataclass(slots=True)
class _Plan:
    """What a step sends, in order, and what it cannot send."""

    messages: list[tuple[Stored, Outgoing]] = field(default_factory=list)
    refused: dict[UUID, RmqError] = field(default_factory=dict)


def relay(alias: str) -> Step:
    """Send what is due in one database, up to a batch.

    Raises ``ServerTrouble``, before anything is locked or after nothing could be sent; the rows are as before.
    """
    now, step = now_ms(), Step()
    due = model().objects.using(alias).filter(due_ms__lte=now).order_by("id")
    found = list(due.values_list("identity", flat=True)[:BATCH])
    if not found:
        return step
    # A step that waited for an unavailable server would keep others from these rows.
    connections.get_broker("coordinator").ping()
    with transaction.atomic(using=alias):
        held = _hold(alias, set(found))
        if held:
            _send(alias, held, now, step)
    step.is_full = len(found) == BATCH and bool(step.rows or step.failed)
    for topic, results in step.results.items():
        announcing.sent(topic, results)
        telemetry.count_sent(topic, len(results))
    if step.trouble is not None and not step.rows:
        raise step.trouble
    return step


def _hold(alias: str, identities: set[UUID]) -> dict[UUID, list[Stored]]:
    """Lock all rows of these messages, and return them by message; without the messages of which others hold a row."""
    features = databases[alias].features
    rows = model().objects.using(alias).filter(identity__in=identities)
    if not features.has_select_for_update:
        rows.update(due_ms=F("due_ms"))  # a write takes the lock that a SELECT cannot take
    locked = rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked).order_by("id")
    held: defaultdict[UUID, list[Stored]] = defaultdict(list)
    for values in locked.values(*_LIGHT):
        row = Stored(**values, member=b"", envelope=None)
        held[row.identity].append(row)
    ours = {row.id for some in held.values() for row in some}
    for number, identity in rows.values_list("id", "identity"):
        if number not in ours:
            held.pop(identity, None)
    return dict(held)


def _send(alias: str, held: Mapping[UUID, Sequence[Stored]], now: int, step: Step) -> None:
    """Send what is held; delete the rows of what Redis has, and set a later time for the others."""
    producer = connections.get_producer("coordinator")
    plan = _planned(alias, held, now)
    messages = [producer.restore(out) for _, out in plan.messages]
    replicas = get_config().outbox.replicas
    needed = [Durability(max(row.replicas, replicas), row.fsync) for row, _ in plan.messages]
    wanted = Durability(max((one.replicas for one in needed), default=0), any(one.fsync for one in needed))
    results, errors = producer.attempt(messages, wanted, removes=any(out.removes for out in messages))
    troubles = dict(plan.refused)
    for index, (row, out) in enumerate(plan.messages):
        error = errors.get(index) or _shortcoming(out.topic, results[index], needed[index])
        if error is not None:
            troubles.setdefault(row.identity, error)
        elif not out.removes:
            step.results[out.topic.name].append(results[index])
    gone = [row.id for identity, rows in held.items() if identity not in troubles for row in rows]
    delete(alias, gone)
    step.rows, step.sent = len(gone), len(held) - len(troubles)
    _postpone(alias, held, troubles, step)


def _planned(alias: str, held: Mapping[UUID, Sequence[Stored]], now: int) -> _Plan:
    """Return what to send for the rows, in the order of their ids."""
    plan = _Plan()
    topics: dict[str, Topic | CallerError] = {}
    config = get_config().topics
    debounced = {name for name, topic in config.items() if topic.debounce_ms}
    chosen = {one: folded(rows, debounces=rows[0].topic in debounced) for one, rows in held.items()}
    contents = _contents(alias, [row.id for rows in chosen.values() for row in rows])
    for identity, rows in chosen.items():
        try:
            parts = [
                (row, outgoing(row._replace(**contents[row.id]), _topic(row.topic, topics), now))
                for row in rows
            ]
        except CallerError as error:
            plan.refused[identity] = error
        else:
            plan.messages += parts
    plan.messages.sort(key=lambda part: part[0].id)
    return plan


def _contents(alias: str, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the members and envelopes of rows: only of those that are sent, because a message may have many."""
    rows = model().objects.using(alias).filter(id__in=ids)
    return {
        number: {"member": bytes(member), "envelope": None if envelope is None else bytes(envelope)}
        for number, member, envelope in rows.values_list("id", "member", "envelope")
    }


def _topic(name: str, known: dict[str, Topic | CallerError]) -> Topic:
    """Return a topic on whose definition this process and Redis agree; raises ``CallerError``."""
    found = known.get(name)
    if found is None:
        try:
            found = get_config().topic(name)
            connections.agree(found)
        except CallerError as error:
            found = error
        known[name] = found
    if isinstance(found, CallerError):
        raise found
    return found


def _shortcoming(topic: Topic, result: SendResult, needed: Durability) -> RmqError | None:
    """Return why the rows of a message that Redis has answered must stay. None: they need not."""
    if result.status == "refused":
        return TopicFull(
            f"slot {result.slot} of topic {topic.name} is full: MAX_BACKLOG = {topic.max_backlog}"
        )
    if (result.replicas or 0) < needed.replicas:
        return _Unconfirmed(
            f"{result.replicas or 0} of {needed.replicas} replicas have confirmed the message"
        )
    if needed.fsync and not result.fsynced:
        return _Unconfirmed("the primary has not confirmed that the message is on its disk")
    return None


def _postpone(
    alias: str, held: Mapping[UUID, Sequence[Stored]], troubles: Mapping[UUID, RmqError], step: Step
) -> None:
    """Set when the rows of messages that could not be sent are tried again, and why they could not."""
    grace_ms, now = get_config().outbox.grace_ms, now_ms()
    changes: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for identity, error in troubles.items():
        rows = held[identity]
        if isinstance(error, ServerTrouble):
            step.trouble = error
            if step.rows:  # one node of several; what is due on the others goes first
                changes["", 0, now + grace_ms] += [row.id for row in rows]
            continue
        step.failed += 1
        attempts = min(1 + max(row.attempts for row in rows), 30_000)
        text = f"{type(error).__name__.lstrip('_')}: {error}"[:1000]
        due_ms = next_attempt(error, attempts, now, grace_ms)
        changes[text, attempts, due_ms] += [row.id for row in rows]
        if due_ms is None:
            logger.error(
                "A message of topic %s in the outbox cannot be sent, and is not tried again: %s. "
                "Look for it in the admin or with rmqoutbox --list, and retry or delete it",
                rows[-1].topic,
                error,
                extra={"rmq_event": "outbox_refused", "rmq_topic": rows[-1].topic},
            )
    for (text, attempts, due_ms), ids in changes.items():
        rows_of = model().objects.using(alias).filter(id__in=ids)
        if text:
            rows_of.update(error=text, attempts=attempts, due_ms=due_ms, failed_ms=now)
        else:
            rows_of.update(due_ms=due_ms)


def relay_all(chosen: Iterable[str] | None = None) -> Generator[Step, None, None]:
    """Send what is due in all databases, or in the ``chosen`` ones, batch by batch."""
    for alias in aliases() if chosen is None else chosen:
        step = _relayed(alias)
        while step is not None:
            yield step
            step = _relayed(alias) if step.is_full else None


def _relayed(alias: str) -> Step | None:
    """Return what a step did. None: the database has no table."""
    try:
        return relay(alias)
    except DatabaseError:
        if has_table(alias):
            raise
        return None


def duties() -> list[tuple[str, Duty]]:
    """Return the duty of a worker for each database that may have an outbox, by its alias."""
    return [(alias, partial(_duty, alias)) for alias in aliases()]


def _duty(alias: str) -> Generator[float, None, None]:
    """Relay at short intervals; while nothing is due, with one query."""
    pause = get_config().outbox.grace / 4
    while True:
        try:
            for _ in relay_all([alias]):
                yield 0.0
        finally:
            close_old_connections()
        yield pause


__all__ = ["BATCH", "Step", "duties", "relay", "relay_all"]
