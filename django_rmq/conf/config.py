"""All settings of the package as frozen, validated values.

The key of a setting is a field in capitals, and the field defines its parser. ``settings_reader`` makes the ``Config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from django_rmq.conf import values
from django_rmq.conf.problems import did_you_mean
from django_rmq.conf.redis_settings import RedisServer
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.conf.values import setting
from django_rmq.conf.zookeeper_settings import ZooKeeper
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.validation import MAX_REPLICAS
from django_rmq.exceptions import UnknownTopic


@dataclass(frozen=True, slots=True)
class Consumer:
    """``RMQ["CONSUMER"]``: defaults of the flags of ``runrmqconsumers``. Times in seconds."""

    processes: int = setting(values.whole(1, 1024), 1)
    threads: int = setting(values.whole(1, 1024), 8)
    shutdown_timeout: float = setting(values.seconds(), 30.0)
    poll_interval: float = setting(values.seconds(0.01), 1.0)
    watchdog: float | None = setting(values.optional(values.seconds(1.0)), 300.0)
    max_messages: int | None = setting(values.optional(values.whole(1)), None)
    max_memory: int | None = setting(values.optional(values.whole(1)), None)
    """In MiB."""
    max_idle_time: float | None = setting(values.optional(values.seconds()), None)
    heartbeat_file: str | None = setting(values.optional(values.text), None)
    health_address: str | None = setting(values.optional(values.address), None)


@dataclass(frozen=True, slots=True)
class Admin:
    """``RMQ["ADMIN"]``."""

    formatter: str | Mapping[str, str] | None = setting(values.optional(values.formatter), None)
    """A dotted path for all topics, or topic -> dotted path."""
    page_size: int = setting(values.whole(1, 1000), 50)

    def formatter_of(self, topic: str) -> str | None:
        """Return the path of the function that redacts a topic's bodies, or None if they are shown as they are."""
        return self.formatter.get(topic) if isinstance(self.formatter, Mapping) else self.formatter


@dataclass(frozen=True, slots=True)
class Api:
    """``RMQ["API"]``."""

    permission: str | None = setting(values.optional(values.dotted_path), None)
    """Dotted path of a REST framework permission class. Without one the package's own is used, which denies by default."""
    send_rate: str | None = setting(values.optional(values.send_rate), "600/min")
    send_bytes: str | None = setting(values.optional(values.byte_rate), "16MB/min")
    idempotent_rate: str | None = setting(values.optional(values.send_rate), "50000/day")
    max_bytes: int = setting(values.whole(1024, 536_870_912), 1_048_576)
    long_polls: int | None = setting(values.optional(values.whole(0, 10_000)), None)
    long_polls_per_user: int | None = setting(values.optional(values.whole(1, 10_000)), None)

    @property
    def rate(self) -> tuple[int, float] | None:
        """SEND_RATE as a number of messages in a number of seconds, or None without a limit."""
        return values.count_and_seconds(self.send_rate)

    @property
    def byte_rate(self) -> tuple[int, float] | None:
        """SEND_BYTES as a number of bytes in a number of seconds, or None without a limit."""
        return values.count_and_seconds(self.send_bytes)

    @property
    def once_rate(self) -> tuple[int, float] | None:
        """IDEMPOTENT_RATE as a number of messages in a number of seconds, or None without a limit."""
        return values.count_and_seconds(self.idempotent_rate)

    def waiting(self, has_threads: bool) -> tuple[int, int]:
        """Return how many requests may wait in one process at a time, and how many of one user.

        ``has_threads``: whether the process answers other requests meanwhile; it decides if nothing is set.
        """
        most = (2 if has_threads else 0) if self.long_polls is None else self.long_polls
        each = -(-most // 2) if self.long_polls_per_user is None else self.long_polls_per_user
        return most, each


@dataclass(frozen=True, slots=True)
class Metrics:
    """``RMQ["METRICS"]``."""

    token: str | None = setting(values.optional(values.token), None, is_secret=True)
    """A client that sends it may read the metrics without logging in."""
    opentelemetry: bool = setting(values.opentelemetry, False)
    """Whether processes record metrics of OpenTelemetry."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """``RMQ["OUTBOX"]`` as a dict: its options. True: the defaults, for all topics."""

    grace: float = setting(values.seconds(0.1), 5.0)
    replicas: int = setting(values.whole(0, MAX_REPLICAS), 0)
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
    broker: str = setting(values.one_of("redis", "memory"), "redis")
    redis: RedisServer | None = None
    """None only with BROKER "memory"."""
    key_prefix: str = setting(values.prefix, "")
    coordinator: str = "redis"
    """``redis``, ``zookeeper``, or a dotted path."""
    testing: bool = setting(values.boolean, False)
    """Whether this is a test run; BROKER is then "memory", and REDIS is not read."""
    zookeeper: ZooKeeper | None = None
    on_commit: bool = setting(values.boolean, True)
    once_retention: float = setting(values.seconds(1.0), 604_800.0)
    """How long (seconds) a database remembers the messages of listeners with ``once``."""
    history_retention: float | None = setting(
        values.optional(values.seconds(60.0, timedelta(days=366))), 172_800.0
    )
    """The seconds for which the figures of each minute are kept, or None if none are recorded."""
    autodiscover: str | None = setting(values.optional(values.module_name), "listeners")
    durability: str = setting(values.one_of("relaxed", "strict"), "relaxed")
    consumer: Consumer = field(default_factory=Consumer, metadata={"section": Consumer})
    admin: Admin = field(default_factory=Admin, metadata={"section": Admin})
    api: Api = field(default_factory=Api, metadata={"section": Api})
    metrics: Metrics = field(default_factory=Metrics, metadata={"section": Metrics})
    outbox: Outbox = field(default_factory=Outbox, metadata={"section": Outbox})
    tracing: bool = setting(values.opentelemetry, False)
    """Whether sends and calls of listeners are spans of OpenTelemetry."""
    events: bool = setting(values.boolean, False)
    """Whether processes publish what happens to messages."""

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
