"""What is said of a Redis that may lose messages, or that does not let us do what we need."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import redis
from django.core.checks import Error, Warning  # noqa: A004 - Django's name
from django.test import override_settings

from django_rmq import connections
from django_rmq.checks import check_redis
from django_rmq.conf import get_config
from django_rmq.core import lua
from django_rmq.core.model.server_checks import ServerInfo, flaws
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.redis.clients import _parse_info, translate
from django_rmq.exceptions import ConfigurationError, ServerUnavailable
from django_rmq.worker import startup
from tests.contract.keyspaces import RedisKeyspace
from tests.support.brokers import Broker, ClusterBroker, OracleBroker, project_on
from tests.support.servers import RedisCluster, RedisServer, ask
from tests.support.workers import client_of, cluster_of

WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)
TOPICS = {"work": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": "1ms"}}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of the test's own that keeps everything on disk."""
    with RedisServer(appendonly=True) as started:
        yield started


def found(server: RedisServer, *, strict: bool = False) -> list[str]:
    broker = Broker(client_of(server.url))
    try:
        return [flaw.name for flaw in flaws(broker, [WORK], strict=strict)]
    finally:
        broker.close()


def test_nothing_is_said_of_a_server_as_it_should_be_and_nothing_is_left_in_it(server: RedisServer) -> None:
    assert found(server, strict=True) == []
    client = client_of(server.url)
    assert RedisKeyspace(client, "").dump() == {}
    client.close()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("allkeys-lru", ["eviction"]),
        ("allkeys-random", ["eviction"]),
        ("volatile-lru", []),
        ("noeviction", []),
    ],
)
def test_a_policy_that_deletes_messages_is_named(server: RedisServer, policy: str, said: list[str]) -> None:
    ask(server.port, "CONFIG", "SET", "maxmemory-policy", policy)
    assert found(server) == found(server, strict=True) == said


def test_it_is_told_how_much_has_been_deleted_already(server: RedisServer) -> None:
    ask(server.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-random")
    for n in range(100):
        ask(server.port, "SET", f"stranger{n}", "x" * 10_000)
    ask(server.port, "CONFIG", "SET", "maxmemory", "1500000")
    ask(server.port, "SET", "one-more", "x" * 10_000)
    broker = Broker(client_of(server.url))
    (flaw,) = flaws(broker, [WORK])
    assert "it has deleted" in flaw.message
    broker.close()


@pytest.mark.parametrize(
    ("save", "relaxed", "strict"),
    [('""', ["persistence"], ["persistence"]), ("60 1000", [], ["persistence"])],
)
def test_a_server_that_forgets_is_named(save: str, relaxed: list[str], strict: list[str]) -> None:
    with RedisServer(save=save) as server:
        assert found(server) == relaxed
        assert found(server, strict=True) == strict


def test_an_old_server_is_named(monkeypatch: pytest.MonkeyPatch, server: RedisServer) -> None:
    told = ServerInfo("Redis", {"redis_version": "6.0.16", "aof_enabled": "1"}, {})
    broker = Broker(client_of(server.url))
    monkeypatch.setattr(broker, "servers", lambda: [told, told._replace(info={"aof_enabled": "1"})])
    (flaw,) = flaws(broker, [WORK])
    assert flaw.name == "version"
    assert "6.0.16" in flaw.message
    broker.close()


def restricted(server: RedisServer, *rules: str) -> Broker:
    ask(server.port, "ACL", "SETUSER", "shop", "reset", "on", ">secret", *rules)
    client = redis.Redis(port=server.port, username="shop", password="secret", protocol=2)
    return Broker(client, "shop:")


ALL = ("~*shop:*", "resetchannels", "&*shop:*", "+@all")


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (ALL, None),
        ((*ALL, "-@dangerous", "-@admin"), None),
        (("~shop:*", "resetchannels", "&*shop:*", "+@all"), "prepare_{shop:work_0}"),
        ((*ALL, "-zadd"), "ZADD"),
        ((*ALL, "-hincrby"), "HINCRBY"),
        ((*ALL, "-publish"), "PUBLISH"),
        ((*ALL, "-subscribe"), "subscribe"),
        ((*ALL, "-evalsha"), "evalsha"),
        ((*ALL, "-script"), "script"),
        (("~*shop:*", "resetchannels", "+@all"), "PUBLISH"),
    ],
)
def test_what_the_user_may_not_do_is_named(
    server: RedisServer, rules: tuple[str, ...], named: str | None
) -> None:
    broker = restricted(server, *rules)
    said = [flaw for flaw in flaws(broker, [WORK]) if flaw.name == "rights"]
    if named is None:
        assert said == []
        assert broker.refused([WORK]) == []
    else:
        assert len(said) == 1
        assert named in said[0].message
        assert len(said[0].message) < 2000
    broker.close()


