"""How many files of the package a reader passes who follows a send, a delivery or an action: it cannot grow unnoticed.

Counted in a process of its own, which has run each flow before: no cache, receiver or thread of another test adds a file.
"""

from __future__ import annotations

import html
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import pytest

from tests.support.commands import ROOT, output_of

PACKAGE = f"{ROOT / 'django_rmq'}/"
MOST = {
    "send_message": 13,
    "send_message in a transaction, and its commit": 14,
    "one delivery, in core/consumer": 17,
    "replay of a dead message in the admin": 15,
    "GET topics": 18,
}
"""Flow → the most files that it may pass. Lower it with the flow."""


@pytest.fixture(scope="module")
def passed() -> dict[str, list[str]]:
    """The files that each flow passes."""
    printed = output_of([sys.executable, "-m", "tests.unit.test_files_of_flows"], seconds=300)
    files: dict[str, list[str]] = json.loads(printed.splitlines()[-1])
    return files


@pytest.mark.parametrize("flow", MOST)
def test_a_flow_passes_no_more_files_than_before(flow: str, passed: dict[str, list[str]]) -> None:
    files = passed[flow]
    assert 1 < len(files) <= MOST[flow], f"{len(files)} files:\n" + "\n".join(files)


def main() -> None:
    """Print the files of all flows as JSON."""
    set_up_project()
    from django.contrib.auth.models import User
    from django.db import transaction
    from django.test import Client
    from fakeredis import FakeStrictRedis

    from django_rmq import Reject, listener, send_message
    from django_rmq.conf import get_config
    from django_rmq.connections import replaced_broker
    from django_rmq.core.redis.broker import RedisBroker
    from django_rmq.worker.worker_process import ProcessOptions, WorkerProcess

    @listener("urgent")
    def handle(message: Any) -> None:
        if message.body == "refused":
            raise Reject("no")

    def send_in_transaction() -> None:
        with transaction.atomic():
            send_message("merged", "body")

    def consume() -> None:
        WorkerProcess([get_config().topic("urgent")], ProcessOptions(threads=1, burst=True)).run()

    def replay() -> None:
        answer = browser.post(f"{page}act/", {"act": "replay", "state": "dead", "id": dead})
        assert answer.status_code == 302

    def list_topics() -> None:
        assert browser.get("/api/v1/topics/").status_code == 200

    broker, browser, page = RedisBroker(FakeStrictRedis(), "t:"), Client(), "/admin/django_rmq/topic/urgent/"
    broker.load_scripts()
    files: dict[str, list[str]] = {}
    with replaced_broker(broker):
        browser.force_login(User.objects.create_superuser("someone"))
        for _ in range(2):  # The second time counts.
            files["send_message"] = files_passed(lambda: send_message("merged", "body"))
            files["send_message in a transaction, and its commit"] = files_passed(send_in_transaction)
            send_message("urgent", "body", priority=100)
            consumed = files_passed(consume)
            files["one delivery, in core/consumer"] = [file for file in consumed if "core/consumer/" in file]
            send_message("urgent", "refused", priority=100)
            consume()
            shown = browser.get(f"{page}change/?tab=dead").content.decode()
            dead = html.unescape(re.findall(r'name="id" value="([^"]*)"', shown)[0])
            files["replay of a dead message in the admin"] = files_passed(replay)
            consume()
            files["GET topics"] = files_passed(list_topics)
    print(json.dumps(files))


def set_up_project() -> None:
    """Set up a Django project of two topics, with the admin and REST, on a database in memory."""
    import django
    from django.conf import settings
    from django.core.management import call_command
    from django.urls import include, path

    apps = ["contenttypes", "auth", "sessions", "messages", "admin"]
    contexts = ["template.context_processors.request"]
    contexts += ["contrib.auth.context_processors.auth", "contrib.messages.context_processors.messages"]
    parts = ["sessions.middleware.Session", "auth.middleware.Authentication", "messages.middleware.Message"]
    urls = ModuleType("urls")
    settings.configure(
        SECRET_KEY="x" * 50,
        INSTALLED_APPS=[*(f"django.contrib.{app}" for app in apps), "rest_framework", "django_rmq"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        MIDDLEWARE=[f"django.contrib.{part}Middleware" for part in parts],
        ROOT_URLCONF=urls,
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": [f"django.{each}" for each in contexts]},
            }
        ],
        ALLOWED_HOSTS=["*"],
        USE_TZ=True,
        RMQ={
            "REDIS": "redis://127.0.0.1:1",
            "TOPICS": {
                "urgent": {"TYPE": "priority", "SLOTS": 1},
                "merged": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 1},
            },
        },
    )
    django.setup()
    from django.contrib import admin

    urls.urlpatterns = [path("admin/", admin.site.urls), path("api/", include("django_rmq.api.urls"))]  # type: ignore[attr-defined]
    call_command("migrate", verbosity=0)


def files_passed(flow: Callable[[], Any]) -> list[str]:
    """Run a flow a minute later and return the files whose functions it called, in all of its threads.

    What is kept for seconds has ended then, however long the flow before took.
    """
    files: set[str] = set()
    monotonic, wall = time.monotonic, time.time
    time.monotonic, time.time = lambda: monotonic() + 60, lambda: wall() + 60

    def note(frame: FrameType, event: str, _: object) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and path.startswith(PACKAGE) and not name.startswith("<"):
            files.add(path.removeprefix(PACKAGE))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        flow()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(files)


if __name__ == "__main__":
    main()
