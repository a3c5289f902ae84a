"""How driver and tasks find a Redis: sentinels, and credentials that a provider makes. Without a session of Spark."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import ConfigurationError, TopicMismatch
from django_rmq.spark.broker_connection import broker_of
from django_rmq.spark.declaring import declare
from django_rmq.spark.pipelines.pipeline import connection_options
from django_rmq.spark.reader import COLUMNS, Reader
from django_rmq.spark.source_options import CONNECTION, READ, SourceOptions
from tests.support.servers import RedisServer, SentinelGuard, ask

USER, PASSWORD = "token", "renewed"


class Provider:
    """Credentials as a cloud's provider gives them; the path of this class is an option."""

    def get_credentials(self) -> tuple[str, str]:
        return USER, PASSWORD


PROVIDER = f"{Provider.__module__}.{Provider.__name__}"


def send(options: dict[str, str], count: int) -> None:
    topic = declare(options, "priority", slots=2)
    producer = Producer(broker_of(SourceOptions(options, CONNECTION, "a test")))
    results = producer.send([producer.build(topic, n, priority=100) for n in range(count)])
    assert all(result.ok for result in results)


def read(options: dict[str, str]) -> int:
    """Read a topic as a driver and its tasks do."""
    reader = Reader(SourceOptions(options, READ, "a test"), COLUMNS)
    tasks = [pickle.loads(pickle.dumps((reader, task))) for task in reader.partitions()]
    return sum(batch.num_rows for executor, task in tasks for batch in executor.read(task))


@pytest.fixture(scope="module")
def guard() -> Iterator[SentinelGuard]:
    with SentinelGuard() as found:
        yield found


def test_sentinels_say_where_the_primary_is_also_after_its_death(guard: SentinelGuard) -> None:
    options = {
        "url": f"redis://{guard.SERVICE}/0",
        "sentinels": ",".join(f"{host}:{port}" for host, port in guard.addresses),
        "topic": "guarded",
        # Sentinels that a pause of the machine has confused promote nobody for half a minute.
        "patience": "180",
    }
    send(options, 100)
    assert read(options) == 100
    ask(guard.primary.port, "WAIT", "1", "5000")
    guard.primary.stop()
    # Driver and tasks ask again for as long as nobody has been promoted.
    assert read(options) == 100
    assert ask(guard.replica.port, "ROLE")[0] == b"master"


def test_pipelines_pass_sentinels_on() -> None:
    alias = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": "redis://rmq/3",
        "OPTIONS": {
            "SENTINELS": [("one", 26379), ("two", 26380)],
            "SENTINEL_KWARGS": {"password": "secret"},
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
        },
    }
    caches = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}, "rmq": alias}
    with override_settings(CACHES=caches, RMQ={"REDIS": "rmq", "TOPICS": {}}):
        told = connection_options()
    assert (told["url"], told["sentinels"]) == ("redis://rmq/3", "one:26379,two:26380")
    assert json.loads(told["secretSentinelOptions"]) == {"password": "secret"}
    broker_of(SourceOptions({**told, "topic": "any"}, CONNECTION, "a test"))


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with RedisServer() as server:
        ask(server.port, "ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~*", "&*", "+@all")
        ask(server.port, "ACL", "SETUSER", "default", "off")
        yield server.url


@pytest.mark.parametrize("given", ["option", "environment"])
def test_tasks_make_a_credential_provider_of_their_own(
    guarded: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"url": guarded, "topic": given}
    if given == "option":
        options["credentialProvider"] = PROVIDER
    else:
        monkeypatch.setenv("RMQ_CREDENTIAL_PROVIDER", PROVIDER)
    send(options, 10)
    assert read(options) == 10


def test_pipelines_say_how_a_provider_reaches_tasks(monkeypatch: pytest.MonkeyPatch, guarded: str) -> None:
    alias = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": guarded,
        "OPTIONS": {"CONNECTION_POOL_KWARGS": {"credential_provider": Provider()}},
    }
    caches = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}, "rmq": alias}
    with override_settings(CACHES=caches, RMQ={"REDIS": "rmq", "TOPICS": {}}):
        with pytest.raises(ConfigurationError, match="set RMQ_CREDENTIAL_PROVIDER to the dotted path"):
            connection_options()
        monkeypatch.setenv("RMQ_CREDENTIAL_PROVIDER", PROVIDER)
        told = connection_options()
    assert told["credentialProvider"] == PROVIDER and "secretConnectionOptions" not in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"credentialProvider": "nowhere.at_all"},
            "option credentialProvider: nowhere.at_all cannot be called",
        ),
        ({"credentialProvider": "builtins.dict"}, "makes a dict, not a credential provider"),
        ({"sentinels": "one,two"}, "option sentinels must be addresses like host:26379"),
        ({"sentinels": "one:1", "cluster": "true"}, "option sentinels has no meaning with cluster"),
        ({"secretSentinelOptions": "7"}, "option secretSentinelOptions must be a JSON object"),
    ],
)
def test_what_cannot_be_used_names_its_option(options: dict[str, str], said: str) -> None:
    given = SourceOptions({"url": "redis://rmq/0", "topic": "any", **options}, CONNECTION, "a test")
    with pytest.raises(ConfigurationError, match=said):
        broker_of(given)


def test_a_topic_is_declared_without_a_project(redis_url: str, prefix: str) -> None:
    options = {"url": redis_url, "prefix": prefix, "topic": "declared"}
    topic = declare(options, "range_merge", slots=8, slot_basis="sku", timeout=60)
    found = broker_of(SourceOptions(options, CONNECTION, "a test")).definitions()["declared"]
    assert found == topic.definition() and (found["slots"], found["slot_basis"]) == (8, "sku")
    # A program says it each time it begins.
    assert declare(options, "range_merge", slots=8, slot_basis="sku", timeout=60) == topic
    with pytest.raises(TopicMismatch, match="SLOT_BASIS"):
        declare(options, "range_merge", slots=8, timeout=60)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"type": "fifo"}, "type must be one of range_merge, priority, fixed_time, got 'fifo'"),
        ({"slots": 3}, "power of two"),
        ({"colour": 1}, "colour is not among slots, body, identity"),
        ({"body": "xml"}, "body must be one of json, text, bytes, got 'xml'"),
        ({"max_retries": 1_000}, "max_retries must be a whole number from 0 to 999"),
        ({"serial": 1}, "serial must be True or False"),
        ({"slot_basis": ""}, "slot_basis must be the name of a field"),
        ({"slot_basis": "sku", "body": "text"}, 'which needs body="json"'),
    ],
)
def test_a_declaration_is_checked(redis_url: str, prefix: str, settings: dict[str, Any], said: str) -> None:
    options = {"url": redis_url, "prefix": prefix, "topic": "wrong"}
    with pytest.raises(ConfigurationError, match=said):
        declare(options, **{"type": "priority", **settings})
    assert "wrong" not in broker_of(SourceOptions(options, CONNECTION, "a test")).definitions()
