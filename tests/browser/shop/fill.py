"""Puts messages into states, from a process of its own: `python -m tests.browser.shop.fill '[["dead", […], {}]]'`.

The argument is a list of calls: the name of a function here, its arguments, and those with a name.
"""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from decimal import Decimal
from typing import Any

import django
from django.db import connection, transaction
from django.utils import timezone

from django_rmq import connections, send_messages
from django_rmq.conf import get_config
from django_rmq.core.commands.reports import read_reports, write_code_version
from django_rmq.core.coordination import Worker, topic_slots
from django_rmq.core.coordination.worker_records import write_record
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.send_results import STORED
from django_rmq.core.model.worker_report import CodeVersion
from django_rmq.core.monitoring.history import HistoryTotals, TimesCount
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.schedules.declarations import Declarations
from django_rmq.core.schedules.stepper import Stepper
from django_rmq.core.topic_registration import register_topics
from django_rmq.worker.listener_registry import autodiscover
from tests.support.brokers import get_broker, set_clock
from tests.support.workers import eventually

HEADROOM_MS = 3_600_000
DAY_SECONDS = 86_400


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.browser.shop.settings")
    django.setup()
    for name, arguments, options in json.loads(sys.argv[1]):
        globals()[name](*arguments, **options)


def user(name: str, *permissions: str) -> None:
    """Make a member of staff with the password ``name``; ``*``: who may do everything."""
    from django.contrib.auth.models import Permission, User

    made = User.objects.create_user(name, password=name, is_staff=True, is_superuser="*" in permissions)
    found = Permission.objects.filter(content_type__app_label="django_rmq", codename__in=permissions)
    assert "*" in permissions or len(found) == len(permissions), permissions
    made.user_permissions.set(found)


def waiting(topic: str, bodies: list[Any], *, priority: int = 500) -> None:
    """Send messages that are not due for an hour (or of this priority)."""
    options: dict[str, Any] = {"on_commit": False}
    kind = get_config().topic(topic).type
    if kind == "priority":
        options["priority"] = priority
    elif kind == "fixed_time":
        options["fixed_time"] = timezone.now() + timedelta(milliseconds=HEADROOM_MS)
    else:
        options["time_range"] = timedelta(milliseconds=HEADROOM_MS)
    send_messages(topic, bodies, **options)


def late(topic: str, bodies: list[Any], seconds: float) -> None:
    """Send messages that have been due for so long."""
    _send(topic, bodies, get_broker().now_ms() - round(seconds * 1000))


def running(topic: str, body: Any, seconds: float) -> None:
    """Send a message and prepare it, as a worker did so long ago."""
    with clock_behind(seconds):
        in_flight(topic, [body])


def dying_schedule(name: str, topic: str) -> None:
    """Let the last run of a daily schedule die, as a worker does that has no retries left."""
    found, broker = get_config().topic(topic), get_broker()
    register_topics(broker, [found])
    with clock_behind(DAY_SECONDS):
        Declarations(broker, {name: Schedule(name, topic, every=DAY_SECONDS)}, {topic: found}).start()
        Stepper(broker, {topic: found}).settle()
    for slot in range(found.slots):
        prepared = broker.prepare(found, slot, "00000000-test", None, 10)
        members = [delivery.member for delivery in prepared.deliveries]
        failures = [Failure(member, "rejected", None, "smtp.Refused: 550") for member in members]
        assert set(broker.rollback(found, slot, prepared.receipt, failures)) <= {"ok"}


@contextmanager
def clock_behind(seconds: float) -> Iterator[None]:
    """Let the scripts of this process run as they did so long ago."""
    broker: Any = connections.get_broker()
    at = broker.now_ms() * 1000 - round(seconds * 1_000_000)
    set_clock(broker, lambda: at)
    try:
        yield
    finally:
        broker.exchange.clock = None


