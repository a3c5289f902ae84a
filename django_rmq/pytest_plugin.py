"""Fixtures for pytest, which pytest finds if the package is installed.

Each test begins with nothing in the broker of ``RMQ["TESTING"]`` and ``RMQ["BROKER"] = "memory"``.

``rmq``           a broker in memory for this test, with a clock that the test advances
``rmq_captured``  the list of all messages that the test sends; they are delivered only if ``rmq`` is used too
``rmq_drain``     runs listeners on due messages in ``rmq``'s broker
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django_rmq.durations import Duration
    from django_rmq.testing import CapturedMessages, Clock, InMemoryBroker


@dataclass(frozen=True, slots=True)
class Rmq:
    """The value of the fixture ``rmq``."""

    broker: InMemoryBroker
    clock: Clock

    def advance(self, by: Duration) -> None:
        """Advance the clock of the broker by seconds, a timedelta, or text such as "250ms" or "15m"."""
        self.clock.advance(by)

    def drain(self, topic: str | None = None, **options: Any) -> int:
        """Run the listeners on what is due; see ``django_rmq.testing.drain``."""
        from django_rmq.testing import drain

        return drain(topic, **options)


@pytest.fixture(autouse=True)
def _rmq_begin() -> None:
    # If it was never imported it holds nothing; importing it would need Django's settings.
    connections = sys.modules.get("django_rmq.connections")
    if connections is not None:
        connections.begin_test()


@pytest.fixture
def rmq() -> Iterator[Rmq]:
    """Use a broker in memory, with a clock that changes only when it is advanced."""
    from django_rmq.testing import clock_from_now, memory_broker

    clock = clock_from_now()
    with memory_broker(clock) as broker:
        yield Rmq(broker, clock)


@pytest.fixture
def rmq_captured(request: pytest.FixtureRequest) -> Iterator[CapturedMessages]:
    """Collect what the test sends; it is delivered only to the broker of ``rmq``."""
    from django_rmq.testing import captured_messages

    with captured_messages(deliver="rmq" in request.fixturenames) as messages:
        yield messages


@pytest.fixture
def rmq_drain(rmq: Rmq) -> Callable[..., int]:
    """Return ``drain``, which runs the listeners on due messages and returns the number of deliveries."""
    return rmq.drain
