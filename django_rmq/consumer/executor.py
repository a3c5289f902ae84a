"""Running listeners: what one call does to its messages, and the threads that make the calls.

A batch is what one prepare handed out of one slot. Threads get whole batches, never single messages,
and report what became of them in slices, so that a slow listener's work is committed while it goes on.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from django_rmq.exceptions import Reject, Retry
from django_rmq.messages import Failure, Message, Topic, cut_error

logger = logging.getLogger("django_rmq.consumer")

FLUSH_SECONDS = 0.1
"""How long results of a batch under way may wait before they are reported."""


class ListenerLike(Protocol):
    """What the registry hands to the consumer."""

    @property
    def topic(self) -> str: ...
    @property
    def function(self) -> Callable[[Any], Any]: ...
    @property
    def batch_size(self) -> int | None: ...


class Hooks(NamedTuple):
    """What surrounds listeners; the Django layer closes database connections here."""

    before: Callable[[], None] = lambda: None
    """Before a thread begins a batch."""
    after: Callable[[], None] = lambda: None
    """After a batch, and after each failure in it."""
    end: Callable[[], None] = lambda: None
    """When a thread ends."""


def uptime() -> float:
    """Return seconds of a clock that also counts while the machine is suspended."""
    return time.clock_gettime(_UPTIME_CLOCK)


_UPTIME_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Undecodable(ValueError):
    """The body is not what the topic's BODY says."""


def describe(error: BaseException) -> str:
    """Return the error's class and message, then the end of its traceback, within 1 KB."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        head = cut_error(f"{name}: {error}", 400).decode()
    except Exception:  # an exception whose own text fails must not hide that the listener failed
        head = name
    tail = "".join(traceback.format_tb(error.__traceback__)).encode("utf-8", "backslashreplace")
    return f"{head}\n{tail[-600:].decode('utf-8', 'ignore')}"


def _failure(message: Message, error: BaseException) -> Failure:
    member = message.delivery.member
    if isinstance(error, Reject):
        failure = Failure(member, "rejected", None, f"Reject: {error.reason}")
    elif isinstance(error, Retry):
        delay = None if error.delay is None else max(0, round(error.delay * 1000))
        failure = Failure(member, "failed", delay, f"Retry: {error}")
    elif isinstance(error, Undecodable):
        failure = Failure(member, "undecodable", None, describe(error))
    else:
        failure = Failure(member, "failed", None, describe(error))
    if failure.delay_ms is None and failure.kind != "rejected":
        failure = failure._replace(delay_ms=_chosen_delay(message))
    _log(message, failure, error)
    return failure


def _chosen_delay(message: Message) -> int | None:
    """Return what the topic's own back-off function says, in ms; None: the registered exponential."""
    function = message.topic.backoff.function
    if function is None:
        return None
    failures = message.topic.max_retries - message.retries_left + 1
    try:
        return max(0, round(function(failures) * 1000))
    except Exception:
        logger.exception("BACKOFF of topic %s failed; the exponential one is used", message.topic.name)
        return None


def _log(message: Message, failure: Failure, error: BaseException | None) -> None:
    expected = isinstance(error, (Retry, Reject))
    logger.log(
        logging.WARNING if expected or error is None else logging.ERROR,
        "Message of topic %s %s (slot %s, %s retries left)",
        message.topic.name,
        failure.kind,
        message.slot,
        message.retries_left,
        exc_info=None if expected or error is None else error,
        extra={
            "rmq_event": failure.kind,
            "rmq_topic": message.topic.name,
            "rmq_slot": message.slot,
            "rmq_message": message.id,
            "rmq_retries_left": message.retries_left,
        },
    )


def _returned_false(message: Message) -> Failure:
    failure = Failure(message.delivery.member, "failed", _chosen_delay(message), "the listener returned False")
    _log(message, failure, None)
    return failure


def _call_one(function: Callable[[Any], Any], message: Message) -> Failure | None:
    try:
        try:
            message.body  # noqa: B018 - decoded here, so that an undecodable body has a kind of its own
        except Exception as error:
            raise Undecodable(f"body is not {message.topic.body}: {error}") from None
        if function(message) is False:
            return _returned_false(message)
    except BaseException as error:
        failure = _failure(message, error)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise Interrupted(failure) from error
        return failure
    return message.outcome


class Interrupted(Exception):
    """A listener raised SystemExit or KeyboardInterrupt: its message failed, and the process shall stop."""

    def __init__(self, failure: Failure) -> None:
        super().__init__("a listener asked the process to exit")
        self.failure = failure


