"""Running listeners, without a server: what returns, errors, batches and odd listeners do to their messages."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from django_rmq.core import log, redaction
from django_rmq.core.clock import uptime
from django_rmq.core.consumer import batch_run
from django_rmq.core.consumer import failures as outcome_log
from django_rmq.core.consumer.batch import Batch, BatchReport, PendingEnd
from django_rmq.core.consumer.batch_run import NO_HOOKS, Hooks, call_all, groups
from django_rmq.core.consumer.executor_pool import ExecutorThread
from django_rmq.core.consumer.failures import describe
from django_rmq.core.consumer.shared_notes import BEGUN, DONE, SharedNotes
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.replies import Delivery, Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.exceptions import Reject, Retry
from django_rmq.message_ids import sealed_id

TOPIC = Topic("prices", TopicType.RANGE_MERGE, max_retries=16)


@dataclass
class Listener:
    function: Callable[[Any], Any]
    batch_size: int | None = None
    topic: str = "prices"
    coroutine: None = None


def message(raw: bytes = b"{}", topic: Topic = TOPIC, *, left: int | None = None) -> Message:
    return Message(topic, 3, 7, Delivery(raw, 1.0, topic.max_retries if left is None else left))


def numbered(count: int, topic: Topic = TOPIC) -> list[Message]:
    return [message(b"%d" % i, topic) for i in range(count)]


def outcome(function: Callable[[Any], Any], raw: bytes = b"{}", topic: Topic = TOPIC) -> Failure | None:
    [found] = call_all(Listener(function), [message(raw, topic)])
    return found


def failed(function: Callable[[Any], Any], raw: bytes = b"{}", topic: Topic = TOPIC) -> Failure:
    failure = outcome(function, raw, topic)
    assert failure is not None
    return failure


def raising(error: BaseException) -> Callable[[Any], Any]:
    def listener(_: Any) -> Any:
        raise error

    return listener


@pytest.mark.parametrize("returned", [None, True, 0, "", "false", [], object()])
def test_whatever_a_listener_returns_but_false_commits(returned: object) -> None:
    assert outcome(lambda _: returned) is None


def test_false_rolls_back_with_a_text_that_says_so() -> None:
    assert outcome(lambda _: False) == Failure(b"{}", "failed", None, "the listener returned False")


def test_an_exception_rolls_back_with_its_class_text_and_traceback() -> None:
    def sell(_: Any) -> None:
        raise LookupError("no such product")

    failure = failed(sell)
    assert (failure.kind, failure.delay_ms) == ("failed", None)
    assert failure.error.startswith("LookupError: no such product\n")
    assert "in sell" in failure.error


def test_what_a_listener_would_have_run_later_is_a_failure_and_not_a_commit() -> None:
    async def later(_: Any) -> None: ...

    def generator(_: Any) -> Any:
        yield 1

    for function in (later, generator):
        failure = failed(function)
        assert "which is not run" in failure.error
        [one, two] = call_all(Listener(function, 10), [message(b"1"), message(b"2")])
        assert one is not None
        assert two is not None


@pytest.mark.parametrize(
    ("delay", "delay_ms"),
    [(1.5, 1500), (0, 0), (timedelta(seconds=2), 2000), ("2s", 2000), ("36525d", 36_525 * 86_400_000)],
)
def test_retry_chooses_its_delay_within_bounds(delay: Any, delay_ms: int) -> None:
    failure = outcome(raising(Retry("rate limit", delay=delay)))
    assert failure == Failure(b"{}", "failed", delay_ms, "Retry: rate limit")


@pytest.mark.parametrize(
    "delay", [math.nan, math.inf, 1e300, -3, "soon", True, object(), timedelta(seconds=-1)]
)
def test_a_delay_that_is_none_is_refused_and_the_topic_chooses(delay: Any) -> None:
    def listener(_: Any) -> None:
        raise Retry(delay=delay)

    failure = failed(listener)
    assert (failure.kind, failure.delay_ms) == ("failed", None)
    assert failure.error.startswith(
        'ValueError: Retry(delay=) must be seconds, a timedelta or text such as "250ms", "2s", "15m" or "7d", from 0s'
    )


def test_reject_sends_to_dead_with_its_reason() -> None:
    rejected = Failure(b"{}", "rejected", None, "Reject: no such shop")
    assert outcome(raising(Reject("no such shop"))) == rejected


@pytest.mark.parametrize("raw", [b"{", b"\xff", b"", b"[" * 100_000, b"nonsense"])
def test_a_body_that_cannot_be_decoded_has_a_kind_of_its_own_and_reaches_no_listener(raw: bytes) -> None:
    called: list[Any] = []
    failure = failed(called.append, raw)
    assert failure.kind == "undecodable"
    assert failure.error.startswith("django_rmq.core.consumer.failures.Undecodable: body is not json: ")
    assert called == []


def test_a_body_that_is_not_text_is_undecodable_where_text_is_wanted_and_fine_as_bytes() -> None:
    text = failed(lambda _: None, b"\xff", replace(TOPIC, body="text"))
    assert text.kind == "undecodable"
    assert outcome(lambda _: None, b"\xff", replace(TOPIC, body="bytes")) is None


def test_the_topics_own_back_off_is_told_how_often_the_message_has_failed() -> None:
    told: list[int] = []

    def backoff(failures: int) -> float:
        told.append(failures)
        return failures * 10

    topic = replace(TOPIC, backoff=BackOff(function=backoff))
    own = Delivery(b"3", 1.0, 2, encode_envelope(Envelope(b"{}", max_retries=2)))
    given = [message(b"1", topic, left=16), message(b"2", topic, left=0)]
    given.append(Message(replace(topic, identity="key"), 3, 7, own))
    found = call_all(Listener(raising(ValueError())), given)
    assert [failure and failure.delay_ms for failure in found] == [10_000, 170_000, 10_000]
    assert told == [1, 17, 1]
    assert outcome(raising(Retry(delay=1)), topic=topic) == Failure(b"{}", "failed", 1000, "Retry: ")


@pytest.mark.parametrize("returned", [math.nan, "soon", None])
def test_a_back_off_that_fails_or_makes_no_sense_leaves_the_exponential_one(
    returned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def backoff(_: int) -> Any:
        if returned is None:
            raise ZeroDivisionError
        return returned

    failure = failed(lambda _: False, topic=replace(TOPIC, backoff=BackOff(function=backoff)))
    assert failure.delay_ms is None
    assert "BACKOFF of topic prices failed" in caplog.text


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class UnspeakableRetry(Retry):
    __str__ = Unspeakable.__str__


@pytest.mark.parametrize("error", [Unspeakable(), UnspeakableRetry(), Reject(Unspeakable())])  # type: ignore[arg-type]
def test_an_error_whose_own_text_fails_is_still_a_failure(error: Exception) -> None:
    failure = failed(raising(error))
    assert "(its text cannot be shown)" in failure.error


def test_a_huge_error_is_cut_and_keeps_its_beginning() -> None:
    failure = failed(raising(ValueError("é" * 10_000_000)))
    assert failure.error.startswith("ValueError: éé")
    assert len(failure.error.encode()) <= 1024


def test_endless_recursion_is_a_failure_like_any_other() -> None:
    def listener(m: Any) -> Any:
        return listener(m)

    failure = failed(listener)
    assert failure.error.startswith("RecursionError: ")


def test_a_failure_is_logged_with_what_finds_the_message_again(caplog: pytest.LogCaptureFixture) -> None:
    error = LookupError("gone")
    given = message(b'{"sku":1}', left=4)
    call_all(Listener(raising(error)), [given])
    [record] = caplog.records
    assert (record.levelno, record.exc_info and record.exc_info[1]) == (logging.WARNING, error)
    assert vars(record)["rmq_message"] == sealed_id("prices", 3, b'{"sku":1}')
    assert vars(record)["rmq_message"] in record.getMessage()
    assert "eyJza3UiOjF9" not in str(vars(record)), "the body, as plain ids hold it"
    assert (vars(record)["rmq_topic"], vars(record)["rmq_slot"]) == ("prices", 3)
    assert vars(record)["rmq_retries_left"] == 4


@pytest.mark.parametrize(
    ("error", "left", "level"),
    [
        (Retry(), 3, logging.WARNING),
        (Retry(), 0, logging.ERROR),
        (Reject(), 3, logging.ERROR),
        (KeyError("x"), 1, logging.WARNING),
        (KeyError("x"), 0, logging.ERROR),
    ],
)
def test_a_failure_is_a_warning_while_retries_are_left_and_an_error_at_death(
    caplog: pytest.LogCaptureFixture, error: Exception, left: int, level: int
) -> None:
    call_all(Listener(raising(error)), [message(b"1", left=left)])
    [record] = caplog.records
    assert record.levelno == level
    assert (record.exc_info is not None) == isinstance(error, KeyError)


def test_failures_that_repeat_are_one_traceback_and_counted_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(log, "time", clock)

    def listener(given: Message) -> None:
        if given.body == 7:
            raise LookupError("another place")
        raise ConnectionError(f"no database for {given.body}")

    for number in range(6_000):  # ten minutes of a database that is down
        call_all(Listener(listener), [message(b"%d" % number, left=16)])
        clock.now += 0.1
    with_traceback = [record for record in caplog.records if record.exc_info]
    errors = [str(record.exc_info[1]) for record in with_traceback if record.exc_info]
    assert errors == ["no database for 0", "another place"]
    assert len(caplog.records) < 12
    assert sum(record.getMessage().count("more since the last line") for record in caplog.records) >= 5
    # The first message of another kind is not hidden by them.
    call_all(Listener(listener), [message(b"1", left=0)])
    assert caplog.records[-1].levelno == logging.ERROR and caplog.records[-1].exc_info


def test_at_debug_each_message_that_is_done_or_fails_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "django_rmq"):
        for number in range(5):
            call_all(Listener(raising(ValueError("bad"))), [message(b"%d" % number)])
        outcome_log.log_done(TOPIC, 3, [b"a", b"b"])
    assert [record.levelname for record in caplog.records] == ["WARNING", *["DEBUG"] * 6]
    assert [vars(record)["rmq_event"] for record in caplog.records] == ["failed"] * 5 + ["done"] * 2
    caplog.clear()
    outcome_log.log_done(TOPIC, 3, [b"a"])
    assert not caplog.records


def test_of_a_redacted_topic_no_error_is_quoted_and_no_frame_is_held(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "rules", redaction.RedactionRules(sealed_id, {"prices"}.__contains__))
    cause = KeyError("S3CRET cause")
    error = LookupError("S3CRET\nS3CRET")
    error.__cause__ = cause
    for raised in (error, Retry("S3CRET"), Reject("S3CRET"), Exception()):
        call_all(Listener(raising(raised)), [message(b'"S3CRET"')])
    call_all(Listener(lambda given: given.reject("S3CRET")), [message(b'"S3CRET"')])
    first, *_ = caplog.records
    assert "(LookupError)" in first.getMessage() and "raise error" in first.getMessage()
    for record in caplog.records:
        assert record.exc_info is None
        assert "S3CRET" not in record.getMessage() + repr(vars(record))
    assert len(caplog.records) == 5


def test_the_text_of_a_message_holds_nothing_of_it() -> None:
    shown = repr(message(b'{"sku":1}'))
    assert sealed_id("prices", 3, b'{"sku":1}') in shown
    assert "eyJza3UiOjF9" not in shown


def test_a_failure_is_settled_where_messages_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_secret(*_: object) -> str:
        raise ValueError("no secret key")

    monkeypatch.setattr(redaction, "rules", redaction.RedactionRules(no_secret))
    assert message(b"1").name == "3~"
    outcome(raising(ValueError()))


def test_describe_keeps_the_end_of_a_long_traceback() -> None:
    def fall(depth: int) -> None:
        if depth:
            fall(depth - 1)
        raise ValueError("bottom")

    with pytest.raises(ValueError, match="bottom") as raised:
        fall(200)
    text = describe(raised.value)
    assert text.startswith("ValueError: bottom\n")
    assert text.rstrip().endswith('raise ValueError("bottom")')
    # The first line that is kept is a whole one.
    assert text.splitlines()[1].startswith("  ")


def test_groups_hold_fresh_messages_together_and_each_retry_alone() -> None:
    fresh = numbered(5)
    retried = [message(b"r1", left=3), message(b"r2", left=0)]
    mixed = [fresh[0], retried[0], *fresh[1:], retried[1]]
    assert groups(mixed, 3) == [fresh[:3], fresh[3:], [retried[0]], [retried[1]]]
    assert groups([], 3) == []


def test_a_batch_listener_gets_lists_and_commits_them() -> None:
    sizes: list[int] = []
    assert call_all(Listener(lambda many: sizes.append(len(many)), 4), numbered(10)) == [None] * 10
    assert sizes == [4, 4, 2]


def test_messages_of_a_batch_may_have_fates_of_their_own() -> None:
    def listener(many: list[Message]) -> None:
        many[0].retry(delay=2, reason="later")
        many[1].reject("never")
        many[2].retry()
        many[3].retry(delay="0s")

    topic = replace(TOPIC, backoff=BackOff(function=lambda _: 7))
    assert call_all(Listener(listener, 10), numbered(5, topic)) == [
        Failure(b"0", "failed", 2000, "later"),
        Failure(b"1", "rejected", None, "never"),
        Failure(b"2", "failed", 7000, "retry"),
        Failure(b"3", "failed", 0, "retry"),
        None,
    ]


@pytest.mark.parametrize("how", ["raises", "returns False"])
def test_a_batch_that_fails_is_handed_out_one_by_one(how: str) -> None:
    calls: list[list[int]] = []

    def listener(many: list[Message]) -> bool:
        calls.append([m.body for m in many])
        many[0].reject("of a call that failed: it does not count")
        if 2 in calls[-1]:
            if how == "raises":
                raise LookupError("two")
            return False
        many[0].outcome = None
        return True

    found = call_all(Listener(listener, 10), numbered(4))

    assert calls == [[0, 1, 2, 3], [0], [1], [2], [3]]
    assert [failure and failure.kind for failure in found] == [None, None, "failed", None]


def test_undecodable_messages_are_left_out_of_a_batch() -> None:
    seen: list[int] = []
    listener = Listener(lambda many: seen.extend(m.body for m in many), 10)
    found = call_all(listener, [message(raw) for raw in (b"1", b"{", b"2", b"\xff")])
    assert seen == [1, 2]
    assert [failure and failure.kind for failure in found] == [None, "undecodable", None, "undecodable"]


def test_a_batch_of_undecodable_messages_calls_nobody() -> None:
    seen: list[Any] = []
    found = call_all(Listener(seen.append, 10), [message(b"{"), message(b"[")])
    assert [failure and failure.kind for failure in found] == ["undecodable"] * 2
    assert seen == []


def work_off(thread: ExecutorThread) -> None:
    """Let a thread run what it has been given."""
    thread.stop()
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def reports(
    messages: list[Message],
    listener: Listener,
    *,
    hooks: Hooks = NO_HOOKS,
    before: Callable[[Batch], None] = lambda _: None,
) -> list[BatchReport]:
    """What a thread reports of one batch."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    thread = ExecutorThread(0, inbox, hooks)
    batch = Batch(ConsumedSlot(TOPIC, 3, 0), listener, 7, messages, uptime())
    before(batch)
    thread.put(batch)
    work_off(thread)
    found: list[BatchReport] = []
    while not inbox.empty():
        found.append(inbox.get_nowait())
    return found


