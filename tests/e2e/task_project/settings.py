"""Settings from the environment, as those of `worker_project`: REDIS_URL, RMQ_KEY_PREFIX, WORKER_DATA (a folder)."""

from __future__ import annotations

import os
from pathlib import Path

import django

WORKER_DATA = Path(os.environ["WORKER_DATA"])

SECRET_KEY = "a-test-has-no-secrets"
INSTALLED_APPS = ["django_rmq", "tests.newsletter"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": WORKER_DATA / "tasks.sqlite3"}}
USE_TZ = True
MAILS, FILES = WORKER_DATA / "mails", "django.core.mail.backends.filebased.EmailBackend"
MAILERS = {"default": {"BACKEND": FILES, "OPTIONS": {"file_path": MAILS}}}
if django.VERSION < (6, 1):
    EMAIL_BACKEND, EMAIL_FILE_PATH = FILES, MAILS

RMQ = {"REDIS": os.environ["REDIS_URL"], "KEY_PREFIX": os.environ["RMQ_KEY_PREFIX"]}
TASKS = {
    "default": {
        "BACKEND": "django_rmq.tasks.RMQBackend",
        "QUEUES": ["default", "brief"],
        "OPTIONS": {
            "TOPIC": {"SLOTS": 4, "BACKOFF": 0, "TIMEOUT": 2},
            "QUEUES": {"brief": {"TIMEOUT": 1, "MAX_RETRIES": 1}},
            "MODULES": ["tests.support.tasks"],
        },
    }
}
