"""Several workers and one Redis: who owns which slots when workers come, go, die, hang, are cut off or find all gone.

Workers are coordinators in threads. What they own is what their callbacks were told.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_rmq.core.coordination import Holding, StaticCoordinator, Worker, topic_slots
from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
from django_rmq.core.model.keys import worker_keys
from django_rmq.core.model.replies import Roster
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import ServerUnavailable, WrongType
from django_rmq.testing import Clock
from tests.contract.keyspaces import RedisKeyspace
from tests.support import coordinators
from tests.support.brokers import Broker, OracleBroker
from tests.support.coordinators import PATIENCE, SERIAL, SESSION, SHARED, SHORT, TAKE_OVER, Slot, Told
from tests.support.servers import RedisServer, TcpProxy, ask
from tests.support.workers import LONG, describe, eventually, members


class Killed:
    """The broker of a process that is no more: nothing arrives."""

    def __getattr__(self, name: str) -> Any:
        raise ServerUnavailable("killed")


class Member(coordinators.Member):
    """A worker that meets others in Redis."""

    def __init__(self, of: Party, broker: Any, topics: Iterable[Topic], **options: Any) -> None:
        options = {"session_seconds": SESSION, "audit_seconds": 0.5, **options}
        super().__init__(of, partial(RedisCoordinator, broker), topics, **options)

    def kill(self) -> None:
        """Be heard of no more."""
        self.silent = True
        self.coordinator.broker = Killed()


class Party(coordinators.Party):
    """Workers under one prefix."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__()
        self.connect = connect

    def add(self, topics: Iterable[Topic] = (SERIAL, SHARED), broker: Any = None, **options: Any) -> Member:
        member = Member(self, broker or self.connect(), topics, **options)
        self.all.append(member)
        member.coordinator.start()
        return member

    def add_mortal(self, **options: Any) -> Member:
        return self.add(session_seconds=SHORT, **options)

    def holdings(self) -> list[Holding]:
        return describe(self.connect())

    def members(self) -> list[str]:
        return [member.worker.id for member in members(self.connect())]

    def coordinator(self, topic: Topic, own: Told, disown: Told) -> RedisCoordinator:
        worker = Worker(uuid.uuid4().hex, "host", 1, 0.0, 4, topic_slots([topic]))
        return RedisCoordinator(self.connect(), worker, own, disown, session_seconds=SESSION)

    def wait_for_members(self, count: int) -> None:
        ask = self.connect()
        eventually(lambda: len(members(ask)) == count, f"{count} workers")


def connect(url: str, prefix: str) -> Broker:
    return Broker(redis.Redis.from_url(url, socket_timeout=LONG, retry=Retry(NoBackoff(), 0)), prefix)


@pytest.fixture
def party(redis_url: str, prefix: str) -> Iterator[Party]:
    with Party(lambda: connect(redis_url, prefix)) as party:
        yield party


@contextmanager
def server_of_its_own(**options: Any) -> Iterator[tuple[RedisServer, Party]]:
    with RedisServer(**options) as server, Party(lambda: connect(server.url, "own:")) as party:
        yield server, party


class TestSharing(coordinators.Sharing):
    """Workers that meet in Redis."""


def test_who_lost_the_reply_to_its_joining_may_start_again(
    party: Party, redis_client: redis.Redis, prefix: str
) -> None:
    with TcpProxy(redis_client.connection_pool.connection_kwargs["port"]) as proxy:
        member = Member(party, connect(proxy.url, prefix), [SERIAL])
        party.all.append(member)
        member.coordinator.broker.ping()
        proxy.drop_reply(containing=member.id.encode())
        with pytest.raises(ServerUnavailable):
            member.coordinator.start()
        member.coordinator.start()
        party.wait_until_shared_out()
        member.leave()


def test_nobody_starts_without_redis(redis_client: redis.Redis, prefix: str, party: Party) -> None:
    with TcpProxy(redis_client.connection_pool.connection_kwargs["port"]) as proxy:
        proxy.cut()
        member = Member(party, connect(proxy.url, prefix), [SERIAL])
        with pytest.raises(ServerUnavailable):
            member.coordinator.start()
        member.coordinator.stop()


