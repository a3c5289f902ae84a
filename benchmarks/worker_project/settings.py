"""REDIS_URL, and of its one topic SLOTS and CONCURRENCY."""

from __future__ import annotations

import os

SECRET_KEY = "a-benchmark-has-no-secrets"
INSTALLED_APPS = ["django_rmq", "benchmarks.worker_project"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
RMQ = {
    "REDIS": os.environ["REDIS_URL"],
    "TOPICS": {
        "noop": {
            "TYPE": "range_merge",
            "SLOTS": int(os.environ["SLOTS"]),
            "TIME_RANGE": 1,
            "CONCURRENCY": int(os.environ.get("CONCURRENCY", "100")),
        }
    },
}
