"""The steps of docs/deploy/backup.md: a copy by replication and one by a snapshot hold everything, and work goes on there."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_rmq.core.commands import fetch
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.topic_registration import register_topics
from example_project.demo.redis_server import NoRedisServer
from tests.support.brokers import Broker, set_clock
from tests.support.servers import RedisServer, absent, ask, wait_for_link, wait_until
from tests.support.workers import Heard, Worker, audit, client_of, eventually, live, send, total

TOPIC = Topic("moved", TopicType.PRIORITY, slots=4, timeout=60, max_retries=3)
KEYED = Topic("keyed", TopicType.PRIORITY, slots=2, timeout=60, max_retries=3, identity="key")
WAITING = 40
PAGE = Path(__file__).parents[2] / "docs/deploy/backup.md"


@pytest.fixture
def old() -> Iterator[RedisServer]:
    """A server with messages in every state."""
    try:
        server = RedisServer(repl_diskless_sync=True, repl_diskless_sync_delay=0)
    except NoRedisServer as error:
        absent(str(error))
    with server, client_of(server.url) as client:
        broker = Broker(client, "p:")
        register_topics(broker, [TOPIC, KEYED])
        send(broker, TOPIC, [{"n": -1}, {"n": -2}], priority=100)
        with Worker(broker, TOPIC, judge):
            eventually(lambda: live(broker, TOPIC) == 0, "the first messages being done")
        send(broker, TOPIC, [{"n": n} for n in range(WAITING)], priority=100)
        send(broker, KEYED, [{"n": "keyed"}], priority=100, key="k")
        # In flight, for somebody who will never report.
        epoch = broker.run(fetch.acquire(TOPIC, 0))
        broker.run(fetch.prepare(TOPIC, 0, "gone", epoch, 3))
        assert broker.audit_ledger(TOPIC, 0).prepare == 3
        yield server


def judge(message: Message) -> None:
    if message.body["n"] == -1:
        message.reject("bad")


def check(server: RedisServer) -> None:
    """Assert that all is there, and that a worker goes on with it."""
    with client_of(server.url) as client:
        check_all(Broker(client, "p:"))


def check_all(broker: Broker) -> None:
    heard = Heard()
    assert broker.definitions().of("moved") == TOPIC.definition()
    assert live(broker, TOPIC) == WAITING and live(broker, KEYED) == 1
    assert total(broker, TOPIC, "died") == 1
    assert sum(ledger.prepare for ledger in audit(broker, TOPIC)) == 3
    # What is in flight has timed out.
    set_clock(broker, lambda: time.time_ns() // 1000 + 120_000_000)
    with Worker(broker, [TOPIC, KEYED], heard):
        eventually(lambda: live(broker, TOPIC) + live(broker, KEYED) == 0, "an empty queue")
    found = [body["n"] for body in heard.bodies]
    assert sorted(found, key=str) == sorted([*range(WAITING), "keyed"], key=str)
    assert total(broker, TOPIC, "expired") == 3


def test_a_replica_that_is_promoted_has_everything(old: RedisServer) -> None:
    with RedisServer(replicaof=f"127.0.0.1 {old.port}", appendonly=True) as new:
        wait_for_link(new)
        wait_until(lambda: offset(old, b"master_repl_offset") == offset(new, b"slave_repl_offset"), "no lag")
        ask(new.port, "REPLICAOF", "NO", "ONE")
        old.stop()
        check(new)


def offset(server: RedisServer, name: bytes) -> bytes:
    (line,) = [
        line for line in ask(server.port, "INFO", "replication").splitlines() if line.startswith(name + b":")
    ]
    return bytes(line)[len(name) :]


def snapshot(server: RedisServer, file: Path) -> None:
    """Write a snapshot of a server that runs, as an operator does: with the user of the docs."""
    client = shutil.which("redis-cli") or absent("redis-cli is not installed: apt-get install redis-tools")
    user = re.search("`ACL SETUSER backup (.*?)`", PAGE.read_text())
    assert user
    ask(server.port, "ACL", "SETUSER", "backup", *user[1].split())
    command = [client, "-u", f"redis://backup:password@127.0.0.1:{server.port}", "--rdb", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def test_a_snapshot_that_is_restored_has_everything_and_is_kept(old: RedisServer) -> None:
    new = RedisServer()
    copy = Path(new.directory) / "dump.rdb"
    snapshot(old, copy)
    old.stop()
    with new:
        # Not by the configuration file: a server that starts with appendonly yes does not read the snapshot.
        ask(new.port, "CONFIG", "SET", "appendonly", "yes")
        wait_until(
            lambda: b"aof_rewrite_in_progress:0" in ask(new.port, "INFO", "persistence"), "the rewrite"
        )
        wait_until(lambda: b"aof_last_bgrewrite_status:ok" in ask(new.port, "INFO", "persistence"), "its end")
        new.options["appendonly"] = True
        copy.unlink()
        new.stop()
        new.start()
        check(new)


def test_a_server_that_starts_with_an_append_only_file_ignores_a_snapshot(old: RedisServer) -> None:
    new = RedisServer(appendonly=True)
    snapshot(old, Path(new.directory) / "dump.rdb")
    with new:
        assert ask(new.port, "DBSIZE") == 0