def test_whose_id_was_taken_while_it_was_away_gives_up_its_slots(
    party: Party, redis_client: redis.Redis
) -> None:
    [first] = party.share(1)
    redis_client.hset(worker_keys(party.connect().prefix).workers.decode(), first.id, "another {}")
    party.wait_for(lambda: not first.serial(), "the first gives up")
    assert not first.coordinator.wait_settled(0)


def test_who_is_cut_off_longer_than_its_session_gives_up_and_comes_back(
    party: Party, redis_client: redis.Redis, prefix: str
) -> None:
    with TcpProxy(redis_client.connection_pool.connection_kwargs["port"]) as proxy:
        near = party.add()
        far = party.add(broker=connect(proxy.url, prefix), session_seconds=SHORT)
        party.wait_until_shared_out()
        proxy.cut()
        party.wait_for(lambda: not far.serial(), "the far one gives up")
        assert ("shared", 0) in far.slots, "what has no gate needs no coordinator"
        party.wait_for(lambda: len(near.serial()) == 64, "the near one takes over")
        proxy.mend()
        party.wait_until_shared_out()
        assert len(far.serial()) == 32
        far.leave()


def test_a_cut_shorter_than_a_session_moves_nothing(
    party: Party, redis_client: redis.Redis, prefix: str
) -> None:
    with TcpProxy(redis_client.connection_pool.connection_kwargs["port"]) as proxy:
        near = party.add()
        far = party.add(broker=connect(proxy.url, prefix))
        party.wait_until_shared_out()
        near.lost.clear()
        far.lost.clear()
        proxy.cut()
        heard = heartbeats(party, far)
        proxy.mend()
        heard.wait_for_next()
        assert near.lost + far.lost == Counter()
        assert party.is_shared_out()
        far.leave()


class heartbeats:  # noqa: N801 - reads as a question
    """Waits for the session of a worker to be renewed."""

    def __init__(self, party: Party, member: Member) -> None:
        self.ask, self.id = party.connect(), member.id
        self.before = self.ends()

    def ends(self) -> float:
        sessions = self.ask.roster().sessions
        return next((session.ends_ms for session in sessions if session.worker == self.id), 0.0)

    def wait_for_next(self) -> None:
        eventually(lambda: self.ends() > self.before, "a heartbeat")


def test_who_is_stuck_in_a_call_to_a_frozen_redis_gives_up_after_its_session_all_the_same() -> None:
    with server_of_its_own() as (server, party):
        first, second = party.share(2, session_seconds=SHORT)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            party.wait_for(lambda: not first.serial() and not second.serial(), "both give up")
            started = time.monotonic()
            first.coordinator.stop(0.5)
            assert time.monotonic() - started < LONG / 2, "it does not wait for the answer"
            party.wait_for(lambda: not first.slots, "the first disowns all")
            first.silent = True
        finally:
            os.kill(server.pid, signal.SIGCONT)
        party.wait_until_shared_out()


def test_while_redis_answers_and_refuses_writes_workers_have_no_slots_and_are_not_ready() -> None:
    with server_of_its_own() as (server, party):
        worker = party.add(session_seconds=SHORT)
        party.wait_until_shared_out()
        ask(server.port, "CONFIG", "SET", "min-replicas-to-write", "1")
        party.wait_for(lambda: not worker.serial(), "it gives up")
        ask(server.port, "CONFIG", "SET", "min-replicas-to-write", "0")
        party.wait_until_shared_out()


def test_workers_go_on_after_redis_was_killed_and_came_back() -> None:
    with server_of_its_own(appendonly="yes", appendfsync="always") as (server, party):
        workers = party.share(3, session_seconds=SHORT)
        had = [member.serial() for member in workers]
        os.kill(server.pid, signal.SIGKILL)
        party.wait_for(lambda: not any(member.serial() for member in workers), "all give up")
        for member in workers:
            member.coordinator.session_seconds = SESSION
        party.settle_for(LONG)
        server.stop()
        server.start()
        party.wait_for_members(3)
        party.settle_for(0.2)
        party.wait_until_shared_out()
        assert [member.serial() for member in workers] == had


