"""Lost replies, forgotten scripts, foreign types, full, read-only, loading, refusing and frozen servers, cut connections.

Each script is put through each fault on a slot that holds a message in every state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_rmq.core import lua
from django_rmq.core.commands import operate
from django_rmq.core.commands.operate import TrashShare, into_trash
from django_rmq.core.commands.script_call import AtSlots, Call, RedisCommand
from django_rmq.core.model.keys import SlotKeys, trash_key
from django_rmq.core.model.replies import Area, Claimed, CopyReply, Failure, OrphansReply, Restored, digest
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.redis.broker import RedisPipeline
from django_rmq.exceptions import ServerFull, ServerRefused, ServerUnavailable, WrongType
from django_rmq.testing import Clock
from tests.contract.keyspaces import Dump, RedisKeyspace
from tests.contract.slots import CONSTANT, START_MS, TYPES, Drift, Slot, drift
from tests.support.brokers import Broker, Methods
from tests.support.servers import RedisServer, TcpProxy
from tests.support.workers import eventually

READ_ONLY = {name for name in lua.names() if lua.declaration(name).reads}
SENDS = {"send_merge", "send_replace", "send_fifo", "ensure"}
ZSETS = {
    "store", "prepare", "retry", "dead", "claimants", "claim", "outcome_times", "delivery_outcomes", "inserting",
}  # fmt: skip


def connect(url: str, seconds: float = 60, **options: Any) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=seconds, retry=Retry(NoBackoff(), 0), **options)


def slot_of(client: redis.Redis, prefix: str, kind: TopicType = TopicType.FIXED_TIME, **options: Any) -> Slot:
    clock = Clock(START_MS)
    # Loose, so that a message can be in each state at the same time.
    options = {"identity": "key", "backoff": CONSTANT, "slots": 1, "order": "loose", **options}
    broker = Broker(client, prefix, clock)
    return Slot(broker, RedisKeyspace(client, prefix), clock, Topic("topic", kind, **options))


def through(slot: Slot, client: redis.Redis) -> Slot:
    """Return the same slot as seen over another connection."""
    broker = Broker(client, slot.broker.prefix, slot.clock)
    return Slot(broker, slot.keyspace, slot.clock, slot.topic)


def stage(slot: Slot, script: str = "") -> int:
    """Put a message into every state; return the receipt of those in flight.

    For the scripts of claims it is Spark that holds what can be taken: a serial slot has one or the other.
    """
    slot.acquire()
    if script == "commit_delivery":
        # Nothing has failed, and every member is its own body.
        slot.send_fifo(0, [b"flying", b"flying too"])
        return int(slot.take().receipt)
    slot.send(b"dead", b"rested", b"resting", b"timed out", b"flying", b"failing", b"marked")
    receipt: int = slot.take().receipt
    slot.reject(receipt, b"dead")
    slot.fail(receipt, b"rested", delay_ms=1_000)
    slot.fail(receipt, b"resting", delay_ms=3_600_000)
    slot.clock.advance(31)
    slot.extend(receipt, [b"flying", b"failing", b"marked"])
    slot.remove([b"marked"])
    slot.send(b"waiting", b"waiting too")
    if script == "restore":
        trash = TrashShare("act", 10, 10_000)
        for copy, members in (("live", [b"waiting too", b"resting"]), ("dead", [b"dead"])):
            slot.broker.run(into_trash(operate.remove(slot.topic, 0, members, copy), trash))
        slot.send(b"resting")
    if script in ("reopen", "move_out", "move_in"):
        if script == "move_out":
            slot.release(receipt, [b"flying", b"failing", b"marked", b"timed out"])
        slot.shut(1)
    if "claim" in script or script in ("renew_claim", "ack_claim"):
        slot.release(receipt, [b"flying", b"failing", b"marked"])
        if script != "claim":
            slot.claim("spark", 1, 60_000, 100)
            slot.renew_claim("spark", 1, 60_000, seal=True)
            slot.send(b"waiting")
        if script in ("ack_claim", "return_claim"):
            slot.fail_claimed("spark", 1, [Failure(b"flying", error="no"), Failure(b"failing", "rejected")])
    return receipt


def send(slot: Slot) -> Any:
    return [sent.status for sent in slot.send(b"new", b"waiting")]


def scatter(slot: Slot) -> Any:
    # The slots that the others stage hold bodies and resting retries, where it does nothing.
    answers = slot.broker.scatter(slot.topic, [1, 2], 0, [b"new", b"waiting"])
    return [sent.status for (sent,) in answers]


def ensure(slot: Slot) -> Any:
    score = 0 if slot.topic.type is TopicType.RANGE_MERGE else slot.fresh_score()
    sent = slot.ensure([score] * 2, [b"new", b"resting"], slot.envelopes(2))
    return [one.status for one in sent]


def move_out(slot: Slot) -> Any:
    answer = slot.move_out(1, 1, LEAVING)
    return getattr(answer, "status", answer)


LEAVING = [("store", b"waiting"), ("retry", b"resting"), ("dead", b"dead")]
ARRIVING = [
    CopyReply("store", b"moved", "1799999999000"),
    CopyReply("retry", b"resting", "1800000000000.5", b"failed 1 1 1 50\nno"),
]

ACTS: dict[str, Callable[[Slot, int], Any]] = {
    **dict.fromkeys(("send_merge", "send_replace", "send_fifo"), lambda slot, receipt: send(slot)),
    "scatter": lambda slot, receipt: scatter(slot),
    "ensure": lambda slot, receipt: ensure(slot),
    "put_tick": lambda slot, receipt: slot.put_tick(
        "nightly", 1, slot.now_ms + 9, b"nightly@9", slot.envelopes(1)[0]
    ),
    "retract": lambda slot, receipt: slot.retract("nightly", 2, slot.now_ms + 9, b"waiting"),
    "acquire": lambda slot, receipt: slot.acquire(),
    "acquire_slots": lambda slot, receipt: slot.broker.acquire_slots(slot.topic, [0, 1]),
    "list_held": lambda slot, receipt: slot.list_held("A"),
    "prepare": lambda slot, receipt: slot.take(),
    "commit": lambda slot, receipt: slot.commit(receipt, [b"flying", b"marked"]),
    "commit_delivery": lambda slot, receipt: slot.commit_delivery(receipt, 2),
    "rollback": lambda slot, receipt: slot.fail(receipt, b"flying", b"failing", b"marked", error="no" * 600),
    "release": lambda slot, receipt: slot.release(receipt, [b"flying", b"marked"]),
    "extend": lambda slot, receipt: slot.extend(receipt, [b"flying", b"failing"]),
    "progress": lambda slot, receipt: slot.progress(receipt, b"flying", 400, b"half"),
    "time_out": lambda slot, receipt: slot.time_out(),
    "promote": lambda slot, receipt: slot.promote(),
    "claim": lambda slot, receipt: slot.claim("spark", 1, 60_000, 100),
    "renew_claim": lambda slot, receipt: slot.renew_claim("spark", 1, 60_000),
    "ack_claim": lambda slot, receipt: slot.ack_claim("spark", 1),
    "fail_claimed": lambda slot, receipt: slot.fail_claimed(
        "spark", 1, [Failure(b"flying"), Failure(b"resting")]
    ),
    "return_claim": lambda slot, receipt: slot.return_claim("spark", 1, spent=True),
    "read_claim": lambda slot, receipt: slot.read_claim("spark", 1, 0, 100),
    "replay": lambda slot, receipt: slot.replay([b"dead"]),
    "bury": lambda slot, receipt: slot.bury([b"waiting", b"flying", b"resting"], "why"),
    "remove": lambda slot, receipt: slot.remove([b"waiting", b"flying", b"resting"], "live"),
    "discard": lambda slot, receipt: slot.discard([slot.now_ms - 31_000], [b"dead"]),
    "reschedule": lambda slot, receipt: slot.reschedule([slot.fresh_score()], [b"waiting"]),
    "purge": lambda slot, receipt: slot.purge("store"),
    "restore": lambda slot, receipt: slot.restore("act"),
    "pause": lambda slot, receipt: slot.pause(),
    "configure": lambda slot, receipt: slot.with_topic(timeout=31).configure(),
    "adopt": lambda slot, receipt: slot.adopt(1, 0),
    "retire": lambda slot, receipt: slot.retire(),
    "shut": lambda slot, receipt: slot.shut(1),
    "reopen": lambda slot, receipt: slot.reopen(1, deliveries=99, paused=True),
    "reslot_progress": lambda slot, receipt: slot.reslot_progress(),
    "move_out": lambda slot, receipt: move_out(slot),
    "move_in": lambda slot, receipt: slot.move_in(1, 1, 1, ARRIVING),
    "list_messages": lambda slot, receipt: slot.list_messages("store"),
    "search_messages": lambda slot, receipt: slot.search_messages("store", b"wait"),
    "group_deaths": lambda slot, receipt: slot.group_deaths(),
    "count": lambda slot, receipt: slot.count(),
    "count_slots": lambda slot, receipt: slot.broker.count_slots([AtSlots(slot.topic, [0])]),
    "heads": lambda slot, receipt: slot.broker.heads(slot.topic, [0]),
    "find_occupied": lambda slot, receipt: slot.broker.find_occupied([AtSlots(slot.topic, [0])]),
    "find_paused": lambda slot, receipt: slot.broker.find_paused([AtSlots(slot.topic, [0])]),
    "audit_ledger": lambda slot, receipt: slot.audit_ledger(),
    "count_between": lambda slot, receipt: slot.count_between("store"),
    "find_orphans": lambda slot, receipt: slot.find_orphans("failures", repair=True),
    "describe_messages": lambda slot, receipt: slot.describe_messages([b"waiting", b"flying", b"dead"]),
    "status": lambda slot, receipt: slot.status(b"dead"),
    "ranks": lambda slot, receipt: slot.ranks("store", [b"waiting"]),
    "find_by_digest": lambda slot, receipt: slot.find_by_digest([b"d" * 20], [Area("store"), Area("dead")]),
}

REPEATED: dict[str, Any] = {
    **{script: ["merged", "merged"] for script in ("send_merge", "scatter")},
    "send_replace": ["replaced", "replaced"],
    **{script: ["present", "present"] for script in ("send_fifo", "ensure")},
    **dict.fromkeys(("put_tick", "shut", "reopen", "move_in"), "known"),
    "retract": "removed",
    **{script: ["stale", "stale"] for script in ("commit", "release")},
    "commit_delivery": [],
    "rollback": ["stale", "stale", "stale"],
    "extend": ["ok", "ok"],
    **dict.fromkeys(("progress", "configure"), "ok"),
    **dict.fromkeys(("time_out", "promote", "purge"), 0),
    "claim": Claimed("ok", 0, 5, False),
    "renew_claim": 5,
    **dict.fromkeys(("ack_claim", "return_claim"), ("ok", 0)),
    "fail_claimed": ["again", "not_found"],
    **{script: ["not_found"] for script in ("replay", "discard")},
    "bury": ["dead", "running", "dead"],
    "remove": ["not_found", "running", "not_found"],
    "reschedule": ["waiting"],
    "restore": Restored("0", 0, 0),
    "pause": "unchanged",
    "adopt": "changed",
    "retire": "holds",
    "find_orphans": OrphansReply("0", 2, []),
    "move_out": "staged",
}
"""What a caller hears who repeats a call whose reply was lost."""

TOLD_TWICE = {"sent", "merged", "replaced", "present", "stale", "fenced", "rescheduled"}
"""Counters of calls, which two calls may raise twice; all others count messages."""


def test_every_script_is_put_through_the_faults() -> None:
    # tests/contract/test_inserting.py has the faults of a part of a transaction.
    assert set(ACTS) == set(lua.names()) - {"insert"}
    assert set(REPEATED) == set(ACTS) - READ_ONLY - {"prepare", "acquire", "acquire_slots"}


def comparable(slot: Slot, *without: str) -> Dump:
    """Return the slot's keys under names that do not tell its prefix; ``without``: fields to leave out."""
    prefix = slot.broker.prefix.encode()
    return {
        key.replace(prefix, b""): {field: value for field, value in content.items() if field.decode() not in without}
        for key, content in slot.keyspace.dump().items()
    }  # fmt: skip


