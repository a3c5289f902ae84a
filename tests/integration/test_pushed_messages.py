"""A worker whose messages are pushed by their sends: it begins each once, in its order, and loses none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from django_rmq.core.clock import uptime
from django_rmq.core.consumer import fetch_round_trips
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Pushed
from django_rmq.core.model.topic import Topic, TopicType
from tests.support.servers import TcpProxy
from tests.support.workers import LONG, Heard, HeldListener, Worker, audit, client_of, eventually, send, total

FIFO = Topic("mails", TopicType.FIFO, slots=1, timeout=300)
MERGE = Topic("prices", TopicType.RANGE_MERGE, slots=1, time_range_ms=0)


class Pushes:
    """What is pushed to a worker. ``lose``: it does not learn of it, as when its connection breaks."""

    def __init__(self, worker: Worker) -> None:
        self.items: list[Pushed] = []
        self.lose = False
        self.delay = 0.0
        mailbox = worker.dispatcher._mailbox
        self.process: Callable[[Pushed], None] = mailbox._handlers[Pushed]
        mailbox.on(Pushed, self._note)

    def have_come(self, count: int) -> bool:
        return len(self.items) >= count

    def _note(self, item: Pushed) -> None:
        # A test may end the loss as soon as it sees the item.
        is_lost = self.lose
        self.items.append(item)
        time.sleep(self.delay)
        if not is_lost:
            self.process(item)


@pytest.fixture
def warm(broker: Any) -> Iterator[Callable[..., tuple[Worker, Pushes]]]:
    """Start a worker that has just ended a delivery of its only slot, and sleeps."""
    running: list[Worker] = []

    def start(
        listener: Callable[[Message], Any], topic: Topic = FIFO, **options: Any
    ) -> tuple[Worker, Pushes]:
        worker = Worker(broker, topic, listener, **{"poll_seconds": 30, **options})
        pushes = Pushes(worker)
        running.append(worker.__enter__())
        worker.asleep()
        send(broker, topic, ["first"])
        eventually(lambda: total(broker, topic, "committed") == 1, "the first message being done")
        worker.asleep()
        return worker, pushes

    yield start
    for worker in running:
        worker.__exit__(None)


Warm = Callable[..., tuple[Worker, Pushes]]


def test_messages_that_come_alone_are_pushed_and_keep_their_order(
    broker: Any, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a push may wait so long in the socket that the worker gives it back.
    monkeypatch.setattr(fetch_round_trips, "STALE_SECONDS", 60.0)
    heard = Heard()
    worker, pushes = warm(heard)
    for number in range(200):
        send(broker, FIFO, [number])
        if number % 3:
            heard.wait(number + 2)
            worker.asleep()
    assert heard.wait(201)[1:] == list(range(200))
    eventually(lambda: total(broker, FIFO, "committed") == 201, "all being done")
    assert len(pushes.items) > 50
    assert (total(broker, FIFO, "stale"), total(broker, FIFO, "released")) == (0, 0)


def test_what_was_pushed_twice_begins_once(broker: Any, warm: Warm) -> None:
    heard = Heard()
    worker, pushes = warm(heard)
    send(broker, FIFO, ["once"])
    heard.wait(2)
    worker.asleep()
    # A new subscription begins before the former one ends.
    worker.dispatcher._mailbox.put(pushes.items[-1])
    send(broker, FIFO, ["next"])
    heard.wait(3)
    worker.asleep()
    assert heard.bodies == ["first", "once", "next"]


@pytest.mark.parametrize("behind", [[], ["behind"]], ids=["alone", "another-waits-for-it"])
def test_a_push_that_is_lost_with_its_connection_is_found_by_the_next_subscription(
    broker: Any, warm: Warm, behind: list[str]
) -> None:
    heard = Heard()
    worker, pushes = warm(heard)
    pushes.lose = True
    send(broker, FIFO, ["lost"])
    eventually(lambda: pushes.items, "the push")
    for body in behind:
        send(broker, FIFO, [body])
    worker.asleep()
    pushes.lose = False
    broker.client.client_kill_filter(_type="pubsub")
    bodies = ["first", "lost", *behind]
    heard.wait(len(bodies), 20)
    eventually(lambda: total(broker, FIFO, "committed") == len(bodies), "their commit")
    assert heard.bodies == bodies


def test_a_push_is_found_though_its_connection_is_dead_without_an_error(
    broker: Any, proxy: TcpProxy, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_rmq.core.consumer.mailbox.CHECK_SECONDS", 0.5)
    through_proxy = client_of(proxy.url)
    monkeypatch.setattr(broker, "_subscription_client", lambda: through_proxy)
    heard = Heard()
    worker, _ = warm(heard)
    proxy.swallow()
    send(broker, FIFO, ["lost"])
    assert total(broker, FIFO, "prepared") == 2, "it was pushed"
    eventually(lambda: not worker.dispatcher._capacity.is_subscribed, "the worker giving up its subscription")
    proxy.let_through()
    assert heard.wait(2, 20) == ["first", "lost"]


def test_a_subscription_that_nothing_is_published_to_stays(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_rmq.core.consumer.mailbox.CHECK_SECONDS", 0.0)
    checks: list[object] = []
    worker, _ = warm(Heard())
    wakeups = worker.dispatcher._mailbox._wakeups
    assert wakeups is not None
    check = wakeups[1].check
    monkeypatch.setattr(wakeups[1], "check", lambda: checks.append(check()))
    eventually(lambda: len(checks) >= 3, "three checks")
    assert worker.dispatcher._mailbox._wakeups is wakeups
    assert worker.dispatcher._capacity.is_subscribed


@pytest.mark.parametrize(
    "topic", [replace(FIFO, order="loose"), replace(MERGE, timeout=300)], ids=["fifo", "merge"]
)
def test_nothing_overtakes_a_push_that_was_not_read_yet(broker: Any, warm: Warm, topic: Topic) -> None:
    heard = Heard()
    _, pushes = warm(heard, topic)
    pushes.lose = True
    send(broker, topic, ["a"])
    eventually(lambda: pushes.items, "the push")
    send(broker, topic, ["b"])
    heard.wait(3, 20)
    assert heard.bodies == ["first", "a", "b"]


def test_nothing_is_pushed_to_programs_that_subscribe_to_all_channels(broker: Any, warm: Warm) -> None:
    worker, _ = warm(Heard())
    others = broker.client.pubsub()
    others.psubscribe("*")
    others.parse_response()
    worker.dispatcher.stop()
    worker.join()
    send(broker, FIFO, ["later"])
    others.close()
    assert audit(broker, FIFO)[0].store == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_nothing_is_pushed_to_a_worker_that_was_killed_and_has_left_a_process_behind(broker: Any) -> None:
    inbox = broker.inbox("A")
    wakeups = broker.wakeups([FIFO], inbox)
    epoch = broker.acquire(FIFO, 0)
    send(broker, FIFO, ["first"])
    prepared = broker.prepare(FIFO, 0, "A", epoch, 1, inbox=inbox)
    broker.commit(FIFO, 0, prepared.receipt, [delivery.member for delivery in prepared.deliveries])
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writable)
        os.read(readable, 1)
        os._exit(0)
    try:
        # The system closes the descriptors of a process that is killed, and nothing else tells the server.
        wakeups._socket.close()
        eventually(lambda: broker.client.pubsub_numsub(inbox)[0][1] == 0, "no subscriber", LONG / 6)
        send(broker, FIFO, ["second"])
        [ledger] = audit(broker, FIFO)
        assert (ledger.store, ledger.prepare) == (1, 0)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it lives on"
    finally:
        os.close(readable)
        os.close(writable)
        os.waitpid(child, 0)
        wakeups.close()


def test_what_another_program_publishes_to_the_inbox_ends_nothing(broker: Any, warm: Warm) -> None:
    heard = Heard()
    worker, _ = warm(heard)
    inbox = broker.inbox(worker.dispatcher.owner)
    for nonsense in (
        b"",
        b"x",
        b"1 2 3 4",
        b"1 2 3 others_0\na",
        b"1 1 1 %bmails_9\na" % broker.prefix.encode(),
    ):
        broker.client.publish(inbox, nonsense)
    send(broker, FIFO, ["next"])
    heard.wait(2)
    worker.asleep()
    assert heard.bodies == ["first", "next"]


def test_the_time_out_of_a_push_counts_from_its_send(broker: Any, warm: Warm) -> None:
    held = HeldListener()
    held.go.set()
    worker, pushes = warm(held)
    pushes.delay = 0.3
    held.go.clear()
    send(broker, FIFO, ["slow"])
    sent = uptime()
    batches: list[Batch] = []

    def begun() -> bool:
        batches[:] = worker.dispatcher.batches()
        return bool(batches)

    eventually(begun, "its beginning")
    held.go.set()
    assert batches[0].confirmed <= sent


def test_a_push_that_was_not_read_for_long_is_given_back(broker: Any, warm: Warm) -> None:
    heard = Heard()
    _, pushes = warm(heard)
    pushes.delay = 1.2
    send(broker, FIFO, ["late"])
    eventually(lambda: pushes.items, "the push")
    pushes.delay = 0.0
    heard.wait(2)
    assert total(broker, FIFO, "released") == 1


def test_what_is_pushed_to_a_worker_that_has_lost_the_slot_is_given_back(broker: Any, warm: Warm) -> None:
    heard = Heard()
    worker, pushes = warm(heard)
    worker.dispatcher.disown([(FIFO.name, 0)])
    eventually(lambda: not worker.dispatcher._table, "the slot being forgotten")
    send(broker, FIFO, ["later"])
    eventually(lambda: audit(broker, FIFO)[0].store == 1, "the message waiting")
    assert pushes.items
    assert heard.bodies == ["first"]
    worker.dispatcher.own([(FIFO.name, 0)])
    heard.wait(2)


def test_limits_that_begin_meanwhile_hold_for_what_is_pushed(broker: Any, warm: Warm) -> None:
    heard = Heard()
    worker, pushes = warm(heard)
    worker.dispatcher.change_limits([replace(FIFO, max_rate=1_000.0)])
    eventually(lambda: FIFO.name in worker.dispatcher._capacity.limits.shares, "the limits")
    for number in range(3):
        send(broker, FIFO, [number])
        heard.wait(number + 2)
        worker.asleep()
    # The first push was given back, and the prepare that took the message withdrew the offer.
    assert len(pushes.items) == 1
    assert total(broker, FIFO, "released") == 1


def test_a_worker_that_stops_leaves_nothing_in_flight_that_was_pushed_to_it(broker: Any) -> None:
    topic = replace(MERGE, slots=8)
    stopped = threading.Event()

    def keep_sending() -> None:
        number = 0
        while not stopped.is_set():
            send(broker, topic, [number])
            number += 1
            time.sleep(0.002)

    sender = threading.Thread(target=keep_sending)
    sender.start()
    try:
        for _ in range(5):
            heard = Heard()
            with Worker(broker, topic, heard, poll_seconds=30) as worker:
                pushes = Pushes(worker)
                eventually(partial(pushes.have_come, 20), "pushes")
            assert sum(ledger.prepare for ledger in audit(broker, topic)) == 0
    finally:
        stopped.set()
        sender.join()
    assert total(broker, topic, "stale") == total(broker, topic, "expired") == 0


@pytest.mark.parametrize(
    "changes",
    [{"flow": 1}, {"slot_rate": 1_000.0}, {"max_in_flight": 10}, {"serial": False}],
    ids=["flow", "slot-rate", "max-in-flight", "not-serial"],
)
def test_where_a_worker_has_to_decide_before_a_message_begins_nothing_is_pushed(
    broker: Any, changes: dict[str, Any]
) -> None:
    topic = replace(MERGE, **changes)
    heard = Heard()
    with Worker(broker, topic, heard, poll_seconds=30) as worker:
        pushes = Pushes(worker)
        for number in range(5):
            send(broker, topic, [number])
            heard.wait(number + 1)
            worker.asleep()
    assert pushes.items == []
