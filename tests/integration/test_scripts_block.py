"""How long each script keeps Redis from everybody else at its largest batch, in a slot with 100,000 messages.

The goal is 15 ms on a quiet machine of today. The tests print what they saw, and hold the scripts to what does not
depend on the machine: the work of 36 commands for each message of the batch, in the same Redis at the same time. What
counts is the time that Redis computes: it does not compute while other processes have its core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_rmq.core import lua
from django_rmq.core.commands import operate
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.commands.script_call import AtSlots
from django_rmq.core.model.bounds import BATCH, CLAIM_STEP
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.replies import Area, Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.exceptions import ServerRefused
from django_rmq.operations import stats
from django_rmq.testing import Clock
from tests.contract.slots import insertion
from tests.oracle.operate import RESTAMPED
from tests.oracle.reslot import MOVED
from tests.oracle.upkeep import UPKEEP
from tests.support.brokers import Broker
from tests.support.servers import RedisServer

PLAIN = """
for score, member in ipairs(ARGV) do redis.call('ZADD', KEYS[1], score, member) end
for _, member in ipairs(ARGV) do
  redis.call('ZREM', KEYS[1], member)
  redis.call('HSET', KEYS[2], member, member)
end
redis.call('UNLINK', KEYS[2])
"""
"""Three commands for each message: what the scripts are compared with."""
MOST_PLAIN = 12
"""How many times as long as ``PLAIN`` a script may take."""
WAITING = 100_000
START_MS = 1_800_000_000_000


def names(count: int, kind: str = "m") -> list[bytes]:
    """Return ``count`` members of 60 bytes."""
    return [f"{kind}{i:0{60 - len(kind)}d}".encode() for i in range(count)]


class Timed:
    """One slot on a server that notes how long every script took."""

    def __init__(
        self, client: redis.Redis, prefix: str, kind: TopicType, identity: str, keeps: bool = False
    ) -> None:
        self.client = client
        self.clock = Clock(START_MS)
        self.broker = Broker(client, prefix, self.clock)
        self.topic = Topic(
            "topic",
            kind,
            slots=1,
            identity=identity,
            max_body=1 << 20,
            backoff=BackOff(1_000, 600_000),
            outcome_retention_ms=3_600_000 if keeps else None,
        )
        self.took: dict[str, int] = {}
        self.plain = self.time_plain()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(self.broker, name)(self.topic, 0, *args, **kwargs)

    def time(self, label: str, call: Callable[[], Any]) -> Any:
        """Run ``call`` and note the µs of its slowest script under ``label``: at most what Redis computed meanwhile."""
        self.client.slowlog_reset()
        before = self.computed_us()
        answer = call()
        computed = self.computed_us() - before
        scripts = [entry for entry in self.client.slowlog_get(16) if entry["command"].startswith(b"EVAL")]
        assert scripts, label
        slowest = max(entry["duration"] for entry in scripts)
        self.took[label] = max(self.took.get(label, 0), min(slowest, computed))
        return answer

    def time_plain(self) -> int:
        """Return the µs of ``PLAIN``, the least of three."""
        keys = [f"{name}_{{{self.broker.prefix}plain_0}}" for name in ("set", "hash")]
        took = []
        for _ in range(3):
            self.time("plain", lambda: self.client.eval(PLAIN, 2, *keys, *names(BATCH)))
            took.append(self.took.pop("plain"))
        return min(took)

    def computed_us(self) -> int:
        """Return how long the server's main thread has computed since its start."""
        cpu = self.client.info("cpu")
        return round(1e6 * (cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]))

    def zcard(self, name: str) -> int:
        return int(self.client.zcard(f"{name}_{{{self.broker.prefix}topic_0}}"))

    def send(self, members: list[bytes], n: int = 0) -> Any:
        envelopes = [encode_envelope(Envelope(b"x" * 200))] * len(members) if self.topic.keyed else []
        if self.topic.type is TopicType.RANGE_MERGE:
            return self.send_merge(0, members, envelopes)
        if self.topic.is_fifo:
            return self.send_fifo(0, members, envelopes)
        score = 50 + n if self.topic.is_priority else self.clock() // 1000 + n
        return self.send_replace([score] * len(members), members, envelopes)

    def fill(self, kind: str = "m", count: int = WAITING) -> None:
        members = names(count, kind)
        for start in range(0, count, BATCH):
            self.send(members[start : start + BATCH])

    def take(self) -> tuple[int, list[bytes]]:
        answer = self.time("prepare", lambda: self.prepare("A", None, BATCH, max_bytes=1 << 40))
        assert answer.status == "ok", answer
        members = [delivery.member for delivery in answer.deliveries]
        return answer.receipt, members


