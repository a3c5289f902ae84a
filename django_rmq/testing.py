"""For the tests of projects that use the package: what was sent, listeners run on the spot, time that is given.

    class CheckoutTests(RMQTestMixin, TestCase):
        def test_an_order_is_closed_when_its_time_is_up(self):
            with self.captureOnCommitCallbacks(execute=True):
                order = checkout(...)
            self.assertMessageSent("order-timeouts", body={"order": order.pk})
            self.advance(seconds=15 * 60)
            self.drain()

Messages wait for the database commit, which never comes inside ``TestCase``: run those callbacks as above
(pytest: ``django_capture_on_commit_callbacks(execute=True)``). Importing this module loads no Django.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from django_rmq.core.memory.broker import Clock, InMemoryBroker
from django_rmq.core.words.messages import Failure, Message, SendResult, Topic
from django_rmq.exceptions import ConfigurationError, InvalidMessage, Reject, Retry

HEADS = 1_024
"""Slots that one ``heads`` call looks at."""

_ANY: Any = object()


@dataclass(frozen=True, slots=True)
class CapturedMessage:
    """One send, as the caller gave it and as it was validated."""

    topic: str
    body: Any
    options: Mapping[str, Any]
    """What was given beside the body: key, priority, time_range, fixed_time, slot_basis, headers, expires."""
    slot: int
    member: bytes
    """What Redis would hold: the encoded body, or the key."""
    ensure: bool
    result: SendResult
    """Says ``pending`` until the commit, ``discarded`` after a rollback."""

    @property
    def key(self) -> str | None:
        """The key that was given."""
        return self.options.get("key")


class CapturedMessages(list[CapturedMessage]):
    """What was sent, in order."""

    def of(self, topic: str) -> list[CapturedMessage]:
        """Return the messages of one topic."""
        return [message for message in self if message.topic == topic]


class _Recorder:
    """An observer of ``sending``."""

    def __init__(self, delivers: bool) -> None:
        self.delivers = delivers
        self.messages = CapturedMessages()
        self._lock = threading.Lock()

    def see(self, outgoing: Any, body: Any, options: Mapping[str, Any], result: SendResult) -> None:
        message = CapturedMessage(
            outgoing.topic.name,
            body,
            options,
            outgoing.slot,
            outgoing.member,
            outgoing.act == "ensure",
            result,
        )
        with self._lock:
            self.messages.append(message)


_recorders: list[_Recorder] = []


@contextmanager
def captured_messages(*, deliver: bool = False) -> Iterator[CapturedMessages]:
    """Gather what the process sends in this block, at the call, also what waits for a commit.

    Messages are validated as ever. Unless ``deliver`` is True nothing reaches a server: sends say ``stored``, removals
    ``not_found``, after the commit where there is a transaction.
    """
    from django_rmq.project import sending

    recorder = _Recorder(deliver)
    sending.observers.append(recorder)
    _recorders.append(recorder)
    try:
        yield recorder.messages
    finally:
        sending.observers.remove(recorder)
        _recorders.remove(recorder)


@contextmanager
def memory_broker(clock: Callable[[], int] | None = None, prefix: str = "") -> Iterator[InMemoryBroker]:
    """Let everything in this block use a new ``InMemoryBroker`` instead of the configured one.

    ``clock``: such as a ``Clock``, which stands until it is advanced; None: real time.
    """
    from django_rmq.project import connections

    broker = InMemoryBroker(prefix, clock)
    with connections.replaced_broker(broker):
        yield broker


def clock_from_now() -> Clock:
    """Return a ``Clock`` that shows the present time and stands still."""
    return Clock(round(time.time() * 1000))


def assert_message_sent(
    topic: str,
    count: int | None = None,
    *,
    body: Any = _ANY,
    key: str | None = None,
    messages: CapturedMessages | None = None,
    **options: Any,
) -> list[CapturedMessage]:
    """Assert that ``topic`` was sent such a message (``count``: exactly so often), and return those that fit.

    ``options`` are compared with those of the send, as ``priority=500``. ``messages``: those of a
    ``captured_messages()`` block; by default of the innermost one around. What was rolled back does not
    count.
    """
    sent = _captured(messages)
    wanted = {**options, **({} if key is None else {"key": key})}
    fitting = [
        message
        for message in sent.of(topic)
        if message.result.status != "discarded"
        and (body is _ANY or message.body == body)
        and all(message.options.get(name) == value for name, value in wanted.items())
    ]
    if len(fitting) != count if count is not None else not fitting:
        given = wanted if body is _ANY else {"body": body, **wanted}
        described = "".join(f", {name}={value!r}" for name, value in given.items())
        expected = "at least one" if count is None else f"exactly {count}"
        raise AssertionError(
            f"expected {expected} message of topic {topic!r}{described}, found {len(fitting)}; {_listed(sent)}"
        )
    return fitting


def assert_no_messages(topic: str | None = None, *, messages: CapturedMessages | None = None) -> None:
    """Assert that nothing was sent (to ``topic``), but for what was rolled back."""
    sent = _captured(messages)
    found = CapturedMessages(
        message
        for message in (sent if topic is None else sent.of(topic))
        if message.result.status != "discarded"
    )
    if found:
        where = "" if topic is None else f" of topic {topic!r}"
        raise AssertionError(f"expected no message{where}; {_listed(found)}")


def _captured(messages: CapturedMessages | None) -> CapturedMessages:
    if messages is not None:
        return messages
    if not _recorders:
        raise RuntimeError("nothing is captured: call this inside `with captured_messages():`")
    return _recorders[-1].messages


def _listed(messages: CapturedMessages) -> str:
    if not messages:
        return "nothing was sent"
    shown = [
        f"{message.topic}: {message.body!r} {dict(message.options) or ''}".rstrip()
        for message in messages[:20]
    ]
    more = f" and {len(messages) - 20} more" if len(messages) > 20 else ""
    return f"sent were: {'; '.join(shown)}{more}"


# --- running listeners ------------------------------------------------------------------------------


def drain(
    topic: str | None = None, *, raise_errors: bool = True, limit: int = 10_000, live: bool = False
) -> int:
    """Run the listeners on all that is due now, and on what they send meanwhile; return the deliveries.

    Works on the broker of the settings or of ``memory_broker()``, in this thread, and commits and rolls
    back as a consumer does. ``raise_errors``: what a listener raises (but ``Retry`` and ``Reject``) is
    raised here once its message was rolled back. Messages that rest until a later time stay; so do those
    that still wait for a database commit. More than ``limit`` deliveries raise ``RuntimeError``.

    On a real Redis it would take messages from running consumers: that needs ``live=True``.
    """
    from django_rmq.project import connections
    from django_rmq.project.listening import registry
    from django_rmq.project.settings import get_config

    config = get_config()
    registry.autodiscover()
    listeners = registry.listeners()
    if topic is not None:
        config.topic(topic)
        if topic not in listeners:
            raise ConfigurationError(f"topic {topic!r} has no listener")
        listeners = {topic: listeners[topic]}
    broker: Any = connections.get_broker("worker")
    owner = uuid4().hex
    if not live and not isinstance(broker, InMemoryBroker):
        raise ConfigurationError(
            "drain() would consume from a real Redis: use memory_broker(), RMQTestMixin, the fixture rmq or "
            'RMQ["TESTING"] = True; or say drain(live=True)'
        )
    total = 0
    while True:
        handled = 0
        for name, listener in listeners.items():
            if name in config.topics:
                for slot in _due_slots(broker, config.topics[name]):
                    handled += _drain_slot(
                        broker,
                        config.topics[name],
                        slot,
                        owner,
                        listener,
                        raise_errors,
                        limit - total - handled,
                    )
        total += handled
        if not handled:
            return total


def _due_slots(broker: Any, topic: Topic) -> list[int]:
    now, due = broker.now_ms(), []
    for first in range(0, topic.slots, HEADS):
        slots = range(first, min(first + HEADS, topic.slots))
        heads = broker.heads(topic, slots)
        due += [slot for slot, head in zip(slots, heads, strict=True) if head is not None and head <= now]
    return due


def _drain_slot(
    broker: Any, topic: Topic, slot: int, owner: str, listener: Any, raise_errors: bool, limit: int
) -> int:
    """Deliver what is due in one slot; return how many deliveries that were."""
    from django_rmq.core.consumer import executor
    from django_rmq.project.watching import announcing

    raised: list[BaseException] = []

    def recorded(argument: Any) -> Any:
        try:
            return listener.function(argument)
        except (Retry, Reject):
            raise
        except Exception as error:
            raised.append(error)
            raise

    recording = replace(listener, function=announcing.around(topic, recorded))
    handled, after = 0, None
    while True:
        prepared = broker.prepare(topic, slot, owner, None, listener.batch_size or 1, after=after)
        after = prepared.cursor
        if prepared.status == "more":
            continue
        if prepared.status != "ok":
            return handled
        handled += len(prepared.deliveries)
        if handled > limit:
            broker.release(topic, slot, prepared.receipt, [given.member for given in prepared.deliveries])
            raise RuntimeError(
                f"drain stopped at its limit of deliveries: do listeners of {topic.name} resend?"
            )

        def extend(message: Message, receipt: int = prepared.receipt) -> bool:
            answers = broker.extend(topic, slot, receipt, [message.delivery.member])
            return bool(answers[0] == "ok")

        messages = [
            Message(topic, slot, prepared.receipt, delivery, extend) for delivery in prepared.deliveries
        ]
        outcomes = executor.run(recording, messages)
        done = [
            message.delivery.member
            for message, outcome in zip(messages, outcomes, strict=True)
            if outcome is None
        ]
        failures = [outcome for outcome in outcomes if outcome is not None]
        if done:
            broker.commit(topic, slot, prepared.receipt, done)
        if failures:
            broker.rollback(topic, slot, prepared.receipt, failures)
        pairs = list(zip(messages, outcomes, strict=True))
        announcing.ended(
            [message for message, outcome in pairs if outcome is None],
            [(message, outcome) for message, outcome in pairs if outcome is not None],
        )
        if raise_errors:
            _raise_first(topic, raised, failures)


def _raise_first(topic: Topic, raised: list[BaseException], failures: list[Failure]) -> None:
    for error in raised:
        raise error
    for failure in failures:
        if failure.kind == "undecodable":
            raise InvalidMessage(f"a message of topic {topic.name} cannot be decoded: {failure.error}")


class RMQTestMixin:
    """For Django's test cases: a broker in memory, a clock that stands, and all that is sent captured.

    Put it before ``TestCase`` among the base classes.
    """

    rmq_broker: InMemoryBroker
    rmq_clock: Clock
    rmq_messages: CapturedMessages

    def setUp(self) -> None:
        """Begin each test with nothing sent and nothing stored."""
        super().setUp()  # type: ignore[misc]
        stack = ExitStack()
        self.addCleanup(stack.close)  # type: ignore[attr-defined]
        self.rmq_clock = clock_from_now()
        self.rmq_broker = stack.enter_context(memory_broker(self.rmq_clock))
        self.rmq_messages = stack.enter_context(captured_messages(deliver=True))

    def advance(self, *, seconds: float = 0, ms: float = 0) -> None:
        """Let time pass for the broker."""
        self.rmq_clock.advance(seconds=seconds, ms=ms)

    def drain(self, topic: str | None = None, *, raise_errors: bool = True) -> int:
        """Run the listeners on what is due; see ``drain``."""
        return drain(topic, raise_errors=raise_errors)

    def assertMessageSent(self, topic: str, count: int | None = None, **wanted: Any) -> list[CapturedMessage]:  # noqa: N802
        """Assert that the test has sent such a message; see ``assert_message_sent``."""
        return assert_message_sent(topic, count, messages=self.rmq_messages, **wanted)

    def assertNoMessages(self, topic: str | None = None) -> None:  # noqa: N802
        """Assert that the test has sent nothing (to ``topic``)."""
        assert_no_messages(topic, messages=self.rmq_messages)


__all__ = [
    "CapturedMessage",
    "CapturedMessages",
    "Clock",
    "InMemoryBroker",
    "RMQTestMixin",
    "assert_message_sent",
    "assert_no_messages",
    "captured_messages",
    "clock_from_now",
    "drain",
    "memory_broker",
]
