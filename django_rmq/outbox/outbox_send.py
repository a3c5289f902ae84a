"""One trip of sends to Redis beside the outbox: what is looked up before it, and deleted after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import DEFAULT_DB_ALIAS, transaction
from django.db import connections as databases

from django_rmq.conf import get_config
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.send_results import (
    OUTDATED,
    STORED,
    Durability,
    SendResult,
)
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.producer import Outcomes
from django_rmq.outbox import sql, storage
from django_rmq.outbox.sql import Older
from django_rmq.outbox.storage import DeliveredSend, StoredSend

logger = safe_logger("django_rmq.outbox")
_complain = LogThrottle(logger)


class OutboxSend:
    """Sends of a transaction and their rows; made before the trip. ``kept`` has a row or None for each message."""

    def __init__(self, alias: str, kept: Sequence[StoredSend | None]) -> None:
        self._alias = alias
        self._kept = kept
        self._own = [row for row in kept if row is not None]
        self._there = {row.id for row in self._own}
        self._older: list[Older] | None = []
        if not self._own:
            return
        try:
            self._there, self._older = storage.look(alias, self._own)
        except Exception as error:  # noqa: BLE001 - the message is sent, and sent again by the relay
            self._older = None
            _complain("older", "Cannot look for older messages in the outbox: %s", error)
        self._own = [row for row in self._own if row.id in self._there]

    @property
    def wanted(self) -> Durability:
        """What the rows require beyond what the senders asked for."""
        return Durability(get_config().outbox.replicas) if self._own else STORED

    def attempt(
        self, messages: Sequence[Outgoing], attempt: Callable[[Sequence[Outgoing]], Outcomes]
    ) -> Outcomes:
        """Send by ``attempt`` what is not ``outdated``, and return the outcomes of all ``messages``.

        The row of an outdated message is gone: the relay or a newer send has dealt with it, and its state is no
        longer the last one.
        """
        current = [index for index, row in enumerate(self._kept) if self._is_current(row)]
        if len(current) == len(messages):
            return attempt(messages)
        results = [SendResult(out.topic.name, out.slot, out.member, OUTDATED) for out in messages]
        found, failed = attempt([messages[index] for index in current]) if current else ([], {})
        for index, result in zip(current, found, strict=True):
            results[index] = result
        return results, {current[at]: error for at, error in failed.items()}

    def conclude(self, messages: Sequence[Outgoing], outcomes: Sequence[SendResult]) -> None:
        """Delete the rows of what Redis has, and those that it replaces. A row that stays is sent again."""
        if not self._own or self._older is None:
            return
        landed = [
            DeliveredSend(row.id, row.identity, storage.decides(out, outcome), out.removes)
            for out, outcome, row in zip(messages, outcomes, self._kept, strict=True)
            if row is not None and self._is_current(row) and row.is_kept_by(outcome)
        ]
        try:
            storage.conclude(self._alias, landed, self._own, self._older)
        except Exception as error:  # noqa: BLE001 - logged, not raised: the messages are in Redis
            _complain_of_rows(error)

    def _is_current(self, row: StoredSend | None) -> bool:
        return row is None or row.id in self._there


class DirectSend:
    """Sends without rows, because they wait for no commit: they replace older rows of the same messages.

    ``waiting``: the rows of the running transaction. They stay, because its commit sends their messages.
    """

    def __init__(
        self, topic: Topic, messages: Sequence[Outgoing], using: str | None, waiting: Collection[int] = ()
    ) -> None:
        self._alias = using or DEFAULT_DB_ALIAS
        self._messages = messages
        self._older: list[Older] = []
        if topic.outbox and not get_config().testing:
            try:
                with _apart(self._alias):
                    found = sql.visible(self._alias, {storage.identity_of(out) for out in messages})
                self._older = [row for row in found if row.id not in waiting]
            except Exception as error:  # noqa: BLE001 - a send that needs no database does not fail without one
                _complain("older", "Cannot look for older messages in the outbox: %s", error)

    def conclude(self, outcomes: Sequence[SendResult]) -> None:
        """Delete the older rows of what Redis has."""
        if not self._older:
            return
        landed = [
            DeliveredSend(None, storage.identity_of(out), storage.decides(out, outcome), out.removes)
            for out, outcome in zip(self._messages, outcomes, strict=True)
            if outcome.status not in ("failed", "refused")
        ]
        try:
            with _apart(self._alias):
                storage.conclude(self._alias, landed, (), self._older)
        except Exception as error:  # noqa: BLE001 - as above
            _complain_of_rows(error)


def _apart(alias: str) -> AbstractContextManager[Any]:
    """Return a savepoint within a transaction of the caller, which an error of ours must not break."""
    is_in_block = databases[alias].in_atomic_block
    return transaction.atomic(using=alias) if is_in_block else nullcontext()


def _complain_of_rows(error: Exception) -> None:
    _complain("delete", "Cannot delete rows of the outbox; their messages are sent again: %s", error)


__all__ = ["DirectSend", "OutboxSend"]