def raw(client: redis.Redis, prefix: str) -> dict[bytes, Any]:
    """Return every key byte for byte."""
    keys: Any = client.keys(f"*{prefix}*")
    return {key: client.dump(key) for key in keys}


def contents(client: redis.Redis, prefix: str) -> dict[bytes, Any]:
    """Return what every key holds: a large hash that was restored may have its fields in another order."""
    return {
        key: client.hgetall(key) if client.type(key) == b"hash" else dump
        for key, dump in raw(client, prefix).items()
    }


KINDS = {"send_merge": TopicType.RANGE_MERGE, "send_fifo": TopicType.FIFO, "commit_delivery": TopicType.FIFO}
"""The types of topics to which a script belongs."""


def suits(script: str, kind: TopicType) -> bool:
    if script in ("put_tick", "retract"):
        return kind not in (TopicType.PRIORITY, TopicType.FIFO)
    if script in ("send_fifo", "commit_delivery") or kind is TopicType.FIFO:
        return script in ("send_fifo", "commit_delivery") and kind is TopicType.FIFO
    return script not in ("send_merge", "send_replace") or (script == "send_merge") == (
        kind is TopicType.RANGE_MERGE
    )


SUITABLE = [
    pytest.param(script, kind, id=f"{script}-{kind.value}")
    for script in sorted(ACTS)
    for kind in TopicType
    if suits(script, kind)
]