def test_every_command_of_the_scripts_is_tried(server: RedisServer) -> None:
    texts = [lua.load(name).text.decode() for name in lua.all_names()]
    named = {word for text in texts for word in re.findall(r"redis\.p?call\('([A-Z]+)'", text)}
    assert len(named) > 15
    ask(server.port, "CONFIG", "RESETSTAT")
    broker = Broker(client_of(server.url))
    flaws(broker, [WORK])
    tried = {
        word.removeprefix("cmdstat_").partition("|")[0].upper()
        for word in _parse_info(ask(server.port, "INFO", "commandstats"))
    }
    assert named <= tried
    broker.close()


def test_a_server_that_does_not_say_is_doubted_only_by_the_strict(server: RedisServer) -> None:
    broker = restricted(server, *ALL, "-info")
    assert flaws(broker, [WORK]) == []
    assert [flaw.name for flaw in flaws(broker, [WORK], strict=True)] == ["persistence"]
    ask(server.port, "CONFIG", "SET", "appendonly", "no")
    hidden = restricted(server, *ALL, "-config")
    assert flaws(hidden, [WORK]) == []
    assert [flaw.name for flaw in flaws(hidden, [WORK], strict=True)] == ["persistence"]
    broker.close()
    hidden.close()


def test_every_primary_of_a_cluster_is_asked(redis_cluster: RedisCluster, prefix: str) -> None:
    client = cluster_of(redis_cluster)
    broker = ClusterBroker(client, prefix)
    told = flaws(broker, [WORK])
    assert [flaw.name for flaw in told] == ["persistence"] * 3
    assert len({flaw.message for flaw in told}) == 3
    client.close()


@pytest.mark.slow
def test_a_node_that_is_away_does_not_keep_the_others_from_being_asked(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisCluster(replicas=False, appendonly=True) as server:
        client = cluster_of(server, patience=0.05)
        broker = ClusterBroker(client, prefix)
        assert flaws(broker, [WORK], strict=True) == []
        away = server.primaries[1]
        away.kill()
        assert flaws(broker, [WORK], strict=True) == []
        # Its wake-ups are subscribed to at any node, also at one that was just away.
        (node,) = (node for node in client.primaries() if node.port == away.port)
        monkeypatch.setattr(client, "some_node", lambda: node)
        assert flaws(broker, [WORK], strict=True) == []
        client.close()


def test_workers_warn_and_start_or_refuse_where_durability_is_strict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with RedisServer() as server:
        with override_settings(RMQ={"REDIS": server.url, "TOPICS": TOPICS}):
            startup.check_start(get_config().topics.values())
            assert "stores nothing on disk" in caplog.text
            (warning,) = check_redis()
            assert isinstance(warning, Warning)
            assert warning.id == "django_rmq.W042"
            connections.close()
        with override_settings(RMQ={"REDIS": server.url, "TOPICS": TOPICS, "DURABILITY": "strict"}):
            with pytest.raises(ConfigurationError, match=r"stores nothing on disk.*appendonly yes"):
                startup.check_start(get_config().topics.values())
            (error,) = check_redis()
            assert isinstance(error, Error)
            assert error.id == "django_rmq.E042"
            connections.close()


def test_a_server_that_is_away_is_an_error_of_the_check(server: RedisServer) -> None:
    server.stop()
    with override_settings(RMQ={"REDIS": server.url, "TOPICS": TOPICS}):
        (message,) = check_redis()
        assert message.id == "django_rmq.E040" and message.msg.endswith("Connection refused.")
        assert ".." not in message.msg
        with pytest.raises(ServerUnavailable):
            connections.server_flaws([])
        connections.close()


def test_options_that_the_driver_refuses_are_an_error_of_the_check() -> None:
    with override_settings(RMQ={"REDIS": "redis://localhost:6379/1?bogus=1", "TOPICS": TOPICS}):
        (message,) = check_redis()
        assert message.id == "django_rmq.E040" and "(see bogus)" in message.msg
        connections.close()


def test_a_sentence_of_the_driver_ends_without_a_full_stop_so_that_more_may_follow() -> None:
    error = translate(redis.ConnectionError("Error 111 connecting to a:1. Connection refused."))
    assert str(error) == "Redis does not answer: Error 111 connecting to a:1. Connection refused"


def test_of_memory_nothing_is_said() -> None:
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": TOPICS, "DURABILITY": "strict"}):
        assert check_redis() == []
        startup.check_start(get_config().topics.values())
    with project_on(OracleBroker(), TOPICS=TOPICS):
        assert connections.server_flaws([]) == []