def usual(topic: str, seconds: float) -> None:
    """Count a hundred calls of a topic that have taken so long."""
    count = TimesCount(get_broker())
    count.note_calls(get_config().topic(topic), [seconds] * 100)
    next(count.flushing())


def threads_taken(count: int) -> None:
    """Wait until the reports of the workers show that ``count`` threads run a listener."""
    broker = get_broker()
    eventually(lambda: sum(one.taken for one in broker.run(read_reports()).values()) >= count)


def _send(topic: str, bodies: list[Any], score: float) -> dict[int, list[bytes]]:
    """Send messages with this score, which a sender may not give; return the members by slot."""
    found = get_config().topic(topic)
    broker = get_broker()
    register_topics(broker, [found])
    by_slot: dict[int, list[tuple[bytes, bytes]]] = {}
    for body in bodies:
        raw = encode_body(found, body)
        member = uuid.uuid4().hex.encode() if found.keyed else raw
        by_slot.setdefault(slot_of(member, found.slots), []).append((member, raw))
    for slot, pairs in by_slot.items():
        members = [member for member, _ in pairs]
        envelopes = [encode_envelope(Envelope(raw, headers={"from": "<b>test</b>"})) for _, raw in pairs]
        broker.send_replace(
            found, slot, [score] * len(members), members, envelopes if found.keyed else ()
        ) if found.type != "range_merge" else broker.send_merge(found, slot, 0, members)
    return {slot: [member for member, _ in pairs] for slot, pairs in by_slot.items()}


def in_flight(topic: str, bodies: list[Any]) -> list[tuple[int, int, list[bytes]]]:
    """Send messages and prepare them, as a worker does; return slot, receipt and members."""
    found, broker = get_config().topic(topic), get_broker()
    held: list[tuple[int, int, list[bytes]]] = []
    for slot, members in _send(topic, bodies, 1000).items():
        wanted = set(members)
        while wanted:
            prepared = broker.prepare(found, slot, "00000000-test", None, 1000)
            assert prepared.status == "ok", prepared
            taken = {delivery.member for delivery in prepared.deliveries}
            # What an earlier test left in flight has timed out, and is handed out alone before ours.
            if strangers := sorted(taken - wanted):
                broker.commit(found, slot, prepared.receipt, strangers)
            if ours := sorted(taken & wanted):
                held.append((slot, prepared.receipt, ours))
            wanted -= taken
    return held


def claimed(topic: str, bodies: list[Any], consumer: str) -> None:
    """Let a Spark query hold messages."""
    waiting(topic, bodies)
    found, broker = get_config().topic(topic), get_broker()
    for slot in range(found.slots):
        if broker.claim(found, slot, consumer, 1, 3_600_000, 1_000).taken:
            broker.renew_claim(found, slot, consumer, 1, 3_600_000, seal=True)


def dead(topic: str, bodies: list[Any], error: str) -> None:
    """Let messages fail for good with this error."""
    _fail(topic, bodies, "rejected", error)


def resting(topic: str, bodies: list[Any], error: str) -> None:
    """Let messages fail once; they rest for an hour."""
    _fail(topic, bodies, "failed", error, HEADROOM_MS)


def _fail(topic: str, bodies: list[Any], kind: str, error: str, delay_ms: int | None = None) -> None:
    found = get_config().topic(topic)
    for slot, receipt, members in in_flight(topic, bodies):
        failures = [Failure(member, kind, delay_ms, error) for member in members]
        words = get_broker().rollback(found, slot, receipt, failures)
        assert set(words) == {"ok"}, words


def outbox(topic: str, bodies: list[Any], *, refused: str = "") -> None:
    """Leave messages in the outbox as a process does that dies after its commit; ``refused``: the error they have."""
    from django_rmq.models import OutboxMessage
    from django_rmq.outbox import write

    found, producer = get_config().topic(topic), connections.get_producer()
    with transaction.atomic():
        written = write(connection, [producer.build(found, body, priority=500) for body in bodies], STORED)
    if refused:
        rows = OutboxMessage.objects.filter(id__in=[row.id for row in written])
        rows.update(due_ms=None, attempts=5, error=refused, failed_ms=1_800_000_000_000)


