"""The path of every message from its call: to Redis at once, or at the commit; and the observers of sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from django.db import transaction

from django_rmq import connections, outbox
from django_rmq.conf import get_config
from django_rmq.core.model.send_results import Durability, SendResult
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import ConfigurationError
from django_rmq.observability import announcements
from django_rmq.sending.on_commit import defer, rows_waiting, went_nowhere
from django_rmq.sending.send_failures import explained


class Observer(Protocol):
    """Sees what is sent, for tests. If ``delivers`` is False, nothing is sent."""

    delivers: bool

    def see(self, outgoing: Outgoing, body: Any, options: Mapping[str, Any], result: SendResult) -> None:
        """Record a validated message; ``result`` is completed later if it waits for a commit."""


observers: list[Observer] = []
"""For ``testing``: the observers of every send of this process, from any thread."""


def commit_to_wait_for(on_commit: bool | None, using: str | None) -> Any:
    """Return the database connection whose commit to wait for. None: send at once.

    Raises ``ConfigurationError`` if autocommit was switched off by hand and no block is open.
    """
    if on_commit is None:
        on_commit = get_config().on_commit
    if not on_commit:
        return None
    connection = transaction.get_connection(using)
    if connection.in_atomic_block:
        return connection
    if connection.connection is not None and not connection.autocommit:
        raise ConfigurationError(
            f"autocommit is off on the database {connection.alias!r} and no atomic block is open, so Django calls "
            "nothing at the commit. Send within transaction.atomic(), or with on_commit=False"
        )
    return None


def dispatch(
    producer: Producer,
    topic: Topic,
    built: list[Outgoing],
    seen: list[tuple[Any, dict[str, Any]]],
    wanted: Durability,
    connection: Any,
    using: str | None = None,
) -> list[SendResult]:
    """Send validated messages of ``topic``, or defer them to the commit of ``connection``.

    ``seen``: what observers are shown of each, its body and its options. ``using``: the database whose outbox
    may have older states of messages that are sent at once.
    """
    watching = list(observers)
    delivers = all(observer.delivers for observer in watching)
    if connection is not None:
        to = producer if delivers else None
        results: list[SendResult] = [*defer(to, topic, built, wanted, connection)]
    elif not delivers:
        results = [went_nowhere(out, wanted) for out in built]
    else:
        connections.agree(topic)
        kept = outbox.DirectSend(topic, built, using, rows_waiting(using) if topic.outbox else ())
        results, errors = producer.attempt(built, wanted)
        kept.conclude(results)
        for error in errors.values():
            raise explained(topic, error)
        announcements.sent(topic.name, results)
    for observer in watching:
        for out, (body, options), result in zip(built, seen, results, strict=True):
            observer.see(out, body, options, result)
    return results