KEPT = {"outcome_retention_ms": 3_600_000}
"""The options of a topic that keeps outcomes, whose calls use the second forms of some scripts."""

SECOND_FORMS = [
    pytest.param(script, KINDS.get(script, TopicType.FIXED_TIME), KEPT, id=f"{script}-kept")
    for script in sorted(ACTS)
    if script + lua.SECOND in lua.all_names() or script == "progress"
]
IN_EACH_FORM = [*(pytest.param(*case.values, {}, id=str(case.id)) for case in SUITABLE), *SECOND_FORMS]


def script_of(name: str, options: dict[str, Any]) -> lua.Script:
    return lua.load(name + lua.SECOND if options and name != "progress" else name)


@pytest.fixture(scope="module")
def proxy(redis_client: redis.Redis) -> Iterator[TcpProxy]:
    with TcpProxy(redis_client.connection_pool.connection_kwargs["port"]) as proxy:
        yield proxy


@pytest.mark.parametrize(("script", "kind", "options"), IN_EACH_FORM)
def test_a_call_whose_reply_was_lost_and_its_repetition_have_one_effect(
    redis_client: redis.Redis,
    prefix: str,
    proxy: TcpProxy,
    script: str,
    kind: TopicType,
    options: dict[str, Any],
) -> None:
    once, slot = (slot_of(redis_client, f"{prefix}{name}:", kind, **options) for name in ("once", "lost"))
    receipts = [stage(once, script), stage(slot, script)]
    assert receipts[0] == receipts[1]
    if script == "adopt":
        for each in (once, slot):
            each.zadd(b"foreign", each.fresh_score())
    answer = ACTS[script](once, receipts[0])
    with connect(proxy.url) as client:
        slot.broker.load_scripts()
        proxy.drop_reply(containing=script_of(script, options).sha)
        with pytest.raises(ServerUnavailable):
            ACTS[script](through(slot, client), receipts[0])
        proxy.wait_for_drop()

    if script == "prepare":
        # Never repeated: the caller acquires again, which fences the late copy, and asks what it holds.
        epoch = slot.acquire()
        assert slot.take(epoch=epoch - 1).status == "fenced"
        held = {h.delivery.member: h for h in slot.list_held("A")}
        assert all(held[delivery.member].delivery == delivery for delivery in answer.deliveries)
        assert {held[delivery.member].receipt for delivery in answer.deliveries} == {answer.receipt}
    elif script == "acquire":
        assert slot.acquire() > answer
    elif script == "acquire_slots":
        again = ACTS[script](slot, receipts[0])
        assert all(one.epoch > first.epoch for one, first in zip(again, answer, strict=True))
    elif script in READ_ONLY:
        assert ACTS[script](slot, receipts[0]) == answer
    else:
        assert ACTS[script](slot, receipts[0]) == REPEATED[script]

    without = {"epoch", "last_place", *TOLD_TWICE}
    assert comparable(once, *without) == comparable(slot, *without)
    assert drift(slot) == drift(once) == Drift(0, 0, 0, 0)


