"""Settings from the environment: REDIS_URL, RMQ_KEY_PREFIX, WORKER_DATA (a folder), WORKER_LISTENERS (a module)."""

from __future__ import annotations

import os
from pathlib import Path

WORKER_DATA = Path(os.environ["WORKER_DATA"])

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

RMQ = {
    "REDIS": os.environ["REDIS_URL"],
    "KEY_PREFIX": os.environ["RMQ_KEY_PREFIX"],
    "AUTODISCOVER": os.environ.get("WORKER_LISTENERS", "listeners"),
    "TOPICS": {
        "work": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 1},
        "one-slot": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 1},
        "brief": {
            "TYPE": "range_merge",
            "SLOTS": 1,
            "TIME_RANGE": 1,
            "TIMEOUT": 1,
            "MAX_RETRIES": 1,
            "BACKOFF": 0,
        },
        "ledger": {
            "TYPE": "range_merge",
            "SLOTS": 16,
            "TIME_RANGE": 1,
            "TIMEOUT": 2,
            "MAX_RETRIES": 2,
            "BACKOFF": 0,
        },
        "later": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 1},
        "moving-merge": {"TYPE": "range_merge", "SLOTS": 16, "TIME_RANGE": 20, "SLOT_BASIS": "entity"},
        "moving-priority": {"TYPE": "priority", "SLOTS": 16, "SLOT_BASIS": "entity"},
        "moving-fixed": {"TYPE": "fixed_time", "SLOTS": 16, "SLOT_BASIS": "entity"},
        "moving-keyed": {
            "TYPE": "range_merge",
            "SLOTS": 16,
            "TIME_RANGE": 20,
            "IDENTITY": "key",
            "TIMEOUT": 2,
            "BACKOFF": 0,
        },
        "moving-shared": {"TYPE": "priority", "SLOTS": 16, "SERIAL": False},
        "nobody": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 1},
    },
}
if "RMQ_TEST_COORDINATOR" in os.environ:
    RMQ["COORDINATOR"] = os.environ["RMQ_TEST_COORDINATOR"]
    RMQ["ZOOKEEPER"] = {"HOSTS": "127.0.0.1:2181"}
if "RMQ_TEST_WATCHDOG" in os.environ:
    RMQ["CONSUMER"] = {"WATCHDOG": int(os.environ["RMQ_TEST_WATCHDOG"])}