def worker(host: str, topic: str) -> None:
    """Let a worker join that says it runs on this host; its session ends in half an hour."""
    found = Worker(f"<b>{uuid.uuid4()}", host, 1, 1.0, 1, topic_slots([get_config().topic(topic)]))
    beat = get_broker().beat(found.id, "token", 1_800_000, record=write_record("token", found))
    assert beat.status == "ok", beat


def history(topic: str, hours: int) -> None:
    """Keep a sample of each minute, as workers do: a busy day with a lunch break, and one hour in which nobody sampled."""
    found = get_config().topic(topic)
    broker = get_broker()
    now = broker.now_ms() // 60_000
    sent = merged = taken = done = failed = died = 0
    for minute in range(now - 60 * hours, now + 1):
        passed = minute - (now - 60 * hours)
        busy = 1.2 + math.sin(passed / 95) + 0.25 * math.sin(passed / 7)
        rate = max(0, round(900 * busy))
        sent, merged, taken = sent + rate, merged + round(rate * 0.3), taken + round(rate * 0.72)
        done, failed, died = done + round(rate * 0.7), failed + rate // 60, died + rate // 900
        if 120 <= now - minute < 150:
            continue
        waiting = round(4000 * busy + 1500)
        numbers = (minute * 60_000, found.slots, found.slots, waiting, waiting // 5, 40, 0, 120, died % 60, 0)
        broker.count_lateness(found, [50, 80, 200, 300, 120, 60, 20, 8, 3, round(busy), *[0] * 14])
        counted = (sent, merged, taken, done, failed, died)
        # The other totals, and that nothing waits since an earlier minute.
        rest = [0] * (len(fields(HistoryTotals)) - len(counted) + 1)
        record = " ".join(map(str, (*numbers, *counted, *rest)))
        broker.store_minute(found, minute, record, 48 * 60)


def versions(names: list[str]) -> None:
    """Let workers have reported one version after the other, two hours apart, the last one half an hour ago."""
    broker = get_broker()
    now = broker.now_ms()
    for before, name in enumerate(reversed(names)):
        broker.run(write_code_version(CodeVersion(name, now - (30 + 120 * before) * 60_000, now)))


def schedules() -> None:
    """Declare the schedules of the shop, as the start of a worker does."""
    from django_rmq import schedules

    autodiscover()
    schedules.declare()


def product_sets(items: int, *, labelled: int) -> None:
    """Make the product sets of the shop, with so many items in one of them, the first of which have their labels."""
    from example_project.product_sets.models import Item, ProductSet
    from example_project.product_sets.sets import (
        Evaluation,
        create_first_sets,
        update_labels,
        write_evaluation,
    )

    create_first_sets()
    chosen = ProductSet.objects.get(name="Best rated")
    for sku in range(1, items + 1):
        Item.objects.get_or_create(
            sku=sku, title=f"Amber Glazed Mug {sku}", price=Decimal("19.50"), rating=Decimal("4.6")
        )
    present = set(chosen.members.values_list("item_id", flat=True))
    wanted = set(range(1, items + 1))
    evaluation = Evaluation(present | wanted, {chosen.pk: chosen.revision}, {chosen.pk: wanted})
    write_evaluation(f"browser {uuid.uuid4()}", 0, evaluation, rows=items)
    update_labels({(sku, chosen.pk) for sku in range(1, labelled + 1)})


def foreign(topic: str, members: list[str]) -> None:
    """Add members as a program that is not RMQ does: bytes of Latin-1."""
    found = get_config().topic(topic)
    broker = get_broker()
    for member in members:
        key = slot_keys(broker.prefix, found.name, 0).store
        broker.client.zadd(key, {member.encode("latin-1"): 9_999_999_999_999})


if __name__ == "__main__":
    main()