class Nowhere:
    """The place of a command without keys."""

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        return ()


def put(pipeline: RedisPipeline, *command: Any) -> None:
    """Put a command of the test's own between the calls of a pipeline."""
    pipeline.add(RedisCommand(command[0], Nowhere(), command[1:], lambda reply: reply))


@pytest.mark.parametrize("script", sorted(ACTS))
def test_a_script_that_the_server_has_forgotten_is_given_again(
    redis_client: redis.Redis, prefix: str, script: str
) -> None:
    kind = KINDS.get(script, TopicType.FIXED_TIME)
    slot, other = (slot_of(redis_client, f"{prefix}{name}:", kind) for name in ("one", "two"))
    receipt = stage(slot, script)
    assert stage(other, script) == receipt
    answer = ACTS[script](other, receipt)
    redis_client.script_flush()
    assert ACTS[script](slot, receipt) == answer
    assert comparable(slot) == comparable(other)


@pytest.mark.parametrize("when", ["between", "within"])
def test_a_flush_of_all_scripts_costs_a_pipeline_nothing(
    redis_client: redis.Redis, prefix: str, when: str
) -> None:
    slot = slot_of(redis_client, prefix, identity="body")
    broker = Broker(redis_client, prefix, slot.clock)
    receipt = stage(slot)
    pipeline: Any = broker.pipeline()
    pipeline.count(slot.topic, 0)
    assert len(pipeline.execute()) == 1
    if when == "between":
        redis_client.script_flush()
    pipeline.send_replace(slot.topic, 0, [slot.now_ms], [b"x"])
    put(pipeline, *(("SCRIPT", "FLUSH") if when == "within" else ("PING",)))
    pipeline.send_replace(slot.topic, 0, [slot.now_ms + 5], [b"x"])
    pipeline.send_replace(slot.topic, 0, [slot.now_ms + 9], [b"x"])
    pipeline.commit(slot.topic, 0, receipt, [b"flying"])
    first, _, second, third, committed = pipeline.execute()
    assert [sent[0].status for sent in (first, second, third)] == ["stored", "replaced", "replaced"]
    assert committed == ["ok"]
    assert slot.zset("store")[b"x"] == slot.now_ms + 9


class Recorder(Methods):
    """Answers with the call that would be made."""

    def run(self, call: Call[Any]) -> Any:
        return call


