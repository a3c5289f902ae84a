"""MAX_RATE and MAX_IN_FLIGHT over several workers: never more in all, everybody in turn, and no busy waiting."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from django_rmq.core import lua
from django_rmq.core.commands import limits
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.keys import limits_key, slot_keys
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.rate_limits import RateLimits, return_permits
from django_rmq.exceptions import NodeUnavailable, ServerUnavailable, WrongType
from django_rmq.testing import Clock
from tests.support.brokers import Broker, OracleBroker, intercept
from tests.support.workers import LONG, Heard, Worker, client_of, eventually, live, send, total, work_off

_IN_USE = [each.name for each in lua.declaration("limits/allow").arguments].index("in_use")
TOPIC = Topic("prices", TopicType.RANGE_MERGE, slots=8, time_range_ms=0, timeout=60)


def ask(broker: Any, topic: Topic, worker: str, **options: int) -> Any:
    return broker.allow(topic, worker, **{"tokens": 0, "in_use": 0, "wanted": 0, "lease_ms": 3000, **options})


@given(
    st.floats(0.5, 5000),
    st.lists(
        st.tuples(st.sampled_from("ABC"), st.integers(1, 400), st.integers(0, 300)), min_size=5, max_size=60
    ),
)
@example(2499.999, [("A", 400, 0)])
def test_in_no_window_more_is_given_than_the_rate_and_a_tenth_of_a_second(
    rate: float, asks: list[Any]
) -> None:
    clock = Clock()
    broker, topic = OracleBroker("m:", clock), replace(TOPIC, max_rate=rate)
    given_at: list[tuple[float, int]] = []
    for worker, tokens, ms in asks:
        clock.advance(ms / 1000)
        allowed = ask(broker, topic, worker, tokens=tokens)
        assert 0 <= allowed.tokens <= tokens
        assert (allowed.wait_us > 0) == (allowed.tokens < tokens)
        given_at.append((clock() / 1e6, allowed.tokens))
    for i, (begin, _) in enumerate(given_at):
        for j in range(i, len(given_at)):
            seconds = given_at[j][0] - begin
            most = rate * seconds + max(1.0, rate / 10)
            assert sum(number for _, number in given_at[i : j + 1]) <= most + 0.01


@pytest.mark.parametrize("rate", [0.2, 3, 50, 20_000])
def test_who_waits_as_told_gets_the_whole_rate(rate: float) -> None:
    clock = Clock()
    broker, topic = OracleBroker("m:", clock), replace(TOPIC, max_rate=rate)
    begun, given_in_all = clock(), 0
    while clock() - begun < 60_000_000:
        allowed = ask(broker, topic, "A", tokens=100_000)
        given_in_all += allowed.tokens
        clock.advance(max(allowed.wait_us / 1000, 20) / 1000)
    assert given_in_all == pytest.approx(rate * 60, rel=0.02, abs=1.5)


def test_what_is_given_back_is_there_for_others(broker: Any) -> None:
    topic = replace(TOPIC, max_rate=0.01)
    assert ask(broker, topic, "A", tokens=1).tokens == 1
    assert ask(broker, topic, "B", tokens=1).tokens == 0
    ask(broker, topic, "A", tokens=-1)
    assert ask(broker, topic, "B", tokens=1).tokens == 1


class Crew:
    """Workers that ask, begin and end as they like."""

    def __init__(self, limit: int, names: str) -> None:
        self.clock = Clock()
        self.broker = OracleBroker("m:", self.clock)
        self.topic = replace(TOPIC, max_in_flight=limit)
        self.running = dict.fromkeys(names, 0)
        self.permits = dict.fromkeys(names, 0)
        self.served: Counter[str] = Counter()

    def ask(self, name: str, wanted: int) -> None:
        wanted = max(wanted, self.running[name])
        allowed = ask(self.broker, self.topic, name, in_use=self.running[name], wanted=wanted)
        self.permits[name] = allowed.permits

    def begin(self, name: str) -> None:
        if self.running[name] < self.permits[name]:
            self.running[name] += 1
            self.served[name] += 1

    def end(self, name: str) -> None:
        self.running[name] -= self.running[name] > 0


@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(
            st.sampled_from("ABCD"), st.sampled_from(["ask", "begin", "begin", "end"]), st.integers(0, 15)
        ),
        max_size=150,
    ),
)
def test_never_more_is_in_flight_than_the_limit(limit: int, story: list[Any]) -> None:
    crew = Crew(limit, "ABCD")
    for name, what, number in story:
        crew.clock.advance(number / 100)
        if what == "ask":
            crew.ask(name, number)
        else:
            getattr(crew, what)(name)
        # Nobody is silent for as long as a lease.
        for other in "ABCD":
            if number == 15:
                crew.ask(other, crew.running[other])
        assert sum(crew.running.values()) <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "names"), [(1, "AB"), (1, "ABCDE"), (3, "ABCD"), (8, "ABC"), (100, "ABC")])
def test_who_always_wants_more_gets_an_equal_part(limit: int, names: str) -> None:
    crew, chance = Crew(limit, names), random.Random(5)
    for _ in range(6000):
        crew.clock.advance("100ms")
        for name in chance.sample(names, len(names)):
            for _ in range(chance.randrange(limit + 1)):
                crew.end(name)
            crew.ask(name, 50)
            for _ in range(limit):
                crew.begin(name)
    shares = [crew.served[name] / sum(crew.served.values()) for name in names]
    assert min(shares) > 0.7 / len(names), crew.served
    assert sum(crew.running.values()) >= limit - len(names)


def test_who_wants_little_leaves_the_rest_to_others() -> None:
    crew = Crew(10, "ABC")
    for _ in range(4):
        crew.clock.advance("100ms")
        crew.ask("A", 1)
        crew.ask("B", 3)
        crew.ask("C", 50)
    assert crew.permits == {"A": 1, "B": 3, "C": 6}
    crew.clock.advance("100ms")
    crew.ask("B", 0)
    crew.ask("C", 50)
    assert crew.permits["C"] == 9


def test_what_a_dead_worker_held_is_free_at_once_but_for_what_it_ran(broker: Any) -> None:
    topic = replace(TOPIC, max_in_flight=5)
    for slot in (0, 3):
        broker.send_merge(topic, slot, 0, [b"a", b"b"])
        epoch = broker.acquire(topic, slot)
        broker.prepare(topic, slot, "A", epoch, 1)
    assert ask(broker, topic, "A", wanted=5, in_use=5).permits == 5
    assert ask(broker, topic, "B", wanted=5).permits == 0
    return_permits(broker, [topic, replace(TOPIC, name="other")], "A")
    assert ask(broker, topic, "B", wanted=5).permits == 3


def test_of_a_dead_worker_that_held_thousands_no_permit_is_free_that_they_use(broker: Any) -> None:
    topic, number = replace(TOPIC, max_in_flight=2_000, slots=1), BATCH + 200
    for start in range(0, number, BATCH):
        broker.send_merge(topic, 0, 0, [b"%d" % n for n in range(start, min(start + BATCH, number))])
    epoch = broker.acquire(topic, 0)
    for most in (BATCH, BATCH):
        broker.prepare(topic, 0, "A", epoch, most)
    assert ask(broker, topic, "A", wanted=2_000, in_use=number).permits == 2_000
    return_permits(broker, [topic], "A")
    assert ask(broker, topic, "B", wanted=2_000).permits == 2_000 - number


def test_permits_of_a_dead_worker_stay_where_a_slot_cannot_be_read(broker: Any) -> None:
    topic = replace(TOPIC, max_in_flight=5)
    assert ask(broker, topic, "A", wanted=5, in_use=5).permits == 5
    broker.client.set(slot_keys(broker.prefix, topic.name, 3).inflight, "of another program")
    return_permits(broker, [topic], "A")
    assert ask(broker, topic, "B", wanted=5).permits == 0


class Gauge:
    """A listener that knows how many of it run, and when each began."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.running = self.most = 0
        self.begun: list[float] = []
        self.by: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.begun.append(time.monotonic())
            self.by[threading.current_thread().name] += 1
        if self.seconds:
            time.sleep(self.seconds)
        with self._lock:
            self.running -= 1


