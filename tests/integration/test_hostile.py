"""Hostile requests to the admin: whatever is asked, nobody gets a 500, and no message is lost.

``HOSTILE_REQUESTS=20000`` asks as many. A request is drawn from its number alone, so that a failure can be asked again:
``HOSTILE_FIRST=N HOSTILE_REQUESTS=1``. A third of the requests are those of somebody who may only look. What REST answers to
hostile requests, ``test_api_schema`` asks.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import transaction
from django.test import Client, override_settings
from django.urls import get_resolver
from django.urls.resolvers import URLResolver

from django_rmq import connections, send_message
from django_rmq.admin.page_actions import ACTS
from django_rmq.conf import get_config
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.schedule import Schedule
from django_rmq.exceptions import TopicFull
from tests.support.brokers import direct

REQUESTS = int(os.environ.get("HOSTILE_REQUESTS", "150"))
FIRST = int(os.environ.get("HOSTILE_FIRST", "0"))
TOPICS: dict[str, Any] = {
    "ranked": {"TYPE": "priority", "SLOTS": 2},
    "timed": {"TYPE": "fixed_time", "SLOTS": 4},
    "merging": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": 1, "BODY": "text"},
    "keyed": {"TYPE": "fixed_time", "SLOTS": 1, "IDENTITY": "key"},
    "raw": {"TYPE": "priority", "SLOTS": 1, "BODY": "bytes"},
    "line": {"TYPE": "fifo", "SLOTS": 2, "SLOT_BASIS": "shop"},
    "kept": {"TYPE": "priority", "SLOTS": 1, "OUTCOME_RETENTION": "1h", "OUTBOX": True},
    "hidden": {"TYPE": "priority", "SLOTS": 1},
    "growing": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 60, "IDENTITY": "key", "ACCUMULATE": 100},
}
FAR = datetime(2099, 1, 1, tzinfo=UTC)

SENDS: dict[str, dict[str, Any]] = {
    "ranked": {"priority": 17},
    "timed": {"fixed_time": FAR},
    "keyed": {"fixed_time": FAR, "key": "k", "headers": {"a": "1"}},
    "line": {},
    "kept": {"priority": 17},
    "hidden": {"priority": 17},
    "growing": {"key": "k"},
}
"""What a send to each topic needs."""

SITE_ACTS = ("pause", "resume", "run", "reset", "quiet", "stop", "return", "spend", "retry")
"""What other pages do than that of the actions on messages."""

FURNISHED = 100
"""The number of requests after which there are messages again."""
STATES = ("store", "prepare", "retry", "dead", "claim", "slots", "history", "consumers")
TEXTS = [
    "", " ", "0", "-1", "1", "17", "50", "1e400", "nan", "inf", "-inf", "True", "null", "None", "0x10", "١٢",
    "9" * 20, "9" * 400, "9" * 5000, "-" + "9" * 400, "1.5", "1,5", "\x00", "\x00\x01", "\ud800", "\U0010ffff", "'",
    '"', "<script>alert(1)</script>", "{{7*7}}", "%s%n", "../../etc/passwd", "//evil.example", "\r\nX: y",
    "http://evil.example/", "javascript:alert(1)", "0.MQ", "1.MQ", "0.dead.100.0123456789abcdef", "99.MQ", "0.",
    "older:60", "older:nan", "newer:" + "9" * 400, "store", "dead", "live", "[]", "{}", "[" * 3000, "a" * 10_000,
    "2099-01-01T00:00", "0001-01-01T00:00:00", "9999-12-31T23:59:59", "2099-13-45T99:99", "e" * 5000, "=" * 8,
]  # fmt: skip
NAMES = [
    "body", "key", "priority", "time_range", "delay", "fixed_time", "fresh_key", "max_retries", "timeout", "id", "act",
    "state", "text", "error", "cause", "age", "slot", "cursor", "back", "why", "rate", "due", "name", "for_good",
    "confirmed", "background", "so_far", "done", "most", "asked", "began", "slice", "run", "hours", "first", "tab", "as",
    "look", "q", "show", "sort", "p", "pin", "worker", "deletion", "topic", "action", "consumer", "cron", "every",
    "timezone", "catch_up", "max_rate", "max_in_flight", "_popup",
]  # fmt: skip


def hide(topic: str, body: Any) -> str:
    """Show nothing of a body."""
    return "hidden"


SETTINGS = {
    "BROKER": "memory",
    "TOPICS": TOPICS,
    "SCHEDULES": {"nightly": {"TOPIC": "keyed", "EVERY": 60}},
    "ADMIN": {"FORMATTER": {"hidden": "tests.integration.test_hostile.hide"}},
    "API": {"SEND_RATE": None, "SEND_BYTES": None, "IDEMPOTENT_RATE": None, "LONG_POLLS": 0},
}


def pages() -> list[str]:
    """Return the addresses of the admin's pages, with their parameters as ``<name>``."""
    found: list[str] = []

    def walk(resolver: Any, before: str) -> None:
        for one in resolver.url_patterns:
            here = before + str(one.pattern)
            if isinstance(one, URLResolver):
                walk(one, here)
            else:
                found.append(here)

    walk(get_resolver(), "")
    return sorted(one for one in found if one.startswith("admin/") and "django_rmq" in one)


