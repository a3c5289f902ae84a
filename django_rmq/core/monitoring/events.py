"""Events: every process publishes what happens to messages with Redis Pub/Sub. Events are not stored.

A process records its events; a thread collects them for a moment and publishes them as a few large payloads.
Each payload is lines of JSON, one event per line:

    {"event": "failed", "at": 1790000000000, "topic": "orders", "count": 1, "ids": ["3.eyJvcmRlciI6OX0"],
     "errors": ["ValueError: no such order"], "host": "web1", "pid": 4711}

``event``: sent, merged, send_failed, started, committed, failed, cancelled, dead, replayed or dropped. ``at``: ms since
the epoch by the clock of the reporting process. ``ids`` are those of up to 100 messages, as the process names
them: plain ids contain the members, so every subscriber may read bodies. ``count``: the number of
messages. Events about a person's action have no ids, but ``outcomes`` and ``actor``. ``dropped``: the events
of ``count`` messages of this process are missing, because they exceeded the limit.

The cost for a process is one command per 0.1 s and 64 KB. Messages are never delayed: events that cannot be published are
dropped.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.bounds import OTHER_FORM
from django_rmq.core.threads import start_daemon
from django_rmq.exceptions import RmqError

logger = safe_logger("django_rmq.events")

GATHER_SECONDS = 0.1
"""Seconds for which events are collected before they are published."""

IDS = 100
"""The maximum number of messages in one event."""

WAITING = 20_000
"""The maximum number of messages whose events may wait to be published."""

PAYLOAD_BYTES = 65_536


class _Noted(NamedTuple):
    event: str
    at_ms: int
    topic: str
    messages: Sequence[tuple[int, bytes]]
    more: dict[str, object]


class EventStream:
    """Publishes the events of this process. It belongs to one process: make another one after a fork."""

    def __init__(self, broker: Broker, name: Callable[[str, int, bytes], str]) -> None:
        """Publish through ``broker``. ``name`` makes the published id from topic, slot and member."""
        self._broker = broker
        self._name = name
        self._pid = os.getpid()
        self._from = {"host": socket.gethostname(), "pid": self._pid}
        self._noted: deque[_Noted] = deque()
        self._waiting = 0
        self._dropped = 0
        self._log_throttled = LogThrottle(logger)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_publishing = False
        self._is_urgent = False
        self._is_closed = False
        atexit.register(self.close)

    def note(
        self, event: str, topic: str, messages: Sequence[tuple[int, bytes]] = (), **more: object
    ) -> None:
        """Record an event of ``messages`` (slot, member) of ``topic``; ``more`` is published unchanged.

        A list in ``more`` has an item for each message.
        """
        at_ms = round(time.time() * 1000)
        with self._changed:
            if self._is_closed:
                return
            weight = max(1, len(messages))
            # Redis is slower than the events, or unavailable: the memory of the process must not grow.
            # One event of more messages than that passes if none waits, or it never would.
            if self._waiting + weight > WAITING and self._waiting:
                self._dropped += weight
                return
            self._waiting += weight
            self._noted.append(_Noted(event, at_ms, topic, messages, more))
            self._thread = self._thread or start_daemon(self._run, "rmq-events")
            self._changed.notify()

    def flush(self, seconds: float = 2.0) -> None:
        """Publish the recorded events at once, and wait for it for at most this many seconds."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._noted or self._is_publishing), seconds)
            self._is_urgent = False

    def close(self, seconds: float = 2.0) -> None:
        """Publish the recorded events within this many seconds, and end."""
        # A registered method would keep the stream and its broker alive until the process ends.
        atexit.unregister(self.close)
        # A fork has inherited this object, but not its thread.
        if self._pid != os.getpid():
            return
        with self._changed:
            self._is_closed = self._is_urgent = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._noted or self._is_closed)
                self._changed.wait_for(lambda: self._is_urgent, GATHER_SECONDS)
                noted, self._noted = self._noted, deque()
                count, self._waiting = self._waiting, 0
                dropped, self._dropped = self._dropped, 0
                self._is_publishing = True
            try:
                for payload in _payloads(self._lines(noted, dropped)):
                    self._broker.publish_events(payload)
            except Exception as error:  # noqa: BLE001 - logged, not raised
                self._failed(count + dropped, error)
            with self._changed:
                self._is_publishing = False
                self._changed.notify_all()
                if self._is_closed and not self._noted:
                    return

    def _lines(self, noted: deque[_Noted], dropped: int) -> Iterator[bytes]:
        if dropped:
            lost = {"event": "dropped", "at": round(time.time() * 1000), "topic": "", "count": dropped}
            yield _line({**lost, **self._from})
        for one in noted:
            common = {"event": one.event, "at": one.at_ms, "topic": one.topic}
            if not one.messages:
                yield _line({**common, **one.more, **self._from})
            for start in range(0, len(one.messages), IDS):
                ids = [
                    self._name(one.topic, slot, member) for slot, member in one.messages[start : start + IDS]
                ]
                more = {
                    name: value[start : start + IDS] if isinstance(value, list) else value
                    for name, value in one.more.items()
                }
                yield _line({**common, "count": len(ids), "ids": ids, **more, **self._from})

    def _failed(self, taken: int, error: Exception) -> None:
        # Messages must not wait for their events, so events that could not be published are only counted.
        with self._changed:
            self._dropped += taken
        text = f"Events of up to {taken} messages could not be published: %s"
        self._log_throttled("publish", text, error, exc_info=not isinstance(error, RmqError))


def _line(event: dict[str, object]) -> bytes:
    # The text of an error may have halves of surrogate pairs, which UTF-8 cannot encode.
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _payloads(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Join lines to payloads of ``PAYLOAD_BYTES``, or of a single line that is longer."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        if part and size + len(line) >= PAYLOAD_BYTES:
            yield b"\n".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
    if part:
        yield b"\n".join(part)


def decode_events(payload: bytes) -> list[dict[str, Any]]:
    """Return the events of one payload; lines that are not events are left out."""
    events = []
    for line in payload.split(b"\n"):
        try:
            event = json.loads(line)
        except OTHER_FORM:
            continue  # any program may publish on the channel
        if (
            isinstance(event, dict)
            and isinstance(event.get("event"), str)
            and isinstance(event.get("at"), int)
        ):
            events.append(event)
    return events
