"""The only reader of settings: ``settings.RMQ`` (and the CACHES alias it names) as a frozen, validated ``Config``.

All problems are found at once; ``checks`` turns them into system checks, ``get_config`` into one error.
Nothing is read at import, nothing is connected here. Every key is described in ``docs/settings.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from django.conf import settings
from django.core.cache import DEFAULT_CACHE_ALIAS
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_rmq.core.producer.checks import check_time_range
from django_rmq.core.words import addresses, bounds
from django_rmq.core.words.bounds import LARGEST, MAX_AGE, MAX_DURATION_MS, is_number, is_whole
from django_rmq.core.words.keys import check_prefix, check_slots, check_topic_name
from django_rmq.core.words.messages import BATCH, MAX_RETRIES_LIMIT, BackOff, Topic, TopicType
from django_rmq.exceptions import ConfigurationError, InvalidMessage, UnknownTopic

MAX_TIMEOUT = 604_800
"""The longest TIMEOUT: a week, in seconds."""

DJANGO_REDIS = "django_redis.cache.RedisCache"


class Problem(NamedTuple):
    """Something wrong in the settings, as a sentence with the value seen and the value wanted."""

    id: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class RedisServer:
    """Where Redis is and how one logs in there. Its text is the address alone."""

    url: str
    cluster: tuple[str, ...] = ()
    """Given: the URLs of some nodes of a Redis Cluster, ``url`` among them."""
    username: str | None = None
    password: str | None = None
    pool: Mapping[str, Any] = field(default_factory=dict)
    """CONNECTION_POOL_KWARGS of the alias."""
    sentinels: tuple[tuple[str, int], ...] = ()
    """Given: ``url`` names the service, and these know its primary."""
    sentinel_options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(addresses.shown(url) for url in self.cluster or (self.url,))

    def __repr__(self) -> str:
        return f"<RedisServer {self}>"


@dataclass(frozen=True, slots=True)
class ZooKeeper:
    """``RMQ["ZOOKEEPER"]``."""

    hosts: str
    root: str = "/rmq"
    session_timeout: float = 10.0
    auth: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(scheme, credential) pairs."""
    acl: str = "open"
    """``open``, or ``creator``: only who logged in with the same AUTH (the default where there is one)."""
    tls: Mapping[str, Any] | None = field(default=None, repr=False)
    """CA, CERT, KEY, KEY_PASSWORD, VERIFY; None: plain."""
    when_away: str = "continue"
    """What workers do with their slots while ZooKeeper is away: ``continue``, or ``stop``."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """``RMQ["CONSUMER"]``: defaults of the flags of ``runrmqconsumers``. Times in seconds."""

    processes: int = 1
    threads: int = 8
    shutdown_timeout: float = 30.0
    poll_interval: float = 1.0
    watchdog: float | None = 300.0
    max_messages: int | None = None
    max_memory: int | None = None
    """MiB."""
    max_idle_time: float | None = None
    heartbeat_file: str | None = None
    health_address: str | None = None


@dataclass(frozen=True, slots=True)
class History:
    """``RMQ["HISTORY"]``."""

    hours: int = 48


@dataclass(frozen=True, slots=True)
class Admin:
    """``RMQ["ADMIN"]``."""

    formatter: str | Mapping[str, str] | None = None
    """A dotted path for all topics, or topic -> dotted path."""
    page_size: int = 50

    def formatter_of(self, topic: str) -> str | None:
        """Return the path of the function that redacts a topic's bodies; None: they are shown as they are."""
        return self.formatter.get(topic) if isinstance(self.formatter, Mapping) else self.formatter


