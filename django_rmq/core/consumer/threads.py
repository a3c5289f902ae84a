"""Running listeners: what one call does to its messages, and the threads that make the calls.

A batch is what one prepare handed out of one slot. Threads get whole batches, never single messages,
and report what became of them in slices, so that a slow listener's work is committed while it goes on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from inspect import isasyncgen, isawaitable, isgenerator
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn, Protocol

from django_rmq.core.consumer import journal
from django_rmq.core.consumer.notes import BEGUN, DONE, Marks
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.words.bounds import delay_ms
from django_rmq.core.words.messages import Failure, Message, Topic, cut_error
from django_rmq.exceptions import Reject, Retry

logger = safe_logger("django_rmq.consumer")

FLUSH_SECONDS = 0.1
"""How long results of a batch under way may wait before they are reported."""

PATIENCE_SECONDS = 0.2
"""How long a thread keeps the rest of a batch for which something better may turn up: a higher
priority, or another thread that is free."""


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
    around: Callable[[Topic, Callable[[Any], Any]], Callable[[Any], Any]] = lambda topic, function: function
    """Once per batch: what is called in a listener's place, with its argument, and calls it."""


NO_HOOKS = Hooks()


def uptime() -> float:
    """Return seconds of a clock that also counts while the machine is suspended."""
    return time.clock_gettime(_UPTIME_CLOCK)


_UPTIME_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Undecodable(ValueError):
    """The body is not what the topic's BODY says."""


Outcome = tuple[Message, Failure | None]
"""What became of a message; None: commit it."""


class Interrupted(Exception):
    """A listener raised SystemExit or KeyboardInterrupt: what it had failed, and the process shall stop."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__("a listener asked the process to exit")
        self.outcomes = outcomes


def describe(error: BaseException) -> str:
    """Return the error's class and message, then the end of its traceback, within 1 KB."""
    head = cut_error(f"{_name_of(error)}: {_text_of(error)}", 400).decode()
    frames = traceback.format_tb(error.__traceback__, limit=-8)
    tail = "".join(frames).encode("utf-8", "backslashreplace")
    return f"{head}\n{tail[-600:].decode('utf-8', 'ignore')}"


def _name_of(error: BaseException) -> str:
    kind = type(error)
    try:
        is_known = kind.__module__ == "builtins"
        return kind.__qualname__ if is_known else f"{kind.__module__}.{kind.__qualname__}"
    except BaseException:  # noqa: BLE001 - a class may have any metaclass
        return "an exception whose class has no name"


