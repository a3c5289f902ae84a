"""docs/how-to/change-capture.md on PostgreSQL: relays die between sending and committing, and the ledger is reconciled."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings

from django_rmq import connections as ours
from django_rmq import send_messages
from django_rmq.conf import get_config
from django_rmq.core.model.topic import Topic
from tests.docs.modules import ROOT, shown
from tests.e2e.postgres import Postgres, postgres
from tests.support.brokers import Broker
from tests.support.workers import client_of, eventually, live

ALIAS = "shop"
PAGE = "docs/how-to/change-capture.md"
TOPICS = {"price-changes": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": "1ms"}}

pytestmark = pytest.mark.slow


@pytest.fixture
def shop(django_db_blocker: Any) -> Iterator[Postgres]:
    """A PostgreSQL with products and what the page says to make."""
    with postgres() as server:
        server.query("CREATE TABLE products (id bigint PRIMARY KEY, price int)")
        (text,) = re.findall(
            r"^```text\n(CREATE TABLE changes.*?)^```$", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL
        )
        server.query(text)
        address = {"NAME": "shop", "USER": "shop", "HOST": "127.0.0.1", "PORT": str(server.port)}
        engine = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {}}
        connections.settings[ALIAS] = {**connections.settings["default"], **engine, **address}
        with django_db_blocker.unblock():
            try:
                yield server
            finally:
                connections[ALIAS].close()
                del connections[ALIAS]
                del connections.settings[ALIAS]


@pytest.fixture
def capture() -> ModuleType:
    return shown(PAGE, "shop/capture.py")


@pytest.fixture
def broker(redis_url: str, prefix: str) -> Iterator[Broker]:
    client = client_of(redis_url)
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}):
        yield Broker(client, prefix)
        ours.close()
    client.close()


def consume(broker: Broker, topic: Topic, into: set[bytes]) -> int:
    """Take and commit all that is due; return how many messages there are by now."""
    for slot in range(topic.slots):
        while (taken := broker.prepare(topic, slot, "worker", None, 100)).deliveries:
            members = [one.member for one in taken.deliveries]
            broker.commit(topic, slot, taken.receipt, members)
            into.update(members)
    return len(into)


def bodies(*items: int) -> set[bytes]:
    return {b'{"item":%d}' % item for item in items}


def ledger(broker: Broker, topic: Topic) -> dict[str, int]:
    found = [broker.audit_ledger(topic, slot) for slot in range(topic.slots)]
    assert all(one.balanced for one in found)
    return {name: sum(one[name] for one in found) for name in ("sent", "merged", "committed")}


def test_what_any_program_commits_is_captured_and_nothing_else(
    shop: Postgres, capture: ModuleType, broker: Broker
) -> None:
    shop.query("INSERT INTO products SELECT n, 10 FROM generate_series(1, 5) AS n")
    assert capture.relay(using=ALIAS) == 5
    shop.query("UPDATE products SET price = 11 WHERE id = 1; UPDATE products SET price = 12 WHERE id = 1")
    shop.query("DELETE FROM products WHERE id = 2")
    shop.query("UPDATE products SET id = 30 WHERE id = 3")
    shop.query("BEGIN; UPDATE products SET price = 0; ROLLBACK")
    topic, seen = get_config().topic("price-changes"), set[bytes]()
    eventually(lambda: consume(broker, topic, seen) == 5, "the inserts")
    assert seen == bodies(1, 2, 3, 4, 5)
    assert capture.relay(using=ALIAS) == 4 and capture.relay(using=ALIAS) == 0
    seen.clear()
    eventually(lambda: consume(broker, topic, seen) == 4, "the changes")
    assert seen == bodies(1, 2, 3, 30)
    assert shop.query("SELECT count(*) FROM changes") == "0"


def test_the_ledger_has_each_change_although_relays_die_between_sending_and_committing(
    shop: Postgres, capture: ModuleType, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, sends, deaths, chance = get_config().topic("price-changes"), [0], [0], random.Random(7)
    monkeypatch.setattr(capture, "TAKE", capture.TAKE.replace("1000", "20"))

    def send_and_die(name: str, given: list[Any], **options: Any) -> Any:
        results = send_messages(name, given, **options)
        sends[0] += len(given)
        if given and chance.random() < 0.4:
            deaths[0] += 1
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(capture, "send_messages", send_and_die)
    done = threading.Event()

    def change() -> None:
        for n in range(1, 31):
            shop.query(f"INSERT INTO products SELECT {n} * 100 + m, 1 FROM generate_series(1, 10) AS m")
            shop.query(f"UPDATE products SET price = 2 WHERE id > {n} * 100")
        done.set()

    seen: set[bytes] = set()
    writer = threading.Thread(target=change)
    writer.start()
    while True:
        was_done = done.is_set()
        try:
            sent = capture.relay(using=ALIAS)
        except KeyboardInterrupt:
            sent = 1
        consume(broker, topic, seen)
        if was_done and not sent:
            break
    writer.join()
    # The last ones are due a millisecond after they were sent.
    eventually(lambda: consume(broker, topic, seen) and live(broker, topic) == 0, "an empty topic")
    assert deaths[0] > 3
    assert seen == bodies(*(n * 100 + m for n in range(1, 31) for m in range(1, 11)))
    counts = ledger(broker, topic)
    assert counts["sent"] == sends[0] >= 300
    assert counts["committed"] == counts["sent"] - counts["merged"]
    assert shop.query("SELECT count(*) FROM changes") == "0"


def test_notes_stay_while_redis_refuses(
    shop: Postgres, capture: ModuleType, broker: Broker, redis_url: str, prefix: str
) -> None:
    shop.query("INSERT INTO products VALUES (1, 1), (2, 2), (3, 3)")
    ours.close()
    small = {"price-changes": {**TOPICS["price-changes"], "SLOTS": 1, "MAX_BACKLOG": 2}}
    rmq = {"REDIS": redis_url, "KEY_PREFIX": f"{prefix}small:", "TOPICS": small}
    with override_settings(RMQ=rmq):
        with pytest.raises(RuntimeError, match="the notes stay"):
            capture.relay(using=ALIAS)
        assert shop.query("SELECT count(*) FROM changes") == "3"
        ours.close()