def told(slices: list[BatchReport]) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """All that was committed, failed and released; the last slice is marked as such."""
    assert [each.last for each in slices] == [False] * (len(slices) - 1) + [True]
    return (
        [member for each in slices for member in each.committed],
        [failure.member for each in slices for failure in each.failures],
        [member for each in slices for member in each.released],
    )


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt()])
@pytest.mark.parametrize("batch_size", [None, 10])
def test_a_listener_that_wants_to_exit_fails_its_message_and_the_batch_goes_on(
    error: BaseException, batch_size: int | None
) -> None:
    """A list is called again, message by message."""

    def listener(given: Any) -> None:
        if any(m.body == 2 for m in (given if batch_size else [given])):
            raise error

    assert told(reports(numbered(4), Listener(listener, batch_size))) == ([b"0", b"1", b"3"], [b"2"], [])


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize(
    ("mark", "value"),
    [("confirmed", uptime() - TOPIC.timeout / 2 - 0.1), ("halted", True)],
    ids=["old", "halted"],
)
def test_what_was_confirmed_long_ago_or_is_halted_does_not_begin(
    batch_size: int | None, mark: str, value: Any
) -> None:
    called: list[Any] = []
    listener = Listener(called.append, batch_size)
    found = reports(numbered(3), listener, before=lambda batch: setattr(batch, mark, value))
    assert told(found) == ([], [], [b"0", b"1", b"2"])
    assert called == []


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_batch_halted_on_the_way_ends_behind_its_running_message(batch_size: int | None) -> None:
    batches: list[Batch] = []

    def listener(_: Any) -> None:
        batches[0].halted = True
        assert batches[0].in_flight() == [b"0"]

    found = reports(numbered(3), Listener(listener, batch_size), before=batches.append)
    assert told(found) == ([b"0"], [], [b"1", b"2"])


