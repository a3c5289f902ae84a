"""The list below each heading of docs/reference/settings.md: what a setting takes, its default, unit and an example.

    make reference      writes them into the page

A heading of the third level is a key, and what stands below its list is written by hand. A test says if the page is not
what this writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from django_rmq.conf.known_keys import Keys, keys_of
from django_rmq.conf.parsers import WHOLE_FORMS, InvalidSetting
from django_rmq.conf.schedule_settings import SCHEDULE_KEYS
from django_rmq.conf.server_settings import ZooKeeper
from django_rmq.conf.settings_reader import PLAIN_KEYS, RMQ_KEYS, SECTIONS, Config
from django_rmq.conf.task_settings import OPTION_KEYS, TaskOptions
from django_rmq.conf.topic_settings import TOPIC_KEYS
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.durations import FORMS, LONGEST, duration_text

PAGE = Path(__file__).parents[1] / "reference/settings.md"
LIST = re.compile(r"^(### (.+)\n)\n?(?:- (?:Takes|Default|Unit|Example|Registered): .*\n)*\n?", re.MULTILINE)
TOPIC = "TOPICS: "
DEFAULTS = {
    "TYPE": '`"fifo"` with `ORDER` `"loose"`: see below',
    "TOPIC": "the name of the schedule",
    "BACKOFF": "1 s doubling to 10 min, with jitter",
    "AUTH": "none",
    "UPCAST": "none",
    "MODULES": "none",
    "COLUMNS": "`[]`",
    "TIMEZONE": "`TIME_ZONE`",
    "ACL": '`"creator"` with `AUTH`, else `"open"`',
}
"""Defaults that are computed, or are not values that somebody writes."""
IN_WORDS = {
    "REDIS": ("the alias of a cache, a URL or a dict", "none, it is required"),
    "TOPICS": ("a dict from names to dicts", "`{}`"),
    "TOPIC_DEFAULTS": ("a dict", "`{}`"),
    "SCHEDULES": ("a dict from names to dicts", "`{}`"),
    "COORDINATOR": (
        "'redis', 'zookeeper' or a dotted path",
        '`"redis"`, or `"zookeeper"` if `ZOOKEEPER` is given',
    ),
    "ZOOKEEPER": ("a dict; or None", "none"),
    "CONSUMER": ("a dict", "`{}`"),
    "ADMIN": ("a dict", "`{}`"),
    "API": ("a dict", "`{}`"),
    "METRICS": ("a dict", "`{}`"),
    "OUTBOX": ("True, False or a dict, which turns it on", "`False`"),
}
"""What keys take, and their defaults, that no parser of one value reads."""
UNITS = {
    "MAX_BODY": "bytes",
    "MAX_BYTES": "bytes",
    "MAX_MEMORY": "MiB",
}
"""Units of numbers that are neither durations nor counts of what the name says."""
EXAMPLES: Mapping[str, Any] = {
    "REDIS": "redis://localhost:6379/1",
    "TOPICS": {"orders": {"TYPE": "fixed_time"}},
    "TOPIC_DEFAULTS": {"MAX_RETRIES": 5},
    "SCHEDULES": {"report": {"TOPIC": "reports", "CRON": "0 3 * * *"}},
    "COORDINATOR": "zookeeper",
    "ZOOKEEPER": {"HOSTS": "zk1:2181,zk2:2181"},
    "CONSUMER": {"PROCESSES": 2, "THREADS": 16},
    "ADMIN": {"PAGE_SIZE": 100},
    "API": {"SEND_RATE": "6000/min"},
    "METRICS": {"OPENTELEMETRY": True},
    "OUTBOX": {"REPLICAS": 1},
    ":KEY_PREFIX": "shop:",
    ":ONCE_RETENTION": "14d",
    ":HISTORY_RETENTION": "7d",
    ":CODE_VERSION": "2026.11.3",
    ":AUTODISCOVER": "queues",
    ":DURABILITY": "strict",
    "TOPICS:TYPE": "fixed_time",
    "TOPICS:SLOTS": 64,
    "TOPICS:TIME_RANGE": 5,
    "TOPICS:MAX_WAIT": "1m",
    "TOPICS:ACCUMULATE": 100,
    "TOPICS:BODY": "shop.events.PriceChanged",
    "TOPICS:UPCAST": "shop.events.upcast",
    "TOPICS:IDENTITY": "key",
    "TOPICS:SLOT_BASIS": "customer",
    "TOPICS:TIMEOUT": 60,
    "TOPICS:MAX_RETRIES": 5,
    "TOPICS:BACKOFF": 30,
    "TOPICS:DEFAULT_PRIORITY": 500,
    "TOPICS:RETRY_PRIORITY": "lowest",
    "TOPICS:ORDER": "loose",
    "TOPICS:ON_DUPLICATE": "replace",
    "TOPICS:MAX_RUNTIME": "10m",
    "TOPICS:HARD_TIMEOUT": "15m",
    "TOPICS:PREFETCH": 1,
    "TOPICS:MAX_BODY": 1048576,
    "TOPICS:MAX_BACKLOG": 100000,
    "TOPICS:MAX_RATE": {"rate": 10, "per": "slot"},
    "TOPICS:MAX_IN_FLIGHT": 20,
    "TOPICS:MAX_PREPARED": 100,
    "TOPICS:FLOW": "auto",
    "TOPICS:CONCURRENCY": 500,
    "TOPICS:DEAD_RETENTION": "30d",
    "TOPICS:OUTCOME_RETENTION": "1h",
    "SCHEDULES:CRON": "0 3 * * *",
    "SCHEDULES:EVERY": "5m",
    "SCHEDULES:TIMEZONE": "Europe/Berlin",
    "SCHEDULES:CATCH_UP": "all",
    "TASKS:PREFIX": "jobs",
    "TASKS:RESULT_RETENTION": "1h",
    "TASKS:MODULES": ["shop.orders"],
    "ZOOKEEPER:HOSTS": "zk1:2181,zk2:2181",
    "ZOOKEEPER:ROOT": "/shop/rmq",
    "ZOOKEEPER:SESSION_TIMEOUT": 30,
    "ZOOKEEPER:TLS": {"CA": "/etc/ssl/zookeeper.pem"},
    "ZOOKEEPER:WHEN_AWAY": "stop",
    "CONSUMER:PROCESSES": 4,
    "CONSUMER:THREADS": 16,
    "CONSUMER:SHUTDOWN_TIMEOUT": "1m",
    "CONSUMER:MAX_MESSAGES": 100000,
    "CONSUMER:MAX_MEMORY": 512,
    "CONSUMER:HEARTBEAT_FILE": "/run/rmq/heartbeat",
    "CONSUMER:HEALTH_ADDRESS": "0.0.0.0:8001",
    "ADMIN:FORMATTER": "shop.privacy.shown",
    "ADMIN:PAGE_SIZE": 100,
    "ADMIN:COLUMNS": ["customer.city", "lines.0.sku"],
    "API:PERMISSION": "shop.api.OwnTopics",
    "API:SEND_RATE": "6000/min",
    "API:SEND_BYTES": "64MB/min",
    "API:LONG_POLLS": 4,
    "OUTBOX:GRACE": 10,
    "OUTBOX:REPLICAS": 1,
    ":BROKER": "memory",
    ":TESTING": True,
    ":ON_COMMIT": False,
    ":TRACING": True,
    ":EVENTS": True,
    "TOPICS:DEBOUNCE": True,
    "TOPICS:SERIAL": False,
    "TOPICS:LISTENER": False,
    "TOPICS:ORIGIN": True,
    "TOPICS:OUTBOX": True,
    "SCHEDULES:TOPIC": "reports",
    "SCHEDULES:BODY": {"kind": "daily"},
    "TASKS:ON_COMMIT": False,
    "TASKS:DATABASE": "orders",
    "ZOOKEEPER:AUTH": ("digest", "shop:secret"),
    "ZOOKEEPER:ACL": "creator",
    "CONSUMER:POLL_INTERVAL": "500ms",
    "CONSUMER:WATCHDOG": "10m",
    "CONSUMER:MAX_IDLE_TIME": "15m",
    "API:IDEMPOTENT_RATE": "100000/day",
    "API:MAX_BYTES": 4194304,
    "API:LONG_POLLS_PER_USER": 2,
    "METRICS:TOKEN": "change-me-0123456789",
    "METRICS:OPENTELEMETRY": True,
}
"""Values that somebody might write. A test has the settings read with each of them."""
REGISTERED = {
    *Topic(
        "any", TopicType.RANGE_MERGE, debounce=True, max_wait_ms=1, accumulate=2, identity="key", origin=True
    ).definition(),
    *Topic("any", TopicType.FIFO, identity="key").definition(),
}
"""Fields of a topic that its definition in Redis has."""
REGISTERED_IN_WORDS = {
    "BACKOFF": "yes, except for a function",
    "BODY": "yes, except for a type",
    "MAX_WAIT": "yes, if `DEBOUNCE` is on",
}
NOTHING: Any = object()
"""No setting takes it, so whatever reads it says what it wants."""


def sections() -> Iterator[tuple[str, Keys, type]]:
    """Yield the parts of the settings: what the headings of its keys begin with, the keys, the class with their defaults."""
    yield "", PLAIN_KEYS, Config
    yield TOPIC, TOPIC_KEYS, Topic
    yield "SCHEDULES: ", SCHEDULE_KEYS, Schedule
    yield "TASKS: ", OPTION_KEYS, TaskOptions
    yield "ZOOKEEPER: ", keys_of(ZooKeeper), ZooKeeper
    for name, (_, kind, keys) in SECTIONS.items():
        yield f"{name}: ", keys, kind


def entries() -> Mapping[str, list[str]]:
    """Return heading → the list below it: what the key takes, its default, unit, an example, whether it is registered."""
    found = {}
    for key in RMQ_KEYS:
        if key not in PLAIN_KEYS:
            found[key] = [*_lines(*IN_WORDS[key]), *_example(key, None)]
    for section, keys, kind in sections():
        defaults = {one.name: one for one in fields(kind)}
        for key, (field, parse) in keys.items():
            takes = taken(parse)
            unit = "seconds" if takes.startswith("a duration") else UNITS.get(key, "")
            default = DEFAULTS.get(key) or _default(defaults[field], unit)
            lines = _lines(takes, default, unit) + _example(section.strip(": ") + ":" + key, parse)
            if section == TOPIC and field in REGISTERED:
                lines.append(f"- Registered: {REGISTERED_IN_WORDS.get(key, 'yes')}")
            found[heading(section, key)] = lines
    return found


def heading(section: str, key: str) -> str:
    """Return the heading of a key, which makes its anchor: another one for each key of the page."""
    if section == TOPIC:
        return f"{key} of a topic" if key in RMQ_KEYS else key
    return section + key


def _lines(takes: str, default: str, unit: str = "") -> list[str]:
    return [f"- Takes: {takes}", f"- Default: {default}", *([f"- Unit: {unit}"] if unit else [])]


def _example(name: str, parse: Any) -> list[str]:
    """Return the line with an example, which has to be a value that the setting takes. Raises if there is none."""
    value = EXAMPLES[name]
    if parse is not None:
        parse(value)
    return [f"- Example: `{json.dumps(name.rpartition(':')[2])}: {_literal(value)}`"]


def _literal(value: Any) -> str:
    """Return a value as Python code, with double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_literal, value)) + ")"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def taken(parse: Any) -> str:
    """Return what a setting takes, in the words in which it refuses anything else."""
    try:
        parse(NOTHING)
    except InvalidSetting as wanted:
        found = re.sub(r" \([A-Za-z_ ]+(=|must).*?\)(?=;|$)", "", str(wanted))
        found = found.replace(f"{FORMS}, ", "a duration ").replace(
            f"{WHOLE_FORMS}, ", "a duration of whole seconds "
        )
        return re.sub(rf"from (\w+) to {duration_text(LONGEST)}", r"of at least \1", found)
    raise ValueError(f"{parse} takes anything")


def _default(field: Any, unit: str) -> str:
    """Return a default as it is written in the settings; that of a long duration also in words."""
    if field.default is MISSING:
        return "none, it is required"
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value
    in_words = f" ({duration_text(timedelta(seconds=value))})" if unit == "seconds" and value > 60 else ""
    return f"`{json.dumps(value) if isinstance(value, str) else repr(value)}`{in_words}"


def filled(page: str) -> str:
    """Return the page with the list below each key as the code is now. Raises if a key is missing, or unknown."""
    known = entries()
    written = re.findall(r"^### (.+)$", page, re.MULTILINE)
    if sorted(written) != sorted(known):
        wrong = sorted(set(written) ^ set(known)) or "one of them twice"
        raise ValueError(f"headings that only the page or only the code has: {wrong}")
    return LIST.sub(lambda part: part[1] + "\n" + "\n".join(known[part[2]]) + "\n\n", page)
