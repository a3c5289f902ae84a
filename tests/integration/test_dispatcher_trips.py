"""A dispatcher with a round trip under way while the next one is sent: what becomes of slots that change meanwhile.

Its threads do not run here: the test makes the turns of its loop, and looks at what is in hand.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from django_rmq.core.clock import uptime
from django_rmq.core.commands import fetch as calls
from django_rmq.core.consumer import Dispatcher, WorkerOptions, capacity, fetch_planner, fetch_round_trips
from django_rmq.core.consumer import mailbox as mailbox_module
from django_rmq.core.consumer.batch import BatchReport
from django_rmq.core.consumer.fetch_round_trips import RoundTrip
from django_rmq.core.consumer.mailbox import Mailbox, MailboxItem, Stop, Wake
from django_rmq.core.consumer.slots import ConsumedSlot, FetchState, SlotState
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import ServerUnavailable
from tests.support.servers import RedisServer
from tests.support.workers import LONG, Broker, Listener, audit, client_of, send, total, turn_until_idle

TOPIC = Topic("prices", TopicType.RANGE_MERGE, slots=4, time_range_ms=0)
COUNT = 40


def made_for(broker: Broker, topic: Topic, **options: Any) -> Dispatcher:
    listener = Listener(topic.name, lambda message: None)
    return Dispatcher(broker, [topic], {topic.name: listener}, WorkerOptions(**options))


def owning(broker: Broker, topic: Topic, threads: int = 1) -> Dispatcher:
    """Return a dispatcher that owns all slots of a topic."""
    made = made_for(broker, topic, threads=threads)
    made.own((topic.name, slot) for slot in range(topic.slots))
    made._mailbox.process_items()
    return made


@pytest.fixture
def dispatcher(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """A dispatcher that owns all slots and asks one of them in each trip."""
    monkeypatch.setattr(fetch_planner, "TURN_MESSAGES", 1)
    send(broker, TOPIC, range(COUNT))
    return owning(broker, TOPIC)


def turn_until_under_way(dispatcher: Dispatcher) -> ConsumedSlot:
    """Make turns until an answer is outstanding; return the slot that is asked."""
    for _ in range(5):
        dispatcher._turn()
        if dispatcher._round_trips.under_way is not None:
            (slot,) = dispatcher._round_trips.under_way.plan.slots
            return slot
    raise AssertionError("no trip stays under way")


def next_trip(dispatcher: Dispatcher) -> RoundTrip:
    trip = dispatcher._round_trips.send()
    assert trip is not None
    return trip


def in_hand(dispatcher: Dispatcher) -> list[tuple[int, bytes]]:
    """Slot and member of all that waits for the threads."""
    return sorted(
        (batch.slot.number, message.delivery.member)
        for batch in dispatcher._in_flight.batches.values()
        for message in batch.messages
    )


def prepared(broker: Broker, slot: int) -> int:
    return broker.count(TOPIC, slot).prepare


def test_what_arrives_for_a_slot_that_was_lost_meanwhile_is_given_back(
    broker: Broker, dispatcher: Dispatcher
) -> None:
    slot = turn_until_under_way(dispatcher)
    dispatcher.disown([slot.key])
    dispatcher._mailbox.process_items()
    turn_until_idle(dispatcher)
    assert prepared(broker, slot.number) == 0
    assert slot.number not in {slot for slot, _ in in_hand(dispatcher)}
    assert total(broker, TOPIC, "released") == broker.count(TOPIC, slot.number).store > 0
    assert slot.key not in dispatcher._table.awake


def test_what_arrives_for_a_slot_that_was_paused_meanwhile_is_given_back(
    broker: Broker, dispatcher: Dispatcher
) -> None:
    slot = turn_until_under_way(dispatcher)
    broker.count(TOPIC, slot.number)  # behind the prepare
    broker.pause(TOPIC, slot.number, True)
    dispatcher._mailbox.handle(Wake(TOPIC.name, -1 - slot.number))
    turn_until_idle(dispatcher)
    assert prepared(broker, slot.number) == 0
    assert slot.number not in {slot for slot, _ in in_hand(dispatcher)}
    broker.pause(TOPIC, slot.number, False)
    dispatcher._mailbox.handle(Wake(TOPIC.name, slot.number))
    turn_until_idle(dispatcher)
    assert len(in_hand(dispatcher)) == COUNT


def test_a_slot_that_is_woken_meanwhile_is_asked_again(dispatcher: Dispatcher) -> None:
    slot = turn_until_under_way(dispatcher)
    dispatcher._mailbox.handle(Wake(TOPIC.name, slot.number))
    assert slot.again
    assert slot not in dispatcher._schedule.waiting
    dispatcher._turn()
    assert slot in dispatcher._schedule.waiting or slot.fetch is FetchState.UNDER_WAY
    turn_until_idle(dispatcher)
    assert len(in_hand(dispatcher)) == COUNT


def test_what_is_cancelled_before_a_lost_answer_is_made_up_for_ends_without_having_begun(
    broker: Broker, dispatcher: Dispatcher
) -> None:
    slot = turn_until_under_way(dispatcher)
    assert dispatcher._round_trips.under_way is not None
    pipeline: Any = dispatcher._round_trips.under_way.pipeline
    receive, cancelled = pipeline.receive, list[bytes]()

    def lose() -> list[Any]:
        receive()
        entries = broker.list_messages(TOPIC, slot.number, "prepare").entries
        cancelled.extend(entry.member for entry in entries)
        broker.cancel(TOPIC, slot.number, cancelled)
        raise ServerUnavailable("the answer is lost")

    pipeline.receive = lose
    with pytest.raises(ServerUnavailable):
        dispatcher._turn()
    assert (slot.state, slot.fetch) == (SlotState.UNCERTAIN, FetchState.IDLE)
    turn_until_idle(dispatcher)
    assert cancelled and not {(slot.number, member) for member in cancelled} & set(in_hand(dispatcher))
    assert broker.audit_ledger(TOPIC, slot.number)["cancelled"] == len(cancelled)
    assert len(in_hand(dispatcher)) == len(set(in_hand(dispatcher))) == COUNT - len(cancelled)


def test_a_commit_whose_answer_is_lost_is_told_again(broker: Broker, dispatcher: Dispatcher) -> None:
    turn_until_idle(dispatcher)
    for batch in list(dispatcher._in_flight.batches.values()):
        dispatcher._pool.threads[0].withdraw(batch)
        members = [message.delivery.member for message in batch.messages]
        dispatcher._router.finished(BatchReport(batch, members, [], [], 0.001, True))
    dispatcher._acks.due = 0.0
    trip = next_trip(dispatcher)
    assert not dispatcher._acks.pending
    replies = trip.pipeline.receive()
    assert all(words == ["ok"] * len(words) for words in replies[: len(trip.parts)])
    lost: Any = trip.pipeline
    lost.receive = lambda: (_ for _ in ()).throw(ServerUnavailable("the answer is lost"))
    with pytest.raises(ServerUnavailable):
        dispatcher._round_trips.receive(trip)
    assert all(settlement.repeated for settlement in dispatcher._acks.pending.values())
    turn_until_idle(dispatcher)
    assert dispatcher.processed == total(broker, TOPIC, "committed") == COUNT
    assert all(ledger.balanced for ledger in audit(broker, TOPIC))


LINES = Topic("lines", TopicType.FIFO, slots=2, identity="key")


def test_a_strict_slot_is_not_asked_before_its_commit_is_known(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two trips have connections of their own, and Redis may run the later one first."""
    monkeypatch.setattr(fetch_planner, "TURN_MESSAGES", 1)
    names = [[b"%d.%d" % (slot, n) for n in range(600)] for slot in range(2)]
    for slot in range(2):
        broker.send_fifo(LINES, slot, 0, names[slot], names[slot])
    dispatcher = owning(broker, LINES)
    turn_until_idle(dispatcher)
    first, second = (batch for batch in dispatcher._in_flight.batches.values())
    for batch in (first, second):
        members = [message.delivery.member for message in batch.messages]
        dispatcher._router.finished(BatchReport(batch, members, [], [], 0.1, True))
    # Both are settled by one trip, which asks only one of them again; the other one has to wait for its answer.
    sent = next_trip(dispatcher)
    (asked,) = sent.plan.slots
    dispatcher._round_trips.under_way = sent
    assert len(sent.sent_acks) == 2
    assert dispatcher._round_trips.send() is None
    dispatcher._round_trips.receive_rest()
    later = next_trip(dispatcher)
    assert later.plan.slots.keys() == {first.slot, second.slot} - {asked}
    dispatcher._round_trips.receive(later)
    held = {batch.slot for batch in dispatcher._in_flight.batches.values()}
    assert held == {first.slot, second.slot}
    assert all(ledger.balanced for ledger in audit(broker, LINES))


