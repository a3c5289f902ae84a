"""The options of ``format("rmq")``: known names, defaults, and a sentence for each mistake.

Spark passes them as text, with names in lower case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import uuid4

from django_rmq.core.model.keys import TOPIC_NAME, check_prefix, check_topic_name
from django_rmq.durations import InvalidDuration, parse_duration
from django_rmq.exceptions import ConfigurationError

QUEUES = ("store", "prepare", "retry", "dead", "claim")
CONNECTION = {
    *(
        "topic",
        "url",
        "cluster",
        "sentinels",
        "username",
        "password",
        "credentialProvider",
        "prefix",
        "patience",
    ),
    *("socketTimeout", "connectionOptions", "secretConnectionOptions", "secretSentinelOptions"),
}
TASKS = {"minPartitions", "messagesPerTask"}
READ = {
    *CONNECTION,
    *TASKS,
    "queues",
    "slots",
    "minScore",
    "maxScore",
    "includeMetadata",
}
STREAM = {
    *(*CONNECTION, *TASKS, "consumerId", "claimTimeout", "failOnDataLoss", "pollInterval", "includeMetadata"),
    *("maxMessagesPerTrigger", "minMessagesPerTrigger", "maxBytesPerTrigger", "maxTriggerDelay"),
}
WRITE = {
    *(*CONNECTION, "bodyColumns", "timeRange", "defaultPriority", "canonical", "maxBody", "maxBacklog"),
    *("allowOverwrite", "pastTimes", "badRows"),
}
PAST_TIMES = ("refuse", "now")
"""What a write may do with a ``fixed_time`` that has passed."""

SPARKS_OWN = {"checkpointlocation", "queryname", "outputmode"}
"""Options of Spark itself, which it also passes to sources and sinks."""


DAY = 86_400.0

MESSAGES_PER_TASK = 50_000
"""The number of messages per task; a task costs some 50 ms before its first row."""

PATIENCE = 60.0
"""Seconds to wait for a Redis that is unavailable."""


def connection_part(given: Mapping[str, str]) -> dict[str, str]:
    names = {name.lower() for name in CONNECTION}
    return {name: value for name, value in given.items() if name.lower() in names}


class SourceOptions:
    """The options of one read or write. Raises ``ConfigurationError`` for an unknown name or an invalid value."""

    def __init__(self, given: Mapping[str, object], known: set[str], what: str) -> None:
        names = {name.lower(): name for name in known}
        # Spark makes the same texts of numbers and flags: `fail` and `declare` get the options of a program as it gives them.
        self._given = {
            name.lower(): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in given.items()
            if value is not None
        }
        if "path" in self._given:
            raise ConfigurationError(
                f"{what} of format rmq takes no path: name the topic by the option topic, got the path {self.text('path')!r}"
            )
        unknown = sorted(set(self._given) - set(names) - SPARKS_OWN)
        if unknown:
            raise ConfigurationError(
                f"unknown option for {what} of format rmq: {', '.join(unknown)}; the options are {', '.join(sorted(known))}"
            )
        self.is_cluster = self.flag("cluster", default=False)
        self.prefix = check_prefix(self.text("prefix") or "")
        self.socket_timeout = self.seconds("socketTimeout", 30.0, low=0.1)
        self.metadata = self.flag("includeMetadata", default=False)
        """Whether rows have all that is known of their messages."""
        self.fails_on_loss = self.flag("failOnDataLoss", default=False)
        """Whether a batch that cannot be read as a whole ends the query."""
        self.patience = self.seconds("patience", PATIENCE)

    @classmethod
    def of_connection(cls, given: Mapping[str, str], what: str) -> SourceOptions:
        """Return those of the options that say how Redis is reached, and which topic is meant."""
        return cls(connection_part(given), CONNECTION, what)

    def text(self, name: str) -> str | None:
        """Return an option unchanged. None: not given."""
        return self._given.get(name.lower())

    def number(self, name: str, default: float, *, low: float = -math.inf, high: float = math.inf) -> float:
        """Return an option as a number within its bounds."""
        text = self.text(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ConfigurationError(f"option {name} must be a number from {low} to {high}, got {text!r}")
        return value

    def seconds(self, name: str, default: float, *, low: float = 0.0, high: float = DAY) -> float:
        """Return an option that is a duration within its bounds, in seconds."""
        if self.text(name) is None:
            return default
        return self.duration(name, timedelta(seconds=low), timedelta(seconds=high)).total_seconds()

    def duration(self, name: str, least: timedelta, most: timedelta, *, is_short: bool = False) -> timedelta:
        """Return an option that is a duration, written as ``90``, ``250ms`` or ``15m``; see ``parse_duration``."""
        try:
            return parse_duration(self.text(name), least, most, is_short=is_short)
        except InvalidDuration as error:
            what = f"option {name} must be {error.typed}, got {error.given}. {error.hint}"
            raise ConfigurationError(what.rstrip(". ")) from None

    def whole(self, name: str, default: int, *, low: int = 0, high: int = 1 << 53) -> int:
        """Return an option as a whole number within its bounds."""
        value = self.number(name, default, low=low, high=high)
        if value != int(value):
            raise ConfigurationError(f"option {name} must be a whole number, got {value}")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return an option as true or false."""
        text = (self.text(name) or str(default)).lower()
        if text not in ("true", "false"):
            raise ConfigurationError(f"option {name} must be true or false, got {text!r}")
        return text == "true"

    def names(self, name: str, default: str = "") -> list[str]:
        """Return an option as a list of names."""
        return [part.strip() for part in (self.text(name) or default).split(",") if part.strip()]

    def keywords(self, name: str) -> dict[str, object]:
        """Return an option that is a JSON object of keyword arguments."""
        try:
            keywords = json.loads(self.text(name) or "{}")
        except ValueError:
            keywords = None
        if not isinstance(keywords, dict):
            raise ConfigurationError(f"option {name} must be a JSON object of redis-py's options")
        return keywords

    @property
    def sentinels(self) -> list[tuple[str, int]]:
        """The addresses of the sentinels, of which ``url`` names the service."""
        parts = [address.rpartition(":") for address in self.names("sentinels")]
        if not all(host and port.isdecimal() for host, _, port in parts):
            raise ConfigurationError(
                f"option sentinels must be addresses like host:26379, separated by commas, got {self.text('sentinels')!r}"
            )
        return [(host.strip("[]"), int(port)) for host, _, port in parts]

    def topics(self) -> list[str]:
        names = [check_topic_name(name) for name in self.names("topic")]
        if not names:
            raise ConfigurationError("option topic is missing: the topic to read from or to write to")
        return list(dict.fromkeys(names))

    def topic(self) -> str:
        names = self.topics()
        if len(names) > 1:
            raise ConfigurationError(f"option topic must name one topic here, got {', '.join(names)}")
        return names[0]

    def queues(self) -> list[str]:
        """Return the states to read."""
        queues = self.names("queues", "store")
        wrong = [name for name in queues if name not in QUEUES]
        if wrong:
            raise ConfigurationError(
                f"option queues must be among {', '.join(QUEUES)}, got {', '.join(wrong)}"
            )
        return list(dict.fromkeys(queues))

    def slots(self, count: int) -> Sequence[int]:
        """Return the slots to read, of ``count``."""
        try:
            slots = [int(part) for part in self.names("slots")]
        except ValueError:
            slots = [-1]
        if not all(0 <= slot < count for slot in slots):
            raise ConfigurationError(
                f"option slots must be numbers from 0 to {count - 1}, got {self.text('slots')!r}"
            )
        return list(dict.fromkeys(slots)) or range(count)

    def bounds(self) -> tuple[float, float]:
        """Return the scores between which to read."""
        return self.number("minScore", -math.inf), self.number("maxScore", math.inf)

    @property
    def messages_per_task(self) -> int:
        """About how many messages a task reads."""
        return self.whole("messagesPerTask", MESSAGES_PER_TASK, low=1)

    @property
    def min_tasks(self) -> int:
        """Minimum number of tasks, the partitions of a frame, for a read that has enough to divide."""
        return self.whole("minPartitions", 1, low=1)

    # --- for a stream

    @property
    def most(self) -> int:
        """Maximum number of messages in a batch."""
        return self.whole("maxMessagesPerTrigger", 200_000, low=1)

    @property
    def lease_ms(self) -> int:
        """How long a claim is valid without being renewed, in ms."""
        return round(self.seconds("claimTimeout", 120.0, low=1.0) * 1000)

    @property
    def poll_seconds(self) -> float:
        """Seconds between two checks of an empty topic."""
        return self.seconds("pollInterval", 0.5, high=3_600.0)

    @property
    def consumer(self) -> str:
        """The consumer, if no checkpoint names it yet: the given one, or a new name each time."""
        name = self.text("consumerId")
        if name is not None and not TOPIC_NAME.fullmatch(name):
            raise ConfigurationError(f"option consumerId must be 1 to 100 of A-Z a-z 0-9 . _ -, got {name!r}")
        return name or uuid4().hex

    def check(self) -> None:
        """Raise ``ConfigurationError`` for an invalid value of any option, before anything is begun."""
        self.topics()
        self.queues()
        self.slots(1 << 20)
        self.bounds()
        _ = (self.messages_per_task, self.min_tasks)
        _ = (gathering(self), most_bytes(self), self.lease_ms, self.poll_seconds, self.consumer)


def gathering(options: SourceOptions) -> tuple[int, float]:
    """Return the minimum number of messages in a batch, and for how many seconds fewer wait at most."""
    least = options.whole("minMessagesPerTrigger", 0)
    if least > options.most:
        raise ConfigurationError(
            f"option minMessagesPerTrigger must be at most maxMessagesPerTrigger, {options.most}, got {least}"
        )
    return least, options.seconds("maxTriggerDelay", 900.0)


def most_bytes(options: SourceOptions) -> int | None:
    """Return about how many bytes of messages a batch has at most. None: any number."""
    return options.whole("maxBytesPerTrigger", 0, low=1) if options.text("maxBytesPerTrigger") else None