def test_after_all_was_wiped_everybody_is_back_with_what_it_had(
    party: Party, redis_client: redis.Redis
) -> None:
    workers = party.share(3)
    had = [member.serial() for member in workers]
    version = party.connect().roster().plan_version
    party.settle_for(LONG)
    redis_client.delete(*worker_keys(party.connect().prefix))
    party.wait_for_members(3)
    party.settle_for(0.2)
    for member in workers:
        wait_for_assignment(party, member, lambda roster: roster.plan_version > version)
    party.wait_until_shared_out()
    assert [member.serial() for member in workers] == had


def wait_for_assignment(party: Party, member: Member, fact: Callable[[Any], bool]) -> None:
    """Wait until Redis and the worker agree about an assignment of which ``fact`` is true."""
    ask, poll, end = party.connect(), threading.Event(), time.monotonic() + 10 * PATIENCE
    while not (fact(ask.roster()) and member.coordinator.wait_settled(0)):
        assert time.monotonic() < end, ask.roster()
        poll.wait(0.02)


def test_a_worker_that_was_taken_for_dead_joins_again(party: Party, redis_client: redis.Redis) -> None:
    first, second = party.share(2)
    keys = worker_keys(party.connect().prefix)
    redis_client.zadd(keys.sessions.decode(), {first.id: 1})
    heartbeats(party, first).wait_for_next()
    party.wait_until_shared_out()
    assert {member.worker.id for member in members(party.connect())} == {first.id, second.id}


def test_a_full_redis_keeps_its_workers_and_takes_new_ones() -> None:
    with server_of_its_own() as (server, party):
        [first] = party.share(1)
        client = redis.Redis(port=server.port)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("x", "y")
        heartbeats(party, first).wait_for_next()
        assert first.lost == Counter()
        [second] = party.share(1)
        second.leave()
        party.wait_until_shared_out()
        assert first.coordinator.wait_settled(TAKE_OVER * PATIENCE)
        client.close()


def spoiled_plans() -> dict[str, Callable[[Party], bytes]]:
    def owner(party: Party, worker: str, slots: int = 64) -> bytes:
        plan = {"workers": [worker], "times": [1], "topics": {"serial": [slots, 0, 0]}}
        return json.dumps(plan).encode()

    return {
        "no plan": lambda party: b"{",
        "empty": lambda party: b"",
        "owned by the dead": lambda party: owner(party, "f" * 32),
        "owned by one": lambda party: owner(party, party.all[0].id),
        "owned in part": lambda party: owner(party, party.all[0].id, 60),
        "owned beyond the end": lambda party: owner(party, party.all[1].id, 128),
    }


@pytest.mark.parametrize("how", spoiled_plans())
def test_an_assignment_that_was_spoiled_is_healed(party: Party, redis_client: redis.Redis, how: str) -> None:
    first, second = party.share(2)
    version = party.connect().roster().plan_version
    key = worker_keys(party.connect().prefix).assignment.decode()
    redis_client.hset(key, "plan", spoiled_plans()[how](party))
    for member in (first, second):
        wait_for_assignment(party, member, lambda roster: roster.plan_version > version)
    party.wait_until_shared_out()


@pytest.mark.slow
@pytest.mark.parametrize("field", ["members", "number", "basis", "plan"])
@pytest.mark.parametrize("value", [None, b"", b"junk", b"1e300", b"-1"])
def test_a_field_that_a_stranger_spoiled_is_healed(
    party: Party, redis_client: redis.Redis, field: str, value: bytes | None
) -> None:
    first, second = party.share(2)
    key = worker_keys(party.connect().prefix).assignment.decode()
    if value is None:
        redis_client.hdel(key, field)
    else:
        redis_client.hset(key, field, value)

    def is_whole(roster: Roster) -> bool:
        return roster.basis == roster.members_version and roster.plan.startswith(b"{")

    for member in (first, second):
        wait_for_assignment(party, member, is_whole)
    party.wait_until_shared_out()
    party.add()
    party.wait_until_shared_out()


