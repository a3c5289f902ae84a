"""The message that a listener gets: its body, its limits, and what the listener may report about its delivery.

It reads only what the delivery brought from Redis. Extending and reporting are calls of a ``DeliveryControl``, which the worker
or the REST consumer passes. Which sends are the same message is said in ``producer.identity``.
"""

from __future__ import annotations

import math
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol

from django_rmq.core.model.body_codec import decode_body
from django_rmq.core.model.bounds import abbreviated, is_number
from django_rmq.core.model.envelope import Envelope, content_of, key_of, raw_body
from django_rmq.core.model.replies import MAX_TEXT, Delivery, Failure, cut_error
from django_rmq.core.model.scores import due_of, priority_of
from django_rmq.core.model.topic import BodyType, Topic
from django_rmq.core.redaction import opaque_name
from django_rmq.core.threads import call_in_thread
from django_rmq.durations import Duration
from django_rmq.exceptions import InvalidBody, ServerTrouble, retry_seconds

PROGRESS_SECONDS = 1.0
"""Seconds between two reports of a message's progress that are written; reports in between are dropped."""


class DeliveryControl(Protocol):
    """The holder of deliveries, which reports about them to Redis."""

    def extend(self, message: Any) -> bool:
        """Restart the time-out; return False if the delivery has ended."""

    def report(self, message: Any, thousandths: int, text: bytes) -> bool:
        """Note the progress; return False if the delivery has ended."""


def message_id(slot: int, member: bytes) -> str:
    """Return the id by which people and programs name a message: its slot and its member."""
    return f"{slot}.{urlsafe_b64encode(member).rstrip(b'=').decode()}"


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # ``typing`` has TypeVars with a default since Python 3.13. The package does not depend on ``typing_extensions``.
    Body = TypeVar("Body", default=Any)
else:
    from typing import TypeVar

    Body = TypeVar("Body")

_UNREAD = object()