def halves(topic: Topic, workers: int) -> list[list[tuple[str, int]]]:
    return [[(topic.name, slot) for slot in range(number, topic.slots, workers)] for number in range(workers)]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "serial"), [(1, True), (3, True), (3, False)])
def test_the_rate_holds_over_all_workers(broker: Any, workers: int, serial: bool) -> None:
    topic = replace(TOPIC, max_rate=100, serial=serial)
    gauge = Gauge()
    send(broker, topic, range(150))
    began = time.monotonic()
    with ExitStack() as stack:
        parts = halves(topic, workers) if serial else [None] * workers
        for slots in parts:
            stack.enter_context(Worker(broker, topic, gauge, slots=slots))
        eventually(lambda: len(gauge.begun) == 150)
    assert gauge.begun[-1] - began >= 1.3, "150 at 100 per second, ten of them at once"
    assert total(broker, topic, "committed") == 150


@pytest.mark.slow
def test_each_slot_keeps_its_own_rate_whoever_takes_from_it(broker: Any) -> None:
    topic = replace(TOPIC, slot_rate=10, slots=2, serial=False)
    gauge = Gauge()
    send(broker, topic, range(20))
    most = max(
        len(entries) for entries in (broker.list_messages(topic, slot, "store").entries for slot in range(2))
    )
    began = time.monotonic()
    with Worker(broker, topic, gauge), Worker(broker, topic, gauge):
        eventually(lambda: len(gauge.begun) == 20)
    assert gauge.begun[-1] - began >= 0.95 * (most - 1) / 10


