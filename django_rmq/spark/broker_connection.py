"""Make a broker and a topic from options, on the driver and in each Python worker, and wait while Redis is unavailable."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from django_rmq.core.cluster.cluster_broker import Cluster, ClusterBroker
from django_rmq.core.cluster.nodes import parse_seeds
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model import redis_url
from django_rmq.core.model.topic import BackOff, Definition, Topic, TopicType
from django_rmq.core.redis import clients
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.redis.clients import RenewingPool
from django_rmq.exceptions import ConfigurationError, ServerUnavailable, UnknownTopic
from django_rmq.spark.source_options import SourceOptions

logger = logging.getLogger("django_rmq.spark")

SAY_SECONDS = 10.0
"""Seconds between two log lines about the same wait."""

PAUSES = (0.05, 1.0)
"""Seconds between two tries: the first pause, and the longest."""

Result = TypeVar("Result")


class RetryPolicy:
    """Repeats work while Redis is unavailable: ``patience(work)`` returns the result of ``work()``.

    ``seconds``: how long one piece of work is repeated; after that the last ``ServerUnavailable`` is raised.
    All other errors are raised at once. The work must be repeatable, because a request whose answer was lost
    may have run.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.what = what
        """The subject of the work, for log lines."""

    def __call__(self, work: Callable[[], Result]) -> Result:
        began = time.monotonic()
        next_line, pause = began, PAUSES[0]
        while True:
            try:
                result = work()
            except ServerUnavailable as error:
                waited = time.monotonic() - began
                if waited >= self.seconds:
                    raise
                if began + waited >= next_line:
                    next_line = began + waited + SAY_SECONDS
                    logger.warning(
                        "%s: Redis is unavailable for %.0f s (%s). The request is repeated for %.0f s more",
                        self.what,
                        waited,
                        error,
                        self.seconds - waited,
                    )
                time.sleep(min(pause, self.seconds - waited))
                pause = min(2 * pause, PAUSES[1])
            else:
                if next_line != began:
                    logger.warning(
                        "%s: Redis is available again after %.1f s", self.what, time.monotonic() - began
                    )
                return result


URL_VARIABLE = "RMQ_URL"
"""The environment variable that names the server if no option does, so that jobs need not contain a password."""

PROVIDER_VARIABLE = "RMQ_CREDENTIAL_PROVIDER"
"""The environment variable that names the credential provider if no option does."""

CLUSTER_PATIENCE = 5.0
"""Seconds for which a call is repeated that no node of a cluster has run, because that is cheaper than trying
a task again."""


def broker_of(options: SourceOptions) -> Broker:
    url = options.text("url") or os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigurationError(
            f"option url is missing, and the environment variable {URL_VARIABLE} is not set"
        )
    more = options.keywords("connectionOptions") | options.keywords("secretConnectionOptions")
    login = {name: options.text(name) for name in ("username", "password")}
    more |= {name: value for name, value in login.items() if value is not None}
    if options.is_cluster and options.sentinels:
        raise ConfigurationError(
            "option sentinels has no meaning with cluster, whose nodes know the primaries"
        )
    return _broker(
        url,
        options.is_cluster,
        options.prefix,
        options.socket_timeout,
        json.dumps(more),
        options.text("credentialProvider") or os.environ.get(PROVIDER_VARIABLE),
        tuple(options.sentinels),
        json.dumps(options.keywords("secretSentinelOptions")),
    )


# Spark runs many tasks in one Python process, one after another, and they share its connections.
# A cache takes only arguments that can be hashed, so options are text.
@lru_cache(maxsize=16)
def _broker(
    url: str,
    is_cluster: bool,
    prefix: str,
    timeout: float,
    more: str,
    provider: str | None,
    sentinels: tuple[tuple[str, int], ...],
    sentinel_options: str,
) -> Broker:
    """Return the broker of this process for a server. Options of connections, and of those to sentinels, are JSON."""
    ours = clients.own_options()
    given: dict[str, object] = {**json.loads(more), **clients.timeouts(timeout)}
    if provider is not None:
        given["credential_provider"] = _credentials(provider)
    urls = redis_url.several(url) if is_cluster else [url]
    try:
        if is_cluster:
            seeds, options = parse_seeds(urls)
            return ClusterBroker(
                Cluster(seeds, {**options, **given, **ours}, patience=CLUSTER_PATIENCE), prefix
            )
        if sentinels:
            client = clients.build_client_behind_sentinels(
                url, sentinels, json.loads(sentinel_options), given, {**ours, **clients.timeouts(timeout)}
            )
        else:
            client = clients.build_client(url, given, ours, RenewingPool)
        return RedisBroker(client, prefix)
    except (ValueError, TypeError) as error:
        where = ", ".join(map(redis_url.printable_url, urls))
        told_why = redis_url.unusable(where, given, error)
        raise ConfigurationError(f"option url, or an option of connections: {told_why}") from None


def _credentials(path: str) -> object:
    """Return the credential provider that a function or class without arguments makes."""
    module, _, name = path.rpartition(".")
    try:
        provider = getattr(import_module(module), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"option credentialProvider: {path} cannot be called without arguments to make a provider "
            f"({type(error).__name__}: {error}). Its module must be importable on driver and executors"
        ) from None
    if not hasattr(provider, "get_credentials"):
        raise ConfigurationError(
            f"option credentialProvider: {path} makes a {type(provider).__name__}, not a credential provider of redis-py"
        )
    return provider


def reached(options: SourceOptions) -> tuple[Broker, Topic]:
    """Return the broker of this process for these options, and their topic."""
    broker, name = broker_of(options), options.topic()
    return broker, topic_of(name, broker.definitions().of(name))


def topic_of(name: str, definition: Definition | None, **local: Any) -> Topic:
    """Return the topic of a registered definition; ``local`` are settings that a definition does not contain."""
    if definition is None:
        raise UnknownTopic(
            f"topic {name} is not registered in Redis: first start the project that declares it, or call "
            "django_rmq.spark.declaring.declare"
        )
    # Settings that a later version has registered are ignored.
    names = {field.name for field in fields(Topic)}
    parts = {name: value for name, value in definition.items() if name in names}
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
