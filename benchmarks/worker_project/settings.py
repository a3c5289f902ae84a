"""REDIS_URL, and of its one topic TYPE, SLOTS and CONCURRENCY; with ORDERED its messages run in order for each entity."""

from __future__ import annotations

import os

SECRET_KEY = "a-benchmark-has-no-secrets"
INSTALLED_APPS = ["django_rmq", "benchmarks.worker_project"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
SLOTS = int(os.environ["SLOTS"])
NOOP = {
    "TYPE": os.environ.get("TYPE", "range_merge"),
    "SLOTS": SLOTS,
    "CONCURRENCY": int(os.environ.get("CONCURRENCY", "100")),
}
if NOOP["TYPE"] == "range_merge":
    NOOP["TIME_RANGE"] = "1ms"
ORDERED = {"TYPE": "fifo", "SLOTS": SLOTS, "SLOT_BASIS": "entity", "BACKOFF": 1}
RMQ = {
    "REDIS": os.environ["REDIS_URL"],
    "TOPICS": {"ordered": ORDERED} if os.environ.get("ORDERED") else {"noop": NOOP},
}
