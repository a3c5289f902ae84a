"""Settings become a configuration, or sentences that say what is wrong with them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from django_rmq import checks, conf, typed_bodies
from django_rmq import schedules as of_schedules
from django_rmq import typed_bodies as of_bodies
from django_rmq.conf import Config, SettingsProblem, get_config, read_settings
from django_rmq.conf.parsers import count_and_seconds
from django_rmq.core.model.bounds import abbreviated
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.exceptions import ConfigurationError, UnknownTopic
from django_rmq.worker import once

REFERENCE = Path(__file__).parents[2] / "docs/reference"
LOCMEM = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}


def redis_cache(location: str, **options: Any) -> dict[str, Any]:
    return {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options}


def read(caches: dict[str, Any] | None = None, **rmq: Any) -> tuple[Config | None, list[SettingsProblem]]:
    """What becomes of these settings, with a broker in memory unless REDIS is among them."""
    given = rmq if "REDIS" in rmq or "BROKER" in rmq else {"BROKER": "memory", **rmq}
    with override_settings(RMQ=given, CACHES={"default": LOCMEM, **(caches or {})}):
        return read_settings()


def problems(caches: dict[str, Any] | None = None, **rmq: Any) -> list[SettingsProblem]:
    config, found = read(caches, **rmq)
    assert (config is None) == bool(found)
    return found


def config(caches: dict[str, Any] | None = None, **rmq: Any) -> Config:
    found, wrong = read(caches, **rmq)
    assert wrong == []
    assert found is not None
    return found


def topic_problems(**options: Any) -> list[SettingsProblem]:
    return problems(TOPICS={"orders": {"TYPE": "range_merge", **options}})


def test_a_path_as_body_is_a_type_whose_bodies_are_json() -> None:
    path = "tests.support.typed_bodies.PriceChanged"
    topic = config(
        TOPICS={
            "prices": {
                "TYPE": "range_merge",
                "BODY": path,
                "UPCAST": "tests.support.typed_bodies.upcast",
                "SLOT_BASIS": "shop",
            }
        }
    ).topic("prices")
    assert (topic.body, topic.slot_basis) == ("json", "shop")
    assert topic.typed == typed_bodies.DeclaredBody(path, "tests.support.typed_bodies.upcast")


def test_a_type_of_all_topics_may_be_a_default() -> None:
    own = {"typed": {"TYPE": "fixed_time"}, "text": {"TYPE": "fixed_time", "BODY": "text"}}
    defaults = {"BODY": "tests.support.typed_bodies.Viewed", "UPCAST": "tests.support.typed_bodies.upcast"}
    found = config(TOPICS=own, TOPIC_DEFAULTS=defaults)
    assert found.topic("typed").typed == typed_bodies.DeclaredBody(*defaults.values())
    assert (found.topic("text").body, found.topic("text").typed) == ("text", None)


def test_what_is_not_said_has_its_default() -> None:
    found = config(TOPICS={"orders": {"TYPE": "fixed_time"}})
    topic = found.topic("orders")
    assert (topic.type, topic.slots, topic.timeout, topic.max_retries) == (TopicType.FIXED_TIME, 16, 30, 16)
    assert topic.backoff == BackOff(1_000, 600_000)
    assert (found.broker, found.key_prefix) == ("memory", "")
    assert (found.coordinator, found.autodiscover) == ("redis", "listeners")
    assert found.on_commit
    assert found.zookeeper is None


AS_GIVEN: dict[str, Any] = {
    "SLOTS": 4, "BODY": "json", "IDENTITY": "key", "SLOT_BASIS": "shop", "SERIAL": False, "MAX_RETRIES": 3,
    "DEFAULT_PRIORITY": 500, "RETRY_PRIORITY": "lowest", "MAX_RUNTIME": 60, "PREFETCH": 10, "MAX_BODY": 1000,
    "MAX_BACKLOG": 5000, "MAX_RATE": 12.5, "MAX_IN_FLIGHT": 8, "MAX_PREPARED": 50, "FLOW": "auto", "CONCURRENCY": 500,
    "LISTENER": False, "ORIGIN": True, "OUTBOX": True,
}  # fmt: skip
READ: dict[str, tuple[Any, Any]] = {
    "TYPE": ("priority", TopicType.PRIORITY),
    "TIMEOUT": (timedelta(minutes=2), 120),
    "HARD_TIMEOUT": (timedelta(minutes=2), 120.0),
    "BACKOFF": (2.5, BackOff(2500, 2500)),
    "DEAD_RETENTION": (timedelta(days=1), 86_400.0),
}


def test_every_option_of_a_topic_arrives() -> None:
    topic = config(TOPICS={"renders": AS_GIVEN | {name: given for name, (given, _) in READ.items()}}).topic(
        "renders"
    )
    wanted = AS_GIVEN | {name: value for name, (_, value) in READ.items()}
    assert {name: getattr(topic, name.lower()) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("given", "ms"),
    [("1s", 1_000), ("15m", 900_000), ("30d", 2_592_000_000), (1.5, 1_500), (timedelta(hours=1), 3_600_000)],
)
def test_outcome_retention_is_seconds_a_timedelta_or_text_with_a_unit(given: Any, ms: int) -> None:
    topic = config(TOPICS={"prices": {"TYPE": "range_merge", "OUTCOME_RETENTION": given}}).topic("prices")
    assert topic.outcome_retention_ms == ms
    assert "outcome_retention_ms" not in topic.definition(), "the settings of each process decide"


def test_a_debounced_topic_has_a_longest_wait() -> None:
    options = {"TYPE": "range_merge", "TIME_RANGE": 2, "DEBOUNCE": True, "MAX_WAIT": timedelta(seconds=30)}
    topic = config(TOPICS={"prices": options}).topic("prices")
    assert (topic.debounce, topic.max_wait_ms, topic.debounce_ms) == (True, 30_000, 30_000)
    assert Topic.registered("prices", topic.definition(), topic.slots).debounce_ms == 30_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"DEBOUNCE": True}, "has DEBOUNCE and no MAX_WAIT"),
        ({"MAX_WAIT": "500ms"}, "has MAX_WAIT without DEBOUNCE"),
        (
            {"DEBOUNCE": True, "MAX_WAIT": "500ms", "TIME_RANGE": "501ms"},
            "MAX_WAIT 500ms and TIME_RANGE 501ms",
        ),
        ({"ACCUMULATE": 100}, 'ACCUMULATE and IDENTITY "body"'),
        ({"ACCUMULATE": 100, "IDENTITY": "key", "ORIGIN": True}, "ACCUMULATE and ORIGIN"),
        ({"ACCUMULATE": 100, "IDENTITY": "key", "OUTBOX": True}, "ACCUMULATE and OUTBOX"),
        (
            {"TYPE": "priority", "IDENTITY": "key", "ACCUMULATE": 100},
            "ACCUMULATE, which only range_merge topics have",
        ),
        ({"TYPE": "priority", "DEBOUNCE": True}, "DEBOUNCE, which only range_merge topics have"),
        ({"TYPE": "fixed_time", "MAX_WAIT": "500ms"}, "MAX_WAIT, which only range_merge topics have"),
        ({"UPCAST": "tests.support.typed_bodies.upcast"}, 'has UPCAST and BODY "json"'),
    ],
)
def test_an_option_that_needs_another_one_says_so(options: dict[str, Any], said: str) -> None:
    (problem,) = topic_problems(**{"TYPE": "range_merge", **options})
    assert problem.id == "django_rmq.E006"
    assert said in problem.message and problem.hint


@pytest.mark.parametrize(
    "options",
    [
        {"TIME_RANGE": "1ms", "DEBOUNCE": True, "MAX_WAIT": "1ms"},
        {"TIME_RANGE": "366d", "DEBOUNCE": True, "MAX_WAIT": timedelta(days=366)},
        {"IDENTITY": "key", "ACCUMULATE": 2, "MAX_RATE": 0.000_001},
        {"IDENTITY": "key", "ACCUMULATE": 10_000, "MAX_RATE": {"rate": 1_000_000, "per": "slot"}},
        {"CONCURRENCY": 1, "HARD_TIMEOUT": 1},
        {"CONCURRENCY": 10_000},
    ],
    ids=str,
)
def test_values_at_their_bounds_are_accepted(options: dict[str, Any]) -> None:
    assert not topic_problems(**{"TYPE": "range_merge", **options})


@pytest.mark.parametrize(
    "given",
    [{"rate": 0, "per": "slot"}, {"rate": 1e-7, "per": "slot"}, {"rate": 5, "per": "shop"}, {"rate": 5}, {}],
)
def test_a_rate_per_slot_is_a_number_and_per_slot(given: dict[str, Any]) -> None:
    (problem,) = topic_problems(MAX_RATE=given)
    assert 'or {"rate": this number, "per": "slot"}; or None' in problem.message


def test_a_rate_may_hold_for_each_slot() -> None:
    options = {"TYPE": "priority", "MAX_RATE": {"rate": 10, "per": "slot"}}
    topic = config(TOPICS={"renders": options}).topic("renders")
    assert (topic.max_rate, topic.slot_rate, topic.slot_each_us) == (None, 10.0, 100_000)


@pytest.mark.parametrize(
    ("given", "ms"),
    [(5, 5000), (0.25, 250), (timedelta(seconds=1.5), 1500), ("5s", 5000), ("1h", 3_600_000), (None, None)],
)
def test_time_range_is_a_duration(given: object, ms: int | None) -> None:
    found = config(TOPICS={"orders": {"TYPE": "range_merge", "TIME_RANGE": given}})
    assert found.topic("orders").time_range_ms == ms


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, BackOff(0, 0)),
        (2, BackOff(2000, 2000)),
        (timedelta(milliseconds=250), BackOff(250, 250)),
        ("math.exp", BackOff(function=math.exp)),
    ],
)
def test_back_off_is_seconds_or_a_timedelta_or_a_function(given: object, expected: BackOff) -> None:
    found = config(TOPICS={"orders": {"TYPE": "range_merge", "BACKOFF": given}})
    assert found.topic("orders").backoff == expected


def test_topic_defaults_hold_for_all_topics_and_yield_to_their_own() -> None:
    found = config(
        TOPIC_DEFAULTS={"TIMEOUT": 90, "SLOTS": 8, "TYPE": "fixed_time"},
        TOPICS={"a": {}, "b": {"SLOTS": 2, "TYPE": "priority"}},
    )
    assert [(topic.slots, topic.timeout, topic.type.value) for topic in found.topics.values()] == [
        (8, 90, "fixed_time"),
        (2, 90, "priority"),
    ]


def test_a_default_that_does_not_fit_a_type_is_of_no_meaning_there() -> None:
    found = config(
        TOPIC_DEFAULTS={"TIME_RANGE": 1, "RETRY_PRIORITY": "lowest"},
        TOPICS={"a": {"TYPE": "priority"}, "b": {"TYPE": "range_merge"}},
    )
    assert (found.topic("a").time_range_ms, found.topic("a").retry_priority) == (None, "lowest")
    assert (found.topic("b").time_range_ms, found.topic("b").retry_priority) == (1000, "original")


def test_a_fifo_topic_is_strict_and_keyed_and_serial_whatever_the_defaults_are() -> None:
    found = config(
        TOPIC_DEFAULTS={"IDENTITY": "body", "SERIAL": False},
        TOPICS={"a": {"TYPE": "fifo"}, "b": {"TYPE": "fifo", "ORDER": "loose", "ON_DUPLICATE": "replace"}},
    )
    strict, loose = found.topic("a"), found.topic("b")
    assert (strict.keyed, strict.is_strict, strict.serial, strict.on_duplicate) == (True, True, True, "keep")
    assert (loose.keyed, loose.is_strict, loose.serial, loose.on_duplicate) == (True, False, False, "replace")


def test_an_outbox_of_the_whole_project_is_refused_for_a_strict_topic_until_it_says_otherwise() -> None:
    (problem,) = problems(OUTBOX=True, TOPICS={"orders": {"TYPE": "fifo"}})
    assert problem.id == "django_rmq.E006"
    assert "promises the order of sending" in problem.message and '"OUTBOX": False' in problem.hint
    found = config(OUTBOX=True, TOPICS={"jobs": {}, "line": {"TYPE": "fifo", "ORDER": "loose"}})
    assert found.topic("jobs").outbox and found.topic("line").outbox
    assert (
        not config(OUTBOX=True, TOPICS={"orders": {"TYPE": "fifo", "OUTBOX": False}}).topic("orders").outbox
    )


def test_zookeeper_selects_its_coordinator_unless_another_is_named() -> None:
    zookeeper = {
        "HOSTS": ["zk1:2181", "zk2"],
        "ROOT": "/queues/rmq",
        "SESSION_TIMEOUT": timedelta(seconds=8),
        "AUTH": ("digest", "a:b"),
        "ACL": "creator",
        "TLS": {"CA": "/ca.pem", "VERIFY": True},
    }
    found = config(ZOOKEEPER=zookeeper)
    assert found.coordinator == "zookeeper"
    assert found.zookeeper is not None
    assert (found.zookeeper.hosts, found.zookeeper.root) == ("zk1:2181,zk2", "/queues/rmq")
    assert (found.zookeeper.session_timeout, found.zookeeper.when_away) == (8.0, "continue")
    assert found.zookeeper.auth == (("digest", "a:b"),)
    assert config(ZOOKEEPER=zookeeper, COORDINATOR="redis").coordinator == "redis"
    assert config(COORDINATOR="shop.rules.Coordinator").coordinator == "shop.rules.Coordinator"


def test_the_sections_arrive() -> None:
    found = config(
        KEY_PREFIX="shop:",
        ON_COMMIT=False,
        AUTODISCOVER=None,
        DURABILITY="strict",
        EVENTS=True,
        CONSUMER={
            "PROCESSES": 2,
            "THREADS": 3,
            "SHUTDOWN_TIMEOUT": 4,
            "POLL_INTERVAL": 0.5,
            "WATCHDOG": None,
            "MAX_MESSAGES": 6,
            "MAX_MEMORY": 8,
            "MAX_IDLE_TIME": timedelta(seconds=7),
            "HEARTBEAT_FILE": "/run/rmq",
            "HEALTH_ADDRESS": "127.0.0.1:8001",
        },
        HISTORY_RETENTION="3d",
        ADMIN={"FORMATTER": "shop.rules.hide", "PAGE_SIZE": 20, "COLUMNS": ["customer.city"]},
        API={
            "PERMISSION": "shop.rules.Allowed",
            "SEND_RATE": "10/s",
            "SEND_BYTES": "5kB/hour",
            "IDEMPOTENT_RATE": "7/min",
            "MAX_BYTES": 2048,
            "LONG_POLLS": 8,
            "LONG_POLLS_PER_USER": 3,
        },
    )
    assert (found.key_prefix, found.on_commit, found.autodiscover) == ("shop:", False, None)
    assert (found.durability, found.events) == ("strict", True)
    consumer = dataclasses.astuple(found.consumer)
    assert consumer == (2, 3, 4.0, 0.5, None, 6, 8, 7.0, "/run/rmq", "127.0.0.1:8001")
    assert found.history_retention == 3 * 86_400
    assert (found.admin.formatter, found.admin.page_size) == ("shop.rules.hide", 20)
    api = found.api
    assert (api.permission, api.max_bytes) == ("shop.rules.Allowed", 2048)
    assert (api.send_rate, api.send_bytes, api.idempotent_rate) == ("10/s", "5kB/hour", "7/min")
    assert api.waiting(has_threads=False) == (8, 3)


def test_a_missing_setting_says_how_it_looks() -> None:
    with override_settings(RMQ=None):
        found, (problem,) = read_settings()
    assert found is None
    assert problem.id == "django_rmq.E001"
    assert "RMQ is missing" in problem.message
    assert "TOPICS" in problem.hint
    with (
        override_settings(RMQ=None),
        pytest.raises(ConfigurationError, match=r"RMQ is missing\. For example: RMQ = "),
    ):
        get_config()


@pytest.mark.parametrize(
    ("rmq", "place"),
    [
        ({"TOPICS": ["orders"]}, 'RMQ["TOPICS"]'),
        ({"TOPICS": {"orders": "priority"}}, 'RMQ["TOPICS"]["orders"]'),
        ({"TOPIC_DEFAULTS": 3}, 'RMQ["TOPIC_DEFAULTS"]'),
        ({"CONSUMER": "8 threads"}, 'RMQ["CONSUMER"]'),
        ({"ZOOKEEPER": "zk1:2181"}, 'RMQ["ZOOKEEPER"]'),
    ],
)
def test_what_must_be_a_dict_is_named(rmq: dict[str, Any], place: str) -> None:
    assert [
        problem for problem in problems(**rmq) if problem.id == "django_rmq.E001" and place in problem.message
    ]


def test_rmq_itself_must_be_a_dict() -> None:
    with override_settings(RMQ=["REDIS"]):
        _, found = read_settings()
    assert found[0].id == "django_rmq.E001"


@pytest.mark.parametrize(
    ("rmq", "sentence"),
    [
        ({"TOPIC": {}}, "RMQ has the unknown key 'TOPIC'; did you mean 'TOPICS'?"),
        ({"HISTORY": {"HOURS": 24}}, "RMQ has the unknown key 'HISTORY'; did you mean 'HISTORY_RETENTION'?"),
        (
            {"TOPICS": {"orders": {"TYPE": "priority", "SLOT": 4}}},
            "RMQ[\"TOPICS\"][\"orders\"] has the unknown key 'SLOT'; did you mean 'SLOTS'?",
        ),
        (
            {"CONSUMER": {"threads": 3}},
            "RMQ[\"CONSUMER\"] has the unknown key 'threads'; did you mean 'THREADS'?",
        ),
        ({"XYZZY": 1}, "RMQ has the unknown key 'XYZZY'."),
    ],
)
def test_an_unknown_key_is_an_error_that_guesses_what_was_meant(rmq: dict[str, Any], sentence: str) -> None:
    (problem,) = problems(**rmq)
    assert (problem.id, problem.message) == ("django_rmq.E002", sentence)
    assert problem.hint.startswith("Allowed here: ")


UNUSABLE: list[tuple[str, list[Any], str]] = [
    ("SLOTS", [3, 0, -8, True, "8", 8.0, 2**21], "a power of two from 1 to 1048576"),
    ("TYPE", ["lifo", None], "'range_merge', 'priority', 'fixed_time' or 'fifo'"),
    (
        "TIME_RANGE",
        [0, "5 parsecs"],
        'seconds, a timedelta or text such as "250ms", "2s", "15m" or "7d", from 1ms to 366d',
    ),
    ("TIME_RANGE", ["31622400001ms", -1, 0.0005, timedelta(days=999)], "from 1ms to 366d"),
    ("MAX_WAIT", [0, timedelta(days=367)], "from 1ms to 366d"),
    ("ACCUMULATE", [1, 10_001], "a whole number from 2 to 10000; or None"),
    ("ORDER", ["any"], "'strict' or 'loose'"),
    ("ON_DUPLICATE", ["merge"], "'keep' or 'replace'"),
    ("BODY", ["pickle"], "'json', 'text', 'bytes' or the dotted path of a type"),
    ("IDENTITY", ["id"], "'body' or 'key'"),
    ("SLOT_BASIS", [""], "non-empty text"),
    ("SERIAL", [1], "True or False"),
    ("TIMEOUT", [0, 0.5, timedelta(milliseconds=1500), math.nan, True], "whole seconds"),
    ("MAX_RETRIES", [-1, 1000, 1.0], "a whole number from 0 to 999"),
    ("BACKOFF", [-1, math.inf, timedelta(days=999)], "seconds"),
    ("BACKOFF", ["exponential"], "from 0s to 366d (0: no rest), or the dotted path of a function"),
    ("BACKOFF", ["no.such.module"], "cannot be imported (ModuleNotFoundError"),
    ("BACKOFF", ["math.pi"], "a function (failures) -> seconds, but this one is 3.14"),
    ("RETRY_PRIORITY", ["highest"], "'original' or 'lowest'"),
    ("MAX_RUNTIME", [0], "from 1s to 36525d"),
    ("HARD_TIMEOUT", [0], "from 1s to 36525d; or None"),
    ("PREFETCH", [0], "a whole number from 1 to 1000"),
    ("MAX_BODY", [0], "a whole number from 1"),
    ("MAX_BACKLOG", [0], "at least 1; or None"),
    ("MAX_RATE", [0], "messages per second from 0.000001 to 1000000, or {"),
    ("MAX_RATE", [0.000_000_9, 1_000_001], "from 0.000001 to 1000000"),
    ("MAX_IN_FLIGHT", [0], "at least 1; or None"),
    ("MAX_PREPARED", [0], "a whole number from 1"),
    ("FLOW", ["on"], "'auto'; or None"),
    ("CONCURRENCY", [0, 10_001], "a whole number from 1 to 10000"),
    ("DEAD_RETENTION", [0], "from 1s to 36525d; or None"),
    ("OUTCOME_RETENTION", [0.5, "31d", True], "from 1s to 30d"),
    ("OUTCOME_RETENTION", ["1 y"], '"15m" or "7d", from 1s to 30d; or None'),
    ("LISTENER", [None], "True or False"),
]


@pytest.mark.parametrize(
    ("key", "value", "wanted"), [(key, value, wanted) for key, values, wanted in UNUSABLE for value in values]
)
def test_a_value_that_cannot_be_used_says_what_it_is_and_what_it_must_be(
    key: str, value: Any, wanted: str
) -> None:
    (problem,) = topic_problems(**{key: value})
    assert problem.id in ("django_rmq.E003", "django_rmq.E008")
    assert problem.message.startswith(f'RMQ["TOPICS"]["orders"]["{key}"] is {value!r}: it must be ')
    assert wanted in problem.message


def test_a_hard_time_out_exceeds_max_runtime() -> None:
    (problem,) = topic_problems(HARD_TIMEOUT=60, MAX_RUNTIME=60)
    assert problem.id == "django_rmq.E095"
    assert "HARD_TIMEOUT 60 and MAX_RUNTIME 60: a listener is ended before its MAX_RUNTIME" in problem.message
    orders = {"TYPE": "priority", "HARD_TIMEOUT": 5}
    # Until its process has ended a listener that hangs keeps its message.
    assert config(TOPICS={"orders": orders}).topic("orders").max_runtime == 3605
    assert config(TOPICS={"orders": orders | {"MAX_RUNTIME": 4}}).topic("orders").max_runtime == 4


OTHERS: list[tuple[str, dict[str, list[Any]]]] = [
    (
        "",
        {
            "KEY_PREFIX": ["{tag}", None],
            "ON_COMMIT": ["yes"],
            "AUTODISCOVER": ["listeners.py!"],
            "DURABILITY": ["high"],
        },
    ),
    ("", {"EVENTS": [1], "COORDINATOR": ["etcd", 3], "HISTORY_RETENTION": [0, "400d"]}),
    ("CONSUMER", {"PROCESSES": [0], "THREADS": ["4"], "SHUTDOWN_TIMEOUT": [-1, 1e10], "POLL_INTERVAL": [0]}),
    ("CONSUMER", {"WATCHDOG": [0.1, 10**400], "MAX_MESSAGES": [0, 10**5000], "MAX_IDLE_TIME": [0]}),
    ("CONSUMER", {"HEARTBEAT_FILE": [""], "HEALTH_ADDRESS": ["8001"]}),
    (
        "ADMIN",
        {
            "FORMATTER": ["nodots"],
            "PAGE_SIZE": [0, 901],
            "COLUMNS": ["customer.city", ["customer..city"], ["x" * 101]],
        },
    ),
    ("ADMIN", {"COLUMNS": [["a", "a"], list("abcdef"), [1], {"orders": "city"}]}),
    ("API", {"PERMISSION": ["IsAdmin"], "SEND_RATE": ["fast"], "SEND_BYTES": ["16/MB", "16TB/day", 1000]}),
    (
        "API",
        {
            "IDEMPOTENT_RATE": ["0/day"],
            "LONG_POLLS": [-1, "many"],
            "LONG_POLLS_PER_USER": [0],
            "MAX_BYTES": [1],
        },
    ),
    (
        "TOPIC_DEFAULTS",
        {"TIMEOUT": [10**400], "TIME_RANGE": [10**5000], "MAX_RATE": [10**400], "BACKOFF": [math.nan]},
    ),
    ("TOPIC_DEFAULTS", {"MAX_BACKLOG": [1 << 54]}),
    (
        "ZOOKEEPER",
        {"HOSTS": [""], "ROOT": ["rmq", "/rmq/../other"], "SESSION_TIMEOUT": [0], "WHEN_AWAY": ["panic"]},
    ),
    ("ZOOKEEPER", {"AUTH": ["digest", ("digest", "password-only"), [("sasl", "a:b")]], "ACL": ["world"]}),
    ("ZOOKEEPER", {"TLS": [{"cafile": "x"}]}),
]


def with_one_wrong() -> Iterator[dict[str, Any]]:
    """Yield settings, each with one value of `OTHERS`."""
    yield {"BROKER": "kafka", "REDIS": "redis://h"}
    for section, options in OTHERS:
        more = {"HOSTS": "zk1:2181"} if section == "ZOOKEEPER" else {}
        for key, value in ((key, value) for key, values in options.items() for value in values):
            yield {section: {**more, key: value}} if section else {key: value}


@pytest.mark.parametrize("rmq", list(with_one_wrong()), ids=abbreviated)
def test_other_values_are_checked_alike(rmq: dict[str, Any]) -> None:
    found = [problem for problem in problems(**rmq) if "it must be " in problem.message]
    assert [problem.id for problem in found] == ["django_rmq.E003"]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "{a}", "-a", "a*", "ä", "a\n", "x" * 101, 5])
def test_a_topic_name_that_could_not_be_a_key_is_refused(name: object) -> None:
    (problem,) = problems(TOPICS={name: {"TYPE": "priority"}})
    assert problem.id == "django_rmq.E004"
    assert repr(name) in problem.message


def test_a_topic_without_a_type_runs_soon_and_in_order() -> None:
    topics = config(TOPICS={"jobs": {}, "line": {"ORDER": "strict"}, "old": {"TYPE": "fifo"}}).topics
    kinds = {name: (topic.type, topic.order, topic.identity, topic.serial) for name, topic in topics.items()}
    assert kinds == {
        "jobs": ("fifo", "loose", "key", True),
        "line": ("fifo", "strict", "key", True),
        "old": ("fifo", "strict", "key", True),
    }


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"TIME_RANGE": 1}, "range_merge"),
        ({"RETRY_PRIORITY": "lowest"}, "priority"),
        ({"DEFAULT_PRIORITY": 50}, "priority"),
    ],
)
def test_an_option_of_one_type_needs_that_type(options: dict[str, Any], kind: str) -> None:
    (problem,) = problems(TOPICS={"jobs": options})
    assert (problem.id, problem.hint) == ("django_rmq.E005", f'Set TYPE "{kind}".')


@pytest.mark.parametrize("priority", [1, 16, 20])
def test_a_default_priority_is_above_the_numbers_of_retries(priority: int) -> None:
    (problem,) = problems(
        TOPICS={"jobs": {"TYPE": "priority", "DEFAULT_PRIORITY": priority, "MAX_RETRIES": 20}}
    )
    assert problem.id == "django_rmq.E006" and "at least 21" in problem.message


@pytest.mark.parametrize(
    "options",
    [
        {"TYPE": "priority", "TIME_RANGE": 1},
        {"TYPE": "fixed_time", "RETRY_PRIORITY": "lowest"},
        {"TYPE": "priority", "SLOT_BASIS": "shop", "BODY": "text"},
        {"TYPE": "priority", "ORIGIN": True, "IDENTITY": "body"},
        {"TYPE": "priority", "ORDER": "strict"},
        {"TYPE": "range_merge", "ON_DUPLICATE": "keep"},
        {"TYPE": "fifo", "IDENTITY": "body"},
        {"TYPE": "fifo", "SERIAL": False, "ORDER": "strict"},
        {"TYPE": "fifo", "OUTBOX": True},
        {"TYPE": "fifo", "TIME_RANGE": 1},
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    (problem,) = problems(TOPICS={"orders": options})
    assert problem.id == "django_rmq.E006" and problem.hint
    assert all(name in problem.message for name in options if name != "TYPE")


@pytest.mark.parametrize(
    ("rmq", "wanted"),
    [
        ({"COORDINATOR": "zookeeper"}, "E007"),
        ({"ZOOKEEPER": {"ROOT": "/rmq"}}, "E007"),
        ({"ZOOKEEPER": {"HOSTS": "zk1:2181", "ACL": "creator"}}, "E007"),
        ({"BROKER": "redis", "TOPICS": {}}, "E009"),
        ({"REDIS": {"CLUSTER": "redis://h:7000/1"}}, "E012"),
        ({"REDIS": {"CLUSTER": ["redis://h:7000", "redis://h:7001/1"]}}, "E012"),
        ({"REDIS": {"CLUSTER": "unix:///run/redis.sock"}}, "E012"),
        ({"REDIS": {"CLUSTER": "h:7000"}}, "E012"),
        ({"REDIS": {"CLUSTER": []}}, "E003"),
        ({"REDIS": {"CLUSTER": [7000]}}, "E003"),
        ({"REDIS": {"CLUSTER": "redis://h:7000", "DB": 0}}, "E003"),
        ({"REDIS": {}}, "E003"),
    ],
    ids=str,
)
def test_an_address_that_is_missing_or_cannot_be_used_and_a_closed_acl_without_a_login_are_reported(
    rmq: dict[str, Any], wanted: str
) -> None:
    assert [problem.id for problem in problems(**rmq)] == [f"django_rmq.{wanted}"]


@pytest.mark.parametrize(
    ("given", "acl"),
    [
        ({}, "open"),
        ({"AUTH": ("digest", "a:b")}, "creator"),
        ({"AUTH": ("digest", "a:b"), "ACL": "open"}, "open"),
        ({"TLS": {"CERT": "c.pem", "KEY": "c.key"}, "ACL": "creator"}, "creator"),
    ],
    ids=str,
)
def test_who_logs_in_to_zookeeper_closes_its_nodes_unless_told_otherwise(
    given: dict[str, Any], acl: str
) -> None:
    found = config(ZOOKEEPER={"HOSTS": "zk1:2181", **given}).zookeeper
    assert found is not None
    assert found.acl == acl
    assert "a:b" not in repr(found)


def test_all_problems_are_told_at_once() -> None:
    rmq = {
        "BROKER": "memory",
        "COLOUR": "red",
        "TOPICS": {"a": {"TYPE": "lifo", "SLOTS": 3}, "b b": {}, "c": {"TIME_RANGE": 2}},
        "CONSUMER": {"THREADS": 0},
    }
    with override_settings(RMQ=rmq), pytest.raises(ConfigurationError) as caught:
        get_config()
    told = re.findall(r"django_rmq\.E\d{3}", str(caught.value))
    assert sorted(told) == [f"django_rmq.E00{number}" for number in (2, 3, 3, 3, 4, 5)]


def test_the_alias_of_a_cache_brings_its_options() -> None:
    cache = redis_cache(
        "rediss://h:7000/3", USERNAME="u", PASSWORD="secret", CONNECTION_POOL_KWARGS={"ssl_ca_certs": "/ca"}
    )
    server = config({"rmq": cache}, REDIS="rmq").redis
    assert server is not None
    assert (server.url, server.username, server.password) == ("rediss://h:7000/3", "u", "secret")
    assert dict(server.pool) == {"ssl_ca_certs": "/ca"}
    assert "secret" not in f"{server} {server!r}"


def test_of_a_primary_and_its_replicas_the_primary_is_used() -> None:
    server = config({"rmq": redis_cache("redis://one:6379/1,redis://two:6379/1")}, REDIS="rmq").redis
    assert server is not None
    assert server.url == "redis://one:6379/1"


def test_an_unknown_alias_is_an_error_that_guesses() -> None:
    (problem,) = problems({"rmq": redis_cache("redis://h/1")}, REDIS="rqm")
    assert (problem.id, "did you mean 'rmq'?" in problem.message) == ("django_rmq.E009", True)


@pytest.mark.parametrize("redis", [{"BROKER": "redis"}, {"REDIS": "localhost:6379"}])
def test_without_the_address_of_a_server_the_hint_shows_one(redis: dict[str, Any]) -> None:
    (problem,) = problems(**redis)
    assert problem.id == "django_rmq.E009"
    assert 'RMQ = {"REDIS": "redis://localhost:6379/1", ...}' in problem.hint


def test_an_address_that_the_environment_lacks_is_shown_as_none() -> None:
    (problem,) = problems(REDIS=None)
    assert (problem.id, "is None: it must be" in problem.message) == ("django_rmq.E003", True)


def test_a_cache_of_another_kind_is_an_error() -> None:
    (problem,) = problems(REDIS="default")
    assert problem.id == "django_rmq.E010"
    assert "locmem" in problem.message


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("redis://h:6379/0", "redis://h"),
        ("redis://localhost:6379/2", "redis://127.0.0.1:6379/2"),
        ("redis://H/1", "rediss://h/1"),
        ("redis://u:p@h/1", "redis://h?db=1"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    ],
)
@pytest.mark.parametrize("by_alias", [True, False])
def test_a_cache_on_the_same_database_is_an_error_for_clearing_it_is_flushdb(
    ours: str, theirs: str, by_alias: bool
) -> None:
    caches = {"pages": redis_cache(theirs)}
    if by_alias:
        caches["rmq"] = redis_cache(ours)
    (problem,) = problems(caches, REDIS="rmq" if by_alias else ours)
    assert problem.id == "django_rmq.E011"
    assert 'CACHES["pages"]' in problem.message
    assert "FLUSHDB" in problem.hint


@pytest.mark.parametrize(
    ("alias", "given", "use"),
    [
        ("default", {}, "the project's own cache"),
        ("template_fragments", {}, "template fragments"),
        ("logins", {"SESSION_CACHE_ALIAS": "logins"}, "SESSION_CACHE_ALIAS"),
        ("pages", {"CACHE_MIDDLEWARE_ALIAS": "pages"}, "CACHE_MIDDLEWARE_ALIAS"),
        ("default", {"SESSION_CACHE_ALIAS": "default"}, "the project's own cache"),
    ],
)
def test_an_alias_that_django_itself_uses_is_an_error_for_clearing_it_is_flushdb(
    alias: str, given: dict[str, Any], use: str
) -> None:
    with override_settings(**given):
        (problem,) = problems({alias: redis_cache("redis://h/1")}, REDIS=alias)
        assert problem.id == "django_rmq.E011"
        assert f"'{alias}', which is also" in problem.message
        assert use in problem.message
        assert "FLUSHDB" in problem.hint and 'CACHES = {"rmq": ' in problem.hint
        # With an alias of its own on the same database nothing is won.
        caches = {alias: redis_cache("redis://h/1"), "rmq": redis_cache("redis://h/1")}
        assert [problem.id for problem in problems(caches, REDIS="rmq")] == ["django_rmq.E011"]
        caches["rmq"] = redis_cache("redis://h/2")
        assert config(caches, REDIS="rmq").redis is not None


def test_an_alias_that_django_no_longer_uses_may_be_ours() -> None:
    with override_settings(
        SESSION_CACHE_ALIAS="rmq", RMQ={"REDIS": "rmq"}, CACHES={"rmq": redis_cache("redis://h")}
    ):
        with pytest.raises(ConfigurationError, match="E011"):
            get_config()
        with override_settings(SESSION_CACHE_ALIAS="default"):
            assert get_config().redis is not None


def test_djangos_own_redis_cache_counts_as_well() -> None:
    cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": "redis://h:6379/0"}
    (problem,) = problems({"pages": cache}, REDIS="redis://h")
    assert problem.id == "django_rmq.E011"


@pytest.mark.parametrize("password", ["p,w", "p;w"])
def test_a_password_with_a_separator_does_not_hide_a_cache_on_the_same_database(password: str) -> None:
    caches = {
        "pages": redis_cache(f"redis://:{password}@h/1"),
        "more": redis_cache("redis://a/1,redis://h/1"),
    }
    problem, other = problems(caches, REDIS="redis://h/1")
    assert [problem.id, other.id] == ["django_rmq.E011"] * 2


def test_another_database_or_host_is_fine() -> None:
    caches = {
        "a": redis_cache("redis://h/1"),
        "b": redis_cache("redis://other/2"),
        "c": redis_cache("redis://h:6380/2"),
        "rmq": redis_cache("redis://h/2"),
    }
    assert config(caches, REDIS="rmq").redis is not None


@pytest.mark.parametrize(
    "url",
    [
        "http://h/1", "redis:///1", "redis://h:port/1", "redis://h:99999/1", "redis://h/one", "unix://?db=1",
        "valkey://h/1",
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_an_error_without_its_password(url: str) -> None:
    secret = url.replace("://", "://user:secret@", 1) if "h" in url.partition("://")[2] else url
    (problem,) = problems(REDIS=secret)
    assert problem.id == "django_rmq.E012"
    assert "redis://host:6379/1" in problem.message
    assert "secret" not in problem.message


def test_with_testing_the_broker_is_in_memory_and_redis_is_not_read() -> None:
    for given in ({"BROKER": "redis"}, {"REDIS": "no such alias"}, {"REDIS": "redis://h", "BROKER": "redis"}):
        found = config(None, **given, TESTING=True)
        assert (found.testing, found.broker, found.redis) == (True, "memory", None)
    assert config().testing is False
    assert config(REDIS="redis://h", TESTING=False).broker == "redis"
    (problem,) = problems(TESTING=1)
    assert problem == ("django_rmq.E003", 'RMQ["TESTING"] is 1: it must be True or False.', "")


def test_a_cluster_is_a_dict_with_one_url_or_several() -> None:
    server = config(REDIS={"CLUSTER": "redis://h:7000"}).redis
    assert server is not None
    assert server.cluster == ("redis://h:7000",)
    server = config(REDIS={"CLUSTER": ["rediss://u:secret@h:7000", "rediss://u:secret@i:7000"]}).redis
    assert server is not None
    assert (server.url, len(server.cluster)) == ("rediss://u:secret@h:7000", 2)
    assert "secret" not in f"{server} {server!r}"


def test_the_configuration_is_read_once_and_again_when_settings_change() -> None:
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": {"a": {"TYPE": "priority"}}}):
        first = get_config()
        assert get_config() is first
        with override_settings(RMQ={"BROKER": "memory", "TOPICS": {"b": {"TYPE": "priority"}}}):
            assert list(get_config().topics) == ["b"]
        assert list(get_config().topics) == ["a"]


def test_the_configuration_cannot_be_changed() -> None:
    found = config(TOPICS={"a": {"TYPE": "priority"}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.broker = "redis"  # type: ignore[misc]
    with pytest.raises(TypeError):
        found.topics["b"] = found.topics["a"]  # type: ignore[index]


def test_an_unknown_topic_is_an_error_that_guesses() -> None:
    found = config(TOPICS={"orders": {"TYPE": "priority"}})
    with pytest.raises(UnknownTopic, match="did you mean 'orders'"):
        found.topic("order")


def test_every_check_is_documented() -> None:
    folders = [Path(str(module.__file__)).parent for module in (checks, conf)]
    files = [file for folder in folders for file in folder.glob("*.py")]
    files += [Path(str(module.__file__)) for module in (once, of_schedules, of_bodies, typed_bodies)]
    source = "".join(file.read_text() for file in files)
    used = set(re.findall(r"\"(?:django_rmq\.)?([EWI]\d{3})\"", source)) | {"E021", "E022"}
    assert len(used) > 15
    page = (REFERENCE / "checks.md").read_text()
    parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)[1:]
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(told) == used
    assert list(told) == sorted(used, key=lambda name: (name[1:], name[0]))
    for name, text in told.items():
        says, advice = text.split("\n\n→ ")
        assert says.startswith(f"\n`django_rmq.{name}`"), name
        assert len(advice.split()) >= 4, name


@pytest.mark.parametrize(
    ("api", "has_threads", "expected"),
    [
        ({}, True, (2, 1)),
        ({}, False, (0, 0)),
        ({"LONG_POLLS": 5}, False, (5, 3)),
        ({"LONG_POLLS": 0}, True, (0, 0)),
        ({"LONG_POLLS_PER_USER": 4}, True, (2, 4)),
    ],
    ids=str,
)
def test_how_many_requests_may_wait(
    api: dict[str, Any], has_threads: bool, expected: tuple[int, int]
) -> None:
    assert config(API=api).api.waiting(has_threads) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("1/s", (1, 1.0)),
        ("999kB/min", (999_000, 60.0)),
        ("16MB/hour", (16_000_000, 3600.0)),
        ("5kB/h", (5_000, 3600.0)),
        ("2GB/d", (2_000_000_000, 86_400.0)),
        (None, None),
    ],
)
def test_bytes_have_a_rate(given: str | None, expected: tuple[int, float] | None) -> None:
    rate = config(API={"SEND_BYTES": given}).api.send_bytes
    assert (rate and count_and_seconds(rate)) == expected


@pytest.mark.parametrize(
    ("outbox", "kept"),
    [
        ({}, {"kept"}),
        ({"OUTBOX": False}, {"kept"}),
        ({"OUTBOX": True}, {"kept", "any"}),
        ({"OUTBOX": {"GRACE": timedelta(seconds=2), "REPLICAS": 1}}, {"kept", "any"}),
        ({"OUTBOX": True, "TOPIC_DEFAULTS": {"OUTBOX": False}}, {"kept"}),
    ],
)
def test_a_topic_has_the_outbox_of_the_project_unless_it_says_otherwise(
    outbox: dict[str, Any], kept: set[str]
) -> None:
    kind = {"TYPE": "priority"}
    topics = {"any": kind, "kept": {**kind, "OUTBOX": True}, "not": {**kind, "OUTBOX": False}}
    found = config(TOPICS=topics, **outbox)
    assert {name for name, topic in found.topics.items() if topic.outbox} == kept
    assert found.uses_outbox
    assert (found.outbox.grace, found.outbox.replicas) == (
        (2.0, 1) if "REPLICAS" in str(outbox) else (5.0, 0)
    )


@pytest.mark.parametrize(
    "outbox", [None, 1, "default", ["default"], {"GRACE": 0}, {"REPLICAS": -1}, {"GRACES": 1}]
)
def test_an_outbox_that_cannot_be_used_is_named(outbox: object) -> None:
    assert any('RMQ["OUTBOX"]' in problem.message for problem in problems(OUTBOX=outbox))