def _call_many(function: Callable[[Any], Any], messages: list[Message]) -> list[Failure | None]:
    """Call a batch listener; a batch that fails as a whole is handed out again one by one."""
    readable: list[Message] = []
    outcomes: dict[int, Failure | None] = {}
    for i, message in enumerate(messages):
        try:
            message.body  # noqa: B018
            readable.append(message)
        except Exception as error:
            outcomes[i] = _failure(message, Undecodable(f"body is not {message.topic.body}: {error}"))
    if readable:
        try:
            fine = function(readable) is not False
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise Interrupted(_failure(readable[0], error)) from error
            fine = False
            if len(readable) == 1:
                failures = [_failure(readable[0], error)]
            else:
                logger.warning(
                    "A batch of %d of topic %s failed (%s); its messages are handed out one by one",
                    len(readable),
                    readable[0].topic.name,
                    type(error).__name__,
                )
        else:
            failures = [] if fine or len(readable) > 1 else [_returned_false(readable[0])]
        if fine:
            results: list[Failure | None] = [message.outcome for message in readable]
        elif len(readable) == 1:
            results = list(failures)
        else:
            results = []
            for message in readable:
                message.outcome = None
                results += _call_many(function, [message])
        remaining = iter(results)
        for i in range(len(messages)):
            if i not in outcomes:
                outcomes[i] = next(remaining)
    return [outcomes[i] for i in range(len(messages))]


def groups(messages: Sequence[Message], size: int) -> list[list[Message]]:
    """Split messages for a batch listener: retries alone, the others in lists of up to ``size``."""
    found: list[list[Message]] = []
    fresh: list[Message] = []
    for message in messages:
        if message.retries_left < message.topic.max_retries:
            found.append([message])
        else:
            fresh.append(message)
    return [fresh[at : at + size] for at in range(0, len(fresh), size)] + found


def run(listener: ListenerLike, messages: Sequence[Message]) -> list[Failure | None]:
    """Call ``listener`` for ``messages``; return None (commit) or a ``Failure`` for each, in order."""
    if not listener.batch_size:
        return [_call_one(listener.function, message) for message in messages]
    outcomes: dict[int, Failure | None] = {}
    for group in groups(messages, listener.batch_size):
        for message, outcome in zip(group, _call_many(listener.function, group), strict=True):
            outcomes[id(message)] = outcome
    return [outcomes[id(message)] for message in messages]


class Batch:
    """What one prepare handed out of one slot, until its last message is settled."""

    __slots__ = (
        "abandoned",
        "confirmed",
        "cost",
        "listener",
        "messages",
        "open",
        "place",
        "receipt",
        "running_since",
        "stale",
        "thread",
    )

    def __init__(
        self, place: Any, listener: ListenerLike, receipt: int, messages: list[Message], confirmed: float
    ) -> None:
        self.place = place
        """The slot's state in the dispatcher."""
        self.listener = listener
        self.receipt = receipt
        self.messages = messages
        self.open = len(messages)
        """How many are not settled yet."""
        self.confirmed = confirmed
        """``uptime`` when Redis last confirmed that the batch is ours (at the sending of that call)."""
        self.stale: set[bytes] = set()
        """Members that are no longer ours."""
        self.running_since: float | None = None
        self.abandoned = False
        """The listener exceeded MAX_RUNTIME: nothing more is extended."""
        self.thread: int | None = None
        self.cost = 0.0
        """Seconds of work it was reckoned to be when it was queued."""

    @property
    def topic(self) -> Topic:
        return self.messages[0].topic

    @property
    def head(self) -> float:
        """The highest score, where the topic has priorities."""
        return self.messages[0].score


class Slice(NamedTuple):
    """A report of a thread: what became of some messages of a batch."""

    batch: Batch
    committed: list[bytes]
    failures: list[Failure]
    released: list[bytes]
    seconds: float
    """Time spent in listeners for these messages."""
    last: bool
    """Nothing of the batch is left with the thread."""


class Exited(NamedTuple):
    """A thread reports that a listener asked the process to exit."""

    batch: Batch


