"""Settings from the environment: REDIS_URL, RMQ_KEY_PREFIX, WORKER_DATA (a folder), WORKER_LISTENERS (a module),
WORKER_POINTS (where its processes kill themselves, see `points`), WORKER_STALLS (see `stalls`), WORKER_ASYNC (1: the
listeners with a ledger are coroutine functions), WORKER_TIMEOUT (of the topics brief, ledger, chaos and kept),
WORKER_HARD_TIMEOUT (of the topic hanging), WORKER_EVENTS (1: EVENTS is on), WORKER_OTEL (1: spans and metrics are
on), WORKER_SCHEDULES (SCHEDULES as JSON, with WORKER_LISTENERS=scheduled), WORKER_DATABASE (the entry of DATABASES,
as JSON, of a server whose topics have the outbox); RMQ_TEST_CLUSTER (URLs) or RMQ_TEST_SENTINELS (host:port, …) in
place of REDIS_URL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from django_rmq.connections import SOCKET_TIMEOUTS
from tests.support.slot_transitions import check_transitions

WORKER_DATA = Path(os.environ["WORKER_DATA"])
TIMEOUT = int(os.environ.get("WORKER_TIMEOUT", "30"))
check_transitions(WORKER_DATA / "illegal-transitions")
# A busy machine can pause for a second. A send does not have to fail then.
SOCKET_TIMEOUTS["web"] = 10.0

SECRET_KEY = "a-test-has-no-secrets"
INSTALLED_APPS = ["django_rmq", os.environ.get("WORKER_APP", "tests.e2e.worker_project")]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": WORKER_DATA / "worker.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
USE_TZ = True

MERGING = {"TYPE": "range_merge", "TIME_RANGE": "1ms"}
MOVING = {"SLOTS": 16, "SLOT_BASIS": "entity"}
RMQ: dict[str, Any] = {
    "REDIS": os.environ["REDIS_URL"],
    "KEY_PREFIX": os.environ["RMQ_KEY_PREFIX"],
    "EVENTS": os.environ.get("WORKER_EVENTS") == "1",
    "TRACING": os.environ.get("WORKER_OTEL") == "1",
    "METRICS": {"OPENTELEMETRY": os.environ.get("WORKER_OTEL") == "1"},
    "AUTODISCOVER": os.environ.get("WORKER_LISTENERS", "listeners"),
    "TOPICS": {
        "work": {**MERGING, "SLOTS": 4},
        "shared": {**MERGING, "SLOTS": 4, "SERIAL": False},
        "one-slot": {**MERGING, "SLOTS": 1},
        "brief": {**MERGING, "SLOTS": 1, "TIMEOUT": TIMEOUT, "MAX_RETRIES": 1, "BACKOFF": 0},
        "ledger": {**MERGING, "SLOTS": 16, "TIMEOUT": TIMEOUT, "MAX_RETRIES": 2, "BACKOFF": 0},
        "chaos": {**MERGING, "SLOTS": 64, "TIMEOUT": TIMEOUT, "BACKOFF": 0},
        "poison": {**MERGING, "SLOTS": 2, "BACKOFF": 0},
        "killing": {**MERGING, "SLOTS": 8, "MAX_RETRIES": 2, "BACKOFF": 0},
        "taken-over": {**MERGING, "SLOTS": 64, "TIMEOUT": 5},
        "later": {**MERGING, "SLOTS": 4},
        "in-line": {
            "TYPE": "fifo", "SLOTS": 64, "SLOT_BASIS": "entity", "TIMEOUT": 2, "MAX_RETRIES": 100, "BACKOFF": 0.05,
        },
        "moving-merge": {**MOVING, "TYPE": "range_merge", "TIME_RANGE": "20ms"},
        "moving-priority": {**MOVING, "TYPE": "priority"},
        "moving-fixed": {**MOVING, "TYPE": "fixed_time"},
        "moving-keyed": {**MERGING, "SLOTS": 16, "TIME_RANGE": "20ms", "IDENTITY": "key", "BACKOFF": 0},
        "moving-shared": {"TYPE": "priority", "SLOTS": 16, "SERIAL": False},
        "nobody": {**MERGING, "SLOTS": 1},
        "permits": {**MERGING, "SLOTS": 16, "MAX_IN_FLIGHT": 3},
        "kept": {
            **MERGING, "SLOTS": 4, "TIMEOUT": TIMEOUT, "MAX_RETRIES": 1, "BACKOFF": 0, "OUTCOME_RETENTION": "1h",
        },
        "hanging": {
            **MERGING, "SLOTS": 16, "MAX_RETRIES": 2, "BACKOFF": 0,
            "HARD_TIMEOUT": float(os.environ.get("WORKER_HARD_TIMEOUT", "1")),
        },
    },
}  # fmt: skip
if os.environ.get("WORKER_LISTENERS") == "effects":
    _KEYED = {"IDENTITY": "key", "ORIGIN": True}
    RMQ["TOPICS"] = {"work": RMQ["TOPICS"]["work"], "effects": {"TYPE": "fixed_time", "SLOTS": 1, **_KEYED}}
if os.environ.get("WORKER_LISTENERS") == "scheduled":
    RMQ["TOPICS"] = {"ticks": {"TYPE": "fixed_time", "SLOTS": 4, "IDENTITY": "key", "ORIGIN": True}}
    RMQ["SCHEDULES"] = json.loads(os.environ["WORKER_SCHEDULES"])
if "WORKER_DATABASE" in os.environ:
    server = json.loads(os.environ["WORKER_DATABASE"])
    DATABASES["default"] = {**server, "CONN_MAX_AGE": None}
    RMQ["OUTBOX"] = {"GRACE": 1}
    for topic in RMQ["TOPICS"].values():
        topic["OUTBOX"] = topic["TYPE"] != "fifo"
    if server["ENGINE"].endswith("mysql"):
        # Not above: it imports pytest, which costs each process as much as Django.
        from tests.e2e.mariadb import use_driver

        use_driver()
if "RMQ_TEST_CLUSTER" in os.environ:
    RMQ["REDIS"] = {"CLUSTER": os.environ["RMQ_TEST_CLUSTER"].split(",")}
if "RMQ_TEST_SENTINELS" in os.environ:
    RMQ["REDIS"] = "rmq"
    CACHES = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "rmq": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": "redis://rmq/0",
            "OPTIONS": {
                "SENTINELS": [address.split(":") for address in os.environ["RMQ_TEST_SENTINELS"].split(",")]
            },
        },
    }
if "RMQ_TEST_COORDINATOR" in os.environ:
    RMQ["COORDINATOR"] = os.environ["RMQ_TEST_COORDINATOR"]
if "RMQ_TEST_ZOOKEEPER" in os.environ:
    RMQ["ZOOKEEPER"] = json.loads(os.environ["RMQ_TEST_ZOOKEEPER"])
