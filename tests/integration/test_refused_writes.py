"""A server that answers and refuses writes: health, checks and metrics say so, and why, as soon as a send fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import html
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.checks import CheckMessage
from django.core.management import CommandError, call_command
from django.test import Client, override_settings
from django.urls import reverse
from django.utils import timezone

from django_rmq import SendResult, asend_message, connections, send_message, send_messages
from django_rmq.checks import check_redis
from django_rmq.conf import get_config
from django_rmq.core.commands import operate
from django_rmq.core.commands import send as send_commands
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.server_checks import ServerInfo
from django_rmq.exceptions import ServerFull, ServerTrouble, ServerUnavailable
from django_rmq.health_check import RmqHealthCheck
from django_rmq.operations import Actor, Operations
from django_rmq.operations.health import Finding, HealthThresholds, Severity
from django_rmq.worker import startup
from example_project.demo.redis_server import redis_server_binaries
from tests.support.brokers import Broker
from tests.support.reports import printed, samples
from tests.support.rights import rights
from tests.support.servers import RedisCluster, RedisServer, ReplicaPair, SentinelGuard, TcpProxy, ask
from tests.support.workers import Heard, Worker, client_of, eventually
from tests.support.workers import send as sent

TOPICS = {"work": {"TYPE": "fixed_time", "SLOTS": 4, "LISTENER": False}}


@pytest.fixture(autouse=True)
def no_server_waits_for_its_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that cannot write to its disk does not end by itself."""
    monkeypatch.setattr(RedisServer, "stop", RedisServer.kill)


@pytest.fixture(autouse=True)
def a_file_that_may_not_grow_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores SIGXFSZ; the servers that it starts inherit this."""
    monkeypatch.setattr(subprocess, "Popen", functools.partial(subprocess.Popen, restore_signals=False))


@contextlib.contextmanager
def connected(server: RedisServer | str | dict[str, Any], **rmq: Any) -> Iterator[None]:
    address = server.url if isinstance(server, RedisServer) else server
    with override_settings(RMQ={"REDIS": address, "TOPICS": TOPICS, **rmq}):
        try:
            yield
        finally:
            connections.close()


def findings(check: str = "writes") -> list[Finding]:
    health = Operations(Actor("tester", "test")).health(HealthThresholds())
    return [one for one in health.findings if one.name == check]


def said() -> str:
    """What is wrong with writes, which must be one finding."""
    (finding,) = findings()
    assert not finding.is_well
    return finding.text


def of_redis() -> dict[tuple[str, ...], float]:
    """The name of each sample about Redis and its node, and its value."""
    return {name: value for name, value in samples().items() if name[0].startswith("rmq_redis")}


def checked() -> list[tuple[str | None, str]]:
    found: list[CheckMessage] = check_redis()
    return [(one.id, one.msg) for one in found if one.id != "django_rmq.W042"]


def send() -> None:
    send_message("work", "x" * 1_000, fixed_time=timezone.now() + timedelta(days=1))


def fill(server: RedisServer) -> None:
    """Set a limit that is below what is used already."""
    ask(server.port, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    ask(server.port, "CONFIG", "SET", "maxmemory", "100kb")


def fail_snapshots(server: RedisServer) -> None:
    """Put a folder where the snapshot belongs."""
    (Path(server.directory) / "dump.rdb" / "in-the-way").mkdir(parents=True)
    ask(server.port, "CONFIG", "SET", "save", "3600 1000000")
    ask(server.port, "SET", "something", "1")
    with contextlib.suppress(Exception):
        ask(server.port, "BGSAVE")
    eventually(
        lambda: b"rdb_last_bgsave_status:err" in ask(server.port, "INFO", "persistence"), "the failure"
    )


def fail_to_append(server: RedisServer) -> None:
    """Let no file of the server grow any more."""
    ask(server.port, "CONFIG", "SET", "appendonly", "yes")
    eventually(
        lambda: (
            b"aof_rewrite_in_progress:0\r\naof_rewrite_scheduled:0" in ask(server.port, "INFO", "persistence")
        ),
        "the first append-only file",
    )
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, 1))
    eventually(lambda: is_refused(server), "the failure")


def is_refused(server: RedisServer) -> bool:
    try:
        ask(server.port, "SET", "something", "1")
    except redis.ResponseError as error:
        return "MISCONF" in str(error)
    return False


def ask_for_replicas(server: RedisServer) -> None:
    ask(server.port, "CONFIG", "SET", "min-replicas-to-write", "1")


REFUSALS: dict[str, tuple[Callable[[RedisServer], object], str]] = {
    "full": (fill, "its memory is full"),
    "snapshot": (fail_snapshots, "its last snapshot failed, and stop-writes-on-bgsave-error is on"),
    "append-only file": (fail_to_append, "it cannot write its append-only file"),
    "replicas": (ask_for_replicas, "0 of the 1 replicas that min-replicas-to-write requires are connected"),
}


@pytest.mark.parametrize("refuse", [pytest.param(refuse, id=name) for name, refuse in REFUSALS.items()])
@pytest.mark.parametrize("binary", redis_server_binaries(), ids=str)
def test_a_server_that_refuses_writes_is_seen_everywhere(
    binary: Path, refuse: tuple[Callable[[RedisServer], object], str]
) -> None:
    break_it, reason = refuse
    with RedisServer(binary=binary) as server, connected(server):
        send()
        assert [one.is_well for one in findings()] == [True]
        assert of_redis()["rmq_redis_writable", ""] == 1
        assert checked() == []
        break_it(server)
        with pytest.raises(ServerTrouble):
            send()
        assert said().startswith(f"Redis refuses writes: {reason}")
        (of_check,) = checked()
        assert of_check[0] == "django_rmq.E045" and reason in of_check[1]
        assert of_redis()["rmq_redis_writable", ""] == 0
        with pytest.raises(CommandError, match="checks failed; Redis refuses writes"):
            printed("rmqhealth", "--no-workers")
        with pytest.raises(Exception, match="Redis refuses writes"):
            RmqHealthCheck(needs_workers=False).run()


def test_a_failed_snapshot_that_stops_no_writes_is_a_note() -> None:
    with RedisServer() as server, connected(server):
        fail_snapshots(server)
        assert "its last snapshot failed" in said()
        ask(server.port, "CONFIG", "SET", "stop-writes-on-bgsave-error", "no")
        send()
        (finding,) = findings()
        assert finding.is_well and finding.text == "Redis: its last snapshot failed"


def test_a_read_only_replica_is_seen_and_also_one_that_takes_writes_which_are_lost() -> None:
    with ReplicaPair() as pair, connected(pair.replica):
        with pytest.raises(ServerTrouble):
            send()
        assert said() == "Redis refuses writes: it is a read-only replica"
        ask(pair.replica.port, "CONFIG", "SET", "replica-read-only", "no")
        assert "whose writes are lost" in said()
        pair.promote()
        assert [one.is_well for one in findings()] == [True]


@contextlib.contextmanager
def fixed_address() -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a primary, and what lets its replica take over behind it: connections to the former one stay."""
    with ReplicaPair() as pair, TcpProxy(pair.primary.port) as address:

        def fail_over() -> None:
            eventually(lambda: ask(pair.primary.port, "WAIT", 1, 1_000) == 1, "the replica having all writes")
            pair.promote()
            ask(pair.primary.port, "REPLICAOF", "127.0.0.1", pair.replica.port)
            address.target_port = pair.replica.port

        yield address.url, fail_over


