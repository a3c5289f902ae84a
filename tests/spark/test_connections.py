"""How driver and tasks find a Redis that wants to know who comes: sentinels, credential providers, users with rights, TLS."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from django_rmq import connections
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import ConfigurationError, TopicMismatch
from django_rmq.spark.broker_connection import broker_of
from django_rmq.spark.declaring import declare
from django_rmq.spark.pipelines.pipeline import connection_options
from django_rmq.spark.reader import COLUMNS, Reader
from django_rmq.spark.source_options import CONNECTION, PATIENCE, READ, SourceOptions
from tests.spark.conftest import TOPICS, run_pipeline, topic
from tests.support.servers import RedisServer, SentinelGuard, TlsProxy, ask
from tests.support.workers import total

USER, PASSWORD = "token", "renewed"
PREFIX = "mine:"


class Provider:
    """Credentials as a cloud's provider gives them; the path of this class is an option."""

    def get_credentials(self) -> tuple[str, str]:
        return USER, PASSWORD


PROVIDER = f"{Provider.__module__}.{Provider.__name__}"


def alias(location: str, **options: object) -> Any:
    """Settings in which RMQ uses the Redis of a cache."""
    caches = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "rmq": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options},
    }
    return override_settings(CACHES=caches, RMQ={"REDIS": "rmq", "KEY_PREFIX": PREFIX, "TOPICS": TOPICS})


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
    sentinels = {"SENTINELS": [("one", 26379), ("two", 26380)], "SENTINEL_KWARGS": {"password": "secret"}}
    with alias("redis://rmq/3", **sentinels, CLIENT_CLASS="django_redis.client.SentinelClient"):
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
    with alias(guarded, CONNECTION_POOL_KWARGS={"credential_provider": Provider()}):
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


def test_options_of_a_program_need_not_be_texts() -> None:
    given = SourceOptions(
        {"topic": "any", "Cluster": True, "includeMetadata": False, "slots": 3, "patience": None},
        READ,
        "a test",
    )
    assert given.is_cluster and not given.metadata and given.slots(4) == [3] and given.patience == PATIENCE
    with pytest.raises(ConfigurationError, match="takes no path"):
        SourceOptions({"Path": "/data"}, READ, "a test")


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


# --- users with rights, and TLS, with a session of Spark

OWNER, SECRET = "spark", "p@ss/wörd%:"


@pytest.fixture(scope="module")
def behind_tls(certificates: Path) -> Iterator[tuple[RedisServer, TlsProxy]]:
    """A Redis behind TLS whose only user may touch the keys of one project."""
    with RedisServer() as server, TlsProxy(server.port, certificates) as proxy:
        rights = ["on", f">{SECRET}", f"~{PREFIX}*", f"~*_{{{PREFIX}*", "resetchannels", f"&{PREFIX}*"]
        rights += ["+@all", "-@admin", "-@dangerous", "+info", "+client|setname", "+client|setinfo"]
        ask(server.port, "ACL", "SETUSER", OWNER, "reset", *rights)
        ask(server.port, "ACL", "SETUSER", "default", "off")
        yield server, proxy


def settings(url: str, password: str, **pool: object) -> Any:
    return alias(url, USERNAME=OWNER, PASSWORD=password, CONNECTION_POOL_KWARGS=pool)


def test_pipelines_log_in_over_tls_with_the_options_of_the_settings(
    spark: Any, behind_tls: tuple[RedisServer, TlsProxy], certificates: Path, tmp_path: Path
) -> None:
    _, proxy = behind_tls
    authority = str(certificates / "ca.pem")
    url = f"rediss://127.0.0.1:{proxy.port}/0"
    (tmp_path / "rows.csv").write_text("n\n" + "\n".join(map(str, range(100))))
    ingest = ("ingest", "events", tmp_path / "rows.csv", "--priority", "50")
    with settings(url, SECRET, ssl_ca_certs=authority, client_name="pipeline"):
        run_pipeline(*ingest)
        assert "events (priority, 4 slots): 100 store" in run_pipeline("report", "events")
        run_pipeline(
            *("consume", "events", "--parquet", tmp_path / "out"),
            *("--checkpoint", tmp_path / "checkpoint", "--available-now"),
        )
        assert spark.read.parquet(str(tmp_path / "out")).count() == 100
        assert total(connections.get_broker(), topic("events"), "acked") == 100
        connections.close()
    with settings(url, SECRET):
        assert "CERTIFICATE_VERIFY_FAILED" in run_pipeline(*ingest, code=3)
        connections.close()
    with settings(url, "wrong", ssl_ca_certs=authority):
        assert SECRET not in run_pipeline(*ingest, code=3)
        connections.close()


def test_options_of_a_program_say_who_comes(
    spark: Any, behind_tls: tuple[RedisServer, TlsProxy], certificates: Path, tmp_path: Path
) -> None:
    _, proxy = behind_tls
    authority = str(certificates / "ca.pem")
    with settings(f"rediss://127.0.0.1:{proxy.port}/0", SECRET, ssl_ca_certs=authority):
        connections.agree(topic("doubled"))
        connections.close()
    options = {
        "url": f"rediss://127.0.0.1:{proxy.port}/0",
        "prefix": PREFIX,
        "topic": "doubled",
        "username": OWNER,
        "password": SECRET,
        "connectionOptions": json.dumps({"ssl_ca_certs": authority}),
    }
    frame = spark.range(50).selectExpr("cast(id as string) as value", "100 as priority")
    frame.write.format("rmq").options(**options).mode("append").save()
    assert spark.read.format("rmq").options(**options).load().count() == 50
    stream = spark.readStream.format("rmq").options(**options).load()
    # A stream from one Redis to the same: each batch goes back to where it came from.
    back = stream.selectExpr("concat('1', cast(value as string)) as value", "100 as priority").writeStream
    back = back.format("rmq").options(**options).option("checkpointLocation", str(tmp_path / "checkpoint"))
    assert back.trigger(availableNow=True).start().awaitTermination(100)
    found = spark.read.format("rmq").options(**options).load().collect()
    assert sorted(int(row.value) for row in found) == sorted(int(f"1{n}") for n in range(50))
    wrong = spark.read.format("rmq").options(**{**options, "password": "guess"})
    with pytest.raises(Exception, match=r"(?i)password") as caught:
        wrong.load().count()
    assert "guess" not in str(caught.value)
