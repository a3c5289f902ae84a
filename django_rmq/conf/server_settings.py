"""The servers: `RMQ["REDIS"]`, whose database no cache may use, `RMQ["ZOOKEEPER"]`, and which `RMQ["COORDINATOR"]` is used.

Nothing is connected here. ``connections.brokers`` makes clients of a ``RedisServer``, and ``connections.coordinators`` the
coordinator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from django.conf import settings
from django.core.cache import DEFAULT_CACHE_ALIAS
from django.utils.module_loading import import_string

from django_rmq.conf.known_keys import Problems, did_you_mean, keys_of, read_values, setting
from django_rmq.conf.parsers import (
    InvalidSetting,
    dotted_path,
    kind,
    matching,
    one_of,
    optional,
    printable,
    seconds,
    secret,
)
from django_rmq.core.model import redis_url

DJANGO_REDIS = "django_redis.cache.RedisCache"

_EXAMPLE = f'CACHES = {{"rmq": {{"BACKEND": "{DJANGO_REDIS}", "LOCATION": "redis://host:6379/1"}}, ...}}.'

ADDRESS = (
    'Give a URL, or name a CACHES alias of django-redis: RMQ = {"REDIS": "redis://localhost:6379/1", ...}.'
)
"""How to say which Redis server is used."""

_QUOTING = "Write @ : / ? # and % in a user name or password as %40 %3A %2F %3F %23 and %25."


# The ``repr`` that a dataclass gets has all fields, and so would bring the password into tracebacks and logs.
@dataclass(frozen=True, slots=True, repr=False)
class RedisServer:
    """The address of Redis and the login. Its text is the address alone."""

    url: str
    cluster: tuple[str, ...] = ()
    """If given: the URLs of some nodes of a Redis Cluster, including ``url``."""
    username: str | None = None
    password: str | None = None
    pool: Mapping[str, object] = field(default_factory=dict)
    """CONNECTION_POOL_KWARGS of the alias."""
    sentinels: tuple[tuple[str, int], ...] = ()
    """If given, ``url`` names the service, and these know its primary."""
    sentinel_options: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(redis_url.printable_url(url) for url in self.cluster or (self.url,))

    def __repr__(self) -> str:
        return f"<RedisServer {self}>"


def read_redis(problems: Problems, given: object) -> RedisServer | None:
    """Return the server that ``RMQ["REDIS"]`` names."""
    place = 'RMQ["REDIS"]'
    if isinstance(given, Mapping):
        return _cluster(problems, place, given)
    if not isinstance(given, str):
        problems.report(
            "E003", f"{place} is {printable(given)}: it must be a CACHES alias, a URL or a dict.", ADDRESS
        )
        return None
    if "://" in given:
        if _url(problems, place, given) is not None:
            _alone(problems, place, given, None)
        return RedisServer(given)
    return _alias(problems, place, given)


def _cluster(problems: Problems, place: str, given: Mapping[str, object]) -> RedisServer | None:
    nodes = given.get("CLUSTER")
    urls = [nodes] if isinstance(nodes, str) else nodes
    if (
        set(given) != {"CLUSTER"}
        or not isinstance(urls, (list, tuple))
        or not urls
        or not all(isinstance(url, str) for url in urls)
    ):
        problems.report(
            "E003",
            f'{place} is a dict: it must be {{"CLUSTER": "redis://host:port"}}, with one URL or a list of URLs.',
        )
        return None
    before, place = len(problems), f'{place}["CLUSTER"]'
    for url in urls:
        parts = _url(problems, place, url)
        if parts is None:
            continue
        if parts.scheme == "unix":
            problems.report(
                "E012",
                f"{place} is {redis_url.printable_url(url)}: the nodes of a cluster are found by host and port.",
            )
        elif redis_url.database(parts) not in ("0", None):
            problems.report(
                "E012", f"{place} is {redis_url.printable_url(url)}: a cluster has only database 0."
            )
        else:
            _alone(problems, place, url, None)
    return RedisServer(urls[0], cluster=tuple(urls)) if len(problems) == before else None


def _alias(problems: Problems, place: str, alias: str) -> RedisServer | None:
    caches = getattr(settings, "CACHES", {})
    if alias not in caches:
        hint = did_you_mean(alias, caches)
        problems.report(
            "E009", f"{place} is {printable(alias)}, which is not an alias in CACHES{hint}", ADDRESS
        )
        return None
    cache = caches[alias]
    if not _is_django_redis(cache.get("BACKEND")):
        problems.report(
            "E010",
            f'CACHES["{alias}"] has the backend {printable(cache.get("BACKEND"))}: RMQ needs {DJANGO_REDIS!r}.',
        )
        return None
    place, before = f'CACHES["{alias}"]', len(problems)
    location = cache.get("LOCATION", "")
    locations = location if isinstance(location, (list, tuple)) else redis_url.several(str(location))
    # The first location of django-redis is the primary, and the others are replicas.
    primary = str(locations[0]).strip() if locations else ""
    options = _options(problems, place, cache, "OPTIONS")
    pool = _options(problems, f'{place}["OPTIONS"]', options, "CONNECTION_POOL_KWARGS")
    sentinel_options = _options(problems, f'{place}["OPTIONS"]', options, "SENTINEL_KWARGS")
    sentinels = _sentinels(problems, f'{place}["OPTIONS"]["SENTINELS"]', options.get("SENTINELS") or ())
    if _url(problems, f'{place}["LOCATION"]', primary) is None or len(problems) > before:
        return None
    if alias in (uses := _aliases_of_django()):
        problems.report(
            "E011",
            f"{place} is {alias!r}, which is also {uses[alias]}.",
            f"cache.clear() of {alias!r} is FLUSHDB: it would delete every message. Give RMQ an alias of its own, "
            f"on a database of its own: {_EXAMPLE}",
        )
    _alone(problems, place, primary, alias)
    return RedisServer(
        primary,
        username=options.get("USERNAME"),
        password=options.get("PASSWORD"),
        pool=MappingProxyType(dict(pool)),
        sentinels=sentinels,
        sentinel_options=MappingProxyType(dict(sentinel_options)),
    )


def _options(problems: Problems, place: str, given: Mapping[str, object], key: str) -> Mapping[str, Any]:
    """Return a dict of options, or report a value that is not one."""
    options = given.get(key) or {}
    if isinstance(options, Mapping) and all(isinstance(name, str) for name in options):
        return options
    problems.report("E003", f'{place}["{key}"] is {kind(options)}: it must be a dict of options by name.')
    return {}


def _sentinels(problems: Problems, place: str, given: Any) -> tuple[tuple[str, int], ...]:
    """Return the addresses of the sentinels, or report a value that has none."""
    try:
        return tuple((str(host), int(port)) for host, port in given)
    except (TypeError, ValueError):
        problems.report("E012", f"{place} is {kind(given)}: it must be a list of (host, port).")
        return ()


def _url(problems: Problems, place: str, url: str) -> SplitResult | None:
    """Return the parts of a Redis URL, or report a problem with it."""
    forms = "it must be redis://host:6379/1, rediss://host:6379/1 or unix:///path?db=1"
    place = f"{place} is {redis_url.printable_url(url)}"
    try:
        parts = redis_url.parse(url)
    except redis_url.UnreadableAddress:
        parts = None
    if parts is None or parts.fragment:
        problems.report("E012", f"{place}, which cannot be read: {forms}.", _QUOTING)
    elif parts.scheme not in redis_url.SCHEMES:
        problems.report("E012", f"{place}, with the unknown scheme {parts.scheme!r}: {forms}.")
    elif not (parts.path if parts.scheme == "unix" else parts.hostname):
        missing = "path" if parts.scheme == "unix" else "host"
        problems.report("E012", f"{place}, without a {missing}: {forms}.")
    elif parts.port == 0 or not (redis_url.database(parts) or "0").isdigit():
        problems.report("E012", f"{place}: port and database must be numbers; {forms}.", _QUOTING)
    else:
        return parts
    return None


def _alone(problems: Problems, place: str, url: str, own_alias: str | None) -> None:
    """Report caches on the same database: clearing one is FLUSHDB, which deletes the queues too."""
    own = _same_database(url, getattr(settings, "CACHES", {}).get(own_alias, {}))
    for alias, other in _redis_caches():
        if alias != own_alias and own in other:
            problems.report(
                "E011",
                f'{place} and CACHES["{alias}"] are the same Redis database ({own}).',
                f"cache.clear() of {alias!r} is FLUSHDB: it would delete every message. "
                "Give RMQ a database of its own.",
            )


def _is_django_redis(backend: object) -> bool:
    if backend == DJANGO_REDIS:
        return True
    try:
        from django_redis.cache import RedisCache

        return isinstance(backend, str) and issubclass(import_string(backend), RedisCache)
    except (ImportError, TypeError):
        # The project need not have django-redis, and the path may name something that is not a class.
        return False


def _same_database(url: str, cache: Mapping[str, Any]) -> str:
    """Return host:port/db (or path/db) of a URL, equal for equal databases."""
    options = cache.get("OPTIONS", {})
    parts = urlsplit(url)
    # django-redis takes the number of the database from its options where the URL has none.
    by_option = options.get("CONNECTION_POOL_KWARGS", {}).get("db", options.get("db", options.get("DB")))
    database = redis_url.database(parts) or str(by_option or 0)
    if parts.scheme == "unix":
        return f"{unquote(parts.path)}/{database}"
    host = (parts.hostname or "localhost").lower()
    # The names of the loopback interface are one server.
    return f"{'localhost' if host in ('127.0.0.1', '::1') else host}:{parts.port or 6379}/{database}"


def _aliases_of_django() -> dict[str, str]:
    """Return the aliases in which Django itself stores data, and their uses."""
    return {
        settings.SESSION_CACHE_ALIAS: "the cache of sessions (SESSION_CACHE_ALIAS)",
        settings.CACHE_MIDDLEWARE_ALIAS: "the cache of whole pages (CACHE_MIDDLEWARE_ALIAS)",
        "template_fragments": "the cache of template fragments",
        DEFAULT_CACHE_ALIAS: "the project's own cache (django.core.cache.cache)",
    }


def _redis_caches() -> Iterator[tuple[str, list[str]]]:
    """Yield every alias that uses Redis, with the databases of its locations."""
    for alias, cache in getattr(settings, "CACHES", {}).items():
        location = cache.get("LOCATION", "")
        urls = location if isinstance(location, (list, tuple)) else redis_url.several(str(location))
        servers = []
        for url in urls:
            try:
                if urlsplit(str(url).strip()).scheme in redis_url.SCHEMES:
                    servers.append(_same_database(str(url).strip(), cache))
            except ValueError:
                # A location that is not a URL cannot be the address of a Redis.
                continue
        if servers:
            yield alias, servers


def _hosts(value: object) -> str:
    if isinstance(value, (list, tuple)):
        value = ",".join(str(host) for host in value)
    if not isinstance(value, str) or not all(
        re.fullmatch(r"\s*(\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d{1,5})?\s*", host) for host in value.split(",")
    ):
        raise InvalidSetting("'host:port,host:port' or a list of 'host:port'")
    return ",".join(host.strip() for host in value.split(","))


_root = matching(
    r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", "a ZooKeeper path such as '/rmq', with no slash at its end"
)


def _auth(value: object) -> tuple[tuple[str, str], ...]:
    pairs = [value] if isinstance(value, (list, tuple)) and value and isinstance(value[0], str) else value
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        for pair in pairs
    ):
        raise InvalidSetting("('digest', 'user:password') or a list of such pairs")
    for scheme, credential in pairs:
        # kazoo deprecates SASL in this list: it has other options for it.
        if scheme == "sasl" or (scheme == "digest" and ":" not in credential):
            raise InvalidSetting("('digest', 'user:password') or a list of such pairs, none of them 'sasl'")
    return tuple((str(scheme), str(credential)) for scheme, credential in pairs)


def _tls(value: object) -> Mapping[str, object]:
    allowed = ("CA", "CERT", "KEY", "KEY_PASSWORD", "VERIFY")
    if not isinstance(value, Mapping) or not set(value) <= set(allowed):
        raise InvalidSetting(f"a dict with the keys {', '.join(allowed)}")
    return MappingProxyType(dict(value))


@dataclass(frozen=True, slots=True)
class ZooKeeper:
    """``RMQ["ZOOKEEPER"]``."""

    hosts: str = field(metadata={"parse": secret(_hosts)})
    root: str = setting(_root, "/rmq")
    session_timeout: float = setting(seconds(1.0), 10.0)
    auth: tuple[tuple[str, str], ...] = setting(_auth, (), is_secret=True)
    """(scheme, credential) pairs."""
    acl: str = setting(secret(one_of("open", "creator")), "open")
    """``open``, or ``creator``: only clients that logged in with the same AUTH (the default if AUTH is set)."""
    tls: Mapping[str, object] | None = setting(optional(_tls), None, is_secret=True)
    """CA, CERT, KEY, KEY_PASSWORD and VERIFY, or None without TLS."""
    when_away: str = setting(one_of("continue", "stop"), "continue")
    """What workers do with their slots while ZooKeeper is unavailable: ``continue``, or ``stop``."""


def read_zookeeper(problems: Problems, root: Mapping[str, object]) -> ZooKeeper | None:
    """Return the settings of ZooKeeper, or None if it is not used, or they have a problem."""
    if root.get("ZOOKEEPER") is None:
        return None
    before = len(problems)
    place = 'RMQ["ZOOKEEPER"]'
    values = read_values(problems, place, root["ZOOKEEPER"], keys_of(ZooKeeper))
    # HOSTS that are given and wrong have been reported already.
    if "hosts" not in values and len(problems) == before:
        problems.report("E007", f"{place} has no \"HOSTS\": it must be 'host:port,host:port'.")
    # A client with a certificate is logged in by it.
    logs_in = bool(values.get("auth") or (values.get("tls") or {}).get("CERT"))
    if values.get("acl") == "creator" and not logs_in:
        problems.report(
            "E007", f'{place} has ACL "creator" but no AUTH: no client could read the created nodes.'
        )
    values.setdefault("acl", "creator" if values.get("auth") else "open")
    return None if len(problems) > before else ZooKeeper(**values)


def read_coordinator(problems: Problems, root: Mapping[str, object]) -> str:
    """Return the chosen coordinator: ``redis``, ``zookeeper``, or a dotted path."""
    has_zookeeper = root.get("ZOOKEEPER") is not None
    name = root.get("COORDINATOR")
    if name is None:
        return "zookeeper" if has_zookeeper else "redis"
    if name == "zookeeper" and not has_zookeeper:
        problems.report(
            "E007",
            'RMQ["COORDINATOR"] is "zookeeper" and RMQ["ZOOKEEPER"] is missing.',
            'RMQ = {"ZOOKEEPER": {"HOSTS": "zk1:2181,zk2:2181"}, ...}.',
        )
    if name in ("redis", "zookeeper"):
        return str(name)
    try:
        return dotted_path(name)
    except InvalidSetting as wanted:
        hint = did_you_mean(name, ("redis", "zookeeper"))
        problems.report(
            "E003",
            f"RMQ[\"COORDINATOR\"] is {printable(name)}: it must be 'redis', 'zookeeper' or {wanted}{hint}",
        )
    return "redis"