def keys_of(script: str, slot: Slot) -> list[bytes]:
    recorded: Any = Slot(Recorder(), slot.keyspace, slot.clock, slot.topic)
    if script in SENDS:
        score: Any = 0 if script in ("send_merge", "send_fifo") else [slot.now_ms]
        call = getattr(recorded.broker, script)(slot.topic, 0, score, [b"a"])
    elif script == "rollback":
        call = recorded.rollback(1, [])
    else:
        call = ACTS[script](recorded, 1)
    assert call.script.removesuffix(lua.SECOND) == script
    return list(call.keys(slot.broker.prefix))


UNTOUCHED = {
    # Touched only while something is claimed, or inserted: tests/contract/test_claims.py
    "prepare": ("claim", "claims", "claim_body", "claim_failed", "inserting"),
    # A push asks only whether they exist: tests/contract/test_pushing.py
    **dict.fromkeys(("send_merge", "send_replace"), ("prepare", "inflight")),
    "send_fifo": ("inflight",),
}
"""Keys of a script whose types it does not look at in the slot of this test."""


@contextmanager
def spoiled(client: redis.Redis, key: bytes, how: str) -> Iterator[None]:
    """Let a key have another type in this block."""
    whole: Any = client.dump(key)
    client.delete(key)
    if how == "string":
        client.set(key, "x")
    elif how == "list":
        client.rpush(key, "x")
    elif how == "hash":
        client.hset(key, "x", "1")
    else:
        client.zadd(key, {"x": 1})
    yield
    client.delete(key)
    if whole:
        client.restore(key, 0, whole)


OF_MANY_SLOTS = {"heads", "acquire_slots", "find_occupied", "find_paused", "count_slots", "scatter"}


@pytest.mark.parametrize(
    ("script", "kind", "options"),
    [
        *(
            pytest.param(script, KINDS.get(script, TopicType.FIXED_TIME), {}, id=script)
            for script in sorted(set(ACTS) - OF_MANY_SLOTS)
        ),
        *SECOND_FORMS,
    ],
)
def test_a_key_of_a_foreign_type_is_named_and_nothing_changes(
    redis_client: redis.Redis, prefix: str, script: str, kind: TopicType, options: dict[str, Any]
) -> None:
    slot = slot_of(redis_client, prefix, kind, **options)
    receipt = stage(slot, script)
    names = dict(zip(slot.keys, SlotKeys._fields, strict=True))
    names |= {trash_key(prefix, "topic", 0, act): "trash" for act in ("", "act")}
    held = contents(redis_client, prefix)
    keys = keys_of(script, slot)
    assert keys
    for key in keys:
        if names[key] in UNTOUCHED.get(script, ()):
            continue
        for how in ("string", "list", "hash" if names[key] in ZSETS else "zset"):
            with spoiled(redis_client, key, how):
                before = raw(redis_client, prefix)
                with pytest.raises(WrongType) as caught:
                    ACTS[script](slot, receipt)
                assert f"{key.decode()} is a {how}, not a " in str(caught.value)
                assert raw(redis_client, prefix) == before
    assert contents(redis_client, prefix) == held


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("identity", ["key", "body"])
def test_a_lone_send_names_a_key_of_a_foreign_type_and_changes_nothing(
    redis_client: redis.Redis, prefix: str, kind: TopicType, identity: str
) -> None:
    slot = slot_of(redis_client, prefix, kind, identity=identity)
    slot.send(b"before")
    for name in ("store", "retry", "body", "stats", "control"):
        key = getattr(slot.keys, name)
        for how in ("string", "hash" if name in ZSETS else "zset"):
            with spoiled(redis_client, key, how):
                before = raw(redis_client, prefix)
                with pytest.raises(WrongType, match=f"is a {how}, not a ") as caught:
                    slot.send(b"new")
                assert key.decode() in str(caught.value)
                assert raw(redis_client, prefix) == before
    assert [sent.status for sent in slot.send(b"new")] == ["stored"]


def test_many_slots_are_acquired_whatever_one_of_them_holds(redis_client: redis.Redis, prefix: str) -> None:
    slot = slot_of(redis_client, prefix)
    for name in ("store", "retry", "prepare", "control", "claimants"):
        key = getattr(slot.keys, name)
        for how in ("string", "list"):
            with spoiled(redis_client, key, how):
                before: Any = redis_client.dump(key)
                [foreign, other] = slot.broker.acquire_slots(slot.topic, [0, 1])
                assert not foreign.is_asleep
                assert (foreign.epoch is None) is (name == "control")
                assert other.is_asleep
                assert redis_client.dump(key) == before
        redis_client.delete(key)


