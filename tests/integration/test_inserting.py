"""What an insertion leaves when a part of it fails: everything as it was, or all of it, and never a Store without its name."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis

from django_rmq.core.commands import insert
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.topic import TopicType
from django_rmq.core.redis import wire
from django_rmq.exceptions import RmqError, ServerUnavailable
from tests.contract.slots import TYPES, Drift, Slot, drift, insertion
from tests.integration.test_faults import connect, memory_full, slot_of
from tests.support.brokers import Broker
from tests.support.servers import RedisServer, ReplicaPair, TcpProxy, ask, wait_until

kinds = pytest.mark.parametrize("kind", TYPES)
BEGIN, ADD, END = "begin", "add", "end"
PARTS = {BEGIN: 1, ADD: 2, END: 3}
ENDING, READING = ("insert", "end"), ("prepare", "claim", "shut")
MEMBERS = [b"a", b"b", b"c"]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(maxmemory_policy="noeviction") as found:
        yield found


@pytest.fixture
def make(server: RedisServer, prefix: str) -> Iterator[Callable[..., Slot]]:
    client = connect(server.url)
    numbers = count()
    yield lambda kind, **how: made(client, f"{prefix}{next(numbers)}:", kind, **how)
    client.close()


def made(client: redis.Redis, prefix: str, kind: TopicType, **how: Any) -> Slot:
    return slot_of(client, prefix, kind, identity="body", time_range_ms=5_000, **how)


def parts(slot: Slot, members: Sequence[bytes] = MEMBERS) -> list[Call[Any]]:
    score = 100 if slot.topic.is_priority else slot.now_ms + 5_000
    return insertion(slot.topic, 0, [score] * len(members), members)


def without(slot: Slot, *failing: str) -> list[Any]:
    """Run an insertion some of whose parts the server does not run."""
    left_out = {PARTS[name] for name in failing}
    return run_all(slot.broker, [call for index, call in enumerate(parts(slot)) if index not in left_out])


def is_whole(slot: Slot) -> bool:
    """Return whether nothing of an insertion is left, and the ledger knows of every message."""
    left = slot.zset("inserting") or b"inserting" in slot.hash("control")
    return not left and drift(slot) == Drift(0, 0, 0, 0)


@kinds
@pytest.mark.parametrize("waiting", [[], [b"a", b"x"]], ids=["empty", "waiting"])
@pytest.mark.parametrize("failing", [[BEGIN], [ADD], [BEGIN, ADD]], ids="-".join)
def test_without_begin_or_the_zadd_the_end_leaves_everything_as_it_was(
    make: Callable[..., Slot], kind: TopicType, waiting: list[bytes], failing: list[str]
) -> None:
    slot = make(kind)
    slot.insert(*waiting) if waiting else slot.configure()
    before = slot.snapshot()
    without(slot, *failing)
    assert slot.snapshot() == before
    assert is_whole(slot)


@kinds
@pytest.mark.parametrize("waiting", [[], [b"a", b"x"]], ids=["empty", "waiting"])
@pytest.mark.parametrize("meanwhile", [[], [b"a", b"x", b"y"]], ids=["at once", "later"])
@pytest.mark.parametrize(
    ("by", "failing"),
    [
        *(pytest.param(by, [END], id=f"{by}-end") for by in (*ENDING, *READING)),
        *(pytest.param(by, [ADD, END], id=f"{by}-add-end") for by in (*ENDING, *READING)),
        # Only the next insertion has to know of a set that nobody began.
        *(pytest.param(by, [BEGIN, END], id=f"{by}-begin-end") for by in ENDING),
    ],
)
def test_what_an_end_that_failed_has_left_is_put_right_by_the_next_one(
    make: Callable[..., Slot],
    kind: TopicType,
    waiting: list[bytes],
    meanwhile: list[bytes],
    by: str,
    failing: list[str],
) -> None:
    slot = make(kind)
    slot.insert(*waiting) if waiting else slot.configure()
    without(slot, *failing)
    if meanwhile:
        slot.clock.advance("10ms")
        slot.send(*meanwhile, score=100 if kind is TopicType.PRIORITY else None)
    later = {member: slot.zset("store")[member] for member in meanwhile}
    if by == "insert":
        assert slot.insert(b"z") == {"stored": 1}
    elif by == "end":
        run_all(slot.broker, [insert.end_insertion(slot.topic, 0)])
    elif by == "prepare":
        slot.take(1)
    elif by == "claim":
        slot.claim("s", 1, 60_000, 1)
    else:
        assert slot.shut(1, only_empty=True) == (
            "holds" if waiting or meanwhile or failing == [END] else "shut"
        )
    came = {*MEMBERS} if failing == [END] else set()
    held = slot.zset("store")
    assert all(by >= 0 for _, by in slot.audit_ledger())
    taken = {*slot.zset("prepare"), *slot.zset("claim")}
    assert {*held, *taken} - {b"z"} == {*waiting, *meanwhile, *came}
    assert {member: held[member] for member in meanwhile if member in held} == {
        member: score for member, score in later.items() if member not in taken
    }
    assert is_whole(slot), slot.audit_ledger()
    assert slot.insert(*MEMBERS) is not None


def test_what_many_have_sent_meanwhile_is_put_right(make: Callable[..., Slot]) -> None:
    slot = make(TopicType.FIXED_TIME)
    for first in range(0, 2_500, 500):
        slot.insert(*(b"%d" % n for n in range(first, first + 500)))
    without(slot, END)
    slot.send(*(b"%d" % n for n in range(2_000, 2_900)))
    assert slot.insert(b"z") == {"stored": 1}
    assert len(slot.zset("store")) == 2_904 and is_whole(slot)


@kinds
def test_a_topic_is_not_retired_while_its_store_has_another_name(
    make: Callable[..., Slot], kind: TopicType
) -> None:
    slot = make(kind)
    without(slot, END)
    assert slot.retire() == "holds"


@kinds
def test_a_server_that_has_lost_its_scripts_has_inserted_nothing(
    make: Callable[..., Slot], kind: TopicType
) -> None:
    slot = make(kind)
    slot.insert(b"a", b"x")
    before = slot.snapshot()
    slot.broker.client.script_flush()
    assert run_all(slot.broker, parts(slot))[-1] is None
    slot.broker.load_scripts()
    run_all(slot.broker, [insert.end_insertion(slot.topic, 0)])
    assert slot.snapshot() == before


def refused(slot: Slot) -> None:
    """Check that an insertion is refused, and changes nothing."""
    before = slot.snapshot()
    answer = run_all(slot.broker, parts(slot))[-1]
    assert answer is None or isinstance(answer, RmqError), answer
    assert slot.snapshot() == before


@kinds
def test_a_full_server_inserts_nothing(make: Callable[..., Slot], kind: TopicType) -> None:
    slot = make(kind)
    slot.insert(b"a", b"x")
    with memory_full(slot.broker.client):
        refused(slot)
    assert slot.insert(*MEMBERS) is not None


@kinds
@pytest.mark.parametrize("denied", ["multi", "exec", "zadd", "evalsha", "rename", "hset", "zcard"])
def test_a_user_who_lacks_a_right_inserts_nothing(
    server: RedisServer, make: Callable[..., Slot], kind: TopicType, denied: str
) -> None:
    slot = make(kind)
    slot.insert(b"a", b"x")
    ask(server.port, "ACL", "SETUSER", "limited", "reset", "on", "nopass", "~*", "&*", "+@all", f"-{denied}")
    with connect(f"redis://limited:x@127.0.0.1:{server.port}/0") as client:
        other = Slot(Broker(client, slot.broker.prefix, slot.clock), slot.keyspace, slot.clock, slot.topic)
        before = slot.snapshot()
        asked = run_all(other.broker, insert.transaction_time())[-1]
        assert isinstance(asked, RmqError) == (denied in ("multi", "exec"))
        if not isinstance(asked, RmqError):
            answer = run_all(other.broker, parts(other))[-1]
            assert answer is None or isinstance(answer, RmqError)
    assert slot.snapshot() == before
    assert slot.insert(b"z") is not None and is_whole(slot)


def changed_before_exec(slot: Slot, server: RedisServer, change: Callable[[], object]) -> bytes:
    """Return the reply to EXEC if ``change`` happens after everything else has been queued."""
    commands = [wire.packed(wire.command(call, slot.broker.prefix, slot.clock)) for call in parts(slot)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"".join(commands[:-1]))
        heard = b""
        while heard.count(b"\r\n") < len(commands) - 1:
            heard += raw.recv(4_096)
        assert heard.count(b"+QUEUED") == len(commands) - 2, heard
        change()
        raw.sendall(commands[-1])
        return raw.recv(4_096)


@kinds
def test_a_server_that_is_full_by_the_time_of_exec_runs_nothing(
    server: RedisServer, make: Callable[..., Slot], kind: TopicType
) -> None:
    slot = make(kind)
    slot.insert(b"a", b"x")
    before, client = slot.snapshot(), slot.broker.client
    try:
        heard = changed_before_exec(slot, server, lambda: client.config_set("maxmemory", "1"))
    finally:
        client.config_set("maxmemory", "0")
    assert heard.startswith((b"-OOM", b"-EXECABORT")), heard
    assert slot.snapshot() == before


def test_a_server_that_is_a_replica_by_the_time_of_exec_runs_nothing(prefix: str) -> None:
    with RedisServer() as primary, RedisServer() as server, connect(server.url) as client:
        slot = made(client, prefix, TopicType.RANGE_MERGE)
        slot.insert(b"a", b"x")
        before = slot.snapshot()

        def follow() -> None:
            client.config_set("replica-serve-stale-data", "yes")
            client.execute_command("REPLICAOF", "127.0.0.1", 1)

        heard = changed_before_exec(slot, server, follow)
        assert heard.startswith((b"-READONLY", b"-EXECABORT")), heard
        assert slot.snapshot() == before
        refused(slot)
        client.execute_command("REPLICAOF", "NO", "ONE")
        assert slot.insert(*MEMBERS) == {"stored": 2, "merged": 1}
        assert primary.running


@kinds
def test_a_connection_that_ends_anywhere_before_exec_has_changed_nothing(
    server: RedisServer, make: Callable[..., Slot], kind: TopicType
) -> None:
    slot = make(kind)
    slot.insert(b"a", b"x")
    before = slot.snapshot()
    raw = b"".join(wire.packed(wire.command(call, slot.broker.prefix, slot.clock)) for call in parts(slot))
    for end in range(0, len(raw), 7):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
            line.sendall(raw[:end])
        assert slot.snapshot() == before, raw[:end]
    assert slot.insert(*MEMBERS) is not None and is_whole(slot)


@kinds
def test_an_insertion_whose_reply_was_lost_merges_when_it_is_repeated(
    server: RedisServer, make: Callable[..., Slot], kind: TopicType
) -> None:
    slot = make(kind)
    slot.insert(b"x")
    with TcpProxy(server.port) as proxy, connect(proxy.url) as client:
        broker = Broker(client, slot.broker.prefix, slot.clock)
        broker.load_scripts()
        broker.ping()
        proxy.drop_reply(containing=b"EXEC")
        with pytest.raises(ServerUnavailable):
            run_all(broker, parts(slot))
        proxy.wait_for_drop()
    assert set(slot.zset("store")) == {b"x", *MEMBERS}
    assert slot.insert(*MEMBERS) == {"merged" if kind is TopicType.RANGE_MERGE else "replaced": 3}
    assert is_whole(slot)


def test_nobody_sees_a_store_without_its_name(server: RedisServer, make: Callable[..., Slot]) -> None:
    slot = make(TopicType.RANGE_MERGE)
    slot.insert(b"first")
    seen: set[tuple[int, int]] = set()
    ended = threading.Event()

    def watch() -> None:
        with connect(server.url) as client:
            while not ended.is_set():
                pipeline = client.pipeline(transaction=False)
                pipeline.exists(slot.keys.store)
                pipeline.exists(slot.keys.inserting)
                seen.add(tuple(pipeline.execute()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for n in range(300):
            assert slot.insert(*(b"%d-%d" % (n, m) for m in range(200))) == {"stored": 200}
    finally:
        ended.set()
        watcher.join()
    assert seen == {(1, 0)}


@kinds
def test_a_replica_has_the_same(prefix: str, kind: TopicType) -> None:
    with ReplicaPair() as pair, connect(pair.primary.url) as client, connect(pair.replica.url) as other:
        slot = made(client, prefix, kind)
        slot.insert(*MEMBERS)
        slot.insert(b"c", b"d")
        client.wait(1, 5_000)
        wait_until(lambda: len(other.zrange(slot.keys.store, 0, -1)) == 4, "the replica")
        for name in ("store", "control", "stats", "inserting"):
            key = getattr(slot.keys, name)
            assert client.dump(key) == other.dump(key)


@kinds
def test_a_log_that_ends_within_an_insertion_is_loaded_without_it(prefix: str, kind: TopicType) -> None:
    with RedisServer(appendonly=True, appendfsync="always", aof_use_rdb_preamble=False) as server:
        with connect(server.url) as client:
            slot = made(client, prefix, kind)
            slot.insert(b"a", b"x")
            before = slot.snapshot()
            [log] = [file for file in Path(server.directory).rglob("*.aof") if ".incr." in file.name] or [
                Path(server.directory) / "appendonly.aof"
            ]
            start = log.stat().st_size
            slot.insert(*MEMBERS)
            after = slot.snapshot()
        server.stop()
        whole = log.read_bytes()
        part = whole[start:]
        assert part.count(b"RENAME") == 2 and b"ZADD" in part and part.rstrip().endswith(b"EXEC")
        for end in (part.index(b"RENAME") + 40, part.index(b"ZADD") + 30, part.rindex(b"RENAME") + 40, None):
            log.write_bytes(whole[:start] + part[:end])
            server.start()
            with connect(server.url) as client:
                again = made(client, prefix, kind)
                assert again.snapshot() == (after if end is None else before)
                assert is_whole(again)
            server.stop()
        server.start()
