"""The settings of the package as a validated ``Config``, from which all other modules take them.

A ``Config`` is frozen, with one exception: schedules may have topics of their own, which are known only when the project's
schedules have been read. ``set_schedule_topics`` then adds these topics. ``operations.topics`` reads ``settings.RMQ`` as well,
to show which values of a topic are written there.

The sections CONSUMER, ADMIN, API, METRICS and OUTBOX are classes here, and ``Config`` has all other settings. The key of a
setting is a field in capitals, and the field defines its parser and its default. Other modules of ``conf`` read the parts
with rules of their own, such as topics and the address of Redis.

The reader finds all problems at once; ``checks`` reports them as system checks, ``get_config`` as one error. Nothing is
read at import, and nothing is connected here. ``docs/reference/settings.md`` describes every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed

from django_rmq.conf import parsers
from django_rmq.conf.known_keys import (
    Keys,
    Problems,
    SettingsProblem,
    did_you_mean,
    keys_of,
    read_section,
    read_values,
    setting,
)
from django_rmq.conf.parsers import printable
from django_rmq.conf.schedule_settings import read_schedules, with_schedule_topics
from django_rmq.conf.server_settings import (
    ADDRESS,
    RedisServer,
    ZooKeeper,
    read_coordinator,
    read_redis,
    read_zookeeper,
)
from django_rmq.conf.task_settings import TaskBackend, read_tasks, with_task_topics
from django_rmq.conf.topic_settings import read_topics
from django_rmq.core.model.bounds import MAX_REPLICAS, SHUTDOWN_SECONDS
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, UnknownTopic


@dataclass(frozen=True, slots=True)
class Consumer:
    """``RMQ["CONSUMER"]``: defaults of the flags of ``runrmqconsumers``. Times in seconds."""

    processes: int = setting(parsers.whole(1, 1024), 1)
    threads: int = setting(parsers.whole(1, 1024), 8)
    shutdown_timeout: float = setting(parsers.seconds(), SHUTDOWN_SECONDS)
    poll_interval: float = setting(parsers.seconds(0.01), 1.0)
    watchdog: float | None = setting(parsers.optional(parsers.seconds(1.0)), 300.0)
    max_messages: int | None = setting(parsers.optional(parsers.whole(1)), None)
    max_memory: int | None = setting(parsers.optional(parsers.whole(1)), None)
    """In MiB."""
    max_idle_time: float | None = setting(parsers.optional(parsers.seconds()), None)
    heartbeat_file: str | None = setting(parsers.optional(parsers.text), None)
    health_address: str | None = setting(parsers.optional(parsers.address), None)


@dataclass(frozen=True, slots=True)
class Admin:
    """``RMQ["ADMIN"]``."""

    formatter: str | Mapping[str, str] | None = setting(parsers.optional(parsers.formatter), None)
    """A dotted path for all topics, or topic -> dotted path."""
    # A form with all ids of a page has at most 1,000 fields, as many as Django takes (DATA_UPLOAD_MAX_NUMBER_FIELDS).
    page_size: int = setting(parsers.whole(1, 900), 50)
    columns: tuple[str, ...] | Mapping[str, tuple[str, ...]] = setting(parsers.columns, ())
    """Paths in the bodies of all topics, or topic -> paths, that are columns of the lists."""

    def columns_of(self, topic: str) -> tuple[str, ...]:
        """Return the paths in the bodies of a topic that are columns of its lists."""
        return self.columns.get(topic, ()) if isinstance(self.columns, Mapping) else self.columns

    def formatter_of(self, topic: str) -> str | None:
        """Return the path of the function that redacts a topic's bodies, or None if they are shown as they are."""
        return self.formatter.get(topic) if isinstance(self.formatter, Mapping) else self.formatter


