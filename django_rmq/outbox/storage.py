"""Rows of the outbox as the sender handles them: written in its transaction, and deleted when Redis has the message.

A message is sent only if its row is still there: otherwise a newer send of the same message, the relay or a person
has dealt with it. Which rows a successful send replaces is decided here. It deletes its own, and the older rows of
the same message that were visible before it was sent: what they stood for is older than what Redis has now. A row
that became visible later may belong to a transaction that was committed later, so it stays. If the process or the
relay of an older row may be sending it at the same time, and so after this one, the own row stays as well, and the
relay sends the newest state once more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID
from zlib import crc32

from django.db import DatabaseError, transaction

from django_rmq.conf import get_config
from django_rmq.core.model.envelope import uuid_of
from django_rmq.core.model.send_results import Durability, SendResult
from django_rmq.core.producer.placement import Outgoing
from django_rmq.outbox import sql
from django_rmq.outbox.databases import check_allowed, explained
from django_rmq.outbox.sql import Older

MOST_OLDER = 200
"""The number of older rows that a sender looks at. A message that is sent all the time may leave thousands while
Redis is unavailable, and looking at all of them for each send would take longer and longer."""


class StoredSend(NamedTuple):
    """A row that the current transaction has written."""

    id: int
    identity: UUID
    act: str
    wanted: Durability
    """What Redis has to confirm before the row may be deleted."""

    def is_kept_by(self, result: SendResult) -> bool:
        """Return whether Redis has the message as durably as the row requires."""
        # rule: forgets_rows_without_replicas
        return (
            result.status not in ("failed", "refused", "pending")
            and (result.replicas or 0) >= self.wanted.replicas
            and (bool(result.fsynced) or not self.wanted.fsync)
        )


class DeliveredSend(NamedTuple):
    """A message that Redis has accepted."""

    row: int | None
    """The id of its row. None: it has none."""
    identity: UUID
    is_last: bool
    """Whether it decides the state of its message. What found the message present does not."""
    is_removal: bool


def now_ms() -> int:
    """Return the time of this machine."""
    return time.time_ns() // 1_000_000


def crc_of(out: Outgoing) -> int:
    """Return the checksum of the slot basis of a message."""
    return crc32(out.member) if out.crc is None else out.crc


def identity_of(out: Outgoing) -> UUID:
    """Return the hash of what makes a message the same one: topic, slot basis and member."""
    name = out.topic.name.encode()
    head = b"%d %d %s " % (crc_of(out), len(name), name)
    return uuid_of(head + out.member)


def wanted_of(wanted: Durability) -> Durability:
    """Return what Redis has to confirm of a send that asked for ``wanted``."""
    return wanted._replace(replicas=max(wanted.replicas, get_config().outbox.replicas))


def write(connection: Any, messages: Sequence[Outgoing], wanted: Durability) -> list[StoredSend]:
    """Write a row for each message in the transaction of ``connection``.

    Raises ``ConfigurationError`` if the database has no table for them.
    """
    if not messages:
        return []
    alias = connection.alias
    check_allowed(messages[0].topic.name, alias)
    now, needed = now_ms(), wanted_of(wanted)
    due_ms = now + get_config().outbox.grace_ms
    identities = [identity_of(out) for out in messages]
    made = [
        {
            "topic": out.topic.name,
            "type": out.topic.type.value,
            "act": out.act,
            "identity": identity,
            "crc": crc_of(out),
            "member": out.member,
            "envelope": out.envelope,
            "score": out.score,
            "replicas": wanted.replicas,
            "fsync": wanted.fsync,
            "sent_ms": now,
            "due_ms": due_ms,
            "attempts": 0,
            "error": "",
        }
        for out, identity in zip(messages, identities, strict=True)
    ]
    try:
        with transaction.mark_for_rollback_on_error(using=alias):  # rule: goes_on_without_its_row
            ids = sql.insert(connection, made)
    except DatabaseError as error:
        raise explained(alias, error) from error
    found = zip(ids, identities, messages, strict=True)
    return [StoredSend(number, identity, out.act, needed) for number, identity, out in found]


def look(alias: str, own: Sequence[StoredSend]) -> tuple[set[int], list[Older] | None]:
    """Return which of a transaction's ``own`` rows are still there, and the older rows of the same messages.

    The second is None if there are too many older rows, so they are left to the relay.
    """
    first: dict[UUID, int] = {}
    for row in own:
        first.setdefault(row.identity, row.id)
    most = len(own) + len(first) + MOST_OLDER
    found = sql.visible(alias, first, most + 1)
    if len(found) > most:
        return sql.existing(alias, [row.id for row in own]), None
    there = {row.id for row in found}
    return {row.id for row in own if row.id in there}, [row for row in found if row.id < first[row.identity]]


def conclude(
    alias: str, landed: Sequence[DeliveredSend], own: Sequence[StoredSend], replaced: Sequence[Older]
) -> None:
    """Delete the rows of what Redis has accepted, ``landed``, and those that it replaces.

    ``own``: the rows of the transaction that were there before the send. ``replaced``: the older rows of then.
    """
    last = {one.identity: one for one in landed if one.is_last}
    # An ensure that found its message present has done nothing. Before an older send or removal that is still
    # to come it stays, so that the relay does both in order. An older ensure would find the same.
    arrived = {one.row for one in landed}
    sends = {row.identity for row in replaced if row.act != "ensure"}
    sends |= {row.identity for row in own if row.act != "ensure" and row.id not in arrived}
    ended = {one.identity for one in landed if one.is_last or one.identity not in sends}
    gone = {one.row for one in landed if one.row is not None and one.identity in ended}
    gone |= {
        row.id
        for row in own
        if (final := last.get(row.identity)) is not None and final.row is not None and row.id <= final.row
    }
    beneath = [row for row in replaced if row.identity in ended]
    limit = now_ms() + get_config().outbox.grace_ms // 2
    relayed = [row for row in beneath if row.due_ms is None or row.due_ms <= limit]
    removed = {one.identity for one in landed if one.is_removal}
    # The process of a row that is not due may be sending it, and after us. An ensure then changes nothing,
    # unless the message was removed.
    doubtful = {
        row.identity
        for row in beneath
        if row.due_ms is not None and row.due_ms > limit and (row.act != "ensure" or row.identity in removed)
    }
    # The relay may be sending what is due, and after us. Only who deletes these rows knows that it is not.
    if relayed and sql.delete_free(alias, [row.id for row in relayed]) < len(relayed):
        doubtful |= {row.identity for row in relayed}
    gone -= {row.id for row in own if row.identity in doubtful}  # rule: trusts_a_relay_that_is_under_way
    gone |= {row.id for row in beneath} - {row.id for row in relayed}
    # What a relay holds, it deletes itself. A commit does not wait for it.
    sql.delete_free(alias, gone)


def decides(out: Outgoing, result: SendResult) -> bool:
    """Return whether a message that Redis has answered is the newest state of its identity."""
    # A send to a fifo topic that keeps the body of a waiting message has changed nothing, like an ensure.
    return result.status != "present"


__all__ = [
    "DeliveredSend",
    "StoredSend",
    "conclude",
    "crc_of",
    "decides",
    "identity_of",
    "look",
    "now_ms",
    "wanted_of",
    "write",
]
