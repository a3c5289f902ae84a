"""Creates redis-py clients with the options of this package: no retries, because repeating a script needs a decision.

Replies are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_rmq.core.redis.pool import Pool, RenewingPool


def own_options() -> dict[str, Any]:
    """Return the options of every connection of this package, whatever was given."""
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
    """Return the options for waiting ``seconds`` for Redis, and ``connect`` seconds for a connection."""
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds if connect is None else connect}


def build_client(
    url: str, given: Mapping[str, Any], ours: Mapping[str, Any], kind: type[RenewingPool] | None = None
) -> redis.Redis:
    """Return a client of the server at ``url`` with the options ``given``; ``ours`` take precedence over all others.

    Raises the errors of redis-py about invalid options. Connects to nothing.
    """
    if kind is None:
        # Credentials that change are renewed when redis-py's own pool takes a connection back.
        kind = RenewingPool if "credential_provider" in given else Pool
    # For another protocol redis-py would prepare notifications that need hiredis.
    pool = kind.from_url(url, **{**given, "protocol": ours.get("protocol")})
    # These are not passed above, because the URL would take precedence over them.
    pool.connection_kwargs.update(ours)
    if issubclass(pool.connection_class, redis.UnixDomainSocketConnection):
        # redis-py knows this option of TCP connections only.
        pool.connection_kwargs.pop("socket_keepalive", None)
    return redis.Redis(connection_pool=checked(pool))


def build_client_behind_sentinels(
    url: str,
    sentinels: Sequence[tuple[str, int]],
    sentinel_options: Mapping[str, Any],
    given: Mapping[str, Any],
    ours: Mapping[str, Any],
) -> redis.Redis:
    """Return a client of the primary that ``sentinels`` report for the service that ``url`` names."""
    from_url = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
    service, database = str(from_url.pop("host")), from_url.get("db", given.get("db", 0))
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        sentinels, sentinel_kwargs={"socket_timeout": ours["socket_timeout"], **sentinel_options}
    )
    kwargs = {**given, **ours, "db": database}
    pool = SentinelConnectionPool(service, sentinel, **kwargs)  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=checked(pool))


def checked(pool: redis.ConnectionPool) -> redis.ConnectionPool:
    """Return ``pool`` if its options make a connection; otherwise raise redis-py's error. Connects to nothing."""
    pool.connection_class(**pool.connection_kwargs)
    return pool
