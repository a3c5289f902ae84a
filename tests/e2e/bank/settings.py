"""Settings from the environment: REDIS_URL, BANK_PORT (of PostgreSQL), RMQ_KEY_PREFIX, WORKER_DATA (a folder), BANK_ONCE
(0: the listener has a transaction of its own, without ``once``), WORKER_POINTS (where workers kill themselves)."""

from __future__ import annotations

import os

SECRET_KEY = "a-test-has-no-secrets"
INSTALLED_APPS = ["django_rmq", "tests.e2e.bank"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "shop",
        "USER": "shop",
        "HOST": "127.0.0.1",
        "PORT": os.environ["BANK_PORT"],
        "CONN_MAX_AGE": None,
    }
}
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
RMQ = {
    "REDIS": os.environ["REDIS_URL"],
    "KEY_PREFIX": os.environ["RMQ_KEY_PREFIX"],
    # A row of the outbox stays until the replica has the message: the primary may die with its last writes.
    "OUTBOX": {"GRACE": 1, "REPLICAS": 1},
    "TOPICS": {
        "transfers": {
            "TYPE": "range_merge", "TIME_RANGE": "1ms", "SLOTS": 32, "IDENTITY": "key", "ORIGIN": True,
            "TIMEOUT": 2, "MAX_RETRIES": 200, "MAX_RUNTIME": 60, "BACKOFF": 0.2,
        }
    },
}  # fmt: skip
