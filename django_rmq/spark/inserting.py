"""Decides when a bulk send inserts, and with which time: the server's, between two readings."""

from __future__ import annotations

import time

from django_rmq.core.calls.broker import Broker
from django_rmq.core.calls.inserting import transaction_time
from django_rmq.exceptions import RmqError, ServerUnavailable

RENEW_MS = 5_000
"""The age at which a reading of the server's clock is replaced."""

PAUSE = 8
"""The number of round trips without insertions after one of which a slot has declined."""


class Inserting:
    """Whether the next round trip inserts. Every reading is a transaction, so that a server that refuses these is noticed."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._reading: tuple[int, float] | None = None
        """The server's clock in ms, and the local time at which it was asked for."""
        self._pause = 0

    def now_ms(self) -> int | None:
        """Return the server's time, not earlier than now and later by one round trip at most; None: do not insert.

        Raises ``ServerUnavailable``.
        """
        if self._pause > 0:
            self._pause -= 1
            return None
        elapsed = self._elapsed()
        if elapsed is None or elapsed > RENEW_MS:
            self._read()
            elapsed = self._elapsed()
        return None if self._reading is None or elapsed is None else self._reading[0] + elapsed

    def decline(self) -> None:
        """Record that messages have to be looked at one by one: for some round trips nothing is inserted."""
        self._pause, self._reading = PAUSE, None

    def _elapsed(self) -> int | None:
        """Return the whole ms since the reading, rounded up."""
        return None if self._reading is None else int((time.monotonic() - self._reading[1]) * 1000) + 1

    def _read(self) -> None:
        # Otherwise the first reading would last as long as loading.
        self._broker.load_scripts()
        pipeline, asked = self._broker.pipeline(), time.monotonic()
        for call in transaction_time():
            pipeline.add(call)
        found = pipeline.execute()[-1]
        if isinstance(found, ServerUnavailable):
            raise found
        if isinstance(found, RmqError):
            self.decline()
        else:
            self._reading = found, asked