def due() -> datetime:
    return timezone.now() + timedelta(days=1)


SENDS: dict[str, Callable[[], object]] = {
    "one": lambda: send_message("work", 1, fixed_time=due()),
    "several": lambda: send_messages("work", [1, 2], fixed_time=due()),
    "the first with a basis": lambda: send_message("work", 1, fixed_time=due(), slot_basis="a"),
}


@pytest.mark.parametrize("send_more", [pytest.param(way, id=name) for name, way in SENDS.items()])
def test_sends_find_the_primary_that_has_taken_over_behind_a_fixed_address(
    send_more: Callable[[], object],
) -> None:
    with fixed_address() as (url, fail_over), connected(url):
        send()
        fail_over()
        with pytest.raises(ServerUnavailable, match="read only"):
            send_more()
        send_more()


def test_shared_sends_find_the_primary_that_has_taken_over_behind_a_fixed_address() -> None:
    async def send_all() -> SendResult:
        for number in range(3):
            await asend_message("work", number, fixed_time=due())
        assert connections.get_shared_connection() is not None
        await asyncio.to_thread(fail_over)
        with pytest.raises(ServerUnavailable, match="read only"):
            await asend_message("work", 4, fixed_time=due())
        return await asend_message("work", 4, fixed_time=due())

    with fixed_address() as (url, fail_over), connected(url):
        assert asyncio.run(send_all()).status == "stored"


def test_a_worker_finds_the_primary_that_has_taken_over_behind_a_fixed_address() -> None:
    heard = Heard()
    with fixed_address() as (url, fail_over), connected(url):
        broker, topic = connections.get_broker("worker"), get_config().topic("work")
        with Worker(broker, topic, heard) as worker:
            worker.asleep()
            fail_over()
            with client_of(url) as client:
                sent(Broker(client), topic, list(range(8)), fixed_time=broker.now_ms())
            heard.wait(8)


