"""A Django project with one task and no other work, for each backend of tasks: PEER_TASKS says which."""

from __future__ import annotations

import os
from typing import Any

PORT = int(os.environ["PEER_REDIS_PORT"])
REDIS = {"HOST": "127.0.0.1", "PORT": PORT, "DB": 0}

SECRET_KEY = "a-benchmark-has-no-secrets"
DATABASES: dict[str, Any] = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
DEBUG = False

_BACKENDS = {
    "rmq": ("django_rmq.tasks.RMQBackend", "django_rmq"),
    "huey": ("huey.contrib.djhuey.tasks_backend.HueyBackend", "huey.contrib.djhuey"),
    "db": ("django_tasks_db.DatabaseBackend", "django_tasks_db"),
    "rq": ("django_tasks_rq.RQBackend", "django_rq"),
}
_PATH, _APP = _BACKENDS[os.environ["PEER_TASKS"]]
INSTALLED_APPS = ["django.contrib.contenttypes", "django_tasks", _APP]
TASKS: dict[str, Any] = {"default": {"BACKEND": _PATH}}

if _APP == "django_rmq":
    RMQ = {"REDIS": f"redis://127.0.0.1:{PORT}/0"}
    TASKS["default"]["OPTIONS"] = {"MODULES": ["task_work"]}
elif _APP == "django_rq":
    RQ_QUEUES = {"default": REDIS}
elif _APP == "django_tasks_db":
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": "127.0.0.1",
            "PORT": os.environ["PEER_POSTGRES_PORT"],
            "NAME": "shop",
            "USER": "shop",
            "CONN_MAX_AGE": None,
        }
    }
else:
    HUEY = {
        "name": "bench",
        "huey_class": "huey.RedisHuey",
        "immediate": False,
        "connection": {"host": "127.0.0.1", "port": PORT},
        "consumer": {"workers": 1, "periodic": False},
    }