def test_strange_workers_get_no_slots_and_go(party: Party, redis_client: redis.Redis) -> None:
    keys = worker_keys(party.connect().prefix)
    now = party.connect().now_ms()
    strange = {b"\xff": now + 60_000.0, b"": now + 500.0, b"far": now + 1e12, b"far too": float("inf")}
    redis_client.zadd(keys.sessions.decode(), strange)
    redis_client.zadd(keys.sessions.decode(), {b"\xfe": float("-inf")})
    redis_client.hset(keys.workers.decode(), "0", '0 {"host":"x","threads":"many"}')
    redis_client.zadd(keys.sessions.decode(), {"0": now + 60_000})
    first = party.add(session_seconds=SHORT)
    party.wait_until_shared_out()
    assert [member.worker.id for member in members(party.connect())] == [first.id]
    poll, end = threading.Event(), time.monotonic() + TAKE_OVER * PATIENCE
    while (left := {s.worker for s in party.connect().roster().sessions}) != {first.id, "0", "\\xff"}:
        assert time.monotonic() < end, left
        poll.wait(0.05)


def test_a_key_of_a_foreign_type_ends_the_session_and_nothing_else(
    party: Party, redis_client: redis.Redis
) -> None:
    first = party.add(session_seconds=SHORT)
    party.wait_until_shared_out()
    key = worker_keys(party.connect().prefix).sessions
    redis_client.set("x" + key.decode(), "string")
    redis_client.rename("x" + key.decode(), key.decode())
    party.wait_for(lambda: not first.serial(), "given up")
    with pytest.raises(WrongType):
        first.coordinator.members()
    redis_client.delete(key)
    party.wait_until_shared_out()


def test_a_registered_definition_decides_how_many_slots_there_are(party: Party) -> None:
    first, second = party.share(2)
    wider = Topic("serial", TopicType.PRIORITY, slots=128)
    party.connect().define(wider, replace=True)
    party.wait_for(lambda: party.is_shared_out(128), "all of the new slots", 5.0 * PATIENCE)
    assert len(first.serial()) == len(second.serial()) == 64


@pytest.mark.slow
def test_idle_workers_send_a_command_per_second_each() -> None:
    with server_of_its_own() as (server, party):
        workers = [party.add(audit_seconds=5.0) for _ in range(3)]
        party.wait_until_shared_out()
        party.wait_until_settled(workers)
        client = redis.Redis(port=server.port)

        def sent() -> int:
            stats: Any = client.info("commandstats")
            counts = [stats.get(f"cmdstat_{name}", {"calls": 0}) for name in ("evalsha", "hgetall")]
            return sum(count["calls"] for count in counts)

        client.config_resetstat()
        began = time.monotonic()
        eventually(lambda: sent() >= 18, "eighteen commands")
        assert time.monotonic() - began >= 18 / 3 - 1
        client.close()


def test_a_static_coordinator_gives_all_to_one() -> None:
    slots: set[Slot] = set()
    worker = Worker("w", "host", 1, 0.0, 4, topic_slots([SERIAL, SHARED]))
    coordinator = StaticCoordinator(worker, slots.update, slots.difference_update)
    assert not coordinator.wait_settled(0)
    coordinator.start()
    assert coordinator.wait_settled(0)
    assert len(slots) == 68
    assert coordinator.owned() == {"serial": (range(64),), "shared": (range(4),)}
    coordinator.announce(topics=[SHARED])
    assert {topic for topic, _ in slots} == {"shared"}
    assert [member.worker.topics for member in coordinator.members()] == [topic_slots([SHARED])]
    coordinator.stop()
    assert slots == set()