@pytest.mark.parametrize(
    ("messages", "pace", "first", "next_ones"),
    [(6_000, 1e-5, 13, 2), (160, 1e-5, 13, 9), (6_000, 0.005, 5, 2)],
    ids=["full", "nearly empty", "full, and asked for little at first"],
)
def test_slots_not_asked_yet_are_taken_for_as_full_as_the_others(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, messages: int, pace: float, first: int, next_ones: int
) -> None:
    """So that one trip does not bring many times what it should, while the threads have nothing to do."""
    monkeypatch.setattr(fetch_planner, "TURN_MESSAGES", 200)
    topic = Topic("many", TopicType.RANGE_MERGE, slots=32, time_range_ms=0, prefetch=100)
    send(broker, topic, range(messages))
    dispatcher = owning(broker, topic)
    dispatcher._capacity.seconds_per_message[topic.name] = pace
    while dispatcher._acquire():
        pass
    # On a slow machine an estimate of the clock of Redis is so far behind that what is due now seems to be due later.
    monkeypatch.setattr(dispatcher._schedule.clock, "ms", lambda: broker.now_ms() + 1)
    begun = next_trip(dispatcher)
    assert len(begun.plan.slots) == first
    dispatcher._round_trips.receive(begun)
    # The thread has been quick.
    dispatcher._capacity.seconds_per_message[topic.name] = 1e-5
    dispatcher._in_flight.load[0] = 0.0
    later = next_trip(dispatcher)
    assert len(later.plan.slots) == next_ones
    dispatcher._round_trips.receive(later)


