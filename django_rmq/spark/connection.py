"""Makes a broker and a topic from options: on the driver, and in each Python worker of an executor."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from functools import lru_cache
from typing import Any

from django_rmq.core.calls.broker import Broker
from django_rmq.core.cluster.broker import Cluster, ClusterBroker
from django_rmq.core.cluster.nodes import parse_seeds
from django_rmq.core.redis import clients
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.redis.pool import RenewingPool
from django_rmq.core.words import addresses
from django_rmq.core.words.topics import BackOff, Topic, TopicType
from django_rmq.exceptions import ConfigurationError, UnknownTopic
from django_rmq.spark.options import Options

URL_VARIABLE = "RMQ_URL"
"""The environment variable that names the server if no option does, so that jobs need not contain a password."""

CLUSTER_PATIENCE = 5.0
"""Seconds for which a call is repeated that no node of a cluster has run, because that is cheaper than trying
a task again."""


def broker_of(options: Options) -> Broker:
    """Return the broker of this process for these options."""
    url = options.url or os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigurationError(
            f"option url is missing, and the environment variable {URL_VARIABLE} is not set"
        )
    return _broker(
        url,
        options.is_cluster,
        options.username,
        options.password,
        options.prefix,
        options.socket_timeout,
        options.text("connectionOptions") or "{}",
        options.text("secretConnectionOptions") or "{}",
    )


@lru_cache(maxsize=16)
def _broker(
    url: str,
    is_cluster: bool,
    username: str | None,
    password: str | None,
    prefix: str,
    timeout: float,
    more: str,
    secret: str,
) -> Broker:
    login = {"username": username, "password": password}
    given: dict[str, Any] = {
        **_connection_options("connectionOptions", more),
        **_connection_options("secretConnectionOptions", secret),
        **{name: value for name, value in login.items() if value is not None},
        **clients.timeouts(timeout),
    }
    urls = addresses.several(url) if is_cluster else [url]
    try:
        if is_cluster:
            seeds, told = parse_seeds(urls)
            return ClusterBroker(
                Cluster(seeds, {**told, **given, **clients.own_options()}, patience=CLUSTER_PATIENCE), prefix
            )
        return RedisBroker(clients.build_client(url, given, clients.own_options(), RenewingPool), prefix)
    except (ValueError, TypeError) as error:
        where = ", ".join(map(addresses.shown, urls))
        raise ConfigurationError(addresses.unusable(where, given, error)) from None


def _connection_options(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigurationError(f"option {name} must be a JSON object of redis-py's options")
    return found


def topic_of(name: str, definition: dict[str, Any] | None, **local: Any) -> Topic:
    """Return the topic of a registered definition; ``local`` are settings that a definition does not contain."""
    if definition is None:
        raise UnknownTopic(
            f"topic {name} is not registered in Redis: start the project that declares it first"
        )
    # Settings that a later version has registered are ignored.
    known = {field.name for field in fields(Topic)}
    parts = {name: value for name, value in definition.items() if name in known}
    try:
        base_ms, cap_ms = definition["backoff"]
        parts |= {"type": TopicType(definition["type"]), "backoff": BackOff(base_ms, cap_ms)}
        topic = Topic(name, **parts, **local)
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError(
            f"topic {name} has a definition in Redis that this version cannot read: see `manage.py rmqtopics`"
        ) from None
    if topic.accumulate:
        raise ConfigurationError(
            f"topic {name} has ACCUMULATE: one message holds several bodies, which Spark neither reads nor writes. "
            "Consume it with workers or over REST"
        )
    return topic