@dataclass(frozen=True, slots=True)
class Api:
    """``RMQ["API"]``."""

    permission: str | None = None
    """Dotted path of a REST framework permission class; None: our own, which denies by default."""
    send_rate: str | None = "600/min"
    send_bytes: str | None = "16MB/min"
    idempotent_rate: str | None = "50000/day"
    max_bytes: int = 1_048_576
    long_polls: int | None = None
    long_polls_per_user: int | None = None

    @property
    def rate(self) -> tuple[int, float] | None:
        """SEND_RATE as so many messages in so many seconds; None: no limit."""
        return _count_and_seconds(self.send_rate)

    @property
    def byte_rate(self) -> tuple[int, float] | None:
        """SEND_BYTES as so many bytes in so many seconds; None: no limit."""
        return _count_and_seconds(self.send_bytes)

    @property
    def once_rate(self) -> tuple[int, float] | None:
        """IDEMPOTENT_RATE as so many messages in so many seconds; None: no limit."""
        return _count_and_seconds(self.idempotent_rate)

    def waiting(self, has_threads: bool) -> tuple[int, int]:
        """Return how many requests may wait in one process at a time, and how many of one user.

        ``has_threads``: whether the process answers other requests meanwhile; it decides where nothing is set.
        """
        most = (2 if has_threads else 0) if self.long_polls is None else self.long_polls
        each = -(-most // 2) if self.long_polls_per_user is None else self.long_polls_per_user
        return most, each


@dataclass(frozen=True, slots=True)
class Metrics:
    """``RMQ["METRICS"]``."""

    token: str | None = field(default=None, repr=False)
    """Who shows it sees the metrics without logging in."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of the package, validated."""

    topics: Mapping[str, Topic]
    broker: str = "redis"
    redis: RedisServer | None = None
    """None with BROKER "memory" only."""
    key_prefix: str = ""
    coordinator: str = "redis"
    """``redis``, ``zookeeper``, or a dotted path."""
    testing: bool = False
    """Whether this is a test run: BROKER is "memory" then, and REDIS is not read."""
    zookeeper: ZooKeeper | None = None
    on_commit: bool = True
    autodiscover: str | None = "listeners"
    durability: str = "relaxed"
    consumer: Consumer = field(default_factory=Consumer)
    history: History = field(default_factory=History)
    admin: Admin = field(default_factory=Admin)
    api: Api = field(default_factory=Api)
    metrics: Metrics = field(default_factory=Metrics)
    tracing: bool = False
    """Whether sends and calls of listeners are spans of OpenTelemetry."""
    events: bool = False
    """Whether processes publish what happens to messages."""

    def topic(self, name: str) -> Topic:
        """Return the topic called ``name``, or raise ``UnknownTopic``."""
        try:
            return self.topics[name]
        except (KeyError, TypeError):
            raise UnknownTopic(
                f'no topic {name!r} is declared in RMQ["TOPICS"]{did_you_mean(name, self.topics)}'
            ) from None


# --- values: each returns the value wanted or raises Wanted with what it must be ------------------


class Wanted(Exception):
    """Carries what a value must be, and the id of the problem that it is otherwise."""

    def __init__(self, what: str, problem_id: str = "E003") -> None:
        super().__init__(what)
        self.problem_id = problem_id


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise Wanted("True or False")
    return value


def _tracing(value: object) -> bool:
    wanted = _boolean(value)
    if wanted and not _has_opentelemetry():
        raise Wanted("False where opentelemetry-api (the extra otel) is not installed")
    return wanted


def _has_opentelemetry() -> bool:
    try:
        return find_spec("opentelemetry.trace") is not None
    except ImportError:
        return False


def _whole(low: int, high: int | None = None) -> Callable[[object], int]:
    wanted = (
        f"a whole number from {low} to {high}" if high is not None else f"a whole number of at least {low}"
    )

    def parse(value: object) -> int:
        if not is_whole(value) or not low <= value <= (LARGEST if high is None else high):
            raise Wanted(wanted)
        return value

    return parse


def _number(value: object) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not is_number(value):
        raise Wanted("a number")
    return value


def _seconds(low: float = 0.0) -> Callable[[object], float]:
    def parse(value: object) -> float:
        try:
            found = float(_number(value))
        except Wanted:
            found = -1.0
        if found < low or (low == 0.0 and found == 0.0):
            least = "more than 0" if low == 0.0 else f"at least {low:g}"
            raise Wanted(f"a number of seconds or a timedelta, {least}")
        if found > MAX_AGE:
            raise Wanted(f"a number of seconds or a timedelta, at most {MAX_AGE} s")
        return found

    return parse


def _whole_seconds(value: object) -> int:
    try:
        found = float(_number(value))
    except Wanted:
        found = 0.0
    if not 1 <= found <= MAX_TIMEOUT or found != int(found):
        raise Wanted(f"whole seconds from 1 to {MAX_TIMEOUT}, as a number or a timedelta")
    return int(found)


def _rate(value: object) -> float:
    if not is_number(value) or not value > 0:
        raise Wanted("a number of messages per second, more than 0")
    return float(value)


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    def parse_optional(value: object) -> Any:
        if value is None:
            return None
        try:
            return parse(value)
        except Wanted as wanted:
            raise Wanted(f"{wanted}; or None") from None

    return parse_optional


def _one_of(*choices: str) -> Callable[[object], str]:
    shown = [repr(choice) for choice in choices]
    wanted = " or ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]

    def parse(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return str(value)
        raise Wanted(wanted)

    return parse


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Wanted("text that is not empty")
    return value


def _dotted_path(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
        raise Wanted("a dotted path such as 'shop.rules.backoff'")
    return value


def _slots(value: object) -> int:
    try:
        return check_slots(value)
    except ConfigurationError as error:
        raise Wanted(f"a power of two from 1 to 1048576 ({error})") from None


def _time_range(value: object) -> int:
    try:
        return check_time_range(value)
    except InvalidMessage as error:
        raise Wanted(f"a timedelta or a whole number of ms ({error})") from None


def _back_off(value: object) -> BackOff:
    if isinstance(value, str):
        path = _dotted_path(value)
        try:
            function = import_string(path)
        except Exception as error:  # noqa: BLE001 - whatever a module of the project raises is reported, not raised
            raise Wanted(
                f"the dotted path of a function, and this one cannot be imported ({_shown_error(error)})",
                "E008",
            ) from None
        if not callable(function):
            what = f"the dotted path of a function (failures) -> seconds, and this one is {_shown(function)}"
            raise Wanted(what, "E008")
        return BackOff(function=function)
    try:
        rest_ms = round(float(_number(value)) * 1000)
    except Wanted:
        rest_ms = -1
    if not 0 <= rest_ms <= MAX_DURATION_MS:
        raise Wanted("seconds (0: none, at most 366 days), a timedelta, or the dotted path of a function")
    return BackOff(rest_ms, rest_ms)


def _hosts(value: object) -> str:
    if isinstance(value, (list, tuple)):
        value = ",".join(str(host) for host in value)
    if not isinstance(value, str) or not all(
        re.fullmatch(r"\s*(\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d{1,5})?\s*", host) for host in value.split(",")
    ):
        raise Wanted("'host:port,host:port' or a list of 'host:port'")
    return ",".join(host.strip() for host in value.split(","))


def _root(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", value):
        raise Wanted("a ZooKeeper path such as '/rmq', with no slash at its end")
    return value


def _auth(value: object) -> tuple[tuple[str, str], ...]:
    pairs = [value] if isinstance(value, (list, tuple)) and value and isinstance(value[0], str) else value
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        for pair in pairs
    ):
        raise Wanted("('digest', 'user:password') or a list of such pairs")
    for scheme, credential in pairs:
        if scheme == "sasl" or (scheme == "digest" and ":" not in credential):
            raise Wanted("('digest', 'user:password') or a list of such pairs, none of them 'sasl'")
    return tuple((str(scheme), str(credential)) for scheme, credential in pairs)


def _tls(value: object) -> Mapping[str, Any]:
    allowed = ("CA", "CERT", "KEY", "KEY_PASSWORD", "VERIFY")
    if not isinstance(value, Mapping) or not set(value) <= set(allowed):
        raise Wanted(f"a dict with the keys {', '.join(allowed)}")
    return MappingProxyType(dict(value))


def _formatter(value: object) -> str | Mapping[str, str]:
    if not isinstance(value, Mapping):
        return _dotted_path(value)
    try:
        return MappingProxyType({str(topic): _dotted_path(path) for topic, path in value.items()})
    except Wanted:
        raise Wanted("a dotted path, or a dict from topic to dotted path") from None


_SIZES = {"": 1, "kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}
_PERIODS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def _count_and_seconds(rate: str | None) -> tuple[int, float] | None:
    """Return a rate that ``_send_rate`` or ``_byte_rate`` has let through as so many in so many seconds."""
    if rate is None:
        return None
    count, _, period = rate.partition("/")
    digits = count.rstrip("kMGB")
    return int(digits) * _SIZES[count[len(digits) :]], _PERIODS[period[0]]


def _send_rate(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[1-9]\d{0,8}/(s|sec|m|min|h|hour|d|day)", value):
        raise Wanted("a rate such as '600/min' (per s, min, hour or day)")
    return value


def _byte_rate(value: object) -> str:
    pattern = r"[1-9]\d{0,8}(kB|MB|GB)?/(s|sec|m|min|h|hour|d|day)"
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise Wanted("a rate such as '16MB/min' (bytes, kB, MB or GB per s, min, hour or day)")
    return value


def _token(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._~+/=-]{16,512}", value):
        raise Wanted("16 to 512 of A-Z a-z 0-9 . _ ~ + / = -, as a bearer token is written")
    return value


def _module_name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", value):
        raise Wanted("the name of a module within an app, such as 'listeners'")
    return value


def _address(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]*):\d{1,5}", value):
        raise Wanted("'host:port'")
    return value


def _prefix(value: object) -> str:
    try:
        return check_prefix(value)
    except ConfigurationError:
        raise Wanted("printable text without braces") from None


# --- keys -----------------------------------------------------------------------------------------

_Keys = Mapping[str, tuple[str, Callable[[object], Any]]]
"""Settings key -> (field of the dataclass, how its value is read)."""

TOPIC_KEYS: _Keys = {
    "TYPE": ("type", _one_of(*(kind.value for kind in TopicType))),
    "SLOTS": ("slots", _slots),
    "TIME_RANGE": ("time_range_ms", _optional(_time_range)),
    "BODY": ("body", _one_of("json", "text", "bytes")),
    "IDENTITY": ("identity", _one_of("body", "key")),
    "SLOT_BASIS": ("slot_basis", _optional(_text)),
    "SERIAL": ("serial", _boolean),
    "TIMEOUT": ("timeout", _whole_seconds),
    "MAX_RETRIES": ("max_retries", _whole(0, MAX_RETRIES_LIMIT)),
    "BACKOFF": ("backoff", _back_off),
    "RETRY_PRIORITY": ("retry_priority", _one_of("original", "lowest")),
    "MAX_RUNTIME": ("max_runtime", _seconds(1.0)),
    "PREFETCH": ("prefetch", _whole(1, BATCH)),
    "MAX_BODY": ("max_body", _whole(1, 536_870_912)),
    "MAX_BACKLOG": ("max_backlog", _optional(_whole(1))),
    "MAX_RATE": ("max_rate", _optional(_rate)),
    "MAX_IN_FLIGHT": ("max_in_flight", _optional(_whole(1))),
    "MAX_PREPARED": ("max_prepared", _whole(1, 1_000_000)),
    "FLOW": ("flow", _optional(_one_of("auto"))),
    "DEAD_RETENTION": ("dead_retention", _optional(_seconds(1.0))),
    "LISTENER": ("listener", _boolean),
}
ZOOKEEPER_KEYS: _Keys = {
    "HOSTS": ("hosts", _hosts),
    "ROOT": ("root", _root),
    "SESSION_TIMEOUT": ("session_timeout", _seconds(1.0)),
    "AUTH": ("auth", _auth),
    "ACL": ("acl", _one_of("open", "creator")),
    "TLS": ("tls", _optional(_tls)),
    "WHEN_AWAY": ("when_away", _one_of("continue", "stop")),
}
CONSUMER_KEYS: _Keys = {
    "PROCESSES": ("processes", _whole(1, 1024)),
    "THREADS": ("threads", _whole(1, 1024)),
    "SHUTDOWN_TIMEOUT": ("shutdown_timeout", _seconds()),
    "POLL_INTERVAL": ("poll_interval", _seconds(0.01)),
    "WATCHDOG": ("watchdog", _optional(_seconds(1.0))),
    "MAX_MESSAGES": ("max_messages", _optional(_whole(1))),
    "MAX_MEMORY": ("max_memory", _optional(_whole(1))),
    "MAX_IDLE_TIME": ("max_idle_time", _optional(_seconds())),
    "HEARTBEAT_FILE": ("heartbeat_file", _optional(_text)),
    "HEALTH_ADDRESS": ("health_address", _optional(_address)),
}
HISTORY_KEYS: _Keys = {"HOURS": ("hours", _whole(0, 8784))}
ADMIN_KEYS: _Keys = {
    "FORMATTER": ("formatter", _optional(_formatter)),
    "PAGE_SIZE": ("page_size", _whole(1, 1000)),
}
API_KEYS: _Keys = {
    "PERMISSION": ("permission", _optional(_dotted_path)),
    "SEND_RATE": ("send_rate", _optional(_send_rate)),
    "SEND_BYTES": ("send_bytes", _optional(_byte_rate)),
    "IDEMPOTENT_RATE": ("idempotent_rate", _optional(_send_rate)),
    "MAX_BYTES": ("max_bytes", _whole(1024, 536_870_912)),
    "LONG_POLLS": ("long_polls", _optional(_whole(0, 10_000))),
    "LONG_POLLS_PER_USER": ("long_polls_per_user", _optional(_whole(1, 10_000))),
}
METRICS_KEYS: _Keys = {"TOKEN": ("token", _optional(_token))}
PLAIN_KEYS: _Keys = {
    "BROKER": ("broker", _one_of("redis", "memory")),
    "KEY_PREFIX": ("key_prefix", _prefix),
    "ON_COMMIT": ("on_commit", _boolean),
    "AUTODISCOVER": ("autodiscover", _optional(_module_name)),
    "DURABILITY": ("durability", _one_of("relaxed", "strict")),
    "EVENTS": ("events", _boolean),
    "TESTING": ("testing", _boolean),
    "TRACING": ("tracing", _tracing),
}
SECTIONS: Mapping[str, tuple[str, type, _Keys]] = {
    "CONSUMER": ("consumer", Consumer, CONSUMER_KEYS),
    "HISTORY": ("history", History, HISTORY_KEYS),
    "ADMIN": ("admin", Admin, ADMIN_KEYS),
    "API": ("api", Api, API_KEYS),
    "METRICS": ("metrics", Metrics, METRICS_KEYS),
}
RMQ_KEYS = (*PLAIN_KEYS, *SECTIONS, "REDIS", "TOPICS", "TOPIC_DEFAULTS", "COORDINATOR", "ZOOKEEPER")


# --- reading --------------------------------------------------------------------------------------


class _Reader:
    """Reads ``settings.RMQ`` and gathers what is wrong with it."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def report(self, problem_id: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(f"rmq.{problem_id}", message, hint))

    def section(self, place: str, given: object, keys: Iterable[str]) -> dict[str, Any]:
        """Return ``given`` without unknown keys; report them, and whatever is no dict."""
        if not isinstance(given, Mapping):
            self.report("E001", f"{place} is {_kind(given)}: it must be a dict.")
            return {}
        known = list(keys)
        for key in given:
            if key not in known:
                self.report(
                    "E002",
                    f"{place} has the unknown key {_shown(key)}{did_you_mean(key, known)}",
                    f"Allowed here: {', '.join(sorted(known))}.",
                )
        return {key: value for key, value in given.items() if key in known}

    def values(self, place: str, given: object, keys: _Keys) -> dict[str, Any]:
        """Return the parsed values by field; report those that cannot be used."""
        found = {}
        for key, value in self.section(place, given, keys).items():
            name, parse = keys[key]
            try:
                found[name] = parse(value)
            except Wanted as wanted:
                shown = f"{_kind(value)} that cannot be used" if key in _SECRET else _shown(value)
                self.report(
                    wanted.problem_id, f'{place}["{key}"] is {shown}: it must be {_quoting(wanted, value)}.'
                )
        return found

    def read(self) -> Config | None:
        """Return the configuration, or None if anything is wrong."""
        given = getattr(settings, "RMQ", None)
        if given is None:
            self.report(
                "E001",
                "The setting RMQ is missing.",
                'For example: RMQ = {"REDIS": "rmq", "TOPICS": {"orders": {"TYPE": "fixed_time"}}}.',
            )
            return None
        root = self.section("RMQ", given, RMQ_KEYS)
        values = self.values("RMQ", {key: root[key] for key in root if key in PLAIN_KEYS}, PLAIN_KEYS)
        for key, (name, kind, keys) in SECTIONS.items():
            if key in root:
                values[name] = kind(**self.values(f'RMQ["{key}"]', root[key], keys))
        values["topics"] = self.topics(root)
        values["zookeeper"] = self.zookeeper(root)
        values["coordinator"] = self.coordinator(root)
        if values.get("testing"):
            values["broker"] = "memory"
        elif "REDIS" in root:
            values["redis"] = self.redis(root["REDIS"])
        elif root.get("BROKER") != "memory":
            self.report(
                "E009",
                'RMQ["REDIS"] is missing.',
                'Name a CACHES alias of django-redis, or give a URL: RMQ = {"REDIS": "rmq", ...}.',
            )
        formatter = values["admin"].formatter if "admin" in values else None
        if isinstance(formatter, Mapping):
            for name in formatter:
                if name not in values["topics"]:
                    meant = did_you_mean(name, values["topics"])
                    self.report(
                        "E004", f'RMQ["ADMIN"]["FORMATTER"] names {name!r}, which is no declared topic{meant}'
                    )
        return None if self.problems else Config(**values)

    # --- topics

    def topics(self, root: Mapping[str, Any]) -> Mapping[str, Topic]:
        defaults_place = 'RMQ["TOPIC_DEFAULTS"]'
        defaults = self.values(defaults_place, root.get("TOPIC_DEFAULTS", {}), TOPIC_KEYS)
        declared = root.get("TOPICS", {})
        if not isinstance(declared, Mapping):
            self.report("E001", f'RMQ["TOPICS"] is {_shown(declared)}: it must be a dict.')
            return {}
        found = {}
        for name, options in declared.items():
            try:
                check_topic_name(name)
            except ConfigurationError as error:
                self.report("E004", f'RMQ["TOPICS"]: {_quoting(error, name)}.')
                continue
            topic = self.topic(name, options, defaults)
            if topic is not None:
                found[name] = topic
        return MappingProxyType(found)

    def topic(self, name: str, options: object, defaults: Mapping[str, Any]) -> Topic | None:
        place = f'RMQ["TOPICS"]["{name}"]'
        before = len(self.problems)
        own = self.values(place, options, TOPIC_KEYS)
        values = {**defaults, **own}
        if "type" not in values and not (isinstance(options, Mapping) and "TYPE" in options):
            kinds = ", ".join(repr(kind.value) for kind in TopicType)
            self.report("E005", f'{place} has no "TYPE": it must be one of {kinds}.')
        if len(self.problems) > before:
            return None
        kind = values["type"] = TopicType(values["type"])

        # What does not fit the type is an error where the topic says it, and of no meaning in the defaults.
        for key, only in (("TIME_RANGE", TopicType.RANGE_MERGE), ("RETRY_PRIORITY", TopicType.PRIORITY)):
            name_of_field = TOPIC_KEYS[key][0]
            if kind is not only:
                values.pop(name_of_field, None)
                if own.get(name_of_field) is not None:
                    self.report(
                        "E006",
                        f'{place} has TYPE "{kind.value}" and {key}, which only {only.value} topics have.',
                    )
        if values.get("slot_basis") is not None and values.get("body", "json") != "json":
            self.report(
                "E006",
                f'{place} has SLOT_BASIS and BODY "{values["body"]}": a field of the body needs BODY "json".',
                "Give slot_basis= with each send instead.",
            )
        return None if len(self.problems) > before else Topic(name, **values)

    # --- coordination

    def zookeeper(self, root: Mapping[str, Any]) -> ZooKeeper | None:
        if root.get("ZOOKEEPER") is None:
            return None
        before = len(self.problems)
        place = 'RMQ["ZOOKEEPER"]'
        values = self.values(place, root["ZOOKEEPER"], ZOOKEEPER_KEYS)
        if "hosts" not in values and len(self.problems) == before:
            self.report("E007", f"{place} has no \"HOSTS\": it must be 'host:port,host:port'.")
        logs_in = bool(values.get("auth") or (values.get("tls") or {}).get("CERT"))
        if values.get("acl") == "creator" and not logs_in:
            self.report("E007", f'{place} has ACL "creator" and no AUTH: nobody could read what was made.')
        values.setdefault("acl", "creator" if values.get("auth") else "open")
        return None if len(self.problems) > before else ZooKeeper(**values)

    def coordinator(self, root: Mapping[str, Any]) -> str:
        has_zookeeper = root.get("ZOOKEEPER") is not None
        chosen = root.get("COORDINATOR")
        if chosen is None:
            return "zookeeper" if has_zookeeper else "redis"
        if chosen == "zookeeper" and not has_zookeeper:
            self.report(
                "E007",
                'RMQ["COORDINATOR"] is "zookeeper" and RMQ["ZOOKEEPER"] is missing.',
                'RMQ = {"ZOOKEEPER": {"HOSTS": "zk1:2181,zk2:2181"}, ...}.',
            )
        if chosen in ("redis", "zookeeper"):
            return str(chosen)
        try:
            return _dotted_path(chosen)
        except Wanted as wanted:
            meant = did_you_mean(chosen, ("redis", "zookeeper"))
            self.report(
                "E003",
                f"RMQ[\"COORDINATOR\"] is {_shown(chosen)}: it must be 'redis', 'zookeeper' or {wanted}{meant}",
            )
        return "redis"

    # --- Redis

    def redis(self, given: object) -> RedisServer | None:
        place = 'RMQ["REDIS"]'
        if isinstance(given, Mapping):
            return self.cluster(place, given)
        if not isinstance(given, str):
            self.report("E003", f"{place} is {_kind(given)}: it must be a CACHES alias, a URL or a dict.")
            return None
        if "://" in given:
            if self.url(place, given) is not None:
                self.alone(place, given, None)
            return RedisServer(given)
        return self.alias(place, given)

    def cluster(self, place: str, given: Mapping[str, Any]) -> RedisServer | None:
        named = given.get("CLUSTER")
        urls = [named] if isinstance(named, str) else named
        if (
            set(given) != {"CLUSTER"}
            or not isinstance(urls, (list, tuple))
            or not urls
            or not all(isinstance(url, str) for url in urls)
        ):
            self.report(
                "E003",
                f'{place} is a dict: it must be {{"CLUSTER": "redis://host:port"}}, with one URL or a list of some.',
            )
            return None
        before, place = len(self.problems), f'{place}["CLUSTER"]'
        for url in urls:
            parts = self.url(place, url)
            if parts is None:
                continue
            if parts.scheme == "unix":
                self.report(
                    "E012",
                    f"{place} is {addresses.shown(url)}: the nodes of a cluster are found by host and port.",
                )
            elif addresses.database(parts) not in ("0", None):
                self.report("E012", f"{place} is {addresses.shown(url)}: a cluster has only database 0.")
            else:
                self.alone(place, url, None)
        return RedisServer(urls[0], cluster=tuple(urls)) if len(self.problems) == before else None

    def alias(self, place: str, alias: str) -> RedisServer | None:
        caches = getattr(settings, "CACHES", {})
        if alias not in caches:
            meant = did_you_mean(alias, caches)
            self.report(
                "E009",
                f"{place} is {_shown(alias)}, which is no alias in CACHES{meant}",
                f'CACHES = {{"rmq": {{"BACKEND": "{DJANGO_REDIS}", "LOCATION": "redis://host:6379/1"}}, ...}}.',
            )
            return None
        cache = caches[alias]
        if not _is_django_redis(cache.get("BACKEND")):
            self.report(
                "E010",
                f'CACHES["{alias}"] has the backend {_shown(cache.get("BACKEND"))}: RMQ needs {DJANGO_REDIS!r}.',
            )
            return None
        place, before = f'CACHES["{alias}"]', len(self.problems)
        location = cache.get("LOCATION", "")
        locations = location if isinstance(location, (list, tuple)) else addresses.several(str(location))
        primary = str(locations[0]).strip() if locations else ""
        options = self.options(place, cache, "OPTIONS")
        pool = self.options(f'{place}["OPTIONS"]', options, "CONNECTION_POOL_KWARGS")
        sentinel_options = self.options(f'{place}["OPTIONS"]', options, "SENTINEL_KWARGS")
        sentinels = self.sentinels(f'{place}["OPTIONS"]["SENTINELS"]', options.get("SENTINELS") or ())
        if self.url(f'{place}["LOCATION"]', primary) is None or len(self.problems) > before:
            return None
        if alias in (uses := _aliases_of_django()):
            self.report(
                "E011",
                f"{place} is {alias!r}, which is also {uses[alias]}.",
                f"cache.clear() of {alias!r} is FLUSHDB: it would delete every message. Give RMQ an alias of its own, "
                'on a database of its own: CACHES = {"rmq": {"BACKEND": '
                f'"{DJANGO_REDIS}", "LOCATION": "redis://host:6379/1"}}, ...}}.',
            )
        self.alone(place, primary, alias)
        return RedisServer(
            primary,
            username=options.get("USERNAME"),
            password=options.get("PASSWORD"),
            pool=MappingProxyType(dict(pool)),
            sentinels=sentinels,
            sentinel_options=MappingProxyType(dict(sentinel_options)),
        )

    def options(self, place: str, given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        """Return a dict of options, or report what stands in its place."""
        found = given.get(key) or {}
        if isinstance(found, Mapping) and all(isinstance(name, str) for name in found):
            return found
        self.report("E003", f'{place}["{key}"] is {_kind(found)}: it must be a dict of options by name.')
        return {}

    def sentinels(self, place: str, given: Any) -> tuple[tuple[str, int], ...]:
        """Return where the sentinels are, or report what stands in their place."""
        try:
            return tuple((str(host), int(port)) for host, port in given)
        except (TypeError, ValueError):
            self.report("E012", f"{place} is {_kind(given)}: it must be a list of (host, port).")
            return ()

    def url(self, place: str, url: str) -> SplitResult | None:
        """Return the parts of a Redis URL, or report what is wrong with it."""
        wanted = "it must be redis://host:6379/1, rediss://host:6379/1 or unix:///path?db=1"
        place = f"{place} is {addresses.shown(url)}"
        try:
            parts = addresses.parse(url)
        except addresses.UnreadableAddress:
            parts = None
        if parts is None or parts.fragment:
            self.report("E012", f"{place}, which cannot be read: {wanted}.", _QUOTING)
        elif parts.scheme not in addresses.SCHEMES:
            self.report("E012", f"{place}, with an unknown scheme: {wanted}.")
        elif not (parts.path if parts.scheme == "unix" else parts.hostname):
            missing = "path" if parts.scheme == "unix" else "host"
            self.report("E012", f"{place}, without a {missing}: {wanted}.")
        elif parts.port == 0 or not (addresses.database(parts) or "0").isdigit():
            self.report("E012", f"{place}: port and database must be numbers; {wanted}.", _QUOTING)
        else:
            return parts
        return None

    def alone(self, place: str, url: str, own_alias: str | None) -> None:
        """Report caches on the same database: clearing one is FLUSHDB, and takes the queues with it."""
        own = same_database(url, getattr(settings, "CACHES", {}).get(own_alias, {}))
        for alias, other in _redis_caches():
            if alias != own_alias and own in other:
                self.report(
                    "E011",
                    f'{place} and CACHES["{alias}"] are the same Redis database ({own}).',
                    f"cache.clear() of {alias!r} is FLUSHDB: it would delete every message. "
                    "Give RMQ a database of its own.",
                )


_QUOTING = "Write @ : / ? # and % in a user name or password as %40 %3A %2F %3F %23 and %25."
_SECRET = ("ACL", "AUTH", "HOSTS", "TLS", "TOKEN")
"""Keys whose values are not shown: credentials, and what credentials are written into by mistake."""

_HARMLESS = (bool, int, float, timedelta, type(None))


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _shown(value: object) -> str:
    """Return a value that cannot be used as it may be printed: a URL without its login, other objects by their type."""
    text = _plain(value)
    return f"{text[:77]}..." if len(text) > 80 else text


def _plain(value: object, depth: int = 0) -> str:
    if isinstance(value, str):
        if "://" in value:
            return addresses.shown(value)
        return "a str that may hold a password" if set("@?") & set(value) else repr(value)
    if isinstance(value, _HARMLESS):
        return bounds.shown(value)
    if depth < 2 and isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain(one, depth + 1) for one in value[:20])}]"
    return _kind(value)


def _quoting(error: Exception, value: object) -> str:
    """Return the text of an error that may quote ``value``, with the value as it may be printed."""
    text = str(error)
    return text.replace(repr(value), _plain(value)) if isinstance(value, str) else text


def _shown_error(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{text[:157]}..." if len(text) > 160 else text


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return how a sentence about an unknown ``name`` ends: with the nearest known name, if one is near."""
    choices = {str(choice).lower(): str(choice) for choice in known}
    near = get_close_matches(str(name).lower(), choices, 1, 0.6)
    return f"; did you mean {choices[near[0]]!r}?" if near else "."


def _is_django_redis(backend: object) -> bool:
    if backend == DJANGO_REDIS:
        return True
    try:
        from django_redis.cache import RedisCache

        return isinstance(backend, str) and issubclass(import_string(backend), RedisCache)
    except (ImportError, TypeError):
        return False


def same_database(url: str, cache: Mapping[str, Any]) -> str:
    """Return host:port/db (or path/db) of a URL, equal for equal databases."""
    options = cache.get("OPTIONS", {})
    parts = urlsplit(url)
    by_option = options.get("CONNECTION_POOL_KWARGS", {}).get("db", options.get("db", options.get("DB")))
    database = addresses.database(parts) or str(by_option or 0)
    if parts.scheme == "unix":
        return f"{unquote(parts.path)}/{database}"
    host = (parts.hostname or "localhost").lower()
    return f"{'localhost' if host in ('127.0.0.1', '::1') else host}:{parts.port or 6379}/{database}"


def _aliases_of_django() -> dict[str, str]:
    """Return the aliases that Django itself puts things into, and what it uses them for."""
    return {
        settings.SESSION_CACHE_ALIAS: "the cache of sessions (SESSION_CACHE_ALIAS)",
        settings.CACHE_MIDDLEWARE_ALIAS: "the cache of whole pages (CACHE_MIDDLEWARE_ALIAS)",
        "template_fragments": "the cache of template fragments",
        DEFAULT_CACHE_ALIAS: "the project's own cache (django.core.cache.cache)",
    }


def _redis_caches() -> Iterator[tuple[str, list[str]]]:
    """Yield every alias that lies in Redis, with the databases of its locations."""
    for alias, cache in getattr(settings, "CACHES", {}).items():
        location = cache.get("LOCATION", "")
        urls = location if isinstance(location, (list, tuple)) else re.split("[,;]", str(location))
        found = []
        for url in urls:
            try:
                if urlsplit(str(url).strip()).scheme in addresses.SCHEMES:
                    found.append(same_database(str(url).strip(), cache))
            except ValueError:
                continue
        if found:
            yield alias, found


# --- the one configuration ------------------------------------------------------------------------

_config: Config | None = None


def read_settings() -> tuple[Config | None, list[Problem]]:
    """Read the settings anew: the configuration, or None and all that is wrong."""
    reader = _Reader()
    return reader.read(), reader.problems


PLANNED: tuple[str, ...] = ()
PLANNED_OF_TOPICS: tuple[str, ...] = ()


def without_effect() -> list[str]:
    """Return the settings that are given and valid, and that nothing of this version acts upon."""
    given: Any = getattr(settings, "RMQ", None) or {}
    found = [f'RMQ["{name}"]' for name in PLANNED if given.get(name)]
    places = {'RMQ["TOPIC_DEFAULTS"]': given.get("TOPIC_DEFAULTS") or {}}
    places |= {f'RMQ["TOPICS"]["{name}"]': topic for name, topic in (given.get("TOPICS") or {}).items()}
    for place, options in places.items():
        found += [f'{place}["{name}"]' for name in PLANNED_OF_TOPICS if options.get(name) is not None]
    return found


def get_config() -> Config:
    """Return the configuration, read once. Raises ``ConfigurationError`` with all that is wrong."""
    global _config  # noqa: PLW0603 - one per process, like the settings it comes from
    config = _config
    if config is None:
        config, problems = read_settings()
        if config is None:
            raise ConfigurationError(
                "the settings of RMQ are wrong:\n"
                + "\n".join(f"  {problem.id}: {problem.message}" for problem in problems)
            )
        _config = config
    return config


def _forget(*, setting: str, **_: object) -> None:
    global _config  # noqa: PLW0603
    if setting in ("RMQ", "CACHES", "SESSION_CACHE_ALIAS", "CACHE_MIDDLEWARE_ALIAS"):
        _config = None


setting_changed.connect(_forget, dispatch_uid="django_rmq.project.settings.reader")
