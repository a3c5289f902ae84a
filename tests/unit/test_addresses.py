"""What is printed of a Redis URL holds no login, whatever the URL looks like and wherever it is printed."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest
from django.core import checks
from django.test import override_settings

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.model import redis_url
from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.broker_connection import broker_of
from django_rmq.spark.pipelines.pipeline import connection_options
from django_rmq.spark.source_options import READ, SourceOptions
from tests.support.brokers import direct

SECRET = "S3CR3T"
LOCMEM = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}


def cache(location: Any, **options: Any) -> dict[str, Any]:
    return {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options}


ZOOKEEPER: dict[str, Any] = {"HOSTS": "zk1:2181"}
SETTINGS: dict[str, dict[str, Any]] = {
    "a password": {"REDIS": "redis://:S3CR3T@h:1/2"},
    "a user and a password": {"REDIS": "redis://u:S3CR3T@h:1/2"},
    "a user alone, which is the password by mistake": {"REDIS": "redis://S3CR3T@h/1"},
    "an encoded at sign": {"REDIS": "redis://u:S3CR3T%40S3CR3T@h/1"},
    "a plain at sign": {"REDIS": "redis://u:S3CR3T@S3CR3T@h/1"},
    "a plain at sign, and a bad port": {"REDIS": "redis://u:p@S3CR3T@h:port/1"},
    "a blank": {"REDIS": "redis://u:S3C R3T S3CR3T@h/1"},
    "a slash": {"REDIS": "redis://u:12/S3CR3T@h/1"},
    "a slash before a word": {"REDIS": "redis://u:S3CR3T/more@h/1"},
    "a question mark": {"REDIS": "redis://u:12?S3CR3T@h/1"},
    "a number sign": {"REDIS": "redis://u:12#S3CR3T@h/1"},
    "a number sign in the query": {"REDIS": "redis://h/1?password=S3CR3T#S3CR3T"},
    "a bracket": {"REDIS": "redis://u:S3CR3T[@h/1"},
    "a colon too many": {"REDIS": "redis://u:S3CR3T:h:6379/1"},
    "what is no number as port": {"REDIS": "redis://h:S3CR3T/1"},
    "what is no number as database": {"REDIS": "redis://h:1/S3CR3T"},
    "no host": {"REDIS": "redis://:S3CR3T@/1"},
    "the query": {"REDIS": "redis://h/1?password=S3CR3T"},
    "the query, and a bad option": {"REDIS": "redis://h/1?password=S3CR3T&max_connections=abc"},
    "the query, and an unknown option": {"REDIS": "redis://h/1?password=S3CR3T&colour=blue"},
    "the query with an at sign": {"REDIS": "redis://h/1?password=S3CR3T@S3CR3T"},
    "a bad option": {"REDIS": "redis://h/1?max_connections=S3CR3T"},
    "another scheme": {"REDIS": "http://u:S3CR3T@h/1"},
    "a scheme with a slip": {"REDIS": "redis//:S3CR3T@h:1/2"},
    "no scheme": {"REDIS": "u:S3CR3T@h:6379/1"},
    "no scheme, and a query": {"REDIS": "h:6379/1?password=S3CR3T"},
    "a secret scheme": {"REDIS": "S3CR3T://h/1"},
    "bytes": {"REDIS": b"redis://:S3CR3T@h/1"},
    "a list": {"REDIS": ["redis://:S3CR3T@h/1"]},
    "a dict of another shape": {"REDIS": {"URL": "redis://:S3CR3T@h/1"}},
    "several by commas": {"REDIS": "redis://:S3CR3T@h/1,redis://:S3CR3T@i/1"},
    "a socket": {"REDIS": "unix://u:S3CR3T@/run/redis.sock?db=1"},
    "a socket, and a slash": {"REDIS": "unix://u:12/S3CR3T@/run/redis.sock"},
    "a socket, and a query": {"REDIS": "unix:///run/redis.sock?password=S3CR3T"},
    "a cluster": {"REDIS": {"CLUSTER": "redis://u:S3CR3T@h:7000"}},
    "a cluster of several": {"REDIS": {"CLUSTER": ["redis://:S3CR3T@h:1", "redis://:S3CR3T@i:1"]}},
    "a cluster by a socket": {"REDIS": {"CLUSTER": "unix://u:S3CR3T@/run/redis.sock"}},
    "a cluster with a database": {"REDIS": {"CLUSTER": "redis://:S3CR3T@h:1/2"}},
    "a cluster with a secret database": {"REDIS": {"CLUSTER": "redis://h:1/S3CR3T"}},
    "a cluster with an unknown option": {"REDIS": {"CLUSTER": "redis://h:1?colour=S3CR3T"}},
    "an alias": {"CACHES": cache("redis://:S3CR3T@h/1")},
    "an alias with a comma": {"CACHES": cache("redis://u:12,S3CR3T@h/1")},
    "an alias of several": {"CACHES": cache(["redis://:S3CR3T@h/1", "redis://:S3CR3T@i/1"])},
    "an alias with options": {"CACHES": cache("redis://h/1", USERNAME=SECRET, PASSWORD=SECRET)},
    "pool options": {"CACHES": cache("redis://h/1", CONNECTION_POOL_KWARGS={"password": SECRET})},
    "an unknown pool option": {
        "CACHES": cache("redis://h/1", CONNECTION_POOL_KWARGS={"password": SECRET, "colour": SECRET})
    },
    "a pool option of the wrong type": {
        "CACHES": cache("redis://h/1", CONNECTION_POOL_KWARGS={"max_connections": SECRET})
    },
    "pool options that are none": {"CACHES": cache("redis://h/1", CONNECTION_POOL_KWARGS=SECRET)},
    "sentinels that are none": {"CACHES": cache("redis://s/1", SENTINELS=["redis://:S3CR3T@h:26379"])},
    "a sentinel's port": {"CACHES": cache("redis://s/1", SENTINELS=[("h", SECRET)])},
    "options of sentinels": {
        "CACHES": cache(
            "redis://s/1", SENTINELS=[("h", 1)], SENTINEL_KWARGS={"password": SECRET, "x": SECRET}
        )
    },
    "a backend": {"CACHES": {"BACKEND": "redis://:S3CR3T@h", "LOCATION": "redis://:S3CR3T@h/1"}},
    "a token for a dict": {"METRICS": SECRET},
    "a token": {"METRICS": {"TOKEN": "S3CR3T S3CR3T"}},
    "a token that can be used": {"METRICS": {"TOKEN": "S3CR3T-S3CR3T-S3CR3T"}},
    "ZooKeeper's hosts": {"ZOOKEEPER": {"HOSTS": "u:S3CR3T@zk1:2181"}},
    "ZooKeeper's hosts with a user": {"ZOOKEEPER": {"HOSTS": "S3CR3T@zk1:2181"}},
    "ZooKeeper's hosts with a scheme": {"ZOOKEEPER": {"HOSTS": ["digest:u:S3CR3T", "zk1:2181"]}},
    "ZooKeeper alone": {"ZOOKEEPER": "u:S3CR3T@zk1:2181"},
    "ZooKeeper's login": {"ZOOKEEPER": {**ZOOKEEPER, "AUTH": ("digest", "S3CR3T")}},
    "ZooKeeper's login that can be used": {"ZOOKEEPER": {**ZOOKEEPER, "AUTH": ("digest", "u:S3CR3T")}},
    "ZooKeeper's login as ACL": {"ZOOKEEPER": {**ZOOKEEPER, "ACL": ("digest", "u:S3CR3T")}},
    "ZooKeeper's key": {"ZOOKEEPER": {**ZOOKEEPER, "TLS": {"PASSWORD": SECRET}}},
    "a broker": {"BROKER": "redis://:S3CR3T@h/1"},
    "a coordinator": {"REDIS": "redis://h/1", "COORDINATOR": "zookeeper://u:S3CR3T@zk1"},
    "an unknown key": {"REDIS": "redis://h/1", "redis://:S3CR3T@h/1": True},
    "slots": {"REDIS": "redis://h/1", "TOPICS": {"a": {"TYPE": "priority", "SLOTS": "redis://:S3CR3T@h"}}},
    "a topic": {"REDIS": "redis://h/1", "TOPICS": {"redis://:S3CR3T@h": {"TYPE": "priority"}}},
    "topics": {"REDIS": "redis://h/1", "TOPICS": ["redis://:S3CR3T@h"]},
    "everything": "redis://:S3CR3T@h/1",  # type: ignore[dict-item]
}


def printed(caplog: pytest.LogCaptureFixture) -> str:
    """All that these settings let be printed: by checks, errors with their tracebacks, texts of objects, and log lines."""
    found = [str(message) for message in checks.run_checks(tags=["rmq"])]
    for look in (get_config, lambda: connections.get_broker("web").ping()):
        try:
            config = look()
            found += [str(config), repr(config)]
        except Exception:  # noqa: BLE001 - whatever comes must hold no secret
            found.append(traceback.format_exc())
    try:
        config = get_config()
        found += [str(config.redis), repr(config.redis)]
        broker = direct(connections.get_broker("web"))
        found += [repr(vars(broker)), repr(broker.client), repr(broker.client.connection_pool)]
    except Exception:  # noqa: BLE001
        found.append(traceback.format_exc())
    return "\n".join([*found, caplog.text])


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_shows_a_secret(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    given = SETTINGS[name]
    caches = {"default": LOCMEM}
    rmq: Any = given
    if isinstance(given, dict):
        rmq = {"TOPICS": {}, **given}
        if "CACHES" in rmq:
            caches["rmq"] = rmq.pop("CACHES")
            rmq["REDIS"] = "rmq"
        if not {"REDIS", "BROKER"} & set(rmq):
            rmq["BROKER"] = "memory"
    with override_settings(RMQ=rmq, CACHES=caches):
        try:
            text = printed(caplog)
        finally:
            connections.close()
    assert text
    assert "S3C" not in text
    assert "R3T" not in text


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://u:p@Host:6379/1", "redis://host:6379/1"),
        ("rediss://:p@q@10.0.0.1/3?ssl_cert_reqs=none", "rediss://10.0.0.1/3"),
        ("redis://[::1]:7000", "redis://[::1]:7000"),
        ("redis://h/1?db=2&password=x", "redis://h/2"),
        ("redis://h/1?password=p@q", "redis://h/1"),
        ("unix://:p@/run/redis.sock?db=4", "unix:///run/redis.sock?db=4"),
        ("redis://u:12/3@h/0", "redis://..."),
        ("redis://u:12?a@h/0", "redis://..."),
        ("redis://u:12#a@h/0", "redis://..."),
        ("redis://u:p[@h/0", "redis://..."),
        ("redis://a b/0", "redis://..."),
        ("redis://:12", "redis://..."),
        ("http://h/1", "..."),
        ("anything", "..."),
    ],
)
def test_a_url_is_shown_as_scheme_host_port_and_database(url: str, wanted: str) -> None:
    assert redis_url.printable_url(url) == wanted


def test_several_urls_are_told_apart_though_a_password_holds_a_comma() -> None:
    assert redis_url.several("redis://:a,b@h/1, rediss://:c;d@i/2;unix:///x") == [
        "redis://:a,b@h/1",
        "rediss://:c;d@i/2",
        "unix:///x",
    ]


def test_an_alias_whose_password_holds_a_comma_leads_where_it_should() -> None:
    with override_settings(
        CACHES={"default": LOCMEM, "rmq": cache("redis://u:12,x@h/1")}, RMQ={"REDIS": "rmq"}
    ):
        assert str(get_config().redis) == "redis://h/1"


@pytest.mark.parametrize(
    "colour", ["redis://h/1?colour=blue", "redis://h/1?max_connections=blue"], ids=["unknown", "bad"]
)
def test_an_option_that_redis_py_refuses_is_named(colour: str) -> None:
    with override_settings(RMQ={"REDIS": colour}), pytest.raises(ConfigurationError, match="redis://h/1"):
        direct(connections.get_broker("web"))
    connections.close()


def hidden_by_spark(name: str) -> bool:
    """Whether Spark hides the value of an option of this name (spark.redaction.regex, as of 4.0)."""
    words = ("secret", "password", "token", "accesskey", "access.key")
    return any(word in name.lower() for word in words)


@pytest.mark.parametrize(
    ("rmq", "caches"),
    [
        ({"REDIS": "redis://u:S3CR3T@h:1/2"}, {}),
        ({"REDIS": "redis://h:1/2?password=S3CR3T&username=u&socket_timeout=3"}, {}),
        ({"REDIS": "rediss://h:1/2?ssl_password=S3CR3T&password=S3CR3T"}, {}),
        ({"REDIS": {"CLUSTER": ["redis://h:1?password=S3CR3T", "redis://:S3CR3T@i:1"]}}, {}),
        ({"REDIS": "rmq"}, cache("redis://h/1", PASSWORD=SECRET)),
        ({"REDIS": "rmq"}, cache("redis://h/1", CONNECTION_POOL_KWARGS={"password": SECRET})),
        ({"REDIS": "rmq"}, cache("rediss://h/1", CONNECTION_POOL_KWARGS={"ssl_password": SECRET})),
    ],
)
def test_spark_is_told_secrets_by_options_that_it_hides(rmq: dict[str, Any], caches: dict[str, Any]) -> None:
    with override_settings(RMQ=rmq, CACHES={"default": LOCMEM, "rmq": caches or LOCMEM}):
        told = connection_options()
        assert SECRET in "".join(told.values())
        assert [name for name, value in told.items() if SECRET in value and not hidden_by_spark(name)] == []
        # What a task makes of the options is what this process makes of the settings.
        theirs = broker_of(SourceOptions(told, READ, "a read"))
        ours = direct(connections.get_broker("web"))
        for name in ("username", "password", "ssl_password", "host", "port", "db"):
            assert _option(theirs, name) == _option(ours, name), name
    connections.close()


def _option(broker: Any, name: str) -> Any:
    pool = getattr(broker.client, "connection_pool", None)
    options = pool.connection_kwargs if pool is not None else broker.client.options
    return options.get(name)


def test_sparks_own_options_are_refused_without_their_values() -> None:
    for given in (
        {"url": "redis://u:S3CR3T/x@h"},
        {"url": "redis://u:S3CR3T@h:port"},
        {"url": "redis://h", "secretConnectionOptions": '["S3CR3T"]'},
        {"url": "redis://h", "connectionOptions": '["S3CR3T"]'},
        {"url": "redis://:S3CR3T@h:x", "cluster": "true"},
    ):
        with pytest.raises(ConfigurationError) as caught:
            broker_of(SourceOptions(given, READ, "a read"))
        assert "S3CR3T" not in "".join(traceback.format_exception(caught.value))