def _is(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Return what ``isinstance`` does, without asking the error: it may answer with an error of its own."""
    return issubclass(type(error), kinds)


def _text_of(thing: object) -> str:
    try:
        return str(thing)
    except BaseException:  # noqa: BLE001 - an error whose own text fails must not hide that the listener failed
        return "(its text cannot be shown)"


def _failure(message: Message, error: BaseException) -> Failure:
    """Return what a listener's error means for its message, and log it. Raises nothing, whatever the error is like."""
    try:
        return _understood(message, error)
    except BaseException:  # noqa: BLE001 - its class, its text or the memory fails, and the message still has to end
        return Failure(message.delivery.member, "failed", None, "an exception that cannot be described")


def _understood(message: Message, error: BaseException) -> Failure:
    member = message.delivery.member
    if isinstance(error, Reject):
        failure = Failure(member, "rejected", None, f"Reject: {_text_of(error.reason)}")
    elif isinstance(error, Retry):
        failure = Failure(member, "failed", None, f"Retry: {_text_of(error)}")
        if error.delay is not None:
            try:
                failure = failure._replace(delay_ms=delay_ms(error.delay))
            except Exception as wrong:  # noqa: BLE001 - whatever a listener gave for a number
                journal.unusable(message.topic, "Retry(delay=...)", wrong)
    else:
        kind = "undecodable" if isinstance(error, Undecodable) else "failed"
        failure = Failure(member, kind, None, describe(error))
    return _judged(message, failure, error)


def _judged(message: Message, failure: Failure, error: BaseException | None = None) -> Failure:
    """Log a failure and give it the delay that the topic's own back-off function chooses."""
    if failure.kind != "rejected":
        if failure.delay_ms is None:
            failure = failure._replace(delay_ms=chosen_delay(message))
        elif failure.delay_ms < 0:
            failure = failure._replace(delay_ms=0)
    journal.failed(message, failure, error)
    return failure


def chosen_delay(message: Message) -> int | None:
    """Return what the topic's own back-off function says, in ms; None: the registered exponential."""
    function = message.topic.backoff.function
    if function is None:
        return None
    failures = message.topic.max_retries - message.retries_left + 1
    try:
        return delay_ms(function(failures))
    except Exception as wrong:  # noqa: BLE001 - whatever a function of the project raises
        journal.unusable(message.topic, "BACKOFF", wrong)
        return None


def _check_returned(returned: Any) -> None:
    """Raise ``TypeError`` for what would have run later: committing it would lose the message."""
    if isawaitable(returned) or isgenerator(returned) or isasyncgen(returned):
        if hasattr(returned, "close"):
            returned.close()
        raise TypeError(f"the listener returned a {type(returned).__name__}, which nobody runs")


_forking: threading.Thread | None = None
"""In a process that a listener has forked: the thread that did, which is the only one there."""


def _note_fork() -> None:
    global _forking  # noqa: PLW0603 - there is one per process
    thread = threading.current_thread()
    _forking = thread if isinstance(thread, ExecutorThread) else None


os.register_at_fork(after_in_child=_note_fork)


def _end_copy() -> None:
    """End this process if a listener has forked it and now returns in it: it is a copy of a worker, and not a worker.

    It would run the rest of the batch a second time, report to nobody, and never end.
    """
    if threading.current_thread() is _forking:
        _exit_copy(sys.exception())


def _exit_copy(error: BaseException | None) -> NoReturn:
    code = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        else:
            how = "".join(traceback.format_exception(error)) if error is not None else ""
            # Not by logging: a lock that another thread held at the fork is never released here.
            text = (
                f"A listener forked and did not end the child process {os.getpid()}; it is ended now.\n{how}"
            )
            os.write(2, text.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(code & 0xFF)


def _call_one(function: Callable[[Any], Any], message: Message, argument: Any) -> Failure | None:
    """Call a listener with ``argument``, which is ``message`` or a list of it alone."""
    try:
        try:
            message.body  # noqa: B018 - decoded here, so that an undecodable body has a kind of its own
        except Exception as error:  # noqa: BLE001 - whatever a decoder raises
            raise Undecodable(f"body is not {message.topic.body}: {_text_of(error)}") from None
        try:
            returned = function(argument)
        finally:
            if _forking is not None:
                _end_copy()
        if returned is not None:
            if returned is False:
                failure = Failure(message.delivery.member, "failed", None, "the listener returned False")
                return _judged(message, failure)
            _check_returned(returned)
    except BaseException as error:
        failure = _failure(message, error)
        if _is(error, KeyboardInterrupt, SystemExit):
            raise Interrupted([(message, failure)]) from error
        return failure
    return None if message.outcome is None else _judged(message, message.outcome)


def call_group(function: Callable[[Any], Any], group: list[Message]) -> list[Outcome] | None:
    """Call a batch listener; None: it failed as a whole, and nobody knows by whose fault."""
    if len(group) == 1:
        return [(group[0], _call_one(function, group[0], group))]
    readable: list[Message] = []
    outcomes: list[Outcome] = []
    unreadable: list[tuple[Message, Undecodable]] = []
    for message in group:
        try:
            message.body  # noqa: B018
            readable.append(message)
        except Exception as error:  # noqa: BLE001 - whatever a decoder raises
            unreadable.append((message, Undecodable(f"body is not {message.topic.body}: {_text_of(error)}")))
    if readable:
        why: object = "returned False"
        try:
            try:
                returned = function(readable)
            finally:
                if _forking is not None:
                    _end_copy()
            if returned is not None and returned is not False:
                _check_returned(returned)
        except BaseException as error:
            if _is(error, KeyboardInterrupt, SystemExit):
                failed = [*((message, error) for message in readable), *unreadable]
                raise Interrupted([(message, _failure(message, each)) for message, each in failed]) from error
            why, returned = _name_of(error), False
        if returned is False:
            journal.batch_failed(readable[0].topic, len(readable), str(why))
            for message in readable:
                message.outcome = None
            return None
        outcomes = [(m, None if m.outcome is None else _judged(m, m.outcome)) for m in readable]
    return outcomes + [(message, _failure(message, error)) for message, error in unreadable]


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
    """Call ``listener`` for ``messages``; return None (commit) or a ``Failure`` for each, in order.

    What would end the process (SystemExit, KeyboardInterrupt) is raised.
    """
    try:
        if not listener.batch_size:
            return [_call_one(listener.function, message, message) for message in messages]
        outcomes: dict[int, Failure | None] = {}
        lists = deque(groups(messages, listener.batch_size))
        while lists:
            group = lists.popleft()
            found = call_group(listener.function, group)
            if found is None:
                lists.extendleft([message] for message in reversed(group))
            else:
                outcomes.update((id(message), outcome) for message, outcome in found)
    except Interrupted as interrupted:
        raise (interrupted.__cause__ or interrupted) from None
    return [outcomes[id(message)] for message in messages]


class Batch:
    """What one prepare handed out of one slot, until its last message is settled."""

    __slots__ = (
        "abandoned",
        "begun",
        "confirmed",
        "cost",
        "cut",
        "dropped",
        "halted",
        "listener",
        "messages",
        "place",
        "queued",
        "receipt",
        "reported",
        "running_since",
        "size",
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
        """In the order of their calls, once these have begun."""
        self.confirmed = confirmed
        """``uptime`` when Redis last confirmed that the batch is ours (at the sending of that call)."""
        self.queued = confirmed
        self.begun = 0
        """How many of ``messages`` the thread has begun. It writes this, then reads ``halted``; the
        dispatcher writes ``halted``, then reads this: so nothing is both given back and begun."""
        self.reported = 0
        """How many of ``messages`` the thread has reported."""
        self.stale: set[bytes] = set()
        """Members that are no longer ours."""
        self.running_since: float | None = None
        self.halted = False
        """Nothing more of it may begin."""
        self.dropped = False
        """Nor may it go on with the messages of a list that failed, one by one."""
        self.cut: frozenset[bytes] = frozenset()
        """Members that the dispatcher has given back by itself."""
        self.abandoned = False
        """The listener exceeded MAX_RUNTIME: nothing more is extended."""
        self.thread: ExecutorThread | None = None
        """The thread that has it; None: it waits for one, or its thread was given up."""
        self.size = 0
        """Bytes of its messages."""
        self.cost = 0.0
        """Seconds of work it was reckoned to be when it was queued."""

    @property
    def topic(self) -> Topic:
        return self.messages[0].topic

    @property
    def head(self) -> float:
        """The highest score, where the topic has priorities."""
        return self.messages[0].score

    def in_flight(self) -> list[bytes]:
        """Return the members that the heartbeat has to keep: neither reported nor given back."""
        end = self.begun if self.halted else None
        return [message.delivery.member for message in self.messages[self.reported : end]]


class Watcher(Protocol):
    """Is told, by the dispatcher's own thread, what Redis has confirmed; so it must be quick."""

    def wants(self) -> bool:
        """Return whether anybody wants to know; asked once per report of a thread."""

    def ended(self, committed: list[Message], failed: list[tuple[Message, Failure]]) -> None:
        """Take note of deliveries of one slot that have ended, by our telling and with our receipt."""


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
    times: Sequence[float] = ()
    """Seconds that each call of the listener took."""


class Exited(NamedTuple):
    """A thread reports that a listener asked the process to exit."""

    batch: Batch


class ExecutorThread(threading.Thread):
    """Runs batches one after the other: topics in turn, and the highest head first among priorities."""

    def __init__(self, index: int, inbox: SimpleQueue[Any], hooks: Hooks, marks: Marks | None = None) -> None:
        super().__init__(name=f"rmq-executor-{index}", daemon=True)
        self.index = index
        self.marks = marks
        self.current: Batch | None = None
        self.hangs = False
        """Its listener exceeded MAX_RUNTIME: it gets no more work."""
        self._inbox = inbox
        self._hooks = hooks
        self._queue: list[Batch] = []
        self._turn = 0
        self._served: dict[str, int] = {}
        """Topic -> the turn it was last served at."""
        self._ready = threading.Condition()
        self._stopping = False

    @property
    def is_dead(self) -> bool:
        """Whether it has run and runs no more."""
        return self.ident is not None and not self.is_alive()

    def put(self, batch: Batch) -> None:
        """Queue a batch."""
        with self._ready:
            batch.thread = self
            self._queue.append(batch)
            self._ready.notify()

    def withdraw(self, batch: Batch) -> bool:
        """Take a batch out of the queue; False: the thread has it already."""
        with self._ready:
            if batch not in self._queue:
                return False
            self._queue.remove(batch)
            return True

    def stop(self) -> None:
        """End when the queue is empty."""
        with self._ready:
            self._stopping = True
            self._ready.notify()

    def _next(self) -> Batch | None:
        with self._ready:
            while not self._queue and not self._stopping:
                self._ready.wait()
            if self.hangs or not self._queue:
                return None
            self.current = self._choose()
            self._queue.remove(self.current)
            self._turn += 1
            self._served[self.current.topic.name] = self._turn
            return self.current

    def _choose(self) -> Batch:
        """Return the batch to run: topics take turns; among a topic's priority slots the highest head is first.

        The receipts of a serial slot rise: its older batch runs before its newer one, whatever their heads.
        """
        topic = min((batch.topic for batch in self._queue), key=lambda t: self._served.get(t.name, 0))
        batches = [batch for batch in self._queue if batch.topic.name == topic.name]
        if not topic.is_priority:
            return batches[0]
        best = max(batches, key=lambda batch: batch.head)
        return next(batch for batch in batches if batch.place is best.place) if topic.serial else best

    def run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._run_batch(batch)
        finally:
            self._surround(self._hooks.end)

    def _surround(self, hook: Callable[[], None]) -> None:
        """Run a hook; should it fail, the listeners run all the same, and fail by themselves if they must."""
        try:
            hook()
        except Exception:
            logger.exception("A hook around the listeners failed")

    def _around(self, batch: Batch) -> Callable[[Any], Any]:
        try:
            return self._hooks.around(batch.topic, batch.listener.function)
        except Exception:
            logger.exception("A hook around the listeners failed")
            return batch.listener.function

    def _run_batch(self, batch: Batch) -> None:
        try:
            self._surround(self._hooks.before)
            if batch.listener.batch_size:
                self._work_groups(batch)
            else:
                self._work_each(batch)
        except Interrupted:
            self._inbox.put(Exited(batch))
        except BaseException:
            # First of all: while the dispatcher waits for this report, the batch is extended. One message counts as begun
            # at least, so that what fails again and again is charged in the end.
            rest = [message.delivery.member for message in batch.messages[max(1, batch.begun) :]]
            self._inbox.put(Slice(batch, [], [], rest, 0.0, True))
            logger.exception(
                "An executor thread failed outside a listener; what it had begun of its batch is left to time out"
            )
        finally:
            batch.running_since = None
            try:
                self._surround(self._hooks.after)
            finally:
                self.current = None

    def _states_of(self, batch: Batch) -> memoryview | bytearray:
        """Return where to note what is begun and what is done, a byte for each message."""
        if self.marks is None:
            return bytearray(len(batch.messages))
        members = [message.delivery.member for message in batch.messages]
        return self.marks.take(batch.topic.name, batch.place.slot, batch.receipt, members)

    def _patience(self, batch: Batch) -> float:
        """Return until when (``uptime``) more messages of this batch are begun."""
        waits_for_better = batch.topic.is_priority or not batch.topic.serial
        return uptime() + PATIENCE_SECONDS if waits_for_better else float("inf")

    def _work_each(self, batch: Batch) -> None:
        function, messages = self._around(batch), batch.messages
        half, patience = batch.topic.timeout / 2, self._patience(batch)
        committed: list[bytes] = []
        failures: list[Failure] = []
        times: list[float] = []
        begun, flushed = time.monotonic(), uptime()
        states = self._states_of(batch)
        for i, message in enumerate(messages, 1):
            batch.begun = i
            now = uptime()
            if batch.running_since is not None:
                # The end of one call is the beginning of the next, and one look at the clock for both.
                times.append(now - batch.running_since)
                batch.running_since = None
            if batch.halted or now > batch.confirmed + half or (now > patience and i > 1):
                break
            member = message.delivery.member
            if batch.stale and member in batch.stale:
                continue
            states[i - 1] = BEGUN
            batch.running_since = now
            try:
                outcome = _call_one(function, message, message)
            except Interrupted as error:
                failures += [failure for _, failure in error.outcomes if failure is not None]
                self._report(batch, committed, failures, messages[i:], begun, times)
                raise
            if outcome is None:
                committed.append(member)
                states[i - 1] = DONE
            else:
                failures.append(outcome)
                self._surround(self._hooks.after)
            if now - flushed > FLUSH_SECONDS and i < len(messages):
                self._report(batch, committed, failures, None, begun, times)
                batch.reported = i
                committed, failures, times = [], [], []
                begun = time.monotonic()
                flushed = now
        else:
            i = len(messages) + 1
        if batch.running_since is not None:
            times.append(uptime() - batch.running_since)
        self._report(batch, committed, failures, messages[i - 1 :], begun, times)

    def _work_groups(self, batch: Batch) -> None:
        function, patience = self._around(batch), self._patience(batch)
        lists = deque(groups(batch.messages, batch.listener.batch_size or 1))
        batch.messages = [message for group in lists for message in group]
        states = self._states_of(batch)
        times: list[float] = []
        at = 0
        while lists:
            group = lists.popleft()
            begun, now = time.monotonic(), uptime()
            # What ran in a list that failed has begun: it is settled one by one, however long that takes. Otherwise the
            # good messages would run in another list with the bad one.
            is_again = at < batch.begun
            batch.begun = max(batch.begun, at + len(group))
            late = now > batch.confirmed + batch.topic.timeout / 2
            is_over = batch.dropped if is_again else batch.halted or (now > patience and at > 0)
            if late or is_over or batch.abandoned:
                break
            batch.running_since = now
            ours = [message for message in group if message.delivery.member not in batch.stale]
            states[at : at + len(group)] = bytes([BEGUN]) * len(group)
            try:
                outcomes = call_group(function, ours) if ours else []
            except Interrupted as error:
                self._report_outcomes(batch, error.outcomes, batch.messages[at + len(group) :], begun, times)
                raise
            times.append(uptime() - now)
            if outcomes is None:
                self._surround(self._hooks.after)
                lists.extendleft([message] for message in reversed(group))
                continue
            failed = [message for message, failure in outcomes if failure is not None]
            if len(outcomes) == len(group) and not failed:
                states[at : at + len(group)] = bytes([DONE]) * len(group)
            else:
                done = {id(message) for message, failure in outcomes if failure is None}
                states[at : at + len(group)] = bytes(DONE if id(each) in done else BEGUN for each in group)
            at += len(group)
            self._report_outcomes(batch, outcomes, None if lists else [], begun, times)
            batch.reported, times = at, []
            if failed:
                self._surround(self._hooks.after)
        if at < len(batch.messages):
            self._report(batch, [], [], batch.messages[at:], time.monotonic(), times)

    def _report_outcomes(
        self,
        batch: Batch,
        outcomes: list[Outcome],
        rest: list[Message] | None,
        begun: float,
        times: Sequence[float],
    ) -> None:
        committed = [message.delivery.member for message, failure in outcomes if failure is None]
        failures = [failure for _, failure in outcomes if failure is not None]
        self._report(batch, committed, failures, rest, begun, times)

    def _report(
        self,
        batch: Batch,
        committed: list[bytes],
        failures: list[Failure],
        rest: list[Message] | None,
        begun: float,
        times: Sequence[float],
    ) -> None:
        """Tell the dispatcher; ``rest`` is what will not begin, None: the batch goes on."""
        released = [message.delivery.member for message in rest or ()]
        seconds = time.monotonic() - begun
        self._inbox.put(Slice(batch, committed, failures, released, seconds, rest is not None, times))
        journal.done(batch.topic, batch.place.slot, committed)
