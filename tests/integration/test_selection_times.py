"""Product sets that begin and end at their time, by messages that are due then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any
from unittest import mock

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.core.model.body_codec import decode_body
from django_rmq.testing import Clock, clock_from_now, drain, memory_broker
from example_project.selection.models import Item, Label, Member, ProductSet
from example_project.selection.sets import (
    TIMES,
    TOPIC,
    Evaluation,
    delete_set,
    differing_sets,
    resume,
    save_set,
    settle,
    turn,
)
from tests.brokers import direct

pytestmark = pytest.mark.django_db(transaction=True)

START, END = timedelta(minutes=1), timedelta(minutes=2)


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    standing = clock_from_now()
    with memory_broker(standing):
        yield standing


@pytest.fixture
def items() -> None:
    Item.objects.bulk_create(Item(sku=sku, price=Decimal(sku)) for sku in range(1, 11))


@pytest.fixture
def sale(items: None) -> ProductSet:
    """A set that begins in a minute, and lasts one."""
    now = timezone.now()
    made = ProductSet(name="sale", rule="price < 5", starts_at=now + START, ends_at=now + END)
    save_set(made)
    return made


@contextmanager
def later(clock: Clock, by: timedelta) -> Iterator[None]:
    """It is so much later than now: for us inside, for Redis from here on."""
    now = timezone.now() + by
    clock.advance(by.total_seconds())
    with mock.patch("django.utils.timezone.now", return_value=now):
        yield


def waiting(name: str = TIMES) -> dict[int, datetime]:
    """Set (or item) -> when its message is due."""
    topic, broker = get_config().topic(name), direct(get_broker())
    return {
        next(iter(decode_body(topic, entry.member).values())): datetime.fromtimestamp(
            entry.score / 1000, timezone.get_default_timezone()
        )
        for slot in range(topic.slots)
        for entry in broker.peek(topic, slot, "store").entries
    }


def evaluated(product_set: ProductSet, *skus: int) -> Evaluation:
    facts = {item.sku: item.facts for item in Item.objects.all()}
    return Evaluation(list(facts), {product_set.pk: product_set.revision}, {product_set.pk: set(skus)}, facts)


def near(found: datetime, wanted: datetime | None) -> bool:
    return wanted is not None and abs(found - wanted) < timedelta(milliseconds=2)


def test_a_set_begins_and_ends_by_itself_and_its_members_follow(sale: ProductSet, clock: Clock) -> None:
    assert (sale.running, waiting(TOPIC)) == (False, {})
    assert near(waiting()[sale.pk], sale.starts_at)
    assert drain(TIMES) == 0
    with later(clock, START + timedelta(seconds=1)):
        assert drain(TIMES) == 1
        sale.refresh_from_db()
        assert (sale.running, sorted(waiting(TOPIC))) == (True, list(range(1, 11)))
        assert near(waiting()[sale.pk], sale.ends_at)
        settle("q", 0, evaluated(sale, 1, 2, 3, 4), rows=10)
        drain("memberships")
        assert Label.objects.count() == 4 and differing_sets() == {}
    with later(clock, END):
        assert drain(TIMES) == 1
        sale.refresh_from_db()
        assert (sale.running, Member.objects.count(), waiting()) == (False, 0, {})
        assert {change.why for change in sale.changes.filter(joined=False)} == {"the time of the set is over"}
        drain("memberships")
        assert not Label.objects.exists() and differing_sets() == {}


def test_a_look_too_early_or_too_many_is_harmless(sale: ProductSet) -> None:
    turn(sale.pk)
    sale.refresh_from_db()
    assert (sale.running, sale.revision) == (False, 1)
    assert near(waiting()[sale.pk], sale.starts_at)
    # Just before it begins it is not looked at again and again.
    begin = sale.starts_at
    assert begin is not None
    turn(sale.pk, begin - timedelta(milliseconds=1))
    assert waiting()[sale.pk] > begin + timedelta(milliseconds=900)
    turn(sale.pk, begin)
    turn(sale.pk, begin)
    sale.refresh_from_db()
    assert (sale.running, sale.revision) == (True, 2)


def test_a_set_begins_by_the_clock_of_redis_once(sale: ProductSet, clock: Clock) -> None:
    # Ours is more than a minute behind.
    clock.advance(61)
    assert drain(TIMES) == 1
    sale.refresh_from_db()
    assert sale.running and near(waiting()[sale.pk], sale.ends_at)


def test_an_evaluation_from_before_a_set_ended_is_not_written(sale: ProductSet, clock: Clock) -> None:
    with later(clock, START):
        turn(sale.pk)
        sale.refresh_from_db()
        old = evaluated(sale, 1, 2)
    with later(clock, END):
        turn(sale.pk)
    settle("q", 0, old, rows=10)
    assert not Member.objects.exists()
    # Nor if it has begun again meanwhile.
    sale.refresh_from_db()
    sale.ends_at = None
    sale.starts_at = None
    save_set(sale)
    assert sale.running
    settle("q", 1, old, rows=10)
    assert not Member.objects.exists()


def test_a_time_that_is_edited_moves_the_one_message(sale: ProductSet) -> None:
    sale.starts_at = timezone.now() + timedelta(seconds=30)
    save_set(sale)
    assert near(waiting()[sale.pk], sale.starts_at)
    sale.starts_at = None
    save_set(sale)
    assert (sale.running, near(waiting()[sale.pk], sale.ends_at)) == (True, True)
    sale.ends_at = None
    save_set(sale)
    assert (sale.running, waiting()) == (True, {})
    sale.starts_at = timezone.now() + START
    save_set(sale)
    assert (sale.running, len(waiting())) == (False, 1)
    sale.active = False
    save_set(sale)
    assert waiting() == {}


def test_a_set_must_begin_before_it_ends(items: None) -> None:
    now = timezone.now()
    with pytest.raises(ValidationError, match="must begin before it ends"):
        save_set(ProductSet(name="sale", rule="price < 5", starts_at=now + END, ends_at=now + START))
    assert not ProductSet.objects.exists() and waiting() == {}


def test_a_set_that_is_deleted_has_no_time(sale: ProductSet) -> None:
    pk = sale.pk
    delete_set(sale)
    assert waiting() == {}
    turn(pk)
    assert not ProductSet.objects.exists()


def test_what_an_empty_redis_has_lost_is_sent_again(sale: ProductSet, clock: Clock) -> None:
    ProductSet.objects.create(name="always", rule="price < 5")
    with later(clock, START):
        turn(sale.pk)
        sale.refresh_from_db()
        settle("q", 0, evaluated(sale, 1, 2), rows=10)
        with memory_broker(clock):
            resume()
            assert near(waiting()[sale.pk], sale.ends_at)
            assert drain("memberships") == 2
    assert Label.objects.count() == 2


def test_people_see_when_a_set_begins_and_ends(
    sale: ProductSet, clock: Clock, client: Client, admin_client: Client
) -> None:
    def said() -> str:
        call_command("selection", count=1, stdout=(told := StringIO()))
        sale.refresh_from_db()
        page = client.get("/sets/").content.decode()
        assert sale.when in page and sale.when in told.getvalue()
        assert sale.when in admin_client.get("/admin/selection/productset/").content.decode()
        return sale.when.split()[0]

    assert said() == "begins"
    with later(clock, START):
        turn(sale.pk)
        assert said() == "until"
    with later(clock, END):
        turn(sale.pk)
        assert said() == "ended"
    sale.active = False
    save_set(sale)
    assert said() == "not"


def test_times_are_edited_in_the_admin(items: None, admin_client: Client) -> None:
    form: dict[str, Any] = {"name": "sale", "rule": "price < 5", "active": "on"}
    form |= {"starts_at_0": "2200-01-02", "starts_at_1": "10:00:00", "ends_at_0": "2200-01-02"}
    add = "/admin/selection/productset/add/"
    mistaken = admin_client.post(add, {**form, "ends_at_1": "09:00:00"})
    assert "A set must begin before it ends." in mistaken.content.decode()
    assert admin_client.post(add, {**form, "ends_at_1": "11:00:00"}).status_code == 302
    made = ProductSet.objects.get()
    # In whatever year.
    assert not made.running and waiting()[made.pk] - timezone.now() < timedelta(days=366)
