"""Clients of redis-py as all of the package has them: no retries, for a repeated script is a decision; replies as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_rmq.core.redis.pool import Pool, RenewingPool


def own_options() -> dict[str, Any]:
    """Return what every connection of ours has, whatever was given."""
    return {
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "decode_responses": False,
        "health_check_interval": 0,
        "protocol": 2,
    }


def timeouts(seconds: float, connect: float | None = None) -> dict[str, Any]:
    """Return the options by which a connection waits ``seconds`` for Redis, and for ``connect`` to be made."""
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds if connect is None else connect}


def build_client(
    url: str, given: Mapping[str, Any], ours: Mapping[str, Any], kind: type[RenewingPool] | None = None
) -> redis.Redis:
    """Return a client of the server at ``url`` with the options ``given``; ``ours`` win over all others.

    Raises what redis-py does about options that make no connection. Connects nothing.
    """
    if kind is None:
        # Credentials that change are renewed as redis-py's own pool takes a connection back.
        kind = RenewingPool if "credential_provider" in given else Pool
    pool = kind.from_url(url, **given)
    # Not passed above: what the URL says would win over it.
    pool.connection_kwargs.update(ours)
    return redis.Redis(connection_pool=checked(pool))


def build_client_behind_sentinels(
    url: str,
    sentinels: Sequence[tuple[str, int]],
    sentinel_options: Mapping[str, Any],
    given: Mapping[str, Any],
    ours: Mapping[str, Any],
) -> redis.Redis:
    """Return a client of the primary that ``sentinels`` know for the service that ``url`` names."""
    from_url = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
    service, database = str(from_url.pop("host")), from_url.get("db", given.get("db", 0))
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        sentinels, sentinel_kwargs={"socket_timeout": ours["socket_timeout"], **sentinel_options}
    )
    kwargs = {**given, **ours, "db": database}
    pool = SentinelConnectionPool(service, sentinel, **kwargs)  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=checked(pool))


def checked(pool: redis.ConnectionPool) -> redis.ConnectionPool:
    """Return ``pool``, whose options make a connection; else raise what redis-py does. Connects nothing."""
    pool.connection_class(**pool.connection_kwargs)
    return pool