class Message(Generic[Body]):
    """What a listener gets: one delivery. The body is decoded when it is first read.

    A type checker takes ``Message[PriceChanged]`` for one whose body is such an instance.

    In a batch, ``retry`` and ``reject`` set the outcome of a single message; otherwise it shares the outcome
    of the batch.
    """

    __slots__ = (
        "_bodies",
        "_body",
        "_envelope",
        "_holder",
        "_reported_at",
        "delivery",
        "labels",
        "outcome",
        "receipt",
        "reported",
        "slot",
        "stopped",
        "topic",
    )

    labels: dict[str, str]
    """What log lines say of the message beside its name: field -> value. Only listeners of RMQ's own set it."""

    def __init__(
        self, topic: Topic, slot: int, receipt: int, delivery: Delivery, holder: DeliveryControl | None = None
    ) -> None:
        self._holder = holder
        """The holder of the delivery. None if this object reports neither extensions nor progress."""
        self._reported_at = -math.inf
        """When the progress was last reported (monotonic)."""
        self.reported: tuple[float, str] | None = None
        """The fraction and the text that the listener reported last. The worker carries them in its next report about itself."""
        self.topic = topic
        self.slot = slot
        self.receipt = receipt
        """The number of the delivery. It rises with every delivery of a slot, so it can serve as a fencing token."""
        self.delivery = delivery
        self.outcome: Failure | None = None
        """The outcome that ``retry`` or ``reject`` has set, or None for success."""
        self.stopped = ""
        """Why the listener has to stop: ``cancelled`` or ``overran``; empty if it may continue."""
        self._body: Any = _UNREAD
        self._envelope: Envelope | None = None

    def __repr__(self) -> str:
        return f"<Message {self.topic.name} {self.name} receipt={self.receipt}>"

    @property
    def id(self) -> str:
        """The message's id: its slot and its member."""
        return message_id(self.slot, self.delivery.member)

    @property
    def name(self) -> str:
        """An id for log lines. It reveals nothing of the message, and finds it in the admin."""
        return opaque_name(self.topic.name, self.slot, self.delivery.member)

    @property
    def envelope(self) -> Envelope:
        """The body with its headers and expiry (unkeyed messages: the body alone)."""
        if self._envelope is None:
            self._envelope = content_of(self.topic, self.delivery.member, self.delivery.envelope)
        return self._envelope

    @property
    def raw(self) -> bytes:
        """The body as it was stored."""
        return raw_body(self.topic, self.delivery.member, self.delivery.envelope)

    @property
    def body(self) -> Body:
        """The decoded body; on topics whose BODY names a type, an instance of it.

        Raises ``ValueError`` for bytes that do not match the topic's BODY: ``InvalidBody`` if it names a type.
        """
        if self._body is _UNREAD:
            topic = self.topic
            if topic.typed is None:
                # A worker spends much of its time here, so `raw` is not called.
                member, _, _, envelope = self.delivery
                self._body = decode_body(topic, raw_body(topic, member, envelope))
            else:
                self._body = self._typed(topic.typed)
        return self._body  # type: ignore[no-any-return]

    @property
    def bodies(self) -> list[Body]:
        """The decoded bodies of all merged sends in their order (topics with ``ACCUMULATE``); otherwise the only one.

        Raises the errors of ``body``.
        """
        collected = self.envelope.bodies
        if collected is None:
            return [self.body]
        if self.topic.typed is None:
            return [decode_body(self.topic, raw) for raw in collected]
        self.body  # noqa: B018 - reads all of them
        return list(self._bodies)

    def _typed(self, typed: BodyType) -> object:
        """Return the instance, and keep the instances of all merged sends, so that each is read once."""
        collected = self.envelope.bodies
        if collected is None:
            return typed.read(self.raw)
        bodies = []
        for index, raw in enumerate(collected):
            try:
                bodies.append(typed.read(raw))
            except InvalidBody as error:
                raise error.reworded(f"body {index + 1} of {len(collected)}: {error}") from None
        self._bodies = bodies
        return bodies[-1]

    @property
    def key(self) -> str | None:
        """The key of the message. None if its topic is not keyed, or if it was sent without one (fifo)."""
        return key_of(self.topic, self.delivery.member)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the sender gave (keyed topics only)."""
        return self.envelope.headers or {}

    @property
    def origin(self) -> str | None:
        """What identifies the send, in every delivery of its message. None if it was sent without one (see ``ORIGIN``)."""
        return self.envelope.origin

    @property
    def max_retries(self) -> int:
        """How often the message may be tried again in all: its own MAX_RETRIES, or its topic's."""
        return self.topic.retries_of(self.envelope.max_retries)

    @property
    def timeout(self) -> int:
        """The seconds until a delivery of the message times out: its own TIMEOUT, or its topic's."""
        own = self.envelope.timeout
        return self.topic.timeout if own is None else min(own, self.topic.timeout)

    @property
    def retries_left(self) -> int:
        """How often the message may still be tried after this delivery."""
        return self.delivery.retries_left

    @property
    def due(self) -> datetime | None:
        """When it was due, in UTC. None on priority topics, and for a retry, which has lost its time."""
        return due_of(self.topic, self.delivery.score)

    @property
    def priority(self) -> int | None:
        """Its priority, also if it failed and kept it. None on other topics, and with RETRY_PRIORITY "lowest" for a retry."""
        return priority_of(self.topic, self.delivery.score)

    @property
    def score(self) -> float:
        """The number in Redis with which it was taken: due ms, priority, or that of a retry. See ``due`` and ``priority``."""
        return self.delivery.score

    def retry(self, reason: str = "retry", *, delay: Duration | None = None) -> None:
        """In a batch: try this message again, after ``delay`` or the topic's back-off. Raises the errors of ``Retry``."""
        seconds = retry_seconds("message.retry", reason, delay)
        rest_ms = None if seconds is None else round(seconds * 1000)
        self.outcome = Failure(self.delivery.member, "failed", rest_ms, reason)

    def reject(self, reason: str = "rejected") -> None:
        """In a batch: put this message into Dead at once."""
        self.outcome = Failure(self.delivery.member, "rejected", None, reason)

    @property
    def cancelled(self) -> bool:
        """Whether a person or a program has cancelled this delivery (``cancel_message``). Reading it costs no round trip."""
        return self.stopped == "cancelled"

    def extend(self) -> bool:
        """Restart the time-out; return False if the delivery has ended, so that another consumer may have the message."""
        return self._holder is None or self._holder.extend(self)

    async def aextend(self) -> bool:
        """Do what ``extend`` does, from a coroutine, without blocking its event loop."""
        return await call_in_thread(self.extend)

    def progress(self, fraction: float, text: str = "") -> bool:
        """Report that ``fraction`` (from 0 to 1) of the work is done: workers say it of what they run, without a round trip.

        ``text``: what to say about it, of which 200 bytes are kept. On topics with OUTCOME_RETENTION it is also written to
        the status of the message: at most once per second; the others are left out, except one with 1. Returns whether
        it was written there: False also if the delivery has ended, and if Redis is unavailable.
        """
        return self._is_to_report(fraction, text) and self._report(fraction, text)

    async def aprogress(self, fraction: float, text: str = "") -> bool:
        """Do what ``progress`` does, from a coroutine, without blocking its event loop."""
        return self._is_to_report(fraction, text) and await call_in_thread(self._report, fraction, text)

    def _is_to_report(self, fraction: float, text: str) -> bool:
        if not (is_number(fraction) and 0 <= fraction <= 1):
            raise ValueError(f"the progress of a message must be from 0 to 1, got {abbreviated(fraction)}")
        self.reported = (fraction, text)
        now = time.monotonic()
        is_soon = now - self._reported_at < PROGRESS_SECONDS
        if not self.topic.outcome_retention_ms or (is_soon and fraction < 1):
            return False
        self._reported_at = now
        return True

    def _report(self, fraction: float, text: str) -> bool:
        thousandths, cut_text = round(fraction * 1000), cut_error(text, MAX_TEXT)
        try:
            return self._holder is not None and self._holder.report(self, thousandths, cut_text)
        except ServerTrouble:
            # Progress is only for people: the listener continues while Redis is unavailable.
            return False


ListenerArgument = Message | list[Message]
"""What a listener is called with: one message, or the messages of a batch."""

ListenerFunction = Callable[[Any], object]
"""A listener as its project wrote it. It takes one of the two, so this is no function of a ``ListenerArgument``."""