@pytest.mark.parametrize("batch_size", [None, 3])
def test_members_that_are_no_longer_ours_are_left_out(batch_size: int | None) -> None:
    def stale(batch: Batch) -> None:
        batch.stale = {b"1"}

    slices = told(reports(numbered(3), Listener(lambda _: None, batch_size), before=stale))
    assert slices == ([b"0", b"2"], [], [])


def test_hooks_surround_a_batch_and_follow_each_failure() -> None:
    order: list[str] = []

    def listener(m: Message) -> None:
        order.append(f"listener {m.body}")
        if m.body == 0:
            raise ValueError

    before, after, end = (partial(order.append, name) for name in ("before", "after", "end"))
    hooks = Hooks(before=before, after=after, end=end)
    reports(numbered(2), Listener(listener), hooks=hooks)
    assert order == ["before", "listener 0", "after", "listener 1", "after", "end"]


def test_a_hook_that_fails_stops_no_listener(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ConnectionError("the database is away")

    found = reports(numbered(2), Listener(lambda _: None), hooks=Hooks(broken, broken, broken))
    assert told(found) == ([b"0", b"1"], [], [])
    assert caplog.text.count("A hook around the listeners failed") == 3


@pytest.mark.parametrize("drops", [False, True])
def test_a_list_that_failed_is_settled_also_when_the_rest_of_its_batch_is_wanted_back(
    monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    monkeypatch.setattr(batch_run, "PATIENCE_SECONDS", -1)
    topic = replace(TOPIC, type=TopicType.PRIORITY)
    batches: list[Batch] = []
    lists: list[list[Any]] = []

    def listener(many: list[Message]) -> None:
        lists.append([message.body for message in many])
        [batch] = batches
        batch.halted, batch.dropped = True, drops
        if any(message.body == 1 for message in many):
            raise ValueError

    found = reports(numbered(6, topic), Listener(listener, 3), before=batches.append)
    if drops:
        assert lists == [[0, 1, 2]]
        assert told(found) == ([], [], [b"0", b"1", b"2", b"3", b"4", b"5"])
    else:
        assert lists == [[0, 1, 2], [0], [1], [2]]
        assert told(found) == ([b"0", b"2"], [b"1"], [b"3", b"4", b"5"])


def order_of(*waiting: tuple[Topic, float]) -> list[Message]:
    """Return the first messages of waiting batches in the order in which a thread runs them."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    thread, order = ExecutorThread(0, inbox, NO_HOOKS), list[Message]()
    for topic, score in waiting:
        given = Message(topic, 0, 1, Delivery(b"1", score, 16))
        thread.put(Batch(ConsumedSlot(TOPIC, 0, 0), Listener(order.append), 1, [given], uptime()))
    work_off(thread)
    return order


def test_of_waiting_priority_batches_the_highest_head_runs_first() -> None:
    topic = replace(TOPIC, type=TopicType.PRIORITY)
    found = order_of((topic, 100.0), (topic, 300.0), (topic, 200.0))
    assert [each.score for each in found] == [300.0, 200.0, 100.0]


def test_topics_take_turns_so_that_a_timed_one_does_not_wait_behind_a_row_of_others() -> None:
    renders = replace(TOPIC, name="renders", type=TopicType.PRIORITY)
    orders = replace(TOPIC, name="orders", type=TopicType.FIXED_TIME)
    found = order_of(*((topic, 100.0) for topic in (renders, renders, renders, orders, orders)))
    assert [each.topic.name for each in found] == ["renders", "orders", "renders", "orders", "renders"]


class Recorded(PendingEnd):
    """The end of a call whose record is written when somebody waits for it."""

    def __init__(self, events: list[str], name: str, error: Exception | None = None) -> None:
        self.events, self.name, self.error = events, name, error

    def wait(self) -> None:
        self.events.append(f"{self.name} is recorded")
        if self.error is not None:
            raise self.error


def test_a_message_is_reported_after_its_end_was_recorded() -> None:
    events = list[str]()
    inbox: SimpleQueue[Any] = SimpleQueue()
    errors = {"1": ValueError("no record")}

    def listener(message: Message) -> Recorded:
        name = message.raw.decode()
        events.append(f"{name} is called")
        return Recorded(events, name, errors.get(name))

    hooks = Hooks(after=lambda: events.append("after"))
    thread = ExecutorThread(0, inbox, hooks)
    thread.put(Batch(ConsumedSlot(TOPIC, 0, 0), Listener(listener), 1, numbered(3), uptime()))
    work_off(thread)
    report = inbox.get_nowait()
    assert report.committed == [b"0", b"2"]
    (failure,) = report.failures
    assert (failure.member, failure.error.partition("\n")[0]) == (b"1", "ValueError: no record")
    assert events == [
        *(f"{number} is called" for number in range(3)),
        *("0 is recorded", "1 is recorded", "after", "2 is recorded", "after"),
    ]


def test_a_message_whose_end_is_not_recorded_is_not_done_for_the_parent() -> None:
    """The parent would commit it if the process died."""
    seen: list[bytes] = []
    notes = SharedNotes(1)
    marks = notes.thread(0)

    class Slow(PendingEnd):
        def wait(self) -> None:
            seen.append(bytes(marks.states[:2]))

    thread = ExecutorThread(0, SimpleQueue(), NO_HOOKS, marks)
    listener = Listener(lambda message: Slow())
    thread.put(Batch(ConsumedSlot(TOPIC, 0, 0), listener, 1, numbered(2), uptime()))
    work_off(thread)
    assert seen == [bytes([BEGUN, BEGUN]), bytes([DONE, BEGUN])]
    assert bytes(marks.states[:2]) == bytes([DONE, DONE])


def test_whoever_runs_a_listener_by_itself_waits_for_its_ends() -> None:
    events = list[str]()
    assert call_all(Listener(lambda message: Recorded(events, "it")), numbered(1)) == [None]
    failing = Listener(lambda message: Recorded(events, "it", ValueError("no record")))
    [failure] = call_all(failing, numbered(1))
    assert failure is not None
    assert failure.error.startswith("ValueError: no record")


def test_a_withdrawn_batch_does_not_run() -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    thread = ExecutorThread(0, inbox, NO_HOOKS)
    batch = Batch(ConsumedSlot(TOPIC, 0, 0), Listener(raising(ValueError())), 1, numbered(1), uptime())
    thread.put(batch)
    assert thread.withdraw(batch)
    assert not thread.withdraw(batch)
    work_off(thread)
    assert inbox.empty()
