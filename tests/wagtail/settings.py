"""The settings of Wagtail's tests, with the backend of tasks that the environment variable BACKEND names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wagtail.test.settings import *  # type: ignore[import-not-found]  # noqa: F403
from wagtail.test.settings import INSTALLED_APPS as APPS_OF_WAGTAIL

INSTALLED_APPS = [*APPS_OF_WAGTAIL, "django_rmq", "tests.wagtail.apps.DrainedTasks"]
DATA = Path(os.environ["WAGTAIL_DATA"])
MEDIA_ROOT = str(DATA / "media")
STATIC_ROOT = str(DATA / "static")
DATABASE = str(DATA / "wagtail.sqlite3")
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": DATABASE, "TEST": {"NAME": DATABASE}}
}
TEST_RUNNER = "tests.wagtail.runner.Runner"

TASKS: dict[str, Any] = {"default": {"BACKEND": "django_tasks.backends.immediate.ImmediateBackend"}}
RMQ: dict[str, Any] = {"BROKER": "memory", "AUTODISCOVER": None, "TOPICS": {}}
if os.environ["BACKEND"] == "rmq":
    # As the immediate backend, which waits for no commit and tries once.
    options: dict[str, Any] = {"ON_COMMIT": False, "TOPIC": {"MAX_RETRIES": 0, "SLOTS": 1}}
    TASKS = {"default": {"BACKEND": "django_rmq.tasks.RMQBackend", "OPTIONS": options}}
