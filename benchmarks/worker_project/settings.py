"""REDIS_URL, and TYPE and SLOTS of its one topic."""

from __future__ import annotations

import os

SECRET_KEY = "a-benchmark-has-no-secrets"
INSTALLED_APPS = ["django_rmq", "benchmarks.worker_project"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
NOOP = {"TYPE": os.environ.get("TYPE", "range_merge"), "SLOTS": int(os.environ["SLOTS"])}
if NOOP["TYPE"] == "range_merge":
    NOOP["TIME_RANGE"] = "1ms"
RMQ = {"REDIS": os.environ["REDIS_URL"], "TOPICS": {"noop": NOOP}}