class Hostile:
    """Draws requests, and asks them."""

    def __init__(self) -> None:
        looker = User.objects.create_user("looker", is_staff=True)
        looker.user_permissions.set(Permission.objects.filter(codename="view_topic"))
        self.clients = [Client(raise_request_exception=True) for _ in range(2)]
        for client, user in zip(self.clients, (User.objects.create_superuser("boss"), looker), strict=True):
            client.force_login(user)
        self.client = self.clients[0]
        self.ids = ["0.MQ"]
        self.answered: set[int] = set()
        self.pages = pages()

    def address(self, draw: random.Random, pattern: str) -> str:
        """Return a pattern with something in the place of each parameter."""

        def filled(name: str) -> str:
            if name == "topic" or (name in ("name", "object_id") and draw.random() < 0.8):
                text = draw.choice([*TOPICS]) if draw.random() < 0.9 else draw.choice(TEXTS)
            elif name == "state" and draw.random() < 0.9:
                text = draw.choice(STATES)
            elif name == "id" and draw.random() < 0.7:
                text = draw.choice(self.ids)
            elif name == "name" and draw.random() < 0.5:
                text = "nightly"
            else:
                text = draw.choice(TEXTS)
            return quote(text.encode("utf-8", "surrogatepass"), safe="")[:2_000] or "x"

        parts = pattern.replace("^", "").replace("$", "").split("<")
        rest = (part.partition(">") for part in parts[1:])
        return f"/{parts[0]}" + "".join(filled(head.rpartition(":")[2]) + tail for head, _, tail in rest)

    def text(self, draw: random.Random) -> str:
        """Return a text, or the id of a message."""
        return draw.choice(self.ids if draw.random() < 0.2 else TEXTS)

    def query(self, draw: random.Random) -> str:
        """Return a query string, good or bad."""
        pairs = draw.randrange(4)
        return "&".join(
            f"{draw.choice(NAMES)}={quote(self.text(draw).encode('utf-8', 'surrogatepass'))[:3_000]}"
            for _ in range(pairs)
        )

    def ask(self, draw: random.Random) -> Any:
        """Ask a page of the admin."""
        address = f"{self.address(draw, draw.choice(self.pages))}?{self.query(draw)}"
        if draw.random() < 0.4:
            return self.client.get(address)
        text = {
            draw.choice(NAMES): [
                self.text(draw).encode("utf-8", "replace").decode() for _ in range(draw.randrange(1, 3))
            ]
            for _ in range(draw.randrange(6))
        }
        # Without a real action and state, a page refuses whatever else it is sent.
        text |= {"act": [draw.choice([*ACTS, *SITE_ACTS])], "state": [draw.choice(STATES)]}
        return self.client.post(address, text)

    def furnish(self) -> None:
        """Let there be messages in every state, a schedule, and a row of the outbox."""
        broker, config = direct(connections.get_broker("web")), get_config()
        broker.change_schedule("nightly", "spec", Schedule("nightly", "keyed", 1, every=60).text)
        for name, options in SENDS.items():
            topic = config.topic(name)
            for number in range(4):
                with suppress(TopicFull):
                    send_message(name, {"n": number, "shop": number}, **options)
            for slot in range(topic.slots):
                broker.pause(topic, slot, False)
                taken = broker.prepare(topic, slot, "hostile", None, 2)
                if taken.status == "ok":
                    failures = [
                        Failure(one.member, "rejected", None, "Boom: bad") for one in taken.deliveries[:1]
                    ]
                    broker.rollback(topic, slot, taken.receipt, failures)
        with transaction.atomic():
            send_message("kept", {"n": "outbox"}, priority=17)
            transaction.get_connection().run_on_commit.clear()
        self.ids = []
        for name in TOPICS:
            for state in ("store", "prepare", "dead"):
                found = self.clients[0].get(f"/api/rmq/v1/topics/{name}/messages/", {"state": state}).json()
                self.ids += [one["id"] for one in found.get("messages", found.get("results", []))]
        assert len(self.ids) > 10, found

    def wrong(self, number: int) -> str:
        """Ask one request; return what is wrong with its answer."""
        if number == FIRST or not number % FURNISHED:
            self.furnish()
        draw = random.Random(number)
        self.client = self.clients[draw.random() < 1 / 3]
        try:
            answer = self.ask(draw)
        except Exception:  # noqa: BLE001 - whatever a view lets out is what we look for
            return traceback.format_exc(limit=-4)
        self.answered.add(answer.status_code)
        if answer.status_code == 500:
            return f"{answer.content[:300]!r}"
        goes_to = answer.headers.get("Location", "")
        is_elsewhere = goes_to.startswith(("http:", "https:", "//")) and "testserver" not in goes_to
        return f"a redirect to {goes_to[:100]!r}" if is_elsewhere else ""


@pytest.fixture
def hostile(transactional_db: None) -> Iterator[Hostile]:
    with override_settings(RMQ=SETTINGS, ALLOWED_HOSTS=["testserver"]):
        yield Hostile()
        connections.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_whatever_is_asked_nobody_gets_a_server_error(hostile: Hostile) -> None:
    wrong = {number: hostile.wrong(number) for number in range(FIRST, FIRST + REQUESTS)}
    assert {number: what for number, what in wrong.items() if what} == {}
    assert REQUESTS < 100 or {200, 403} <= hostile.answered
    # A message that is gone without an end was lost: the counts would differ.
    call_command("rmqaudit")
