"""Signals: what happens to messages. They are sent with ``send_robust``: a receiver that raises is logged by Django.

``sender`` is the name of the topic, and so is the argument ``topic``. A receiver may connect to one topic,
``@receiver(message_dead, sender="orders")``, or to all. Without receivers nothing is done.

=====================  ==========================================================================
signal                 arguments, beside ``topic``
=====================  ==========================================================================
``message_sent``       ``results``: a list of ``SendResult``; after the server has answered, in the
                       sending process. One signal for all messages of a topic in one call or
                       transaction
``send_failed``        ``results``, ``error``: sends that were waiting for a database commit and did
                       not reach Redis then
``remove_failed``      ``results``: a list of ``RemoveResult``, ``error``: removals that were waiting for a
                       database commit and did not reach Redis then
``message_merged``     ``results``: those of ``message_sent`` that met a waiting message
``message_started``    ``messages``: a list of ``Message``, one or what a batch listener gets; just before
                       the listener is called, in its process and thread. Before an async listener, receivers
                       are called as ``asend_robust`` calls them: coroutine functions in the event loop, others
                       in the thread that has the database connections of the call
``message_committed``  ``messages``: those that were committed, after Redis has confirmed it
``message_failed``     ``failures``: a list of pairs (``Message``, ``Failure``) that raised, returned False or
                       were marked by ``retry`` or ``reject``, after Redis has confirmed it; includes dead ones
``message_dead``       ``failures``: those of ``message_failed`` that are not tried again
``message_replayed``   ``outcomes``: how many by outcome, ``actor``: whose name; after somebody has replayed dead
                       messages, in the process that did it (admin, REST or command; a worker, when a replay in the
                       background has ended)
=====================  ==========================================================================

``message_committed``, ``message_failed`` and ``message_dead`` are sent in the worker process that ran the listener, by one
separate thread for all of them: a slow receiver delays the next signal, but no message. If more than 20,000 messages wait
to be announced, further ones are left out, with a warning. These signals are sent at most once. No signal is sent if
another process ends the delivery (a time-out, the work of a process that died, REST, Spark, a person's action), or if
the confirmation is lost with a connection. Count with the metrics, which miss nothing; react with signals.

Worker processes are forked after listeners and apps were loaded, so connect receivers in ``AppConfig.ready``, as
everywhere in Django. Connections made by a receiver belong to its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.dispatch import Signal

_SENDERS: dict[str, str] = {}
"""The names of topics that are or were senders, each as the one object that stands for it."""


def _sender(topic: object) -> str | None:
    """Return the object that stands for a topic's name: Django compares senders by identity, not by value."""
    if topic is None:
        return None
    if not isinstance(topic, str):
        raise TypeError(f"the sender of this signal is the name of a topic, not {topic!r}")
    return _SENDERS.setdefault(topic, topic)


class TopicSignal(Signal):
    """A signal whose sender is the name of a topic."""

    def connect(
        self,
        receiver: Callable[..., object],
        sender: object | None = None,
        weak: bool = True,
        dispatch_uid: object = None,
    ) -> None:
        """Connect ``receiver`` to all topics, or to the one named by ``sender``."""
        super().connect(receiver, _sender(sender), weak, dispatch_uid)

    def disconnect(
        self,
        receiver: Callable[..., object] | None = None,
        sender: object | None = None,
        dispatch_uid: object = None,
    ) -> bool:
        """Disconnect ``receiver``; the arguments are those of ``connect``."""
        return super().disconnect(receiver, _sender(sender), dispatch_uid)

    def has_listeners(self, sender: object | None = None) -> bool:
        """Return whether a receiver is connected to the topic ``sender``."""
        # Django takes a lock to find its live receivers, even if there never were any.
        return bool(self.receivers) and super().has_listeners(_sender(sender))

    def send(self, sender: object, **named: object) -> list[tuple[Callable[..., Any], str | None]]:
        """Send as the topic ``sender``."""
        return super().send(_sender(sender), **named)

    def send_robust(
        self, sender: object, **named: object
    ) -> list[tuple[Callable[..., Any], Exception | Any]]:
        """Send as the topic ``sender``; an error of a receiver is logged and returned."""
        return super().send_robust(_sender(sender), **named)

    async def asend_robust(
        self, sender: object, **named: object
    ) -> list[tuple[Callable[..., Any], Exception | Any]]:
        """Send as the topic ``sender`` from an event loop; an error of a receiver is logged and returned."""
        return await super().asend_robust(_sender(sender), **named)


message_sent = TopicSignal()
send_failed = TopicSignal()
remove_failed = TopicSignal()
message_merged = TopicSignal()
message_started = TopicSignal()
message_committed = TopicSignal()
message_failed = TopicSignal()
message_dead = TopicSignal()
message_replayed = TopicSignal()
