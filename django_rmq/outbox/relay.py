"""The relay: it sends the messages of rows that a process left in the outbox, oldest first; ``deletion`` says when a row goes.

Several relays may run. One step holds all rows of the messages that it sends until Redis has answered, so a row is sent
after every older row of its message that another relay holds. A step passes over the rows that others hold, so relays
share the work, and one that stands still stops none of the others. Where the database cannot skip locked rows, a step
holds what its first write locks: the rows, or with SQLite the file. An error of the database or of Redis ends the step, and
``core.duties`` begins the relay again after some seconds.

``merged_rows`` turns the rows of one message into what is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

from django.db import DatabaseError, close_old_connections, reset_queries, transaction
from django.db import connections as databases
from django.db.models import F

from django_rmq import connections, observability
from django_rmq.conf import get_config
from django_rmq.core.clock import uptime
from django_rmq.core.duties import Duty
from django_rmq.core.log import safe_logger
from django_rmq.core.model.send_results import Durability, SendResult
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing
from django_rmq.exceptions import CallerError, LostRace, RmqError, ServerTrouble, TopicFull
from django_rmq.outbox.deletion import may_be_deleted, needed_durability
from django_rmq.outbox.merged_rows import merge_rows, outgoing
from django_rmq.outbox.rows import (
    LIGHT,
    StoredRow,
    aliases,
    delete,
    has_table,
    is_mariadb,
    model,
    now_ms,
    parts,
    read_contents,
    with_sizes,
)

REFUSALS = 5
"""Attempts at a message that cannot be sent as it is, until the relay leaves it out. While a new version is deployed,
other processes may have other settings."""

LONGEST_REST_MS = 600_000
"""The longest time between two attempts at one message."""


def next_attempt(error: Exception, attempts: int, now_ms: int, grace_ms: int) -> int | None:
    """Return when to try again after ``attempts`` failed attempts, or None if the relay leaves the message out."""
    if isinstance(error, CallerError) and attempts >= REFUSALS:
        return None
    # A row may have thousands of attempts, and a shift by that many bits would build a huge number.
    return now_ms + min(grace_ms << min(attempts, 20), LONGEST_REST_MS)


logger = safe_logger("django_rmq.outbox")

# A step names the messages of all of them in one query, and SQLite was long built for 999 values in one.
BATCH = 500
"""The number of rows with which a step begins. It takes all other rows of their messages along."""

STEP_BYTES = 4_194_304
"""The number of bytes that a step sends, at most; a larger message has a step of its own. So a step takes little
memory, and a message that does not pass within the time-out does not stop the messages behind it."""

HELD_SECONDS = 30
"""Seconds after which PostgreSQL and MariaDB end the transaction of a step that stands still. A step that waits for Redis
takes a few seconds."""


class _Unconfirmed(LostRace):
    """Redis has the message, but not as durably as its row requires."""


@dataclass(slots=True)
class RelayStep:
    """The work of one step."""

    sent: int = 0
    """The number of messages sent or removed."""
    rows: int = 0
    """The number of rows deleted."""
    failed: int = 0
    """The number of messages that Redis did not take; their rows stay."""
    is_full: bool = False
    """Whether more rows may be due."""
    trouble: ServerTrouble | None = None
    """The error because of which some messages could not be tried."""
    results: defaultdict[str, list[SendResult]] = field(default_factory=lambda: defaultdict(list))
    """The results of the messages that were sent, by topic."""


@dataclass(slots=True)
class _Plan:
    """The messages that a step sends, in order, and the errors of those that it cannot send."""

    messages: list[tuple[StoredRow, Outgoing]] = field(default_factory=list)
    refused: dict[UUID, RmqError] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """The rows that a step has locked, without their contents, by message; in the order of the first row of each."""

    rows: dict[UUID, list[StoredRow]]
    sizes: dict[int, int]
    """The size of the contents of each row in bytes."""
    since: float
    """The ``uptime`` before they were locked."""


def relay(alias: str) -> RelayStep:
    """Send the due rows of one database, up to a batch.

    Raises ``ServerTrouble`` before anything is locked, or after nothing could be sent.
    """
    now, step, last = now_ms(), RelayStep(), 0
    due = model().objects.using(alias).filter(due_ms__lte=now).order_by("id").values_list("id", "identity")
    while due_rows := list(due.filter(id__gt=last)[:BATCH]):
        if not last:
            # A step that waited for an unavailable server would lock these rows for as long, and keep others from them.
            connections.get_broker("coordinator").ping()
        with _bounded_transaction(alias):
            held = _hold(alias, {identity for _, identity in due_rows})
            if held.rows:
                step.is_full = _send(alias, held, now, step) or len(due_rows) == BATCH
        # Other relays hold all rows of this page, and send them. This step then looks at the rows behind them.
        if held.rows or len(due_rows) < BATCH:
            break
        last = due_rows[-1][0]
    # If the step sent and refused nothing, Redis does not take these messages now, and the next step can wait.
    step.is_full = step.is_full and bool(step.rows or step.failed)
    # Receivers of signals may take long, so they are called after the transaction, when the rows are free.
    for topic, results in step.results.items():
        observability.announce_sent(topic, results)
        observability.count_sent(topic, len(results))
    if step.trouble is not None and not step.rows:
        raise step.trouble
    return step


@contextmanager
def _bounded_transaction(alias: str) -> Iterator[None]:
    """Run a transaction that the database ends, so that others get its rows, if this process stands still in it."""
    connection = databases[alias]
    has_session_limit = is_mariadb(connection)
    # PostgreSQL has a limit for one transaction. MariaDB has one for the session, so its former value is put back.
    if has_session_limit:
        with connection.cursor() as cursor:
            cursor.execute("SET @rmq_idle = @@SESSION.idle_transaction_timeout")
            cursor.execute("SET SESSION idle_transaction_timeout = %s", [HELD_SECONDS])
    try:
        with transaction.atomic(using=alias):
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute(
                        "SET LOCAL idle_in_transaction_session_timeout = %s", [HELD_SECONDS * 1000]
                    )
            yield
    finally:
        if has_session_limit:
            # If the connection has broken, the session and its setting have ended with it.
            with suppress(DatabaseError), connection.cursor() as cursor:
                cursor.execute("SET SESSION idle_transaction_timeout = @rmq_idle")


def _hold(alias: str, identities: set[UUID]) -> _Held:
    """Lock all rows of these messages, and return them; without the messages of which others hold a row."""
    connection, since = databases[alias], uptime()
    features = connection.features
    rows = model().objects.using(alias).filter(identity__in=identities)
    if not features.has_select_for_update:
        # A write takes the lock that a SELECT cannot take here. With SQLite an UPDATE of no row locks the file, and does not
        # write large rows again.
        (rows.filter(pk=0) if connection.vendor == "sqlite" else rows).update(due_ms=F("due_ms"))
    locked = rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked).order_by("id")
    held: defaultdict[UUID, list[StoredRow]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for values in with_sizes(locked).values(*LIGHT, "size"):
        sizes[values["id"]] = values.pop("size")
        row = StoredRow(**values, member=b"", envelope=None)
        held[row.identity].append(row)
    # The second query finds the rows that the first one skipped as locked, or that were committed meanwhile. Another
    # relay may be sending one of them, so this step leaves the whole message out.
    for number, identity in rows.values_list("id", "identity"):
        if number not in sizes:
            held.pop(identity, None)
    return _Held(dict(held), sizes, since)


def _send(alias: str, held: _Held, now: int, step: RelayStep) -> bool:
    """Send the held rows, up to STEP_BYTES; delete those whose message Redis has, and set a later time for the others.

    Returns whether there was more.
    """
    producer = connections.get_producer("coordinator")
    chosen = _chosen(held)
    rows = {identity: held.rows[identity] for identity in chosen}
    plan = _planned(alias, chosen, now)
    messages = [producer.restore(out) for _, out in plan.messages]
    needed = [needed_durability(Durability(row.replicas, row.fsync)) for row, _ in plan.messages]
    durability = Durability(
        max((one.replicas for one in needed), default=0), any(one.fsync for one in needed)
    )
    if uptime() - held.since > HELD_SECONDS / 2:
        # This process stood still. If others have got the rows, Redis may have newer states; then this query fails.
        # rule: sends_what_it_no_longer_holds
        model().objects.using(alias).filter(pk=0).exists()
    results, errors = producer.attempt(messages, durability, removes=any(out.removes for out in messages))
    troubles = dict(plan.refused)
    for index, (row, out) in enumerate(plan.messages):
        error = errors.get(index) or _shortcoming(out.topic, results[index], needed[index])
        if error is not None:
            troubles.setdefault(row.identity, error)
        elif not out.removes:
            step.results[out.topic.name].append(results[index])
    gone = [row.id for identity, some in rows.items() if identity not in troubles for row in some]
    # If this process dies before the deletion is committed, the next step sends these messages a second time.
    delete(alias, gone)
    step.rows, step.sent = len(gone), len(rows) - len(troubles)
    _postpone(alias, rows, troubles, step)
    return len(rows) < len(held.rows)


def _chosen(held: _Held) -> dict[UUID, list[StoredRow]]:
    """Return what to send for each of the first messages, up to STEP_BYTES."""
    config = get_config().topics
    waits = {name: topic.debounce_ms for name, topic in config.items()}
    keeping = {name for name, topic in config.items() if topic.is_fifo and topic.on_duplicate == "keep"}
    chosen: dict[UUID, list[StoredRow]] = {}
    carried = 0
    for identity, rows in held.rows.items():
        name = rows[0].topic
        parts = merge_rows(rows, max_wait_ms=waits.get(name, 0), keeps=name in keeping)
        size = sum(held.sizes[row.id] for row in parts)
        if chosen and carried + size > STEP_BYTES:
            break
        chosen[identity] = parts
        carried += size
    return chosen


def _planned(alias: str, chosen: Mapping[UUID, Sequence[StoredRow]], now: int) -> _Plan:
    """Return what to send for the rows, in the order of their ids."""
    plan = _Plan()
    topics: dict[str, Topic | CallerError] = {}
    contents = read_contents(alias, [row.id for rows in chosen.values() for row in rows])
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


def _topic(name: str, known: dict[str, Topic | CallerError]) -> Topic:
    """Return a topic on whose definition this process and Redis agree; raises ``CallerError``."""
    answer = known.get(name)
    if answer is None:
        try:
            answer = get_config().topic(name)
            connections.agree(answer)
        except CallerError as error:
            answer = error
        known[name] = answer
    if isinstance(answer, CallerError):
        raise answer
    return answer


def _shortcoming(topic: Topic, result: SendResult, needed: Durability) -> RmqError | None:
    """Return why the rows of a message that Redis has answered must stay, or None if they need not."""
    if may_be_deleted(result, needed):
        return None
    if result.status == "refused":
        return TopicFull(
            f"slot {result.slot} of topic {topic.name} is full: MAX_BACKLOG = {topic.max_backlog}"
        )
    if needed.fsync and not result.fsynced:
        return _Unconfirmed("the primary has not confirmed that the message is on its disk")
    return _Unconfirmed(f"{result.replicas or 0} of {needed.replicas} replicas have confirmed the message")


def _postpone(
    alias: str, held: Mapping[UUID, Sequence[StoredRow]], troubles: Mapping[UUID, RmqError], step: RelayStep
) -> None:
    """Set when the rows of messages that could not be sent are tried again, and why they could not."""
    grace_ms, now = get_config().outbox.grace_ms, now_ms()
    changes: defaultdict[tuple[str, int, int | None], list[int]] = defaultdict(list)
    for identity, error in troubles.items():
        rows = held[identity]
        if isinstance(error, ServerTrouble):
            # Redis has answered before this step. One node of a cluster does not answer, or the message is too large for the
            # time-out of the link. The messages that are due behind it go first.
            step.trouble = error
            changes["", 0, now + grace_ms] += [row.id for row in rows]
            continue
        step.failed += 1
        # The column of attempts holds numbers up to 32,767.
        attempts = min(1 + max(row.attempts for row in rows), 30_000)
        text = f"{type(error).__name__.lstrip('_')}: {error}"[:1000]
        due_ms = next_attempt(error, attempts, now, grace_ms)
        changes[text, attempts, due_ms] += [row.id for row in rows]
        if due_ms is None:
            logger.error(
                "A message of topic %s in the outbox cannot be sent, and is not tried again. "
                "Look for it in the admin or with rmqoutbox --list, and retry or delete it: %s",
                rows[-1].topic,
                error,
                extra={"rmq_event": "outbox_refused", "rmq_topic": rows[-1].topic},
            )
    for (text, attempts, due_ms), ids in changes.items():
        failure = {"error": text, "attempts": attempts, "failed_ms": now} if text else {}
        for part in parts(ids):  # rule: updates_more_rows_than_a_query_may_name
            model().objects.using(alias).filter(id__in=part).update(due_ms=due_ms, **failure)


def relay_all(alias: str) -> Generator[RelayStep, None, None]:
    """Send the due rows of a database, batch by batch."""
    step = _relayed(alias)
    while step is not None:
        yield step
        step = _relayed(alias) if step.is_full else None


def _relayed(alias: str) -> RelayStep | None:
    """Return what a step did, or None if the database has no table."""
    try:
        return relay(alias)
    except DatabaseError:
        # Before its migration a database has no table, and its relay has nothing to do.
        if has_table(alias):
            raise
        return None


def duties() -> list[tuple[str, Duty]]:
    """Return the duty of a worker for each database that may have an outbox, by its alias."""
    return [(alias, partial(_duty, alias)) for alias in aliases()]


def _duty(alias: str) -> Generator[float, None, None]:
    """Relay at short intervals; while nothing is due, with one query."""
    # A row that its process left waits at most a quarter longer than its grace time.
    pause = get_config().outbox.grace / 4
    while True:
        reset_queries()  # With DEBUG, Django keeps all queries of a thread until they are reset.
        try:
            for _ in relay_all(alias):
                yield 0.0
        finally:
            # Django closes broken and old connections around requests, and this thread serves none.
            close_old_connections()
        yield pause
