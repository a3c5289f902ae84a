"""The project that the documents talk to: its settings, and the names that their snippets use without defining them.

    python stage.py FILE ...      runs snippets one after the other, in the project of the working directory

A snippet that needs another name than these should import or define it: its reader would have to do so, too.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

FIRST_BATCH_SECONDS = 60.0
"""How long a query of Spark may take to begin with its first batch."""

PLAIN_SETTINGS = """
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent
SECRET_KEY = "of a project that lives for a minute"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "db.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
STATIC_URL = "static/"
USE_TZ = True
"""
"""What `startproject` writes, about."""

WITH_RMQ = """
INSTALLED_APPS += ["django_rmq"]
RMQ = {"REDIS": "redis://localhost:6379/1", "TOPICS": {}}
"""
"""What the first steps add: where the other pages begin."""

OURS = """
# --- what is true on this machine only
if "RMQ" in globals():
    from django_rmq.connections import SOCKET_TIMEOUTS

    SOCKET_TIMEOUTS["web"] = 10.0
    for name, topic in {topics!r}.items():
        RMQ["TOPICS"].setdefault(name, topic)
"""

TOPICS = {
    "price-changes": {"TYPE": "range_merge", "SLOTS": 64, "TIME_RANGE": 5},
    "price-updates": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 1},
    "image-renders": {"TYPE": "priority", "SLOTS": 16},
    "cheap-products": {"TYPE": "priority", "SLOTS": 4},
    "order-timeouts": {"TYPE": "fixed_time", "SLOTS": 16},
    "payments": {"TYPE": "fixed_time", "SLOTS": 4},
    "clicks": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 1},
    "mails": {"TYPE": "fixed_time", "SLOTS": 4},
    "bookings": {"TYPE": "fifo", "SLOTS": 4, "SLOT_BASIS": "account", "OUTBOX": False},
    "reports": {"TYPE": "fixed_time", "IDENTITY": "key", "SLOTS": 4},
}

URLS = """
from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls)]
"""


def create_order() -> Any:
    """Make an order as a shop would: unpaid, and to be closed in a quarter of an hour."""
    from datetime import timedelta

    from django.utils import timezone

    from django_rmq import listener, send_message
    from django_rmq.worker import listener_registry

    order = SimpleNamespace(pk=9, state="unpaid", refresh_from_db=lambda: None)

    def close(message: Any) -> None:
        order.state = "closed"

    if "order-timeouts" not in listener_registry.listeners():
        listener("order-timeouts")(close)
    send_message("order-timeouts", {"order": order.pk}, fixed_time=timezone.now() + timedelta(minutes=15))
    return order


def names() -> dict[str, Any]:
    """Return what the snippets of all pages may use."""
    from django.contrib.auth.models import User

    boss = User.objects.get(username="program")
    return {
        "Product": MagicMock(),
        "busy": lambda: False,
        "create_order": create_order,
        "draw": MagicMock(),
        "draw_price_onto_image": MagicMock(),
        "known": lambda body: True,
        "path": str(Path("checkpoint").absolute()),
        "request": SimpleNamespace(user=boss),
        "work": lambda frame, number: frame.count(),
    }


def recorded() -> list[Any]:
    """Return a list to which each query of Spark that is started from now on is added."""
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    found: list[Any] = []
    start = DataStreamWriter.start

    def starting(writer: Any, *arguments: Any, **options: Any) -> Any:
        found.append(start(writer, *arguments, **options))
        return found[-1]

    patch.object(DataStreamWriter, "start", starting).start()
    return found


def end(query: Any) -> None:
    """Let a query have its first batch, if there is anything for it, and stop it. Raises what went wrong in it."""
    until = time.monotonic() + FIRST_BATCH_SECONDS
    while query.isActive and not query.recentProgress and time.monotonic() < until:
        time.sleep(0.1)
    error = query.exception()
    query.stop()
    if error is not None:
        raise error


def main(files: list[str]) -> int:
    """Run each file; say what failed, and return how many did."""
    import django

    from django_rmq import connections
    from django_rmq.conf import get_config

    os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
    sys.path.insert(0, str(Path.cwd()))
    django.setup()
    for topic in get_config().topics.values():
        connections.agree(topic)
    found: dict[str, Any] = {"__name__": "snippet", **names()}
    failed = 0
    queries = recorded() if any("pyspark" in Path(file).read_text() for file in files) else []
    for file in files:
        text = Path(file).read_text()
        before = set(found)
        try:
            exec(compile(text, file, "exec"), found)
            tests = [
                found[name]
                for name in set(found) - before
                if isinstance(found[name], type) and issubclass(found[name], unittest.TestCase)
                if found[name].__module__ == "snippet"
            ]
            for case in tests:
                suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
                result = unittest.TextTestRunner().run(suite)
                assert result.testsRun and result.wasSuccessful(), f"{case.__name__} fails"
        except Exception:  # noqa: BLE001 - whatever a snippet raises is told with its traceback
            traceback.print_exc()
            failed += 1
    for query in queries:
        try:
            end(query)
        except Exception:  # noqa: BLE001 - as above
            traceback.print_exc()
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