class ExecutorThread(threading.Thread):
    """Runs batches one after the other: of its priority batches the one with the highest head first."""

    def __init__(self, index: int, inbox: SimpleQueue[Any], hooks: Hooks) -> None:
        super().__init__(name=f"rmq-executor-{index}", daemon=True)
        self.index = index
        self.current: Batch | None = None
        self._inbox = inbox
        self._hooks = hooks
        self._queue: list[Batch] = []
        self._ready = threading.Condition()
        self._stopping = False
        self._draining = False

    def put(self, batch: Batch) -> None:
        """Queue a batch."""
        with self._ready:
            batch.thread = self.index
            self._queue.append(batch)
            self._ready.notify()

    def drain(self) -> None:
        """Start no further message: report what has not begun as released."""
        self._draining = True

    def stop(self) -> None:
        """End when the queue is empty."""
        with self._ready:
            self._stopping = True
            self._ready.notify()

    def take_queue(self) -> list[Batch]:
        """Take away what has not begun; the thread ends after its present batch."""
        with self._ready:
            queue, self._queue = self._queue, []
            self._stopping = True
            self._ready.notify()
            return queue

    def _next(self) -> Batch | None:
        with self._ready:
            while not self._queue:
                if self._stopping:
                    return None
                self._ready.wait()
            chosen = 0
            if self._queue[0].topic.is_priority:
                for i, batch in enumerate(self._queue):
                    if batch.topic.is_priority and batch.head > self._queue[chosen].head:
                        chosen = i
            return self._queue.pop(chosen)

    def run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._run_batch(batch)
        finally:
            self._hooks.end()

    def _run_batch(self, batch: Batch) -> None:
        self.current = batch
        try:
            self._work(batch)
        except Interrupted:
            self._inbox.put(Exited(batch))
        except BaseException:
            # A hook failed, before or after the listeners: what was not reported is left to its time-out.
            logger.exception("An executor thread failed outside a listener")
            self._inbox.put(Slice(batch, [], [], [], 0.0, True))
        finally:
            self.current = None

    def _work(self, batch: Batch) -> None:
        self._hooks.before()
        try:
            if batch.listener.batch_size:
                self._work_groups(batch)
            else:
                self._work_each(batch)
        finally:
            batch.running_since = None
            self._hooks.after()

    def _startable(self, batch: Batch, now: float) -> bool:
        return not self._draining and not batch.abandoned and now <= batch.confirmed + batch.topic.timeout / 2

    def _work_each(self, batch: Batch) -> None:
        function = batch.listener.function
        half = batch.topic.timeout / 2
        committed: list[bytes] = []
        failures: list[Failure] = []
        begun, flushed = time.monotonic(), uptime()
        for i, message in enumerate(batch.messages):
            now = uptime()
            if self._draining or batch.abandoned or now > batch.confirmed + half:
                rest = [later.delivery.member for later in batch.messages[i:]]
                self._report(batch, committed, failures, rest, begun, True)
                return
            member = message.delivery.member
            if batch.stale and member in batch.stale:
                continue
            batch.running_since = now
            try:
                outcome = _call_one(function, message)
            except Interrupted as error:
                rest = [later.delivery.member for later in batch.messages[i + 1 :]]
                self._report(batch, committed, [*failures, error.failure], rest, begun, True)
                raise
            if outcome is None:
                committed.append(member)
            else:
                failures.append(outcome)
                self._hooks.after()
            if now - flushed > FLUSH_SECONDS and i + 1 < len(batch.messages):
                self._report(batch, committed, failures, [], begun, False)
                committed, failures = [], []
                begun = time.monotonic()
                flushed = now
        self._report(batch, committed, failures, [], begun, True)

    def _work_groups(self, batch: Batch) -> None:
        lists = groups(batch.messages, batch.listener.batch_size or 1)
        for i, group in enumerate(lists):
            begun, now = time.monotonic(), uptime()
            if not self._startable(batch, now):
                rest = [message.delivery.member for later in lists[i:] for message in later]
                self._report(batch, [], [], rest, begun, True)
                return
            ours = [message for message in group if message.delivery.member not in batch.stale]
            batch.running_since = now
            try:
                outcomes = _call_many(batch.listener.function, ours) if ours else []
            except Interrupted as error:
                rest = [message.delivery.member for later in lists[i:] for message in later]
                rest.remove(error.failure.member)
                self._report(batch, [], [error.failure], rest, begun, True)
                raise
            committed = [m.delivery.member for m, outcome in zip(ours, outcomes, strict=True) if outcome is None]
            failures = [outcome for outcome in outcomes if outcome is not None]
            if failures:
                self._hooks.after()
            self._report(batch, committed, failures, [], begun, i + 1 == len(lists))
        if not lists:
            self._report(batch, [], [], [], time.monotonic(), True)

    def _report(
        self,
        batch: Batch,
        committed: list[bytes],
        failures: list[Failure],
        released: list[bytes],
        begun: float,
        last: bool,
    ) -> None:
        seconds = time.monotonic() - begun
        self._inbox.put(Slice(batch, committed, failures, released, seconds, last))
