"""Clients of redis-py for the server that the settings name: one server, one behind Sentinels, or a Redis Cluster.

Errors of the options become ``ConfigurationError`` here, without the passwords in them.
"""

from __future__ import annotations

from typing import Any

import redis
from django.views.decorators.debug import sensitive_variables

from django_rmq.conf import RedisServer
from django_rmq.core.cluster.broker import Cluster
from django_rmq.core.cluster.nodes import parse_seeds
from django_rmq.core.model import redis_url
from django_rmq.core.redis import clients
from django_rmq.core.redis.clients import Pool
from django_rmq.exceptions import ConfigurationError


@sensitive_variables()
def build_cluster(server: RedisServer, socket_timeout: float, patience: float) -> Cluster:
    """Return a client of a Redis Cluster, which repeats for ``patience`` seconds a call that no node has run."""
    # A node that is down must not delay the calls to the other nodes, so a connection has less time than a call.
    ours = {**clients.own_options(), **clients.timeouts(socket_timeout, min(socket_timeout, 1.0))}
    options: dict[str, Any] = {}
    try:
        seeds, options = parse_seeds(server.cluster)
        clients.checked(Pool(**{**options, **ours}))
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigurationError(redis_url.unusable(str(server), options, error)) from None
    return Cluster(seeds, {**options, **ours}, patience=patience)


@sensitive_variables()
def build_client(server: RedisServer, socket_timeout: float) -> redis.Redis:
    """Return a client of ``server`` that neither retries nor decodes."""
    ours = {**clients.own_options(), **clients.timeouts(socket_timeout)}
    given = dict(server.pool)
    for name in redis_url.LOGIN:
        value = getattr(server, name)
        if value:
            given[name] = value
    names = {*given, *server.sentinel_options}
    try:
        names |= set(redis_url.without_login(server.url).options)
        if server.sentinels:
            return clients.build_client_behind_sentinels(
                server.url, server.sentinels, server.sentinel_options, given, ours
            )
        return clients.build_client(server.url, given, ours)
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigurationError(redis_url.unusable(str(server), names, error)) from None