STEP = st.one_of(
    st.tuples(
        st.just("beat"),
        st.sampled_from("uvw"),
        st.sampled_from(["t1", "t2"]),
        st.sampled_from(["", " {}", " {1}"]),
        st.booleans(),
    ),
    st.tuples(st.just("leave"), st.sampled_from("uvw"), st.sampled_from(["t1", "t2"])),
    st.tuples(st.just("assign"), st.booleans(), st.booleans()),
    st.tuples(st.just("pass"), st.integers(0, 3000)),
    st.tuples(st.just("back"), st.just(7_200)),
    st.tuples(st.just("roster")),
)


@given(st.lists(STEP, max_size=30))
def test_scripts_and_memory_answer_and_keep_the_same(
    redis_client: redis.Redis, steps: list[tuple[Any, ...]]
) -> None:
    clock = Clock()
    prefix = f"t{uuid.uuid4().hex[:12]}:"
    both: list[Any] = [Broker(redis_client, prefix, clock), OracleBroker(prefix, clock)]
    known, rosters = ("", ""), [Roster(0, "", "", "", b"", [])] * 2
    try:
        for step in steps:
            clock.advance("1ms")
            answers = []
            for broker in both:
                match step:
                    case ("beat", worker, token, record, knows):
                        names = ("known_members_version", "known_plan_version")
                        seen = dict(zip(names, known if knows else ("", ""), strict=True))
                        record = record and token + record
                        answers.append(broker.beat(worker, token, 1000, record=record, **seen))
                    case ("leave", worker, token):
                        answers.append(broker.leave(worker, token))
                    case ("assign", same_members, same_number):
                        now = broker.roster()
                        members_version = now.members_version if same_members else "0"
                        plan_version = now.plan_version if same_number else "0"
                        answers.append(broker.assign(members_version, plan_version, "{}"))
                    case ("roster",):
                        answers.append(broker.roster(rosters[len(answers)]))
                    case _:
                        answers.append(None)
            if step[0] == "pass":
                clock.advance(step[1] / 1000)
            if step[0] == "back":
                clock.advance(-step[1])
            assert answers[0] == answers[1]
            if step[0] == "roster":
                rosters = answers
            assert RedisKeyspace(redis_client, prefix).dump() == {
                key: dict(value) for key, value in both[1].keyspace.items()
            }
            now = both[1].roster()
            known = (now.members_version, now.plan_version)
    finally:
        redis_client.delete(*worker_keys(prefix))


def test_as_many_workers_as_there_may_be_keep_no_successor_out_when_they_have_died_together(
    redis_client: redis.Redis, prefix: str
) -> None:
    clock = Clock()
    broker = Broker(redis_client, prefix, clock)
    broker.beat("first", "t", 1000, record="t {}")
    sessions = worker_keys(prefix).sessions
    ends = clock() // 1_000 + 1_000
    redis_client.zadd(sessions, {f"w{n}": ends for n in range(1_999)})
    assert broker.beat("successor", "t", 1000, record="t {}").status == "full"
    clock.advance("1s")
    assert broker.beat("successor", "t", 1000, record="t {}").status == "ok"


def test_of_two_who_assign_from_the_same_knowledge_one_wins(party: Party) -> None:
    broker = party.connect()
    broker.beat("w", "t", 1000, record="t {}")
    roster = broker.roster()
    assert broker.assign(roster.members_version, roster.plan_version, "first") is not None
    assert broker.assign(roster.members_version, roster.plan_version, "second") is None
    assert broker.roster().plan == b"first"


def test_who_knows_a_roster_is_sent_no_records_and_no_plan_again(
    party: Party, redis_client: redis.Redis
) -> None:
    broker = party.connect()
    broker.beat("w", "t", 5000, record="t " + "r" * 100_000)
    first = broker.roster()
    assert broker.assign(first.members_version, first.plan_version, "p" * 100_000) is not None
    known = broker.roster()
    before = redis_client.info("stats")["total_net_output_bytes"]
    again = broker.roster(known)
    assert again._replace(now_ms=0) == known._replace(now_ms=0)
    assert redis_client.info("stats")["total_net_output_bytes"] - before < 50_000
    broker.beat("v", "t", 5000, record="t {}")
    assert [one.record for one in broker.roster(known).sessions] == [b"t " + b"r" * 100_000, b"t {}"]
