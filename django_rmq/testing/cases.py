"""What a test case has: a broker in memory, and a clock that the test advances.

``RMQTestMixin`` gives both to Django's test cases, with their ``captured_messages``. The broker is ``core.redis.in_memory``:
the scripts run there as on a server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import TestCase

from django_rmq.core.redis.in_memory import InMemoryBroker
from django_rmq.durations import Duration, parse_duration
from django_rmq.testing.captured_messages import (
    CapturedMessage,
    CapturedMessages,
    assert_message_sent,
    assert_no_messages,
    captured_messages,
)
from django_rmq.testing.inline_worker import drain


class Clock:
    """A time for tests: microseconds since the epoch, changed only by ``advance``."""

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._micros = start_ms * 1000

    def __call__(self) -> int:
        return self._micros

    def advance(self, by: Duration) -> None:
        """Move on by a duration, to the microsecond. A negative one stands for a clock that was set back."""
        self._micros += parse_duration(by, timedelta.min, timedelta.max) // timedelta(microseconds=1)


@contextmanager
def memory_broker(clock: Callable[[], int] | None = None, prefix: str = "") -> Iterator[InMemoryBroker]:
    """Use a new ``InMemoryBroker`` in this block instead of the configured broker.

    ``clock``: for example a ``Clock``, which changes only when it is advanced. None: real time.
    """
    from django_rmq import connections

    broker = InMemoryBroker(prefix, clock)
    with connections.replaced_broker(broker):
        yield broker


def clock_from_now() -> Clock:
    """Return a ``Clock`` that starts at the present time and changes only when it is advanced."""
    return Clock(round(time.time() * 1000))


class RMQTestMixin:
    """For Django's test cases: a broker in memory, a clock that is advanced by hand, and captured messages.

    Put it before ``TestCase`` among the base classes.
    """

    rmq_broker: InMemoryBroker
    rmq_clock: Clock
    rmq_messages: CapturedMessages

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a class whose ``setUp`` would never reach that of the mixin, so that its sends would go to Redis."""
        super().__init_subclass__(**arguments)
        if TestCase in cls.__mro__[: cls.__mro__.index(RMQTestMixin)]:
            raise TypeError(
                f"{cls.__qualname__}: RMQTestMixin must stand before TestCase among the base classes"
            )

    def setUp(self) -> None:
        """Begin each test with nothing sent and nothing stored."""
        super().setUp()  # type: ignore[misc]
        stack = ExitStack()
        # Unlike ``tearDown``, a cleanup also runs if the ``setUp`` of a subclass fails.
        self.addCleanup(stack.close)  # type: ignore[attr-defined]
        self.rmq_clock = clock_from_now()
        self.rmq_broker = stack.enter_context(memory_broker(self.rmq_clock))
        self.rmq_messages = stack.enter_context(captured_messages(deliver=True))

    def advance(self, by: Duration) -> None:
        """Advance the clock of the broker by seconds, a timedelta, or text such as "250ms" or "15m"."""
        self.rmq_clock.advance(by)

    def drain(self, topic: str | None = None, *, raise_errors: bool = True) -> int:
        """Run the listeners on what is due; see ``drain``."""
        return drain(topic, raise_errors=raise_errors)

    def assertMessageSent(self, topic: str, count: int | None = None, **wanted: Any) -> list[CapturedMessage]:  # noqa: N802
        """Assert that the test has sent a matching message; see ``assert_message_sent``."""
        return assert_message_sent(topic, count, messages=self.rmq_messages, **wanted)

    def assertNoMessages(self, topic: str | None = None) -> None:  # noqa: N802
        """Assert that the test has sent nothing (to ``topic``)."""
        assert_no_messages(topic, messages=self.rmq_messages)
