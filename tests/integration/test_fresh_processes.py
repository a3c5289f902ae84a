"""What a process has and knows that has just started: checks in any order, no pool of its parent, a web server alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import connections as databases

from django_rmq.worker.worker_process import before_fork

ROOT = Path(__file__).parents[2]

LISTENERS = """
from django_rmq import schedule

@schedule("tea", every=1)
def remind(message): ...
"""

ERRANDS = """
from django_rmq import listener

@listener("parcels")
def carry(message): ...
"""

START = """
import json, os, sys
import django
from django.conf import settings

class Nowhere:
    def allow_migrate(self, db, app_label, **hints):
        return False if hints.get("model_name") == "outboxmessage" else None

settings.configure(
    SECRET_KEY="a-test-has-no-secrets",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "shop", "django_rmq"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    USE_TZ=True,
    **json.loads(os.environ["GIVEN"]),
)
django.setup()
"""

CHECKS = """
settings.DATABASE_ROUTERS = [Nowhere()]
from django_rmq import checks

ordered = sorted(name for name in vars(checks) if name.startswith("check_"))
if sys.argv[1] == "reversed":
    ordered.reverse()
found = []
for name in ordered:
    found += [[one.id, one.msg] for one in getattr(checks, name)(app_configs=None, databases=["default"])]
print(json.dumps(sorted(found)))
"""

WORKER = """
from django_rmq.worker import startup

startup.check_start(startup.chosen_topics())  # from now on, a tick waits in the topic
print(json.dumps([]))
"""

WEB = """
from django.contrib.auth.models import User
from django.core.management import call_command
from rest_framework.test import APIClient
from health_check.exceptions import HealthCheckException
from django_rmq.health_check import RmqHealthCheck

call_command("migrate", verbosity=0)
client = APIClient()
client.force_authenticate(User.objects.create_superuser("boss"))
ready = client.get("/v1/health/ready/", {"workers": "false"}).json()
trouble = ""
try:
    RmqHealthCheck(needs_workers=False).run()
except HealthCheckException as error:
    trouble = str(error)
topics = client.get("/v1/topics/").json()
schedules = client.get("/v1/schedules/").json()
print(json.dumps([
    ready["ok"], ready["findings"], trouble, [one["name"] for one in topics["results"]],
    [one["name"] for one in schedules["results"]],
]))
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The folder of an app with a schedule that brings its topic along."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "listeners.py").write_text(LISTENERS)
    (folder / "errands.py").write_text(ERRANDS)
    return tmp_path


def begin(shop: Path, script: str, *arguments: str, **given: Any) -> subprocess.Popen[str]:
    """Start a process of the project with these settings."""
    return subprocess.Popen(
        [sys.executable, "-c", START + script, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{shop}", "GIVEN": json.dumps(given)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> Any:
    """What the process has printed."""
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


def test_checks_report_the_same_in_any_order(shop: Path, redis_url: str, prefix: str) -> None:
    topics = {"parcels": {"TYPE": "fixed_time", "SLOTS": 1, "OUTBOX": False}}
    options = {"MODULES": ["shop.errands"], "TOPIC": {"OUTBOX": False, "SLOTS": 1}}
    given = {
        "RMQ": {"REDIS": redis_url, "KEY_PREFIX": prefix, "OUTBOX": True, "TOPICS": topics},
        "TASKS": {"default": {"BACKEND": "django_rmq.tasks.RMQBackend", "OPTIONS": options}},
    }
    # Of each two checks, each one comes first once.
    processes = [begin(shop, CHECKS, order, **given) for order in ("forward", "reversed")]
    first, second = map(result, processes)
    assert first == second
    ids = [id_ for id_, _ in first]
    assert "django_rmq.E050" in ids, "the topic of the schedule has the outbox"
    assert "django_rmq.W001" not in ids, "the module of tasks has the listener of parcels"


def test_a_web_server_knows_the_schedules_of_decorators_and_their_topics(
    shop: Path, redis_url: str, redis_client: redis.Redis, prefix: str
) -> None:
    given = {
        "RMQ": {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": {}},
        "ROOT_URLCONF": "django_rmq.api.urls",
    }
    result(begin(shop, WORKER, **given))
    well, findings, trouble, topics, schedules = result(begin(shop, WEB, **given))
    assert (well, trouble, topics, schedules) == (True, "", ["tea"], ["tea"]), findings
    redis_client.unlink(*redis_client.scan_iter(match=f"*{prefix}*"))
    _, findings, _, topics, schedules = result(begin(shop, WEB, **given))
    assert (topics, schedules) == (["tea"], ["tea"])
    assert any("Redis does not know it" in one["text"] for one in findings), findings


def test_the_pool_of_a_database_is_closed_before_a_worker_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module need not be installed here: the backend of PostgreSQL has this method, and opens the pool again when needed."""
    closed: list[str] = []
    database = databases["default"]
    monkeypatch.setitem(database.settings_dict["OPTIONS"], "pool", True)
    monkeypatch.setattr(database, "close", lambda: closed.append("connection"))
    monkeypatch.setattr(database, "close_pool", lambda: closed.append("pool"), raising=False)
    before_fork()
    assert closed == ["connection", "pool"]