@pytest.mark.parametrize(
    ("workers", "serial", "limit"), [(1, True, 3), (1, False, 3), (2, True, 1), (2, True, 3), (2, False, 3)]
)
def test_never_more_messages_are_in_flight_over_all_workers(
    broker: Any, workers: int, serial: bool, limit: int
) -> None:
    topic = replace(TOPIC, max_in_flight=limit, serial=serial)
    gauge = Gauge(0.02)
    send(broker, topic, range(30))
    with ExitStack() as stack:
        parts = halves(topic, workers) if serial else [None] * workers
        for slots in parts:
            stack.enter_context(Worker(broker, topic, gauge, slots=slots, threads=4))
        eventually(lambda: live(broker, topic) == 0)
    assert gauge.most <= limit
    if workers == 1:
        assert gauge.most == limit


def test_what_has_ended_is_in_flight_until_redis_has_heard_of_it(broker: Any) -> None:
    topic, gauge = replace(TOPIC, max_in_flight=3), Gauge(0.01)
    told: list[tuple[int, int]] = []

    def allow(call: Call[Any]) -> Any:
        # Somebody who wants much comes and goes, so that what has ended is to be told at once.
        run(limits.allow(topic, "other", tokens=0, in_use=0, wanted=len(told) % 2 * 50, lease_ms=3000))
        prepared = sum(broker.audit_ledger(topic, slot).prepare for slot in range(topic.slots))
        told.append((int(str(call.own[_IN_USE])), prepared))
        return run(call)

    run = intercept(broker, "limits/allow", allow)
    send(broker, topic, range(60))
    work_off(broker, topic, gauge, threads=4)
    assert any(prepared for _, prepared in told)
    assert all(in_use >= prepared for in_use, prepared in told), told


def room_for(shared: RateLimits, slots: int, now: float, unsettled: int = 0) -> int:
    """How many messages a worker may take, once it has asked for so many slots that wait."""
    for _ in "permits", "deliveries":
        shared.ask(now, lambda name: slots, lambda name, error: None, lambda name: unsettled)
    return shared.room("prices")


