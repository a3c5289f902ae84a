"""When a row of the outbox is deleted, by a send or by ``relay``: once Redis has its message, or a newer state of it.

``OutboxSend`` and ``DirectSend`` go with one trip to Redis: they read rows before it, and delete rows after it. ``relay``
deletes the rows that it sends by the same rule, ``may_be_deleted``.

A message is sent only if its row is still there: otherwise a newer send of the same message, the relay or a person
has dealt with it. A row that was just written is taken for there if its message can have no older row.

Which rows a successful send replaces is decided here. The send deletes its own row, and the older rows of the same
message that were visible before it was sent: their state is older than the state that Redis has now.
A row that became visible later may belong to a transaction that committed later, so it stays. If the process or the
relay of an older row may be sending it at the same time, and so after this send, the own row stays as well, and the
relay sends the newest state once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, transaction
from django.db import connections as databases

from django_rmq.conf import get_config
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.send_results import OUTDATED, STORED, Durability, SendResult
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.producer import Outcomes
from django_rmq.outbox.rows import (
    Older,
    StoredSend,
    delete_free,
    has_no_older,
    identity_of,
    is_allowed,
    now_ms,
    read_own_and_older,
    visible,
)

logger = safe_logger("django_rmq.outbox")
_log_throttled = LogThrottle(logger)

SURE_SECONDS = 0.05
"""Seconds for which a sender takes its row for there without a query, if the row replaces no older one. A relay takes no row
before ``GRACE``, and beside a transaction that takes longer the query costs little."""


class DeliveredSend(NamedTuple):
    """A message that Redis has accepted."""

    row: int | None
    """The id of its row, or None if it has none."""
    identity: UUID
    is_last: bool
    """Whether it decides the state of its message. A send that found the message present decides nothing."""
    is_removal: bool


def needed_durability(wanted: Durability) -> Durability:
    """Return what Redis has to confirm of the message of a row: what its sender wants, and the replicas of the settings.

    A send without a row (``DirectSend``) deletes the older rows of its message without them.
    """
    return wanted._replace(replicas=max(wanted.replicas, get_config().outbox.replicas))


def may_be_deleted(result: SendResult, needed: Durability) -> bool:
    """Return whether Redis has the message of a row as durably as the row needs it."""
    # Redis may have accepted the message, but a failover before its replicas have it would lose it. The row stays until
    # then.
    # rule: forgets_rows_without_replicas
    return result.status not in ("failed", "refused", "pending") and needed.is_reached_by(result)


def conclude(
    alias: str, landed: Sequence[DeliveredSend], own: Sequence[StoredSend], replaced: Sequence[Older]
) -> None:
    """Delete the rows of what Redis has accepted, ``landed``, and those that it replaces.

    ``own``: the rows of the transaction that were there before the send. ``replaced``: the older rows of then.
    """
    last = {one.identity: one for one in landed if one.is_last}
    # An ensure that found its message present has changed nothing. If an older send or removal has yet to be relayed, its
    # row stays, so that the relay does both in order. An older ensure would find the same message.
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
    # A relay on another machine may take a row before this clock says that it is due. Clocks may differ by half of
    # the grace time.
    limit = now_ms() + get_config().outbox.grace_ms // 2
    relayed = [row for row in beneath if row.due_ms is None or row.due_ms <= limit]
    removed = {one.identity for one in landed if one.is_removal}
    # The process that wrote a row that is not due yet may be sending it now, after this send. An ensure then changes
    # nothing, unless this send has removed the message.
    doubtful = {
        row.identity
        for row in beneath
        if row.due_ms is not None and row.due_ms > limit and (row.act != "ensure" or row.identity in removed)
    }
    # A relay may be sending the rows that are due, after this send. If this process deletes all of them, no relay does.
    if relayed and delete_free(alias, [row.id for row in relayed]) < len(relayed):
        doubtful |= {row.identity for row in relayed}
    gone -= {row.id for row in own if row.identity in doubtful}  # rule: trusts_a_relay_that_is_under_way
    gone |= {row.id for row in beneath} - {row.id for row in relayed}
    # A relay deletes the rows that it holds itself, so the commit does not wait for its locks.
    delete_free(alias, gone)


def decides(result: SendResult) -> bool:
    """Return whether a message that Redis has answered is the newest state of its identity."""
    # A send to a fifo topic that keeps the body of a waiting message has changed nothing, like an ensure.
    return result.status != "present"


class OutboxSend:
    """Sends of a transaction with their rows; made before the trip. ``kept`` has a row or None for each message."""

    def __init__(self, alias: str, kept: Sequence[StoredSend | None]) -> None:
        self._alias = alias
        self._kept = kept
        self._own = [row for row in kept if row is not None]
        self._there = {row.id for row in self._own}
        self._older: list[Older] | None = []
        # Nobody has deleted a row that was just written, and a send that has drawn its member replaces no row.
        sure = time.monotonic() - SURE_SECONDS
        if all(row.is_first and row.written > sure for row in self._own):  # rule: looks_for_no_older_row
            return
        try:
            self._there, self._older = read_own_and_older(alias, self._own)
        except Exception as error:  # noqa: BLE001 - the message is sent, and sent again by the relay
            self._older = None
            _log_throttled("older", "Cannot look for older messages in the outbox: %s", error)
        self._own = [row for row in self._own if row.id in self._there]

    @property
    def wanted(self) -> Durability:
        """The durability that the rows require beyond the wishes of the senders."""
        return Durability(get_config().outbox.replicas) if self._own else STORED

    def attempt(
        self, messages: Sequence[Outgoing], attempt: Callable[[Sequence[Outgoing]], Outcomes]
    ) -> Outcomes:
        """Send the messages that are not ``outdated`` by ``attempt``, and return the outcomes of all ``messages``.

        The row of an outdated message was deleted: the relay, a newer send or a person has dealt with it, and its state is
        no longer the last one.
        """
        current = [index for index, row in enumerate(self._kept) if self._is_current(row)]
        if len(current) == len(messages):
            return attempt(messages)
        results = [SendResult(out.topic.name, out.slot, out.member, OUTDATED) for out in messages]
        results_now, failed = attempt([messages[index] for index in current]) if current else ([], {})
        for index, result in zip(current, results_now, strict=True):
            results[index] = result
        return results, {current[at]: error for at, error in failed.items()}

    def conclude(self, messages: Sequence[Outgoing], outcomes: Sequence[SendResult]) -> None:
        """Delete the rows of messages that Redis has, and the rows that they replace. The relay sends the rows that stay."""
        # If the older rows are not known, one of them may be sent after this message. The own rows stay for the
        # relay.
        if not self._own or self._older is None:
            return
        landed = [
            DeliveredSend(row.id, row.identity, decides(outcome), out.removes)
            for out, outcome, row in zip(messages, outcomes, self._kept, strict=True)
            if row is not None
            and self._is_current(row)
            and may_be_deleted(outcome, needed_durability(row.wanted))
        ]
        try:
            conclude(self._alias, landed, self._own, self._older)
        except Exception as error:  # noqa: BLE001 - logged, not raised: the messages are in Redis
            _log_kept_rows(error)

    def _is_current(self, row: StoredSend | None) -> bool:
        return row is None or row.id in self._there


class DirectSend:
    """Sends to topics with the outbox that wait for no commit, and have no rows: they replace older rows of the same messages.

    ``waiting``: the rows of the running transaction. They stay, because its commit sends their messages.
    """

    def __init__(
        self, messages: Sequence[Outgoing], using: str | None, waiting: Collection[int] = ()
    ) -> None:
        self._alias = using or DEFAULT_DB_ALIAS
        self._messages = messages
        self._older: list[Older] = []
        if not get_config().testing:
            try:
                identities = {identity_of(out) for out in messages if not has_no_older(out)}
                # Where the routers allow no outbox there is no row, and ``default`` need not even be a database.
                if identities and is_allowed(self._alias):
                    with _apart(self._alias):
                        older_rows = visible(self._alias, identities)
                    self._older = [row for row in older_rows if row.id not in waiting]
            except Exception as error:  # noqa: BLE001 - a send that needs no database does not fail without one
                _log_throttled("older", "Cannot look for older messages in the outbox: %s", error)

    def conclude(self, outcomes: Sequence[SendResult]) -> None:
        """Delete the older rows of what Redis has."""
        if not self._older:
            return
        landed = [
            DeliveredSend(None, identity_of(out), decides(outcome), out.removes)
            for out, outcome in zip(self._messages, outcomes, strict=True)
            # Without a row, no relay repeats this send. If the older rows stayed until replicas confirm it, a relay would
            # write their older state over it.
            if may_be_deleted(outcome, STORED)
        ]
        try:
            with _apart(self._alias):
                conclude(self._alias, landed, (), self._older)
        except Exception as error:  # noqa: BLE001 - logged, not raised: the messages are in Redis
            _log_kept_rows(error)


def _apart(alias: str) -> AbstractContextManager[object]:
    """Return a savepoint within a transaction of the caller, which an error of the outbox must not break."""
    is_in_block = databases[alias].in_atomic_block
    return transaction.atomic(using=alias) if is_in_block else nullcontext()


def _log_kept_rows(error: Exception) -> None:
    _log_throttled("delete", "Cannot delete rows of the outbox; their messages are sent again: %s", error)