def test_memory_is_reported_from_four_fifths_of_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server, connected(server):
        ask(server.port, "SET", "ballast", "x" * 10_000_000)
        assert ("rmq_redis_memory_limit_bytes", "") not in of_redis()
        ask(server.port, "CONFIG", "SET", "maxmemory", 100_000_000)
        assert checked() == []
        used = of_redis()["rmq_redis_memory_used_bytes", ""]
        assert used > 10_000_000
        limit = int(used * 1.1)
        ask(server.port, "CONFIG", "SET", "maxmemory", limit)
        assert of_redis()["rmq_redis_memory_limit_bytes", ""] == limit
        (finding,) = findings()
        assert finding.is_well and finding.as_json()["severity"] == "note"
        assert "its memory is almost full" in finding.text and "it refuses sends" in finding.text
        assert [id_ for id_, _ in checked()] == ["django_rmq.W046"]
        printed("rmqhealth", "--no-workers")
        ask(server.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        (finding,) = findings()
        assert "it deletes messages" in finding.text


def test_a_worker_starts_with_a_full_redis_even_if_durability_is_strict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with RedisServer(appendonly=True) as server, connected(server, DURABILITY="strict"):
        startup.check_start(get_config().topics.values())
        fill(server)
        startup.check_start(get_config().topics.values())
        assert "Redis refuses writes: its memory is full" in caplog.text


def test_each_primary_of_a_cluster_is_looked_at() -> None:
    with RedisCluster() as server, connected({"CLUSTER": server.url}):
        assert {one.is_well for one in findings()} == {True}
        nodes = {node for _, node in of_redis()}
        assert nodes == {f"127.0.0.1:{one.port}" for one in server.primaries}
        fill(server.primaries[1])
        assert said().startswith(f"the node 127.0.0.1:{server.primaries[1].port} refuses writes: its memory")
        assert [value for (name, _), value in of_redis().items() if name == "rmq_redis_writable"].count(
            0
        ) == 1


@pytest.mark.slow
def test_behind_sentinels_the_primary_is_looked_at() -> None:
    with SentinelGuard() as guard:
        sentinel = {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": f"redis://{guard.SERVICE}/0",
            "OPTIONS": {"SENTINELS": guard.addresses},
        }
        with override_settings(CACHES={**settings.CACHES, "guarded": sentinel}), connected("guarded"):
            assert [one.is_well for one in findings()] == [True]
            fill(guard.primary)
            assert "its memory is full" in said()


def test_the_documented_rights_are_enough_and_without_info_it_is_unknown() -> None:
    with RedisServer() as server:
        ask(server.port, "ACL", "SETUSER", "shop", "on", ">secret", *rights("shop:"))
        with connected(f"redis://shop:secret@127.0.0.1:{server.port}/0", KEY_PREFIX="shop:"):
            fill(server)
            assert "its memory is full" in said()
            # The user that may not read settings knows from INFO what it needs.
            ask(server.port, "ACL", "SETUSER", "shop", "-config")
            assert "its memory is full" in said()
            ask(server.port, "ACL", "SETUSER", "shop", "-info")
            (finding,) = findings()
            assert finding.is_well and "unknown whether Redis takes writes" in finding.text
            assert of_redis() == {}
            with pytest.raises(ServerFull):
                send()


WELL = {"role": "master", "rdb_last_bgsave_status": "ok", "aof_enabled": "1", "aof_last_write_status": "ok"}


@pytest.mark.parametrize(
    ("info", "config", "reasons", "warnings"),
    [
        ({}, {}, 0, 0),
        ({"used_memory": "90", "maxmemory": "100"}, {}, 0, 1),
        ({"used_memory": "101", "maxmemory": "100"}, {}, 1, 0),
        ({"used_memory": "101", "maxmemory": "100", "maxmemory_policy": "volatile-lru"}, {}, 1, 0),
        ({"used_memory": "101", "maxmemory": "100", "maxmemory_policy": "allkeys-lru"}, {}, 0, 1),
        ({"used_memory": "120", "maxmemory": "100", "mem_not_counted_for_evict": "50"}, {}, 0, 0),
        ({"used_memory": "101", "maxmemory": "0"}, {}, 0, 0),
        ({"rdb_last_bgsave_status": "err"}, {}, 1, 0),
        ({"rdb_last_bgsave_status": "err"}, {"stop-writes-on-bgsave-error": "no"}, 0, 1),
        ({"rdb_last_bgsave_status": "err"}, {"save": ""}, 0, 1),
        ({"aof_last_write_status": "err"}, {}, 1, 0),
        ({"aof_last_write_status": "err", "aof_enabled": "0"}, {}, 0, 0),
        ({"min_slaves_good_slaves": "0"}, {}, 1, 0),
        ({"min_slaves_good_slaves": "1"}, {"min-replicas-to-write": "2"}, 1, 0),
        ({"min_slaves_good_slaves": "1"}, {}, 0, 0),
        ({"role": "slave", "slave_read_only": "1", "aof_last_write_status": "err"}, {}, 1, 0),
        ({"role": "slave", "slave_read_only": "0"}, {}, 1, 0),
        ({"used_memory": "a lot", "maxmemory": "none"}, {}, 0, 0),
    ],
)
def test_what_follows_from_info(
    info: dict[str, str], config: dict[str, str], reasons: int, warnings: int
) -> None:
    server = ServerInfo("Redis", {**WELL, **info}, config)
    assert (len(server.refusals), len(server.warnings)) == (reasons, warnings)


@pytest.mark.django_db
def test_a_server_that_has_deleted_messages_to_make_room_is_trouble_everywhere(
    staff: Callable[..., Client], capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisServer() as server, connected(server):
        ask(server.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        for n in range(100):
            ask(server.port, "SET", f"key{n}", "x" * 20_000)
        used = of_redis()["rmq_redis_memory_used_bytes", ""]
        ask(server.port, "CONFIG", "SET", "maxmemory", f"{used + 500_000:.0f}")
        assert all(finding.is_well for finding in findings())
        for n in range(100, 200):
            ask(server.port, "SET", f"key{n}", "x" * 20_000)
        (trouble,) = findings("eviction")
        assert trouble.severity is Severity.BAD
        probe = Operations(Actor("probe", "rest")).health(HealthThresholds(needs_workers=False), ())
        assert probe.is_well, "a web process serves on"
        assert re.fullmatch(
            "Redis: its memory was full, and it has deleted [0-9]+ keys since its start, because its "
            "maxmemory-policy is allkeys-random. Messages may be among them. Set maxmemory-policy noeviction",
            trouble.text,
        )
        call_command("rmqstats")
        assert trouble.text.partition(" keys")[2] in capsys.readouterr().out
        text = page(staff("view_topic").get(address("servers")))
        assert "Messages may be among them. Set maxmemory-policy noeviction" in text
        assert samples()["rmq_redis_deleted_keys", ""] > 0
        ask(server.port, "CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert findings("eviction") == []
        assert ("rmq_redis_deleted_keys", "") not in samples()


BODY = '{"much": "that somebody has typed"}'


@pytest.fixture
def boss(staff: Callable[..., Client]) -> Client:
    return staff(
        "view_topic", "view_bodies", "send_messages", "replay_messages", "edit_messages", "edit_topic"
    )


def page(response: Any) -> str:
    return html.unescape(response.content.decode())


def address(name: str, *args: str) -> str:
    return reverse(f"admin:django_rmq_topic_{name}", args=args)


@pytest.mark.parametrize(
    "refuse", [pytest.param(fill, id="full"), pytest.param(ask_for_replicas, id="replicas")]
)
def test_the_admin_says_that_redis_refuses_writes_and_keeps_what_was_typed(
    boss: Client, refuse: Callable[[RedisServer], object]
) -> None:
    with RedisServer() as server, connected(server):
        broker = connections.get_broker()
        topic = get_config().topic("work")
        broker.run(send_commands.send_replace(topic, 0, [broker.now_ms() - 1_000], [b'"old"']))
        broker.run(operate.bury(topic, 0, [b'"old"'], "test"))
        assert "refuses writes" not in page(boss.get(address("changelist")))
        refuse(server)
        for dashboard in ("changelist", "dashboard_live"):
            assert "Redis refuses writes: " in page(boss.get(address(dashboard)))
        answer = boss.post(address("send", "work"), {"body": BODY, "fixed_time": "2040-01-01T00:00"})
        assert answer.status_code == 503
        assert "Redis refuses writes." in page(answer) and "Redis is unavailable." not in page(answer)
        assert BODY in page(answer) and 'value="2040-01-01T00:00"' in page(answer)
        edited = boss.post(address("edit", "work", message_id(0, b'"old"')), {"body": BODY})
        assert BODY in page(edited) and "Redis refuses writes." in page(edited)
        ask(server.port, "CONFIG", "SET", "maxmemory", 0)
        ask(server.port, "CONFIG", "SET", "min-replicas-to-write", 0)
        assert "refuses writes" not in page(boss.get(address("changelist")))


def test_the_rest_api_does_not_call_it_full_when_the_disk_is(staff: Callable[..., Client]) -> None:
    with RedisServer() as server, connected(server):
        send()
        fail_snapshots(server)
        client, address = staff("send_messages", "view_topic"), "/api/rmq/topics/work/messages/"
        given = {"body": 1, "fixed_time": "2040-01-01T00:00:00Z"}
        answer = client.post(address, given, content_type="application/json")
        assert answer.status_code == 507 and answer.json()["code"] == "redis_full"
        assert answer.json()["detail"].startswith("Redis refuses writes")
        ready = Client().get("/api/rmq/health/ready/")
        assert (ready.status_code, ready.json()) == (503, {"ok": False})