def test_permits_that_become_free_are_used_at_once_though_a_rate_holds_as_well() -> None:
    topic = replace(TOPIC, max_rate=300, max_in_flight=4)
    shared = RateLimits(OracleBroker("m:", Clock()), "A", [topic], lambda topic: 4)
    assert room_for(shared, 4, 1.0) == 4
    shared.started("prices", 4)
    # No slot waits, so the worker gives back the deliveries that it does not use.
    assert room_for(shared, 0, 1.2) == 0
    shared.ended("prices", 3, 1.25)
    assert room_for(shared, 3, 1.25) == 3


def test_what_cannot_be_acknowledged_counts_once_for_topics_with_both_limits(broker: Any) -> None:
    topic = replace(TOPIC, max_rate=300, max_in_flight=4)
    shared = RateLimits(broker, "A", [topic], lambda topic: 4)
    assert room_for(shared, 4, 1.0) == 4
    shared.started("prices", 4)
    shared.ended("prices", 3, 1.05)
    # One of the three was acknowledged. Redis counts the others: three are in flight, and one permit is free.
    # In between no slot waits, so the deliveries are given back.
    for now, slots in ((1.1, 1), (1.25, 0), (1.3, 1), (1.35, 1)):
        room_for(shared, slots, now, unsettled=2)
    assert shared.room("prices") == 1


def test_a_worker_that_has_given_back_its_permits_asks_at_once_when_it_wants_one() -> None:
    topic = replace(TOPIC, max_in_flight=20)
    shared = RateLimits(OracleBroker("m:", Clock()), "A", [topic], lambda topic: 4)
    room_for(shared, 1, 1.0)
    shared.started("prices", 1)
    assert room_for(shared, 0, 2.5) == 0, "none is held for what may come"
    assert room_for(shared, 1, 2.6) > 0


def test_a_slot_that_waits_for_its_limits_is_known_by_one_record(broker: Any) -> None:
    topic = replace(TOPIC, slots=1, max_in_flight=1)
    heard, forgotten = Heard(), set[Any]()

    def look() -> None:
        schedule, table = worker.dispatcher._schedule, worker.dispatcher._table
        queued = [*schedule.waiting, *schedule.parked[topic.name]]
        forgotten.update(slot for slot in queued if table.awake.get(slot.key) is not slot)

    worker = Worker(broker, topic, heard, beat=look)
    with worker:
        for sent in range(3, 31, 3):
            send(broker, topic, range(sent - 3, sent))
            heard.wait(sent)
            worker.asleep()
    assert not forgotten, "another record would be fetched beside it"


def test_a_limited_topic_leaves_the_others_alone(broker: Any) -> None:
    limited = replace(TOPIC, max_in_flight=1)
    free = replace(TOPIC, name="free")
    go, heard = threading.Event(), Heard()
    send(broker, limited, range(50))
    with Worker(broker, [limited, free], {"prices": lambda _: go.wait(LONG), "free": heard}, threads=2):
        eventually(lambda: total(broker, limited, "prepared") == 1)
        send(broker, free, range(500))
        # Half of its slots share a thread with the message that waits.
        heard.wait(200)
        assert total(broker, limited, "prepared") == 1
        go.set()
        heard.wait(500)
    assert total(broker, limited, "prepared") <= 50


@pytest.mark.slow
def test_a_worker_that_is_limited_sleeps(broker: Any) -> None:
    topic = replace(TOPIC, max_rate=0.1)
    gauge = Gauge()
    send(broker, topic, range(50))
    with Worker(broker, topic, gauge) as worker:
        eventually(lambda: len(gauge.begun) == 1)
        turns = Counter[str]()
        turn = worker.dispatcher._turn

        def counted() -> bool:
            turns["turn"] += 1
            return turn()

        def asked(call: Call[Any]) -> Any:
            turns["ask"] += 1
            return run(call)

        worker.dispatcher._turn = counted  # type: ignore[method-assign]
        run = intercept(broker, "limits/allow", asked)
        threading.Event().wait(1.0)
    assert turns["turn"] <= 20, turns
    assert turns["ask"] <= 3, turns