def test_a_slot_that_all_threads_share_is_asked_for_work_for_all_of_them(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the work of one thread each would get so little that threads are busy with each other."""
    topic = Topic("shared", TopicType.RANGE_MERGE, slots=2, time_range_ms=0, serial=False)
    send(broker, topic, range(1_000))
    dispatcher = owning(broker, topic, threads=4)
    dispatcher._capacity.seconds_per_message[topic.name] = pace = 0.001
    while dispatcher._acquire():
        pass
    monkeypatch.setattr(dispatcher._schedule.clock, "ms", lambda: broker.now_ms() + 1)
    dispatcher._schedule.collect_due()
    trip = next_trip(dispatcher)
    dispatcher._round_trips.receive(trip)
    sizes = [len(batch.messages) for batch in dispatcher._in_flight.batches.values()]
    assert sizes == 8 * [round(capacity.WORK_SECONDS / pace)]
    # It is unknown how much a slot returns, so half of it counts.
    assert trip.plan.load == pytest.approx(4 * [capacity.WORK_SECONDS])


def test_a_dispatcher_that_stops_waits_for_what_is_under_way_and_gives_it_back(
    broker: Broker, dispatcher: Dispatcher
) -> None:
    turn_until_under_way(dispatcher)
    dispatcher._shut_down()
    assert not dispatcher.forced
    assert dispatcher._round_trips.under_way is None
    assert sum(prepared(broker, slot) for slot in range(TOPIC.slots)) == 0
    assert sum(broker.count(TOPIC, slot).store for slot in range(TOPIC.slots)) == COUNT


LONE = Topic("lone", TopicType.FIFO, slots=1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slot of each prepare."""
    slots: list[int] = []
    prepare = calls.prepare

    def noted(topic: Topic, slot: int, *rest: Any, **options: Any) -> Any:
        slots.append(slot)
        return prepare(topic, slot, *rest, **options)

    monkeypatch.setattr(calls, "prepare", noted)
    return slots


def with_one_message_in_hand(broker: Broker, *, burst: bool = False) -> Dispatcher:
    send(broker, LONE, [1])
    made = made_for(broker, LONE, threads=1, burst=burst, poll_seconds=3600)
    # However long this process stands still, what its threads do not begin stays in hand.
    made._router._next_refresh = float("inf")
    made.own([(LONE.name, 0)])
    made._mailbox.process_items()
    turn_until_idle(made)
    return made


def wake(dispatcher: Dispatcher) -> None:
    dispatcher._mailbox.put(Wake(LONE.name, 0))
    dispatcher._mailbox.process_items()
    turn_until_idle(dispatcher)


def report_the_batch(dispatcher: Dispatcher, *, is_released: bool = False) -> None:
    (batch,) = dispatcher._in_flight.batches.values()
    members = [message.delivery.member for message in batch.messages]
    committed, released = ([], members) if is_released else (members, [])
    dispatcher._router.finished(BatchReport(batch, committed, [], released, 0.001, True))


def end_the_batch(dispatcher: Dispatcher, *, is_released: bool = False) -> None:
    report_the_batch(dispatcher, is_released=is_released)
    turn_until_idle(dispatcher)


def test_a_commit_goes_with_the_next_fetch_if_there_is_one_soon(
    broker: Broker, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "PUSHED_COMMIT_DELAY_SECONDS", 3600.0)
    dispatcher = with_one_message_in_hand(broker)
    report_the_batch(dispatcher)
    assert not dispatcher._turn()
    assert total(broker, LONE, "committed") == 0
    send(broker, LONE, [2])
    dispatcher._mailbox.handle(Wake(LONE.name, 0))
    trip = next_trip(dispatcher)
    assert len(trip.parts) == len(trip.plan.slots) == 1, "one trip commits and fetches"
    dispatcher._round_trips.receive(trip)
    assert asked == [0, 0]
    assert total(broker, LONE, "committed") == len(in_hand(dispatcher)) == 1


def test_a_commit_that_no_fetch_takes_along_is_sent_soon(broker: Broker) -> None:
    dispatcher = with_one_message_in_hand(broker)
    report_the_batch(dispatcher)
    assert dispatcher._sleep_seconds() <= capacity.PUSHED_COMMIT_DELAY_SECONDS
    time.sleep(capacity.PUSHED_COMMIT_DELAY_SECONDS)
    assert dispatcher._turn()
    assert total(broker, LONE, "committed") == 1


@pytest.mark.parametrize("ends", ["its time", "a slot that waits"])
def test_the_answer_to_commits_on_which_nothing_depends_rests(broker: Broker, ends: str) -> None:
    dispatcher = with_one_message_in_hand(broker)
    (batch,) = dispatcher._in_flight.batches.values()
    trips = dispatcher._round_trips
    dispatcher._capacity.is_subscribed = True
    report_the_batch(dispatcher)
    dispatcher._acks.hurry()
    assert dispatcher._turn()
    assert trips.under_way is not None
    assert not dispatcher._has_more(), "the worker sleeps"
    assert trips.answer_due <= time.monotonic() + fetch_round_trips.ANSWER_SECONDS
    assert not dispatcher._turn(), "a message that is pushed meanwhile begins before the answer is read"
    assert trips.under_way is not None
    if ends == "its time":
        trips.answer_due = time.monotonic()
    else:
        dispatcher._schedule.make_ready(batch.slot)  # its prepare must not overtake the commit
    assert dispatcher._turn()
    assert (dispatcher.processed, trips.answer_due) == (1, float("inf"))
    assert not trips.is_awaited


@pytest.mark.parametrize(("rate", "in_flight"), [(0, 1), (0.01, 0)])
def test_behind_a_commit_that_rests_no_slot_is_asked_beyond_the_limits(
    broker: Broker, rate: float, in_flight: int
) -> None:
    limited = replace(TOPIC, slots=2, max_rate=rate or None, max_in_flight=in_flight or None)
    send(broker, LONE, [1])
    listeners = {name: Listener(name, lambda message: None) for name in (LONE.name, limited.name)}
    dispatcher = Dispatcher(broker, [LONE, limited], listeners, WorkerOptions(threads=1, poll_seconds=3600))
    dispatcher._router._next_refresh = float("inf")
    dispatcher.own([(LONE.name, 0), (limited.name, 0), (limited.name, 1)])
    dispatcher._mailbox.process_items()
    turn_until_idle(dispatcher)
    dispatcher._capacity.is_subscribed = True
    report_the_batch(dispatcher)
    dispatcher._acks.hurry()
    for slot in range(limited.slots):
        broker.send_merge(limited, slot, 0, [b"%d" % slot])
        dispatcher._mailbox.handle(Wake(limited.name, slot))
    assert dispatcher._turn()
    assert dispatcher._round_trips.answer_due < float("inf"), "the commit rests"
    assert len(dispatcher._schedule.parked[limited.name]) == 1, "the limits let one of two slots be asked"
    for _ in range(4):
        dispatcher._turn()
    assert len(in_hand(dispatcher)) == total(broker, limited, "prepared") == 1


@pytest.mark.parametrize("ends", ["a release", "no pushes"])
def test_the_answer_to_other_ends_is_awaited(broker: Broker, ends: str) -> None:
    dispatcher = with_one_message_in_hand(broker)
    dispatcher._capacity.is_subscribed = ends == "a release"
    report_the_batch(dispatcher, is_released=ends == "a release")
    dispatcher._acks.hurry()
    assert dispatcher._turn()
    assert not dispatcher._acks.unconfirmed()


def report_of(dispatcher: Dispatcher, *, fails: bool = False) -> BatchReport:
    (batch,) = dispatcher._in_flight.batches.values()
    members = [message.delivery.member for message in batch.messages]
    failures = [Failure(member) for member in members] if fails else []
    return BatchReport(batch, [] if fails else members, failures, [], 0.001, True)


@pytest.mark.parametrize("fails", [False, True])
def test_only_the_report_of_a_failure_wakes_a_worker_that_has_nothing_else_to_do(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    dispatcher = with_one_message_in_hand(broker)
    monkeypatch.setattr(capacity, "PUSHED_COMMIT_DELAY_SECONDS", 2.0 if fails else 0.3)
    monkeypatch.setattr(dispatcher, "_sleep_seconds", lambda: 3600.0)
    begun = time.monotonic()
    report = threading.Timer(0.05, dispatcher._mailbox.put, [report_of(dispatcher, fails=fails)])
    report.start()
    dispatcher._sleep()
    report.join()
    assert (time.monotonic() - begun < 0.3) is fails
    assert dispatcher._turn(), "the acknowledgement waits no longer"
    assert total(broker, LONE, "failed" if fails else "committed") == 1


def test_a_worker_waits_for_the_end_of_a_message_that_came_alone_without_another_turn(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = with_one_message_in_hand(broker)
    deferrals, waits = [0.0, 0.001], list[tuple[float, bool]]()
    monkeypatch.setattr(dispatcher, "_sleep_seconds", lambda: 60.0)
    monkeypatch.setattr(dispatcher._router, "deferral", lambda: deferrals.pop(0))

    def read(timeout: float, *, defers_reports: bool = False) -> None:
        waits.append((timeout, defers_reports))

    monkeypatch.setattr(dispatcher._mailbox, "read", read)
    dispatcher._sleep()
    assert waits == [(60.0, False), (0.001, True)]


def test_a_deferred_report_is_read_with_the_next_message(broker: Broker, asked: list[int]) -> None:
    dispatcher = with_one_message_in_hand(broker)
    mailbox = dispatcher._mailbox
    mailbox.put(report_of(dispatcher))
    send(broker, LONE, [2])
    mailbox.put(Wake(LONE.name, 0))
    mailbox.read(60.0, defers_reports=True)
    assert dispatcher._turn()
    assert asked == [0, 0]
    assert total(broker, LONE, "committed") == len(in_hand(dispatcher)) == 1


def test_reports_are_deferred_only_while_nothing_but_a_commit_depends_on_them(broker: Broker) -> None:
    dispatcher = with_one_message_in_hand(broker)
    (batch,) = dispatcher._in_flight.batches.values()
    can_wait = dispatcher._router.deferral
    batch.queued = uptime() + 3600
    assert can_wait()
    batch.slot.sleeping_until = None
    assert not can_wait(), "the slot may have more"
    batch.slot.sleeping_until, batch.queued = 0, uptime() - 1.0
    assert not can_wait(), "the call takes long"
    batch.queued, dispatcher._schedule.asks_always = uptime() + 3600, True
    assert not can_wait(), "a burst ends with its last report"
    dispatcher._schedule.asks_always = False
    dispatcher._shutdown.begun = True
    assert not can_wait(), "the end of the worker waits for its reports"


@pytest.mark.parametrize("item", [Wake(LONE.name, 0), Stop()])
def test_whatever_comes_ends_the_sleep_of_a_worker(broker: Broker, item: MailboxItem) -> None:
    mailbox = with_one_message_in_hand(broker)._mailbox

    class Late(SimpleQueue[MailboxItem]):
        """The item comes when the dispatcher has looked, and is about to wait."""

        def empty(self) -> bool:
            if found := super().empty():
                mailbox.put(item)
            return found

    mailbox._items = Late()
    begun = time.monotonic()
    mailbox.read(LONG, defers_reports=True)
    assert time.monotonic() - begun < LONG / 2
    assert mailbox._items.qsize() == 0


@pytest.mark.parametrize("selectable", [1024, 0])
def test_a_wait_of_less_than_a_millisecond_ends_with_what_comes(
    monkeypatch: pytest.MonkeyPatch, selectable: int
) -> None:
    monkeypatch.setattr(mailbox_module, "SELECTABLE", selectable)
    mailbox, heard = Mailbox(), list[Stop]()
    mailbox.on(Stop, heard.append)
    mailbox._is_asleep = True
    mailbox.put(Stop())
    begun = time.monotonic()
    mailbox._wait_briefly(0.3)
    assert (time.monotonic() - begun < 0.3) is bool(selectable)
    mailbox.process_items()
    assert heard == [Stop()]


def test_a_report_that_comes_when_the_worker_wakes_up_is_read_before_the_next_sleep(broker: Broker) -> None:
    dispatcher = with_one_message_in_hand(broker)
    mailbox, begun = dispatcher._mailbox, time.monotonic()
    mailbox._is_asleep = mailbox._defers_reports = True
    mailbox.put(report_of(dispatcher))
    mailbox.read(60.0)
    assert time.monotonic() - begun < 30
    assert not dispatcher._in_flight.batches


@pytest.mark.parametrize("ends", ["failures", "released"])
def test_a_failure_and_what_is_given_back_wait_for_no_fetch(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(capacity, "PUSHED_COMMIT_DELAY_SECONDS", 3600.0)
    dispatcher = with_one_message_in_hand(broker)
    (batch,) = dispatcher._in_flight.batches.values()
    (member,) = (message.delivery.member for message in batch.messages)
    failures, released = ([Failure(member)], []) if ends == "failures" else ([], [member])
    # The batch goes on, so its slot is not asked either.
    dispatcher._router.finished(BatchReport(batch, [], failures, released, 0.001, False))
    assert not dispatcher._schedule.waiting
    assert dispatcher._turn()
    assert total(broker, LONE, "failed" if failures else "released") == 1


def test_a_slot_is_not_asked_again_when_its_last_message_has_succeeded(
    broker: Broker, asked: list[int]
) -> None:
    dispatcher = with_one_message_in_hand(broker)
    end_the_batch(dispatcher)
    assert asked == [0]
    assert broker.count(LONE, 0).prepare == 0
    assert not dispatcher._table.awake, "nothing of the slot is kept but its epoch"
    send(broker, LONE, [2])
    wake(dispatcher)
    assert (asked, len(in_hand(dispatcher))) == ([0, 0], 1)


def test_what_comes_while_the_last_message_runs_is_taken_when_that_ends(
    broker: Broker, asked: list[int]
) -> None:
    dispatcher = with_one_message_in_hand(broker)
    send(broker, LONE, [2])
    wake(dispatcher)
    send(broker, LONE, [3])
    assert asked == [0]
    end_the_batch(dispatcher)
    assert (asked, len(in_hand(dispatcher))) == ([0, 0], 2)


def test_a_slot_is_asked_again_when_its_last_message_is_given_back(broker: Broker, asked: list[int]) -> None:
    dispatcher = with_one_message_in_hand(broker)
    end_the_batch(dispatcher, is_released=True)
    assert (asked, len(in_hand(dispatcher))) == ([0, 0], 1)


def test_a_burst_asks_again_after_each_batch(broker: Broker, asked: list[int]) -> None:
    dispatcher = with_one_message_in_hand(broker, burst=True)
    send(broker, LONE, [2])
    end_the_batch(dispatcher)
    assert (asked, len(in_hand(dispatcher))) == ([0, 0], 1)


def test_a_slot_is_asked_again_when_a_fail_over_has_lost_what_it_delivered(
    broker: Broker, prefix: str, asked: list[int]
) -> None:
    client: Any = broker.client
    send(broker, LONE, [1])
    before = {key: client.dump(key) for key in client.scan_iter(f"*{prefix}*")}
    dispatcher = with_one_message_in_hand(broker)
    client.delete(*client.scan_iter(f"*{prefix}*"))
    for key, value in before.items():
        client.restore(key, 0, value)
    end_the_batch(dispatcher)
    assert (asked, len(in_hand(dispatcher))) == ([0, 0], 1)


@pytest.mark.parametrize("runs", [True, False], ids=["while the last one runs", "behind it"])
def test_what_no_wake_up_has_announced_is_found_by_the_slow_poll(
    broker: Broker, asked: list[int], runs: bool
) -> None:
    dispatcher = with_one_message_in_hand(broker)
    if not runs:
        end_the_batch(dispatcher)
    send(broker, LONE, [2])
    turn_until_idle(dispatcher)
    assert asked == [0], "its wake-up is lost"
    dispatcher._due_poll.due = 0.0
    turn_until_idle(dispatcher)
    if runs:
        end_the_batch(dispatcher)  # a strict slot is asked when it ends
    assert (asked, len(in_hand(dispatcher))) == ([0, 0], 1)


def commands(client: Any) -> int:
    """How many commands Redis has executed, those of scripts included."""
    return sum(each["calls"] for name, each in client.info("commandstats").items() if name != "cmdstat_info")


def test_a_message_that_comes_alone_takes_few_commands_from_its_send_to_its_end() -> None:
    with RedisServer() as server, client_of(server.url) as client:
        broker = Broker(client, "")
        dispatcher = with_one_message_in_hand(broker)
        end_the_batch(dispatcher)
        before = commands(client)
        send(broker, LONE, [2])
        wake(dispatcher)
        end_the_batch(dispatcher)
        assert commands(client) - before <= 36
        assert total(broker, LONE, "committed") == 2