def test_the_slow_poll_calls_a_slot_with_a_foreign_type_due_and_answers_for_the_others(
    redis_client: redis.Redis, prefix: str
) -> None:
    slot = slot_of(redis_client, prefix)
    stage(slot)
    waiting = Slot(slot.broker, slot.keyspace, slot.clock, slot.with_topic(name="other").topic)
    waiting.send(b"later", score=slot.now_ms + 5_000)
    for name in ("store", "retry", "prepare", "control", "claimants"):
        with spoiled(redis_client, getattr(slot.keys, name), "string"):
            before = raw(redis_client, prefix)
            assert slot.broker.heads(slot.topic, [0])[0] == 0
            assert slot.broker.heads(waiting.topic, [0]) == [slot.now_ms + 5_000]
            assert raw(redis_client, prefix) == before


@pytest.fixture(scope="module")
def small_server() -> Iterator[redis.Redis]:
    with RedisServer(maxmemory_policy="noeviction") as server, connect(server.url) as client:
        yield client


@contextmanager
def memory_full(client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("more", "x")
        yield
    finally:
        client.config_set("maxmemory", "0")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("identity", ["body", "key"])
def test_a_full_server_refuses_sends_and_nothing_is_written(
    small_server: redis.Redis, prefix: str, kind: TopicType, identity: str
) -> None:
    slot = slot_of(small_server, prefix, kind, identity=identity)
    stage(slot)
    unused = Slot(slot.broker, slot.keyspace, slot.clock, slot.with_topic(name="unused").topic)
    with memory_full(small_server):
        before = raw(small_server, prefix)
        for send_it in (
            lambda: slot.send(b"new"),
            lambda: slot.send(b"new", b"waiting", b"resting", b"flying"),
            lambda: slot.send(b"resting"),
            lambda: slot.send(b"flying"),
            lambda: ensure(slot),
            lambda: unused.send(b"new"),
            lambda: ensure(unused),
            *([lambda: slot.replay([b"dead"], [slot.envelope(b"edited")])] if identity == "key" else []),
            *([lambda: ACTS["put_tick"](slot, 0)] if suits("put_tick", kind) and identity == "key" else []),
        ):
            with pytest.raises(ServerFull):
                send_it()
            assert raw(small_server, prefix) == before
        # Nothing was done, so `send_merge` sends these, and is refused.
        assert slot.broker.scatter(slot.topic, [1, 2], 0, [b"new", b"new"]) == [None, None]
        assert raw(small_server, prefix) == before


@pytest.mark.parametrize(
    ("script", "kind", "options"),
    [one for one in IN_EACH_FORM if one.values[0] not in {*SENDS, "scatter", "adopt", "put_tick"}],
)
def test_on_a_full_server_everything_else_does_what_it_always_does(
    small_server: redis.Redis, prefix: str, script: str, kind: TopicType, options: dict[str, Any]
) -> None:
    free, full = (slot_of(small_server, f"{prefix}{name}:", kind, **options) for name in ("free", "full"))
    receipt = stage(free, script)
    assert stage(full, script) == receipt
    answer = ACTS[script](free, receipt)
    with memory_full(small_server):
        assert ACTS[script](full, receipt) == answer
    assert comparable(full) == comparable(free)
    assert full.hash("outcomes").keys() == full.zset("outcome_times").keys()
    if options and script in ("commit", "progress"):
        assert digest(b"flying") in full.hash("outcomes")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("state", ["retry", "dead"])
def test_on_a_full_server_a_person_can_make_room(
    small_server: redis.Redis, prefix: str, kind: TopicType, state: str
) -> None:
    slot = slot_of(small_server, prefix, kind)
    stage(slot)
    with memory_full(small_server):
        assert slot.purge(state) > 0
        assert slot.pause(True) == "paused"
        assert slot.pause(False) == "resumed"
    assert slot.zset(state) == {}
    assert drift(slot) == Drift(0, 0, 0, 0)


def test_a_full_server_deletes_without_keeping(small_server: redis.Redis, prefix: str) -> None:
    slot, trash = slot_of(small_server, prefix), TrashShare("act", 10, 10_000)
    stage(slot)
    calls: list[Any] = [
        operate.remove(slot.topic, 0, [b"waiting"], "live"),
        operate.discard(slot.topic, 0, [slot.zset("dead")[b"dead"]], [b"dead"]),
        operate.purge(slot.topic, 0, "retry"),
    ]
    with memory_full(small_server):
        answers = [slot.broker.run(into_trash(call, trash)) for call in calls]
        assert slot.restore("act") == Restored("0", 0, 0)
    assert [answer.answer for answer in answers] == [["waiting"], ["dead"], 2]
    assert {answer[1:] for answer in answers} == {(0, 0)}
    assert drift(slot) == Drift(0, 0, 0, 0)


@pytest.mark.parametrize("kind", TYPES)
def test_a_full_server_drains_whether_listeners_succeed_or_fail(
    small_server: redis.Redis, prefix: str, kind: TopicType
) -> None:
    slot = slot_of(small_server, prefix, kind, max_retries=2)
    good, bad = [b"good%d" % i for i in range(30)], [b"bad%d" % i for i in range(30)]
    slot.send(*good, *bad)
    given_back: set[bytes] = set()
    with memory_full(small_server):
        slot.acquire()
        for _ in range(100):
            answer = slot.take(7)
            if answer.status != "ok":
                break
            names = {delivery.member for delivery in answer.deliveries}
            assert set(slot.extend(answer.receipt, sorted(names))) == {"ok"}
            back = names - given_back
            given_back |= back
            assert set(slot.release(answer.receipt, sorted(back))) <= {"ok"}
            assert set(slot.commit(answer.receipt, sorted((names - back) & set(good)))) <= {"ok"}
            assert set(slot.fail(answer.receipt, *(names - back) & set(bad), error="x" * 2_000)) <= {"ok"}
            slot.clock.advance(2)
        assert answer.status == "empty"
        assert set(slot.zset("dead")) == set(bad)
        assert set(slot.remove(bad)) == {"dead"}
    assert slot.zset("store") == slot.zset("prepare") == slot.zset("retry") == slot.zset("dead") == {}
    assert slot.hash("body") == slot.hash("failures") == slot.hash("deaths") == {}
    assert drift(slot) == Drift(0, 0, 0, 0)
    assert (slot.counted("committed"), slot.counted("failed"), slot.counted("released")) == (30, 90, 60)


def test_on_a_full_server_what_a_stranger_sent_into_an_unused_slot_is_handed_out(
    small_server: redis.Redis, prefix: str
) -> None:
    slot = slot_of(small_server, prefix, identity="body")
    slot.zadd(b"foreign", slot.fresh_score())
    with memory_full(small_server):
        receipt, delivery = slot.take_one()
        assert slot.commit(receipt, [delivery.member]) == ["ok"]
    assert slot.hash("control")[b"timeout"] == b"30"


def test_on_a_full_server_a_record_dated_ahead_is_dated_now(small_server: redis.Redis, prefix: str) -> None:
    slot = slot_of(small_server, prefix, identity="body")
    slot.send(b"a")
    receipt, _ = slot.take_one()
    small_server.zadd(slot.keys.prepare, {b"a": (slot.now_ms // 1000 + 86_400) * 1000 + 16})
    with memory_full(small_server):
        assert slot.time_out() == 0
    assert slot.zset("prepare") == {b"a": slot.now_ms // 1000 * 1000 + 16}
    assert slot.commit(receipt, [b"a"]) == ["ok"]


def every_write(slot: Slot) -> Iterator[Callable[[], Any]]:
    """Yield a call of each script that must write when nothing has been staged."""
    yield lambda: slot.send(b"a")
    yield lambda: ensure(slot)
    yield slot.acquire
    yield slot.take
    yield slot.pause


@pytest.fixture
def two_servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    with RedisServer() as first, RedisServer(repl_diskless_sync=False) as second:
        yield first, second


@pytest.mark.slow
def test_a_replica_that_loads_is_read_only_or_has_lost_its_primary_is_trouble_that_passes(
    two_servers: tuple[RedisServer, RedisServer],
) -> None:
    primary, replica = two_servers
    with connect(primary.url) as client, connect(replica.url) as other:
        slot = slot_of(client, "p:")
        slot.send(b"a")
        # 10 MB in keys of 2 ms each: a server that loads looks at its clients after every 2 MB.
        for i in range(1_000):
            client.set(f"filler{i}", os.urandom(10_000))
        other.config_set("key-load-delay", "2000")
        other.execute_command("REPLICAOF", "127.0.0.1", primary.port)
        eventually(lambda: other.info("persistence")["loading"] == 1)
        seen = through(slot, other)
        with pytest.raises(ServerUnavailable):
            seen.count()
        eventually(lambda: other.info("replication")["master_link_status"] == "up")
        assert seen.count().store == 1
        for write in every_write(seen):
            with pytest.raises(ServerUnavailable):
                write()
        other.config_set("replica-serve-stale-data", "no")
        primary.stop()
        eventually(lambda: other.info("replication")["master_link_status"] == "down")
        with pytest.raises(ServerUnavailable):
            seen.count()
        other.execute_command("REPLICAOF", "NO", "ONE")
        assert seen.take().status == "ok"


def test_a_primary_without_its_replicas_is_trouble_that_passes() -> None:
    with RedisServer(min_replicas_to_write=1) as server, connect(server.url) as client:
        slot = slot_of(client, "p:")
        for write in every_write(slot):
            with pytest.raises(ServerUnavailable):
                write()
        assert client.keys("*") == []
        client.config_set("min-replicas-to-write", "0")
        assert slot.send(b"a")[0].status == "stored"


def test_a_server_that_knows_us_not_or_allows_us_not_refuses() -> None:
    with RedisServer() as server, connect(server.url, password="secret") as admin:
        with connect(server.url) as client:
            client.config_set("requirepass", "secret")
        slot = slot_of(admin, "p:")
        slot.send(b"a")
        before = raw(admin, "p:")
        scripts_only = {"commands": ["+evalsha", "+script"], "keys": ["*"]}
        other_keys = {"categories": ["+@all"], "keys": ["other:*"]}
        for name, rights in (("commands", scripts_only), ("keys", other_keys), ("nothing", {})):
            admin.acl_setuser(name, enabled=True, passwords=["+p"], **rights)
        slot.broker.load_scripts()
        identities: list[dict[str, Any]] = [{}, {"password": "wrong"}]
        identities += [{"username": name, "password": "p"} for name in ("commands", "keys", "nothing")]
        for credentials in identities:
            with connect(server.url, **credentials) as client:
                refused = through(slot, client)
                reads = (refused.count, refused.audit_ledger, refused.broker.definitions)
                for call in (*every_write(refused), *reads):
                    with pytest.raises(ServerRefused):
                        call()
        assert raw(admin, "p:") == before


def test_a_cut_in_the_middle_of_a_pipeline_fails_every_call_and_the_next_gets_its_own_answer(
    redis_client: redis.Redis, prefix: str, proxy: TcpProxy
) -> None:
    slot = slot_of(redis_client, prefix, identity="body")
    with connect(proxy.url, max_connections=1) as client:
        broker = Broker(client, prefix, slot.clock)
        pipeline: Any = broker.pipeline()
        pipeline.send_replace(slot.topic, 0, [slot.now_ms], [b"before"])
        pipeline.send_replace(slot.topic, 0, [slot.now_ms], [b"marker"])
        pipeline.send_replace(slot.topic, 0, [slot.now_ms], [b"after"])
        broker.load_scripts()
        proxy.drop_reply(containing=b"marker")
        with pytest.raises(ServerUnavailable):
            pipeline.execute()
        proxy.wait_for_drop()
        assert broker.count(slot.topic, 0).store == 3
        assert broker.send_replace(slot.topic, 0, [slot.now_ms], [b"marker"])[0].status == "replaced"


def test_an_answer_that_comes_too_late_is_never_read_by_another_call(
    redis_client: redis.Redis, prefix: str
) -> None:
    slot = slot_of(redis_client, prefix, identity="body")
    slot.send(b"a", b"b")
    pool = redis_client.connection_pool.connection_kwargs
    url = f"redis://{pool['host']}:{pool['port']}/{pool['db']}"
    with connect(url, max_connections=1) as client:
        broker = Broker(client, prefix, slot.clock)
        pipeline: Any = broker.pipeline()
        pipeline.count(slot.topic, 0)
        put(pipeline, "BLPOP", f"{prefix}nothing", 30)
        pipeline.audit_ledger(slot.topic, 0)
        pipeline.send()._connection._sock.settimeout(0.2)
        with pytest.raises(ServerUnavailable):
            pipeline.receive()
        for _ in range(3):
            assert broker.count(slot.topic, 0).store == 2


def test_a_server_that_is_not_there_is_unavailable(
    redis_client: redis.Redis, prefix: str, proxy: TcpProxy
) -> None:
    slot = slot_of(redis_client, prefix)
    with connect(proxy.url) as client:
        away = through(slot, client)
        proxy.cut()
        try:
            for call in (*every_write(away), away.count, away.broker.definitions, away.broker.ping):
                with pytest.raises(ServerUnavailable):
                    call()
            pipeline = away.broker.pipeline()
            pipeline.count(slot.topic, 0)
            with pytest.raises(ServerUnavailable):
                pipeline.execute()
        finally:
            proxy.mend()
        assert slot.keyspace.dump() == {}
        assert away.send(b"a")[0].status == "stored"


def test_a_frozen_server_is_unavailable_within_the_socket_time_out_and_acts_once_when_it_wakes() -> None:
    with RedisServer() as server, connect(server.url) as client, connect(server.url, 0.3) as hasty:
        slot = slot_of(client, "p:", identity="body")
        slot.broker.load_scripts()
        frozen = through(slot, hasty)
        frozen.count()
        server.pause()
        try:
            pipeline = frozen.broker.pipeline()
            pipeline.count(slot.topic, 0)
            others = (frozen.take, frozen.count, frozen.broker.load_scripts, pipeline.execute)
            for call in (lambda: frozen.send(b"a"), *others):
                began = time.monotonic()
                with pytest.raises(ServerUnavailable):
                    call()
                assert time.monotonic() - began < 30
        finally:
            server.resume()
        # What was on its way is done when the server wakes; nobody reads those answers any more.
        # (The send was the only one: each later call already waited for its new connection.)
        eventually(lambda: slot.counted("stored") == 1)
        assert slot.send(b"a")[0].status == "replaced"
        assert slot.zset("store").keys() == {b"a"}
        assert drift(slot) == Drift(0, 0, 0, 0)