@dataclass(frozen=True, slots=True)
class Api:
    """``RMQ["API"]``."""

    permission: str | None = setting(parsers.optional(parsers.dotted_path), None)
    """Dotted path of a REST framework permission class. Without one ``TopicPermission`` is used: users have to be logged in, and
    Django's permissions decide."""
    send_rate: str | None = setting(parsers.optional(parsers.send_rate), "600/min")
    send_bytes: str | None = setting(parsers.optional(parsers.byte_rate), "16MB/min")
    idempotent_rate: str | None = setting(parsers.optional(parsers.send_rate), "50000/day")
    max_bytes: int = setting(parsers.whole(1024, 536_870_912), 1_048_576)
    long_polls: int | None = setting(parsers.optional(parsers.whole(0, 10_000)), None)
    long_polls_per_user: int | None = setting(parsers.optional(parsers.whole(1, 10_000)), None)

    def waiting(self, has_threads: bool) -> tuple[int, int]:
        """Return how many requests may wait in one process at a time, and how many of one user.

        ``has_threads``: whether the process answers other requests meanwhile; it decides if nothing is set.
        """
        most = (2 if has_threads else 0) if self.long_polls is None else self.long_polls
        # Rounded up: one user may have half of the places, and the only one if there is no other.
        each = -(-most // 2) if self.long_polls_per_user is None else self.long_polls_per_user
        return most, each


@dataclass(frozen=True, slots=True)
class Metrics:
    """``RMQ["METRICS"]``."""

    token: str | None = setting(parsers.optional(parsers.token), None, is_secret=True)
    """A client that sends it may read the metrics without logging in."""
    opentelemetry: bool = setting(parsers.opentelemetry, False)
    """Whether processes record metrics of OpenTelemetry."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """``RMQ["OUTBOX"]`` as a dict: its options. True: the defaults, for all topics."""

    grace: float = setting(parsers.seconds(0.1), 5.0)
    replicas: int = setting(parsers.whole(0, MAX_REPLICAS), 0)
    """The number of replicas of Redis that must have a message before its row is deleted."""

    @property
    def grace_ms(self) -> int:
        """The time after a send, in ms, for which the relay leaves its row to the process that sends the message."""
        return round(self.grace * 1000)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of the package, validated."""

    topics: Mapping[str, Topic]
    """The topics of ``RMQ["TOPICS"]``, of ``TASKS``, and of schedules that have a topic in their own name."""
    tasks: Mapping[str, TaskBackend] = field(default_factory=dict)
    """The backends of ``TASKS`` that are RMQ's, by alias."""
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    time_zone: str = "UTC"
    """The time zone of schedules that name none: the project's TIME_ZONE."""
    broker: str = setting(parsers.one_of("redis", "memory"), "redis")
    redis: RedisServer | None = None
    """None only with BROKER "memory"."""
    key_prefix: str = setting(parsers.prefix, "")
    coordinator: str = "redis"
    """``redis``, ``zookeeper``, or a dotted path."""
    testing: bool = setting(parsers.boolean, False)
    """Whether this is a test run; BROKER is then "memory", and REDIS is not read."""
    zookeeper: ZooKeeper | None = None
    on_commit: bool = setting(parsers.boolean, True)
    once_retention: float = setting(parsers.seconds(1.0), 604_800.0)
    """How long (seconds) a database remembers the messages of listeners with ``once``."""
    history_retention: float | None = setting(
        parsers.optional(parsers.seconds(60.0, timedelta(days=366))), 172_800.0
    )
    """The seconds for which the figures of each minute are kept, or None if none are recorded."""
    code_version: str = setting(
        parsers.matching(r"[ -~]{0,100}", "text of at most 100 printable ASCII characters"), ""
    )
    """The version of the project's code, which workers report."""
    autodiscover: str | None = setting(parsers.optional(parsers.module_name), "listeners")
    durability: str = setting(parsers.one_of("relaxed", "strict"), "relaxed")
    consumer: Consumer = field(default_factory=Consumer, metadata={"section": Consumer})
    admin: Admin = field(default_factory=Admin, metadata={"section": Admin})
    api: Api = field(default_factory=Api, metadata={"section": Api})
    metrics: Metrics = field(default_factory=Metrics, metadata={"section": Metrics})
    outbox: Outbox = field(default_factory=Outbox, metadata={"section": Outbox})
    tracing: bool = setting(parsers.opentelemetry, False)
    """Whether sends and calls of listeners are spans of OpenTelemetry."""
    events: bool = setting(parsers.boolean, False)
    """Whether processes publish what happens to messages."""

    @property
    def uses_telemetry(self) -> bool:
        """Whether spans or metrics of OpenTelemetry are switched on."""
        return self.tracing or self.metrics.opentelemetry

    @property
    def uses_outbox(self) -> bool:
        """Whether any topic has the outbox."""
        return any(topic.outbox for topic in self.topics.values())

    def topic(self, name: str) -> Topic:
        """Return the topic called ``name``, or raise ``UnknownTopic``."""
        try:
            return self.topics[name]
        except (KeyError, TypeError):
            raise UnknownTopic(
                f'no topic {name!r} is declared in RMQ["TOPICS"]{did_you_mean(name, self.topics)}'
            ) from None


PLAIN_KEYS: Keys = keys_of(Config)
SECTIONS: Mapping[str, tuple[str, type, Keys]] = {
    one.name.upper(): (one.name, one.metadata["section"], keys_of(one.metadata["section"]))
    for one in fields(Config)
    if "section" in one.metadata
}
RMQ_KEYS = (
    *PLAIN_KEYS,
    *SECTIONS,
    "REDIS",
    "TOPICS",
    "TOPIC_DEFAULTS",
    "SCHEDULES",
    "COORDINATOR",
    "ZOOKEEPER",
)

_configs: list[Config] = []
"""The configuration, once it was read. If settings change, an empty list takes its place."""

_of_schedules: frozenset[str] = frozenset()
"""The topics that schedules of ``@schedule`` have in their own names. The settings need not declare them."""


def read_settings() -> tuple[Config | None, list[SettingsProblem]]:
    """Read the settings; return the configuration, or None and all problems."""
    problems = Problems()
    return _read(problems), problems


def _read(problems: Problems) -> Config | None:
    """Return the configuration, or None if there is any problem."""
    value = getattr(settings, "RMQ", None)
    if value is None:
        problems.report(
            "E001",
            "The setting RMQ is missing.",
            'For example: RMQ = {"REDIS": "redis://localhost:6379/1", "TOPICS": {"orders": {}}}.',
        )
        return None
    root = read_section(problems, "RMQ", value, RMQ_KEYS)
    values = read_values(problems, "RMQ", {key: root[key] for key in root if key in PLAIN_KEYS}, PLAIN_KEYS)
    for key, (name, kind, keys) in SECTIONS.items():
        if key == "OUTBOX" and not isinstance(root.get(key, {}), Mapping):
            if not isinstance(root[key], bool):
                message = f'RMQ["OUTBOX"] is {printable(root[key])}: it must be True, False or a dict.'
                problems.report("E003", message)
        elif key in root:
            values[name] = kind(**read_values(problems, f'RMQ["{key}"]', root[key], keys))
    values["topics"] = read_topics(problems, root)
    values["tasks"] = read_tasks(problems, root, getattr(settings, "TASKS", {}))
    values["topics"] = with_task_topics(problems, values["topics"], values["tasks"].values())
    values["time_zone"] = settings.TIME_ZONE or "UTC"
    values["schedules"] = read_schedules(problems, root, values["time_zone"])
    own = {one.topic for one in values["schedules"].values() if one.topic == one.name}
    values["topics"] = with_schedule_topics(problems, root, values["topics"], own | _of_schedules)
    values["zookeeper"] = read_zookeeper(problems, root)
    values["coordinator"] = read_coordinator(problems, root)
    if values.get("testing"):
        values["broker"] = "memory"
    elif "REDIS" in root:
        values["redis"] = read_redis(problems, root["REDIS"])
    elif root.get("BROKER") != "memory":
        problems.report("E009", 'RMQ["REDIS"] is missing.', ADDRESS)
    return None if problems else Config(**values)


def get_config() -> Config:
    """Return the configuration, read once. Raises ``ConfigurationError`` with all problems."""
    # Another thread may replace the list between the check and the return, but not this variable.
    configs = _configs
    if not configs:
        config, problems = read_settings()
        if config is None:
            raise ConfigurationError(
                "the setting RMQ is not valid:\n"
                + "\n".join(f"  {each.id}: {each.message} {each.hint}".rstrip() for each in problems)
            )
        # Two threads may read the settings at the same time, and both use the configuration that was added first. There is no
        # lock: one that another thread held during a fork would never be released in the child process.
        configs.append(config)
    return configs[0]


def with_unwritten_identity(config: Config) -> list[str]:
    """Return the topics whose IDENTITY is "body" because the settings say nothing about it."""
    root: Mapping[str, Any] = settings.RMQ
    if "IDENTITY" in root.get("TOPIC_DEFAULTS", {}):
        return []
    written = root.get("TOPICS", {})
    return [
        name
        for name, topic in config.topics.items()
        if not topic.keyed and name in written and "IDENTITY" not in written[name]
    ]


def set_schedule_topics(names: Iterable[str]) -> None:
    """Set the schedules that have a topic in their own name, in place of those of the last call."""
    global _of_schedules, _configs  # noqa: PLW0603
    before, _of_schedules = _of_schedules, frozenset(names)
    # A topic is no longer wanted, as after a reload, so the settings are read again at the next use. So they are if another
    # thread is reading them now, perhaps without these topics.
    if before - _of_schedules or not _configs:
        _configs = []
    elif _of_schedules - (config := _configs[0]).topics.keys():
        # The object stays the same, because a broker in memory, and its messages, last as long as the configuration.
        topics = with_schedule_topics(Problems(), settings.RMQ, config.topics, _of_schedules)
        object.__setattr__(config, "topics", topics)


def is_debug() -> bool:
    """Return the project's DEBUG."""
    return bool(settings.DEBUG)


def _forget(*, setting: str, **_: object) -> None:
    global _configs  # noqa: PLW0603 - one per process, like the settings it comes from
    # ``server_settings`` looks up an alias of CACHES, and compares with the caches of sessions and of the middleware.
    if setting in ("RMQ", "TASKS", "TIME_ZONE", "CACHES", "SESSION_CACHE_ALIAS", "CACHE_MIDDLEWARE_ALIAS"):
        _configs = []


# Django sends this signal when a test overrides settings.
setting_changed.connect(_forget, dispatch_uid="django_rmq.conf.settings_reader")