def test_a_worker_with_nothing_to_do_holds_nothing_and_asks_for_nothing(broker: Any) -> None:
    topic = replace(TOPIC, max_in_flight=3, max_rate=100)
    gauge = Gauge()
    send(broker, topic, range(10))
    with Worker(broker, topic, gauge) as worker:
        eventually(lambda: len(gauge.begun) == 10)
        worker.asleep()
        eventually(lambda: not worker.dispatcher._capacity.limits.shares["prices"].told)
        eventually(lambda: worker.dispatcher._capacity.limits.due() == float("inf"))
        assert ask(broker, topic, "other", wanted=9).permits == 3


def test_a_worker_that_stops_gives_its_permits_back(broker: Any) -> None:
    topic = replace(TOPIC, max_in_flight=3)
    gauge = Gauge(0.01)
    send(broker, topic, range(100))
    with Worker(broker, topic, gauge):
        eventually(lambda: len(gauge.begun) > 5)
    assert ask(broker, topic, "other", wanted=9).permits == 3


def test_a_burst_waits_for_the_rate(broker: Any) -> None:
    topic = replace(TOPIC, max_rate=20)
    heard = Heard()
    send(broker, topic, range(12))
    with Worker(broker, topic, heard, burst=True, max_idle_time=0.01) as worker:
        worker.join()
    assert sorted(heard.bodies) == list(range(12))


def test_a_foreign_key_at_the_limits_stops_the_topic_and_is_named(
    redis_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    limited, free = replace(TOPIC, max_rate=5), replace(TOPIC, name="free")
    heard = Heard()
    with client_of(redis_url) as client:
        broker = Broker(client, prefix)
        client.set(limits_key(prefix, "prices"), "foreign")
        send(broker, limited, [1])
        send(broker, free, range(20))
        with Worker(broker, [limited, free], heard):
            heard.wait(20)
            eventually(lambda: "Cannot apply the limits of topic prices" in caplog.text)
        assert total(broker, limited, "prepared") == 0
        with pytest.raises(WrongType):
            ask(broker, limited, "A", tokens=1)


def test_a_node_that_is_away_stops_only_the_topic_whose_limits_it_has() -> None:
    said: list[str] = []
    clock = Clock()
    broker: Any = OracleBroker("m:", clock)

    def away(call: Any) -> Any:
        if call.place.name == "prices":
            raise NodeUnavailable("a node of the cluster")
        return run(call)

    run = intercept(broker, "limits/allow", away)
    limited = [replace(TOPIC, max_in_flight=2), replace(TOPIC, name="other", max_in_flight=2)]
    shared = RateLimits(broker, "A", limited, lambda topic: 4)
    shared.ask(1.0, lambda name: 1, lambda name, error: said.append(name), lambda name: 0)
    assert (shared.room("prices"), shared.room("other")) == (0, 2)
    assert said == ["prices"]
    assert shared.shares["prices"].due == pytest.approx(2.0), "and it is asked again"
    broker.run = run
    shared.ask(2.1, lambda name: 1, lambda name, error: said.append(name), lambda name: 0)
    assert shared.room("prices") == 2

    def all_away(call: Call[Any]) -> Any:
        raise ServerUnavailable("all away")

    intercept(broker, "limits/allow", all_away)
    with pytest.raises(ServerUnavailable):
        shared.ask(9.0, lambda name: 1, lambda name, error: said.append(name), lambda name: 0)


def test_topics_without_limits_ask_for_nothing() -> None:
    shared = RateLimits(OracleBroker("m:"), "A", [TOPIC], lambda topic: 1)
    assert not shared
    assert shared.room("prices") > 1_000_000
    assert shared.due() == float("inf")