def assert_within_bound(look: Callable[[int], Timed]) -> None:
    """Look up to three times, as a machine that is busy elsewhere asks for, and take the best of each script."""
    best: dict[str, int] = {}
    plain = 0
    for attempt in range(3):
        slot = look(attempt)
        best = {label: min(micros, best.get(label, micros)) for label, micros in slot.took.items()}
        plain = min(plain or slot.plain, slot.plain)
        if max(best.values()) <= MOST_PLAIN * plain:
            break
    figures = sorted(best.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{label} {micros / 1000:.1f} ms" for label, micros in figures)
    print(f"\n{slot.topic.type.value} {slot.topic.identity}: plain {plain / 1000:.1f} ms; {shown}")
    assert {label: micros for label, micros in best.items() if micros > MOST_PLAIN * plain} == {}


@pytest.fixture(scope="module")
def client() -> Iterator[redis.Redis]:
    with RedisServer(slowlog_log_slower_than=0, slowlog_max_len=16) as server:
        client = redis.Redis(port=server.port, socket_timeout=60, retry=Retry(NoBackoff(), 0))
        yield client
        client.close()


def fifo_scripts(slot: Timed) -> Timed:
    """Time what is different on fifo topics: sending, ends of whole batches, and a failure that holds the slot."""
    slot.send_fifo(0, names(BATCH, "plain"))
    slot.clock.advance(1)
    plain, members = slot.take()
    ended = slot.time("commit_delivery", lambda: slot.commit_delivery(plain, BATCH))
    assert (ended, len(members)) == (["ok"] * BATCH, BATCH)
    slot.fill()
    for delay_ms in (0, 5):
        members = names(BATCH, f"later{delay_ms}")
        envelopes = [encode_envelope(Envelope(b"x" * 200))] * BATCH
        slot.time("send_fifo", partial(slot.send_fifo, delay_ms, members, envelopes))
        slot.time("send_fifo again", partial(slot.send_fifo, delay_ms, members, envelopes))
    receipt, members = slot.take()
    slot.time(
        "rollback", lambda: slot.rollback(receipt, [Failure(member, error="x" * 1_024) for member in members])
    )
    slot.clock.advance(600)
    slot.time("promote", lambda: slot.promote(BATCH))
    receipt, members = slot.take()
    slot.time("release", lambda: slot.release(receipt, members))
    slot.take()
    slot.clock.advance(3_600)
    slot.time("time_out", lambda: slot.time_out(BATCH))
    slot.client.unlink(*slot.client.keys(f"*{slot.broker.prefix}*"))
    return slot


def every_script(slot: Timed) -> Timed:
    """Time every script at its largest batch."""
    kind = slot.topic.type
    slot.fill()
    send = "send_merge" if kind is TopicType.RANGE_MERGE else "send_replace"
    slot.time(f"{send} again", lambda: slot.send(names(BATCH), 1))
    slot.time(send, lambda: slot.send(names(BATCH, "new"), 1))
    slot.time("scatter", lambda: slot.broker.scatter(slot.topic, range(1, 65), 1, names(64)))
    scores = [1 if kind is TopicType.RANGE_MERGE else 60 if slot.topic.is_priority else START_MS] * BATCH
    envelopes = [encode_envelope(Envelope(b"x" * 200))] * BATCH if slot.topic.keyed else []
    slot.time("ensure again", lambda: slot.ensure(scores, names(BATCH), envelopes))
    slot.time("ensure", lambda: slot.ensure(scores, names(BATCH, "ensured"), envelopes))
    unkeyed = replace(slot.topic, name="inserted", identity="body", time_range_ms=0)
    score = 60 if slot.topic.is_priority else slot.clock() // 1000
    inserted = insertion(unkeyed, 0, [score] * BATCH, names(BATCH))
    for _ in range(2):
        assert slot.time("insert", lambda: run_all(slot.broker, inserted))[-1]
    if not slot.topic.is_priority:
        tick = (START_MS + 1, b"nightly@1", encode_envelope(Envelope(b"x" * 200)))
        slot.time("put_tick", lambda: slot.put_tick("nightly", 1, *tick))
        slot.time("retract", lambda: slot.retract("nightly", 2, *tick[:2]))
    slot.time("acquire", slot.acquire)
    many = replace(slot.topic, name="many")
    assert all(
        one.is_asleep
        for one in slot.time("acquire_slots", lambda: slot.broker.acquire_slots(many, range(1_024)))
    )

    receipt, members = slot.take()
    assert len(members) == BATCH
    assert set(slot.time("extend", lambda: slot.extend(receipt, members))) == {"ok"}
    slot.time("progress", lambda: slot.progress(receipt, members[0], 500, b"x" * 200))
    held = slot.time("list_held", lambda: slot.list_held("A", 0, BATCH))
    assert len(held) == BATCH
    slot.time(f"{send} in flight", lambda: slot.send(members))
    # Two batches of 3,000 are in flight, and newer copies of them wait at the head.
    second = slot.time("prepare past busy", lambda: slot.prepare("A", None, BATCH, max_bytes=1 << 40))
    assert second.status in ("ok", "more", "busy")
    assert set(slot.time("commit", lambda: slot.commit(receipt, members))) == {"ok"}
    if second.status == "ok":
        slot.commit(second.receipt, [delivery.member for delivery in second.deliveries])

    receipt, members = slot.take()
    error = "x" * 1_024
    failures = [Failure(member, error=error) for member in members]
    assert set(slot.time("rollback", lambda: slot.rollback(receipt, failures))) == {"ok"}
    slot.time(f"{send} superseding", lambda: slot.send(members))
    slot.clock.advance(600)
    receipt, members = slot.take()
    slot.rollback(receipt, [Failure(member, error=error) for member in members])
    slot.clock.advance(600)
    assert slot.time("promote", lambda: slot.promote(BATCH)) == BATCH

    receipt, members = slot.take()
    assert set(slot.time("release", lambda: slot.release(receipt, members))) == {"ok"}
    receipt, members = slot.take()
    slot.clock.advance(3_600)
    assert slot.time("time_out", lambda: slot.time_out(BATCH)) == BATCH
    receipt, members = slot.take()
    rejected = [Failure(member, "rejected", error=error) for member in members]
    assert set(slot.time("rollback to dead", lambda: slot.rollback(receipt, rejected))) == {"ok"}
    dead = [entry.member for entry in slot.list_messages("dead", limit=BATCH).entries]
    words = set(slot.time("replay", lambda: slot.replay(dead)))
    assert words == {"replayed"}

    waiting = [entry.member for entry in slot.list_messages("store", limit=BATCH, max_bytes=1 << 40).entries]
    new = [70 if slot.topic.is_priority else START_MS + 10_000_000] * BATCH
    slot.time("reschedule", lambda: slot.reschedule(new, waiting))
    assert set(slot.time("bury", lambda: slot.bury(waiting, error))) <= {"waiting", "resting"}
    half = waiting[: BATCH // 2]
    deaths = [entry.score for entry in slot.list_messages("dead", limit=1).entries] * len(half)
    assert set(slot.time("discard", lambda: slot.discard(deaths, half))) == {"dead"}
    assert set(slot.time("remove dead", lambda: slot.remove(waiting))) == {"dead", "not_found"}
    waiting = [entry.member for entry in slot.list_messages("store", limit=BATCH, max_bytes=1 << 40).entries]
    assert set(slot.time("remove", lambda: slot.remove(waiting))) == {"waiting"}

    claims(slot)

    for descending in (False, True):
        look = partial(slot.list_messages, "store", limit=BATCH, descending=descending, max_bytes=1 << 40)
        last = slot.time("list_messages", look).entries[-1]
        for member in (last.member, last.member + b"x"):
            after = (f"{last.score:.17g}", member)
            slot.time("list_messages", partial(look, after=after))
            search = partial(
                slot.search_messages, "store", b"nowhere", after=after, scan=BATCH, descending=descending
            )
            slot.time("search_messages", search)
            slot.time("search_messages", partial(search, where="error"))
    slot.time("group_deaths", partial(slot.group_deaths, scan=BATCH, max_bytes=1 << 40))
    move(slot)
    slot.time("count", slot.count)
    slot.time("count_between", lambda: slot.count_between("store"))
    slot.time("describe_messages", lambda: slot.describe_messages(waiting[:100]))
    slot.time("status", lambda: slot.status(waiting[0]))
    slot.time("ranks", lambda: slot.ranks("store", waiting[:100]))
    nobody = [b"%020d" % n for n in range(100)]
    for area in (Area("store"), Area("dead"), Area("store", 70, 500)):
        slot.time("find_by_digest", partial(slot.find_by_digest, nobody, [area]))
    for records in ("inflight", "deaths", "failures", "body", "claim_body", "claim_failed"):
        slot.time("find_orphans", partial(slot.find_orphans, records))
    slot.time("audit_ledger", slot.audit_ledger)
    slot.time("configure", slot.configure)
    purge = operate.purge(slot.topic, 0, "store", limit=BATCH)
    kept = operate.into_trash(purge, operate.TrashShare("act", BATCH, 1 << 30))
    assert slot.time("purge", lambda: slot.broker.run(kept)).answer
    # As many as one step of undoing asks of a slot.
    assert slot.time("restore", lambda: slot.restore("act")).back
    slot.time("adopt", lambda: slot.adopt(1, 0))
    slot.time("retire", slot.retire)
    slot.time("pause", slot.pause)
    counted = [AtSlots(slot.topic, [0])] * stats.COUNTED_AT_ONCE
    slot.time("count_slots", lambda: slot.broker.count_slots(counted))
    slot.time("heads", lambda: slot.broker.heads(slot.topic, [0] * 1_024))
    slot.time("find_occupied", lambda: slot.broker.find_occupied([AtSlots(slot.topic, [0] * 1_024)]))
    slot.time("find_paused", lambda: slot.broker.find_paused([AtSlots(slot.topic, [0] * 1_024)]))
    timed = {label.split(" ")[0] for label in slot.took}
    others = {"send_merge", "send_replace", "send_fifo", "commit_delivery"}
    others |= {"put_tick", "retract"} if slot.topic.is_priority else set()
    assert timed == set(lua.names()) - others | {send}
    slot.client.unlink(*slot.client.keys(f"*{slot.broker.prefix}*"))
    return slot


def move(slot: Timed) -> None:
    """Time the steps of a re-slotting at their largest: messages that failed, with bodies, and dead ones."""
    receipt, members = slot.take()
    slot.rollback(receipt, [Failure(member, error="x" * 1_024) for member in members])
    receipt, dead = slot.take()
    slot.rollback(receipt, [Failure(member, "rejected", error="x" * 1_024) for member in dead])
    slot.time("shut", lambda: slot.shut(1))
    assert slot.time("reslot_progress", slot.reslot_progress).is_shut
    target = replace(slot.topic, name="target")
    slot.broker.shut(target, 0, 1)
    last = 0
    for state, group in (("retry", members), ("dead", dead)):
        for part in (group[:MOVED], group[MOVED : 2 * MOVED]):
            pairs = [(state, member) for member in part]
            go = partial(slot.move_out, 1, 0, pairs, max_bytes=1 << 40)
            gone = slot.time("move_out", partial(go, arrived=last))
            assert (gone.status, len(gone.rows)) == ("moved", MOVED)
            assert slot.time("move_out staged", lambda: slot.move_out(1, 0)).status == "staged"
            come = partial(slot.broker.move_in, target, 0, 1, 0, gone.ticket, gone.rows)
            assert slot.time("move_in", come) == "in"
            last = gone.ticket
    slot.time("reopen", lambda: slot.reopen(1))


def claims(slot: Timed) -> None:
    """Time what Spark does, at its largest: every message has failed before, and there is a claim of ten batches."""
    size = 10 * BATCH
    receipt, members = slot.take()
    slot.rollback(receipt, [Failure(member, delay_ms=0, error="x" * 1_024) for member in members])
    for number, end in enumerate(("return", "spend", "time_out", "ack_claim", "ack_claim failed"), 1):
        held = 0
        while held < size:
            answer = slot.time("claim", lambda: slot.claim("s", number, 60_000, BATCH, max_bytes=1 << 40))  # noqa: B023
            assert answer.status == "ok" and answer.taken, answer
            held = answer.size
        slot.send(names(BATCH))
        assert slot.time("renew_claim", lambda: slot.renew_claim("s", number, 60_000, seal=True)) == held  # noqa: B023
        for offset in (0, held - BATCH):
            look = partial(slot.read_claim, "s", number, offset, BATCH)
            assert len(slot.time("read_claim", look).rows) == 2 * BATCH
        if end == "ack_claim failed":
            failed = [Failure(member, error="x" * 1_024) for member in look().rows[::2]]
            noted = slot.time("fail_claimed", partial(slot.fail_claimed, "s", number, failed))
            assert noted == ["ok"] * BATCH
        if end == "time_out":
            slot.clock.advance(60)
            while slot.zcard("claim"):
                slot.time("time_out claim", lambda: slot.time_out(BATCH))
        else:
            spent = end == "spend"
            give_back = partial(slot.return_claim, "s", number, spent=spent)
            acknowledges = end.startswith("ack_claim")
            call = partial(slot.ack_claim, "s", number) if acknowledges else give_back
            label = end if acknowledges else f"return_claim {end}"
            while slot.time(label, call)[1]:
                pass
    slot.client.delete(f"failures_{{{slot.broker.prefix}topic_0}}")
    slot.clock.advance(3_600)
    while slot.promote(BATCH):
        pass
    waiting = slot.count().store
    some = slot.time("claim step", lambda: slot.claim("s", 6, 60_000, waiting // 2, max_bytes=1 << 53))
    assert some.taken == (BATCH if slot.topic.keyed else CLAIM_STEP)
    slot.renew_claim("s", 6, 60_000, seal=True)
    assert slot.time("ack_claim whole", lambda: slot.ack_claim("s", 6)) == ("ok", 0)
    waiting = slot.count().store
    # As much as may be carried back, and as little.
    for number, rest in ((7, CLAIM_STEP), (8, 0)):
        take = partial(slot.claim, "s", number, 60_000, waiting - rest, max_bytes=1 << 53)
        assert slot.time("claim whole", take).taken == (BATCH if slot.topic.keyed else waiting - rest)
        while slot.return_claim("s", number)[1]:
            pass


def another_time_out(slot: Timed) -> Timed:
    """Time a change of TIMEOUT while more deliveries run than get new stamps, all with a time-out of their own."""
    slot.topic = replace(slot.topic, serial=False, max_prepared=WAITING)
    envelopes = [encode_envelope(Envelope(b"x" * 200, timeout=5))] * BATCH
    for n in range(2 * RESTAMPED // BATCH):
        slot.send_replace([slot.clock() // 1000] * BATCH, names(BATCH, f"m{n}-"), envelopes)
        slot.take()
    slot.topic = replace(slot.topic, timeout=60)
    assert slot.time("configure", slot.configure) == "ok"
    slot.client.unlink(*slot.client.keys(f"*{slot.broker.prefix}*"))
    return slot


def a_whole_upkeep(slot: Timed) -> Timed:
    """Time a prepare that expires and promotes as many as one may, and hands out as many."""
    slot.fill(count=4 * BATCH)
    receipt, members = slot.take()
    slot.rollback(receipt, [Failure(member, error="x" * 1_024) for member in members])
    slot.take()
    slot.clock.advance(3_600)
    slot.took.clear()
    _, members = slot.take()
    ledger = slot.audit_ledger()
    assert (ledger["expired"], ledger["prepared"]) == (UPKEEP, 2 * BATCH + len(members))
    return slot


# Each script of sends with messages of both kinds, and each type of topic.
@pytest.mark.parametrize(
    ("look", "kind", "identity", "keeps"),
    [
        *(
            pytest.param(look, *shape, id="-".join(map(str, (look.__name__, *shape))), marks=pytest.mark.slow)
            for look, *shape in (
                (every_script, TopicType.RANGE_MERGE, "body", False),
                (every_script, TopicType.RANGE_MERGE, "key", True),
                (every_script, TopicType.PRIORITY, "key", False),
                (every_script, TopicType.PRIORITY, "body", True),
                (every_script, TopicType.FIXED_TIME, "body", False),
                (fifo_scripts, TopicType.FIFO, "key", False),
                (another_time_out, TopicType.FIXED_TIME, "key", False),
            )
        ),
        pytest.param(a_whole_upkeep, TopicType.FIXED_TIME, "body", False, id="a_whole_upkeep"),
    ],
)
def test_no_script_blocks_redis_at_its_largest_batch(
    client: redis.Redis,
    prefix: str,
    look: Callable[[Timed], Timed],
    kind: TopicType,
    identity: str,
    keeps: bool,
) -> None:
    assert_within_bound(lambda attempt: look(Timed(client, f"{prefix}{attempt}:", kind, identity, keeps)))


def dumped(client: redis.Redis, prefix: str) -> dict[bytes, Any]:
    keys: Any = client.keys(f"*{prefix}*")
    return {key: client.dump(key) for key in keys}


@pytest.mark.parametrize("ending", ["commit", "release", "extend", "bury", "remove", "cancel"])
def test_more_than_the_largest_batch_is_refused_and_changes_nothing(
    client: redis.Redis, prefix: str, ending: str
) -> None:
    slot = Timed(client, prefix, TopicType.PRIORITY, "body")
    slot.send(names(10))
    receipt, _ = slot.take()
    many = names(BATCH + 1)
    before = dumped(client, prefix)
    with pytest.raises(ServerRefused, match="too many members"):
        getattr(slot, ending)(*([many] if ending in ("bury", "remove", "cancel") else [receipt, many]))
    assert dumped(client, prefix) == before
